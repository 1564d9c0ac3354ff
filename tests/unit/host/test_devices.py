"""Detect without torch whether torch could find a GPU; compared with what torch finds on this machine."""

from __future__ import annotations

import pytest
import torch

from shoal.host.facts import is_cpu_only, this_machine_is_cpu_only


@pytest.mark.parametrize(
    ("torch_version", "devices", "expected"),
    [
        ("2.13.0+cpu", ["nvidia0", "nvidiactl", "kfd"], True),
        ("2.13.0", ["null", "dri", "nvidiactl", "kfdx"], True),
        ("2.13.0", ["null", "nvidia0"], False),
        ("2.13.0+cu130", ["nvidia11"], False),
        ("2.13.0", ["dxg"], False),
        ("2.13.0+rocm7.1", ["kfd", "dri"], False),
        ("2.13.0+xpu", ["dri"], False),
        ("", ["null"], True),
        ("", ["nvidia0"], False),
    ],
)
def test_cpu_only_depends_on_the_build_and_the_devices(torch_version: str, devices: list[str], expected: bool) -> None:
    assert is_cpu_only(torch_version, devices) == expected


def test_the_detection_agrees_with_torch() -> None:
    if torch.cuda.is_available():
        assert not this_machine_is_cpu_only()
    if "+cpu" in torch.__version__:
        assert this_machine_is_cpu_only()
