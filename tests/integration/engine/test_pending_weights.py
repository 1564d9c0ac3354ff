"""A program may use a weight anywhere while the weights of its last step are still on their way.

Every gather is slowed down, so that a use that does not wait sees the weights of the step before.

Exercises sync.sharded.pending, sync.sharded.sync.
"""

from __future__ import annotations

import copy
import ctypes
import io
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from shoal.engine.session import Session
from shoal.sync.sharded.exchange import PartExchange
from shoal.sync.sharded.sync import UpdatedWeights
from shoal.sync.world import World
from tests.support.programs import read_jsonl
from tests.support.ranks import run_ranks
from tests.support.sessions import make_folder, open_session

STEPS, BATCH, LENGTH, SLOW_S = 3, 8, 5, 0.02
INPUTS = torch.linspace(-1, 1, 8 * LENGTH).view(8, LENGTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(LENGTH, 16)
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(16, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(inputs).tanh())
        return output


class Program:
    """What a program has at hand: also what it kept from before the first step."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer: Optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.kept = self.model.state_dict()
        self.data = [parameter.data for parameter in self.model.parameters()]
        self.rows = [parameter.view(-1) for parameter in self.model.parameters()]
        self.compiled: Callable[[Tensor], Tensor] = self.model


def joined(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).clone()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


def without_gradients(program: Program) -> Tensor:
    with torch.no_grad():
        return joined(parameter * 2 for parameter in program.model.parameters())


def inference(program: Program) -> Tensor:
    with torch.inference_mode():
        return joined([program.model(INPUTS)])


def saved_with_gradients(program: Program) -> Tensor:
    file = io.BytesIO()
    torch.save(program.model.state_dict(keep_vars=True), file)
    file.seek(0)
    return joined(torch.load(file).values())


def in_arrays(program: Program) -> Tensor:
    return joined(torch.from_numpy(np.array(p.detach().numpy())) for p in program.model.parameters())


def by_address(program: Program) -> Tensor:
    numbers: list[float] = []
    for parameter in program.model.parameters():
        numbers += (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())
    return torch.tensor(numbers)


def gradient_function(program: Program) -> Tensor:
    def loss(weights: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(program.model, weights, (INPUTS,))
        return output.sum()

    return joined(torch.func.grad(loss)(dict(program.model.named_parameters())).values())


def functional(program: Program) -> Tensor:
    weights: dict[str, Tensor] = dict(program.model.named_parameters())
    return joined([torch.func.functional_call(program.model, weights, (INPUTS,))])


def mapped(program: Program) -> Tensor:
    return joined([torch.vmap(program.model)(INPUTS)])


def from_a_loader(program: Program) -> Tensor:
    return joined(program.model(inputs) for (inputs,) in DataLoader(TensorDataset(INPUTS), batch_size=3, num_workers=1))


def in_a_device_block(program: Program) -> Tensor:
    with torch.device("cpu"):
        return joined([program.model(INPUTS)])


USES: dict[str, Callable[[Program], Any]] = {
    "no_grad": without_gradients,
    "inference_mode": inference,
    "deepcopy": lambda program: joined(copy.deepcopy(program.model.first).parameters()),
    "state_dict": lambda program: joined(program.model.state_dict().values()),
    "saved": saved_with_gradients,
    "numpy": in_arrays,
    "data_ptr": by_address,
    "data": lambda program: joined(parameter.data for parameter in program.model.parameters()),
    "tolist": lambda program: [parameter.tolist() for parameter in program.model.parameters()],
    "repr": lambda program: [repr(parameter) for parameter in program.model.parameters()],
    "norms": lambda program: torch.stack(torch._foreach_norm(list(program.model.parameters()))),
    "to vector": lambda program: nn.utils.parameters_to_vector(program.model.parameters()).detach(),
    "param_groups": lambda program: joined(p for group in program.optimizer.param_groups for p in group["params"]),
    "storage": lambda program: [parameter.untyped_storage().tolist() for parameter in program.model.parameters()],
    "autograd function": lambda program: joined(map(Double.apply, program.model.parameters())),
    "functional_call": functional,
    "func.grad": gradient_function,
    "vmap": mapped,
    "parametrized": lambda program: program.model.last.weight.detach().clone(),
    "checkpoint": lambda program: checkpoint(program.model, INPUTS, use_reentrant=False).detach(),
    "loader": from_a_loader,
    "device block": in_a_device_block,
    "kept state_dict": lambda program: joined(program.kept.values()),
    "kept data": lambda program: joined(program.data),
    "kept views": lambda program: joined(program.rows),
}


def slow_gathers() -> None:
    for name in ("_gather", "_gather_lossy"):
        gather = getattr(PartExchange, name)

        def slow(self: PartExchange, *arguments: Any, _gather: Any = gather, **options: Any) -> Iterator[Any]:
            time.sleep(SLOW_S)
            yield from _gather(self, *arguments, **options)

        setattr(PartExchange, name, slow)


def settings_of(mode: str, steps: int, wire: str = "fp32") -> dict[str, Any]:
    # A bucket for every parameter.
    sync = {"mode": mode, "wire": wire, "bucket_mb": 0.00001, **({"inside": "gloo"} if mode == "ddp" else {})}
    return {"train": {"steps": steps, "global_batch": BATCH, "pin": "off"}, "sync": sync}


def weights_of(session: Session) -> UpdatedWeights:
    shards = session.replica.shards.sync
    assert shards is not None
    assert shards.weights is not None
    return shards.weights


def loss_sum(model: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().sum()


def use_after_steps(world: World, path: Path, mode: str, wire: str) -> dict[str, str]:
    """Use the weights in all ways after steps; return the ways that did not see those of their step."""
    slow_gathers()
    program, wrong = Program(), {}
    session = open_session(world, path, settings_of(mode, len(USES) + 1, wire))
    session.attach(program.model, program.optimizer)
    uses = iter(USES.items())
    for step in session:
        with step:
            for (inputs,) in step.batches((INPUTS,)):
                step.backward(loss_sum(program.model, inputs))
            step.update()
        if step.number > len(USES):
            continue
        name, use = next(uses)
        weights = weights_of(session)
        if weights.is_complete:
            wrong[name] = "the weights had arrived before"
        seen = use(program)
        weights.complete()
        expected = use(program)
        if not (torch.equal(seen, expected) if isinstance(seen, Tensor) else seen == expected):
            wrong[name] = "it saw other weights"
    return wrong


@pytest.mark.parametrize(("mode", "wire"), [("zero1", "fp32"), ("zero2", "int8")])
def test_no_use_sees_the_weights_of_the_step_before(mode: str, wire: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings_of(mode, len(USES) + 1, wire))
    assert run_ranks(use_after_steps, 2, tmp_path, path, mode, wire) == [{}, {}]


# Compiled code, of which no use can be intercepted.


def script_product(program: Program) -> Callable[[], Tensor]:
    function = torch.jit.trace(lambda weight: weight * 2, (torch.ones(16, LENGTH),))
    return lambda: function(program.model.first.weight).detach()


def compile_model(program: Program) -> Callable[[], Tensor]:
    model = torch.compile(program.model, backend="eager")
    return lambda: model(INPUTS).detach()


def compile_function(program: Program) -> Callable[[], Tensor]:
    function = torch.compile(lambda: program.model.first.weight * 2, backend="eager")
    return lambda: function().detach()


COMPILED = {"traced": script_product, "compiled model": compile_model, "compiled function": compile_function}


def use_compiled(world: World, path: Path, name: str) -> tuple[int, int]:
    """Return after how many steps compiled code saw the right weights, and calls that were intercepted then."""
    slow_gathers()
    program, right = Program(), 0
    use = COMPILED[name](program)
    session = open_session(world, path, settings_of("zero1", STEPS))
    session.attach(program.model, program.optimizer)
    modes = 0
    for step in session:
        with step:
            for (inputs,) in step.batches((INPUTS,)):
                step.backward(loss_sum(program.model, inputs))
            step.update()
        modes += len(_get_current_function_mode_stack())
        seen = use()
        weights_of(session).complete()
        right += torch.equal(seen, use())
    return right, modes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_gets_new_weights(name: str, tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings_of("zero1", STEPS))
    assert run_ranks(use_compiled, 2, tmp_path, path, name) == [(STEPS, 0)] * 2


# Programs that change weights between steps


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def shrink(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def replace_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.9


def train_and_change(world: World, path: Path, mode: str, wire: str, change: Callable[[nn.Module], None]) -> Any:
    slow_gathers()
    model = Model()
    session = open_session(world, path, settings_of(mode, 6, wire))
    session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for step in session:
        with step:
            for (inputs,) in step.batches((INPUTS,)):
                step.backward(loss_sum(model, inputs))
            step.update()
        change(model)
    return [parameter.detach().numpy().copy() for parameter in model.parameters()]


def train_and_change_plainly(change: Callable[[nn.Module], None]) -> list[Any]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(6):
        optimizer.zero_grad()
        (loss_sum(model, INPUTS) / BATCH).backward()
        optimizer.step()
        change(model)
    return [parameter.detach().numpy() for parameter in model.parameters()]


def replace_by_a_vector(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.9, model.parameters())


@pytest.mark.parametrize("change", [clamp, shrink, replace_data, replace_by_a_vector])
@pytest.mark.parametrize(("mode", "wire"), [("zero1", "fp32"), ("zero2", "int8")])
def test_changes_between_steps_stay(mode: str, wire: str, change: Callable[[nn.Module], None], tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings_of(mode, 6, wire))
    results = run_ranks(train_and_change, 2, tmp_path, path, mode, wire, change)
    rtol, atol = (1e-4, 1e-6) if wire == "fp32" else (0.05, 0.02)
    for own, first, expected in zip(results[1], results[0], train_and_change_plainly(change), strict=True):
        np.testing.assert_array_equal(own, first)
        np.testing.assert_allclose(own, expected, rtol=rtol, atol=atol)


# The program's own blocks and errors


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def train_in_blocks(world: World, path: Path, mode: str) -> list[float]:
    slow_gathers()
    program, counting = Program(), Counting()
    session = open_session(world, path, settings_of(mode, 9))
    session.attach(program.model, program.optimizer)
    for step in session:
        match step.number % 3:
            case 0:
                with step, torch.device("cpu"), counting:
                    for (inputs,) in step.batches((INPUTS,)):
                        step.backward(loss_sum(program.model, inputs))
                    step.update()
            case 1:
                with step:
                    with torch.device("cpu"):
                        for (inputs,) in step.batches((INPUTS,)):
                            with counting:
                                step.backward(loss_sum(program.model, inputs))
                    step.update()
            case _:
                with step:
                    for (inputs,) in step.batches((INPUTS,)):
                        step.backward(loss_sum(program.model, inputs))
                    with torch.device("cpu"):
                        step.update()
                    program.model(INPUTS)
    assert counting.calls
    assert not _get_current_function_mode_stack()
    return []


@pytest.mark.parametrize("mode", ["zero1", "zero2"])
def test_blocks_of_the_program_around_a_step_change_nothing(mode: str, tmp_path: Path) -> None:
    losses = {}
    for name in ("ddp", mode):
        path = make_folder(tmp_path / name, settings_of(name, 9))
        run_ranks(train_in_blocks, 2, tmp_path, path, name)
        losses[name] = [commit["loss"] for commit in read_jsonl(path / "commits.jsonl")]
    assert losses[mode] == losses["ddp"]


def fail_in_forward(world: World, path: Path) -> tuple[str, bool, list[Any], int]:
    """Fail in the forward of a step; return the error, whether weights had arrived, weights, and modes that stay."""
    slow_gathers()
    program = Program()
    session = open_session(world, path, settings_of("zero1", STEPS))
    session.attach(program.model, program.optimizer)
    message = ""
    try:
        for step in session:
            with step:
                if step.number == 2:
                    raise ValueError("bad image")
                for (inputs,) in step.batches((INPUTS,)):
                    step.backward(loss_sum(program.model, inputs))
                step.update()
    except ValueError as error:
        message = str(error)
    seen = joined(program.model.parameters())
    time.sleep(len(program.kept) * 2 * SLOW_S)
    is_same = torch.equal(seen, joined(program.model.parameters()))
    return message, is_same, seen.tolist(), len(_get_current_function_mode_stack())


def test_an_error_of_the_program_leaves_it_whole_weights(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings_of("zero1", STEPS))
    [first, second] = run_ranks(fail_in_forward, 2, tmp_path, path)
    assert first == second
    message, is_same, _, modes = first
    assert (message, is_same, modes) == ("bad image", True, 0)


def read_in_a_thread(world: World, path: Path) -> list[bool]:
    slow_gathers()
    program, right = Program(), []
    session = open_session(world, path, settings_of("zero1", STEPS))
    session.attach(program.model, program.optimizer)
    seen: list[Tensor] = []

    def read() -> None:
        reader = threading.Thread(target=lambda: seen.append(joined(program.model.parameters())))
        reader.start()
        reader.join()

    for step in session:
        with step:
            for (inputs,) in step.batches((INPUTS,)):
                step.backward(loss_sum(program.model, inputs))
            # Another thread gets the weights of a step by `after`.
            step.update(after=read)
        right.append(torch.equal(seen[-1], joined(program.model.parameters())))
    return right


def test_what_comes_with_an_update_sees_whole_weights_in_any_thread(tmp_path: Path) -> None:
    path = make_folder(tmp_path / "run", settings_of("zero1", STEPS))
    assert run_ranks(read_in_a_thread, 2, tmp_path, path) == [[True] * STEPS] * 2
