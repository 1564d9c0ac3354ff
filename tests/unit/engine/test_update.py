"""An update that the device decides on does what the processor would have decided."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop

from shoal.engine.update import (
    StepNumbers,
    can_decide_on_gpu,
    clip_gradients,
    gradient_norm,
    update_if_finite,
)

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]
FUSED: dict[str, MakeOptimizer] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=0.1, fused=True),
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}


def make_parameters(scale: float = 1.0) -> list[nn.Parameter]:
    chance = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(size, generator=chance)) for size in (3, 50, 7)]
    for parameter in parameters[:2]:
        parameter.grad = scale * torch.randn(parameter.shape, generator=chance)
    return parameters


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_update_in_the_queue_equals_one_that_was_waited_for(
    make: MakeOptimizer, scale: float, clip: float | None
) -> None:
    queued, plain = make_parameters(scale), make_parameters(scale)
    optimizers = [make(queued), make(plain)]
    for _ in range(2):
        update_if_finite([optimizers[0]], torch.tensor(2.0), gradient_norm(queued), clip)
        clip_gradients(plain, float(gradient_norm(plain)), math.inf if clip is None else clip)
        optimizers[1].step()
        for parameters in (queued, plain):
            fresh = make_parameters(scale)
            for parameter, other in zip(parameters, fresh, strict=True):
                parameter.grad = other.grad
    torch.testing.assert_close(queued, plain, rtol=1e-6, atol=1e-7)
    assert torch.equal(queued[2], make_parameters()[2])


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
@pytest.mark.parametrize(("loss", "gradient"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)])
def test_nothing_changes_when_loss_or_norm_is_not_finite(make: MakeOptimizer, loss: float, gradient: float) -> None:
    parameters = make_parameters()
    optimizer = make(parameters)
    update_if_finite([optimizer], torch.tensor(1.0), gradient_norm(parameters), clip=1.0)
    before = [parameter.detach().clone() for parameter in parameters]
    state = [value.clone() for one in optimizer.state.values() for value in one.values() if torch.is_tensor(value)]
    assert parameters[0].grad is not None
    parameters[0].grad[0] = gradient
    update_if_finite([optimizer], torch.tensor(loss), gradient_norm(parameters), clip=1.0)
    assert all(torch.equal(parameter, old) for parameter, old in zip(parameters, before, strict=True))
    after = [value for one in optimizer.state.values() for value in one.values() if torch.is_tensor(value)]
    assert all(torch.equal(value, old) for value, old in zip(after, state, strict=True))
    assert not hasattr(optimizer, "found_inf")
    assert not hasattr(optimizer, "grad_scale")


def test_only_fused_optimizers_decide_on_the_gpu() -> None:
    parameters = make_parameters()
    assert can_decide_on_gpu([make(parameters) for make in FUSED.values()])
    assert not can_decide_on_gpu([Adam(parameters, fused=True), Adam(parameters)])
    assert not can_decide_on_gpu([RMSprop(parameters)])


def test_loss_and_norm_are_read_as_numbers() -> None:
    assert StepNumbers(torch.tensor(0.1, dtype=torch.float64), torch.tensor(2.0)).read() == (0.1, 2.0)
