"""Small parts of a step."""

from __future__ import annotations

import torch

from shoal.engine.step import flush_denormals, seed_generators


def test_generators_in_use_are_seeded_as_torch_does() -> None:
    torch.manual_seed(7 << 40)
    expected = torch.rand(9)
    seed_generators(7 << 40)
    assert torch.equal(torch.rand(9), expected)


def is_flushed() -> bool:
    return bool(torch.full((8,), 1e-40).mul(0.5).eq(0).all())


def test_denormal_numbers_are_zero_while_training_only() -> None:
    assert not is_flushed()
    with flush_denormals():
        assert is_flushed()
        with flush_denormals():
            pass
        assert is_flushed(), "the inner one must leave the setting as it was"
    assert not is_flushed()
