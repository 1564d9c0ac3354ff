"""What the demo says about its figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli.demo import _next_steps, explain_all_cores
from tests.support.run_samples import point


@pytest.mark.parametrize(
    ("alone_ms", "verdict"),
    [
        (100, "One process with 2 threads was 2.00 times as fast as two ranks."),
        (202, "One process with 2 threads was as fast as two ranks."),
        (400, "Two ranks were 2.00 times as fast as one process with 2 threads."),
    ],
)
def test_one_process_with_all_cores_is_compared_honestly(alone_ms: float, verdict: str) -> None:
    text = explain_all_cores(point(1, alone_ms, threads=2), point(2, 200), cores=2)
    assert text.startswith(verdict)
    assert "exchange no gradients" in text


def test_more_or_fewer_cores_than_ranks_are_named() -> None:
    assert "it had 8 cores where they had two" in explain_all_cores(point(1, 50, threads=8), point(2, 200), cores=8)
    assert "one core, which both ranks share" in explain_all_cores(None, point(2, 400), cores=1)


def test_the_demo_ends_with_commands_that_work_in_this_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/shoal")
    assert _next_steps() == "next: shoal train --on local:2 --data YOUR-TEXT.txt"
    monkeypatch.setattr("shutil.which", lambda name: None)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    activate, train = _next_steps().splitlines()
    assert activate == f"next: . {tmp_path}/bin/activate"
    assert train.strip() == "shoal train --on local:2 --data YOUR-TEXT.txt"
