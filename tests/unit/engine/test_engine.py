"""Small parts of the engine."""

from __future__ import annotations

import torch

from shoal.engine.engine import seed_generators


def test_generators_in_use_are_seeded_as_torch_does() -> None:
    torch.manual_seed(7 << 40)
    expected = torch.rand(9)
    seed_generators(7 << 40)
    assert torch.equal(torch.rand(9), expected)
