"""`shoal probe`, `plan` and `doctor` on a machine with a GPU, against what torch itself reports.

Exercises tools.probe, tools.plan, tools.doctor.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from shoal.config.load import read_profile
from shoal.config.profile import Backend
from shoal.errors import RunFailed
from shoal.sync.world import gpu_runtime
from shoal.train.gpu_speed import await_event, measure_card, time_on_gpu
from tests.support.needs import need_gpu
from tests.support.programs import shoal


@pytest.mark.gpu
def test_the_rates_of_a_card_are_plausible() -> None:
    need_gpu()
    precision = torch.backends.cuda.matmul.fp32_precision
    card = measure_card(torch.device("cuda", 0), budget_s=2.0)
    assert card["runtime"] == gpu_runtime()
    assert card["memory_bytes"] == torch.cuda.mem_get_info(0)[1]
    assert card["bf16_tflops"] is None or card["bf16_tflops"] > card["fp32_tflops"]
    assert card["tf32_tflops"] >= 0.9 * card["fp32_tflops"]
    # A bus carries less than the card's own memory, and a detour does not make it faster.
    assert card["memory_gbytes_per_s"] > card["to_gpu_gbytes_per_s"] > 0.8 * card["to_gpu_pageable_gbytes_per_s"]
    assert card["from_gpu_gbytes_per_s"] > 0.8 * card["from_gpu_pageable_gbytes_per_s"]
    assert torch.backends.cuda.matmul.fp32_precision == precision


@pytest.mark.gpu
def test_a_wait_for_the_gpu_ends_at_its_deadline() -> None:
    need_gpu()
    begin = torch.cuda.Event(enable_timing=True)
    # About a second at any clock of such cards.
    torch.cuda._sleep(3_000_000_000)
    begin.record()
    with pytest.raises(RunFailed, match="did not finish a test within 0 s"):
        await_event(begin, "a test", timeout_s=0.01)
    torch.cuda.synchronize()
    assert time_on_gpu(lambda: torch.cuda._sleep(1_000_000)) > 1e-4


@pytest.mark.gpu
def test_a_probe_measures_the_card_models_on_it_and_the_way_between_two_ranks(tmp_path: Path) -> None:
    need_gpu()
    file = tmp_path / "profile.toml"
    done = shoal("probe", "--on", "local:2", "--budget", "40", "-o", file)
    assert done.returncode == 0, done.stderr
    profile = read_profile(file)
    node = profile.nodes[0]
    assert node.gpus
    assert node.gpus[0].name == torch.cuda.get_device_name(0)
    timings = {(entry.name, entry.device, entry.precision) for entry in node.timings}
    assert {("small", "cpu", "fp32"), ("small", "cuda", "fp32"), ("wide", "cuda", "fp32")} <= timings
    backend: Backend = "nccl" if torch.cuda.device_count() > 1 else "staged"
    assert profile.collective("all-reduce", backend=backend) is not None
    assert any("NCCL was not measured" in note for note in profile.notes) == (backend == "staged")
    plan = shoal("plan", "--profile", file, "--json", "--set", "train.device=cuda")
    assert plan.returncode == 0, plan.stderr
    assert json.loads(plan.stdout)["rows"]


@pytest.mark.gpu
def test_doctor_finds_nothing_wrong_with_the_driver_and_its_torch() -> None:
    need_gpu()
    done = shoal("doctor", "--on", "local:1", "--no-proof", "--json")
    findings = {finding["id"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert not {"gpu.driver", "gpu.torch", "gpu.mode"} & findings.keys(), findings
