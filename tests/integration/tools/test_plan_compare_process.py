"""`shoal plan` from a profile, and predictions compared with a real run.

Exercises `shoal plan`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.config.load import load_config, read_profile, write_profile
from shoal.config.profile import Profile
from shoal.tools.plan.compare import predict_run
from tests.support.programs import TINY, set_flags, shoal
from tests.unit.tools.plan.test_compare import (
    profile,  # noqa: F401 - a fixture
    record_of,
)


def test_a_plan_is_made_from_a_profile(profile: Profile, tmp_path: Path) -> None:  # noqa: F811
    """Nodes that differ by noise are not balanced; nodes beyond the measured ones are noted."""
    file = tmp_path / "profile.toml"
    write_profile(profile, file)
    done = shoal("plan", "--profile", file, "--nodes", "1,2,4")
    assert done.returncode == 0, done.stderr
    assert "nodes beyond the 2 measured ones are assumed to equal the last of them" in done.stdout
    assert "balanced" not in done.stdout
    assert "to do that on 4 machines (hosts.toml lists them):" in done.stdout
    measured = shoal("plan", "--profile", file, "--nodes", "1,2").stdout
    assert "--on lab:2" in measured
    assert "hosts.toml" not in measured
    faster = json.loads(shoal("plan", "--profile", file, "--link", "10gbe", "--json").stdout)
    slower = json.loads(shoal("plan", "--profile", file, "--link", "100mbit", "--json").stdout)
    assert [row["nodes"] for row in faster["rows"]] == [1, 2]
    assert faster["rows"][1]["step_s"] < slower["rows"][1]["step_s"]
    refused = shoal("plan", "--profile", file, "--machine", "laptop")
    assert refused.returncode == 2
    assert "--machine does not go with --profile" in refused.stderr


def test_a_run_that_cannot_be_predicted_is_not_started(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = shoal("train", "--out", out, "--plan", "--profile", tmp_path / "none.toml", *set_flags(*TINY))
    assert done.returncode == 2
    assert "there is no profile" in done.stderr
    assert not out.exists()


@pytest.mark.long
def test_a_run_is_predicted_measured_and_used_for_calibration(profile: Profile, tmp_path: Path) -> None:  # noqa: F811
    nodes = (profile.nodes[0].model_copy(update={"name": "local", "address": "127.0.0.1", "ranks": 2}),)
    summary = profile.summary.model_copy(update={"nodes": 1})
    local_profile = profile.model_copy(update={"on": "local:2", "nodes": nodes, "links": (), "summary": summary})
    file, run = tmp_path / "local.toml", tmp_path / "run"
    write_profile(local_profile, file)
    flags = set_flags(*TINY)
    done = shoal("train", "--on", "local:2", "--steps", "8", "--out", run, "--plan", "--profile", file, *flags)
    assert done.returncode == 0, done.stderr
    assert "predicted: a step takes" in done.stderr
    assert "A step was predicted to take" in done.stdout
    page = shoal("report", run)
    assert page.returncode == 0
    assert "Predicted and measured" in (run / "report.html").read_text()
    before = record_of(run)
    calibrated = shoal("plan", "--calibrate", run, "--profile", file, "--json")
    assert calibrated.returncode == 0, calibrated.stderr
    document = json.loads(calibrated.stdout)
    learned = read_profile(file).calibration
    assert learned is not None
    assert document["calibration"] == learned.model_dump()
    [entry] = document["runs"]
    assert entry["before_s"] == pytest.approx(before.step_s, rel=1e-3)
    after = predict_run(load_config(run / "config.toml"), file)
    assert after.compute_s == pytest.approx(learned.compute * before.compute_s, rel=1e-3)
