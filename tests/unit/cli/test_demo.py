"""What the demo says about its figures."""

from __future__ import annotations

import pytest

from shoal.cli.demo import explain_all_cores
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
