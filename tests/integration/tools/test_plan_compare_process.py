"""From a profile to a prediction, from runs to constants, and what is said about the differe: what starts processes."""

from __future__ import annotations

import json
from pathlib import Path

from shoal.config.load import write_profile
from shoal.config.profile import Profile
from tests.support.programs import TINY, set_flags, shoal


def test_a_plan_from_a_profile(profile: Profile, tmp_path: Path) -> None:
    """Nodes that differ by noise are not balanced, and what lies beyond the measured ones is said."""
    file = tmp_path / "profile.toml"
    write_profile(profile, file)
    done = shoal("plan", "--profile", file, "--nodes", "1,2,4")
    assert done.returncode == 0, done.stderr
    assert "nodes beyond the 2 measured ones are assumed to equal the last of them" in done.stdout
    assert "balanced" not in done.stdout
    assert "--on lab:2" in done.stdout
    assert "hosts.toml" not in done.stdout
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
