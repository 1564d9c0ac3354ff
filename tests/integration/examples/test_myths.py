"""The scripts of docs/myths.md: what they print is what the page says.

Exercises examples/myths.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.labs import need_lab
from tests.support.paths import ROOT
from tests.support.programs import shoal

MYTHS = ROOT / "examples" / "myths"


def run_myth(name: str, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, str(MYTHS / f"{name}.py"), *options], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def launch(name: str, on: str, folder: Path) -> str:
    done = shoal("run", "--on", on, "--out", folder / "run", MYTHS / f"{name}.py")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_and_the_folder_name_the_same_scripts() -> None:
    page = (ROOT / "docs/myths.md").read_text(encoding="utf-8")
    assert set(re.findall(r"examples/myths/(\w+)\.py", page)) == {path.stem for path in MYTHS.glob("*.py")}


def test_losses_differ_and_weights_are_equal(tmp_path: Path) -> None:
    lines = re.findall(r"step (\d): own loss ([\d.]+), weights (\w+)", launch("own_loss", "local:2", tmp_path))
    assert len(lines) == 6
    for step in "123":
        of_step = [(loss, weights) for number, loss, weights in lines if number == step]
        assert len({loss for loss, _ in of_step}) == 2
        assert len({weights for _, weights in of_step}) == 1


@pytest.mark.long
def test_a_killed_rank_is_an_error_before_the_timeout() -> None:
    text = run_myth("dead_rank", "kill", "60")
    assert re.search(r"Connection reset by peer|Connection closed by peer", text)
    assert float(re.findall(r"after ([\d.]+) s", text)[0]) < 60


@pytest.mark.long
def test_a_frozen_rank_is_an_error_at_the_timeout() -> None:
    text = run_myth("dead_rank", "freeze", "2")
    assert "Timed out waiting 2000ms" in text
    assert float(re.findall(r"after ([\d.]+) s", text)[0]) >= 2


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_a_ring_sends_this_many_bytes(ranks: int, tmp_path: Path) -> None:
    """On emulated nodes each rank has an interface of its own; packets have headers, and acknowledgements pass too."""
    need_lab()
    sent = dict(re.findall(r"([\w-]+), \d ranks: a rank sent ([\d.]+)", launch("bytes_sent", f"lab:{ranks}", tmp_path)))
    all_reduce = 2 * (ranks - 1) / ranks
    assert float(sent["all-reduce"]) == pytest.approx(all_reduce, rel=0.05)
    assert float(sent["all-gather"]) == pytest.approx(all_reduce / 2, rel=0.05)
    assert float(sent["reduce-scatter"]) == pytest.approx(all_reduce, rel=0.05)


def test_a_probe_has_two_bandwidths(tmp_path: Path) -> None:
    text = launch("one_probe", "local:3", tmp_path)
    calls = re.findall(r"call (\d): [\d.]+ s, ([\d.]+) Gbit/s by the algorithm, ([\d.]+) on the link", text)
    assert [number for number, _, _ in calls] == list("1234")
    for _, algorithm, bus in calls:
        assert float(bus) == pytest.approx(4 / 3 * float(algorithm), abs=0.02)


@pytest.mark.exhaustive
def test_the_linear_rule_holds_for_sgd_and_not_for_adamw() -> None:
    """The seed is fixed and there is one thread, so only another processor could change digits."""
    text = run_myth("rate_rule")
    lines = re.findall(r"(SGD|AdamW) at ([\d.]+): loss ([\d.]+); .* root ([\d.]+), linear ([\d.]+)", text)
    losses = {(name, lr): [float(loss) for loss in rest] for name, lr, *rest in lines}
    before, root, linear = losses["SGD", "0.03"]
    assert abs(linear - before) < 0.05 < root - before
    for lr in ("0.01", "0.03"):
        _, root, linear = losses["AdamW", lr]
        assert root < linear
