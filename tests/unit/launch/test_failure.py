"""Which ranks count as lost after a cut of the network."""

from __future__ import annotations

import pytest

from shoal.launch.failure import ProcessEnd, count_cut_off

SILENT = "it has sent nothing for 20 s"


@pytest.mark.parametrize(
    ("lost_by", "lost"),
    [
        # Behind a cut both sides report the other; two of three remain.
        ({"node3": {"node1": SILENT, "node2": SILENT}, "node1": {"node3": SILENT}, "node2": {"node3": SILENT}}, [2]),
        # One report of three does not decide.
        ({"node3": {"node1": SILENT}}, []),
        # All are apart: the first remains.
        (
            {name: dict.fromkeys({"node1", "node2", "node3"} - {name}, SILENT) for name in ("node1", "node2", "node3")},
            [1, 2],
        ),
    ],
)
def test_a_node_that_most_others_lost_is_cut_off(lost_by: dict[str, dict[str, str]], lost: list[int]) -> None:
    ends = [ProcessEnd(f"rank-{rank}", f"node{rank + 1}", (rank,), -9, rank, by_agent=True) for rank in range(3)]
    counted = count_cut_off(ends, lost_by, ["node1", "node2", "node3"])
    assert [end.ranks[0] for end in counted if end.lost == SILENT and not end.by_agent] == lost
    assert [end.ranks[0] for end in counted if end.by_agent] == [rank for rank in range(3) if rank not in lost]


def test_of_two_nodes_the_first_remains() -> None:
    ends = [ProcessEnd(f"rank-{rank}", f"node{rank + 1}", (rank,), -9, rank, by_agent=True) for rank in range(2)]
    counted = count_cut_off(ends, {"node1": {"node2": SILENT}, "node2": {"node1": SILENT}}, ["node1", "node2"])
    assert [end.lost for end in counted] == ["", SILENT]
