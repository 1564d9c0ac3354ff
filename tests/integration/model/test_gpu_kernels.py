"""The Triton kernels compute what torch's own operations do.

Exercises model.gpu_kernels.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.model.gpt import head_loss
from shoal.model.kernels import add_norm
from tests.support.needs import need_gpu

pytestmark = pytest.mark.gpu


def difference(actual: Tensor, expected: Tensor) -> float:
    one, other = actual.detach().float(), expected.detach().float()
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("has_branch", [True, False])
@pytest.mark.parametrize("width", [768, 100])
def test_the_sum_with_its_norm_has_torchs_values_and_gradients(
    dtype: torch.dtype, has_branch: bool, width: int
) -> None:
    need_gpu()
    torch.manual_seed(0)
    norm = nn.LayerNorm(width).cuda()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x, branch = (torch.randn(7, 33, width, device="cuda").to(dtype).requires_grad_() for _ in range(2))
    inputs = [x, branch, norm.weight, norm.bias] if has_branch else [x, norm.weight, norm.bias]
    factors = [torch.randn(7, 33, width, device="cuda") for _ in range(2)]

    def run(fused: bool) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        if fused:
            with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
                total, normed = add_norm(x, branch if has_branch else None, norm)
        else:
            total = x + branch if has_branch else x
            normed = F.layer_norm(total.float(), (width,), norm.weight, norm.bias)
        loss = (total.float() * factors[0]).sum() + (normed.float() * factors[1]).sum()
        return total, normed, torch.autograd.grad(loss, inputs)

    (total, normed, gradients), (plain_total, plain_normed, plain_gradients) = run(True), run(False)
    assert normed.dtype == dtype
    assert torch.equal(total, plain_total)
    most = 1e-6 if dtype == torch.float32 else 5e-3
    assert difference(normed, plain_normed) < most
    assert max(map(difference, gradients, plain_gradients)) < most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("vocabulary", [70_001, 50_257, 64, 33])
def test_the_head_has_torchs_loss_and_gradients(
    dtype: torch.dtype, in_chunks: bool, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_gpu()
    if in_chunks:
        part_of_logits = 3000 * vocabulary * dtype.itemsize / 7
        memory = torch.cuda.get_device_properties(0).total_memory
        monkeypatch.setattr("shoal.model.gpu_kernels._LOGITS_PART", part_of_logits / memory)
    torch.manual_seed(0)
    hidden = torch.randn(3000, 128, device="cuda", requires_grad=True)
    weight = (torch.randn(vocabulary, 128, device="cuda") * 0.1).requires_grad_()
    targets = torch.randint(0, vocabulary, (3000,), device="cuda")
    loss = head_loss(hidden, weight, targets, matmul_dtype=dtype)
    expected = F.cross_entropy((hidden @ weight.t()).double(), targets, reduction="sum")
    most = 1e-5 if dtype == torch.float32 else 5e-3
    assert loss.item() == pytest.approx(expected.item(), rel=most)
    with torch.no_grad():
        assert float(head_loss(hidden, weight, targets, matmul_dtype=dtype)) == pytest.approx(loss.item(), rel=1e-6)
    for actual, reference in zip(
        *(torch.autograd.grad(total, (hidden, weight)) for total in (loss, expected)), strict=True
    ):
        assert difference(actual, reference) < most
