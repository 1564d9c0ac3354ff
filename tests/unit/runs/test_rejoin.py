"""`shoal join RUN`: which node of a run folder can come back, and when none can."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from shoal.control.orders import GoOrder, MeetOrder, RosterEntry, save_orders
from shoal.errors import UsageError
from shoal.run_folder import RunFolder
from shoal.runs.join import rejoin

READY = {
    "event": "ready",
    "time": 0.0,
    "agent_mark": "mark",
    "script_port": None,
    "interface": "lo",
    "cores": 2,
    "cpu_only": True,
    "incarnation": 0,
    "highest_generation": 0,
}


def make_folder(path: Path, *members: str, address: str = "127.0.0.1", port: int = 1) -> RunFolder:
    """Make the folder of a run whose last generation had these members; node1 and node2 wrote into it."""
    run = RunFolder(path)
    (path / "agents").mkdir(parents=True)
    (path / "job.json").write_text("{}")
    for node in ("node1", "node2"):
        meet = MeetOrder(str(path), node, 0, address, "lo", "t" * 64, "this", 0.0, "c", "d")
        save_orders(run, meet, GoOrder((RosterEntry(node, address, port, "mark"),), ()))
        generations = (["node1", "node2", "node9"], list(members))
        lines = [json.dumps({"event": "generation", "time": 1.0, "members": names}) for names in generations]
        lines.insert(0, json.dumps({**READY, "port": port}))
        run.journal(node).write_text("\n".join(lines) + "\n")
    return run


@pytest.mark.parametrize("node", [None, "node2"])
def test_a_run_without_any_machine_left_is_resumed_instead(tmp_path: Path, node: str | None) -> None:
    run = make_folder(tmp_path / "run", "node1", "node2")
    with pytest.raises(UsageError, match=r"no machine of .* is left that could let another one in") as refused:
        rejoin(run.path, node)
    assert refused.value.fix.endswith(f"shoal train --resume {run.path}")


@pytest.mark.parametrize(("late", "invite"), [(False, ""), (True, ", then shoal host RUN")])
def test_a_machine_that_joined_goes_on_with_the_host(tmp_path: Path, late: bool, invite: str) -> None:
    run = make_folder(tmp_path / "run", "node1", "node2")
    run.joined.write_text(json.dumps({"host": "192.0.2.7", "node": "node1", "late": late}))
    # Once the run was resumed here, it is a training of this machine's own.
    assert run.rejoin_advice() == ""
    run.job.unlink()
    run.config.touch()
    with pytest.raises(UsageError) as refused:
        rejoin(run.path, None)
    assert refused.value.fix == (
        f"on 192.0.2.7: shoal train --resume RUN{invite}; then here the shoal join command that it prints"
    )


def test_a_machine_elsewhere_may_still_train(tmp_path: Path) -> None:
    run = make_folder(tmp_path / "run", "node1", "node2", "node3")
    with pytest.raises(UsageError, match=r"several nodes of .* could come back: node1, node2"):
        rejoin(run.path, None)


def test_a_lab_node_whose_processes_this_one_cannot_see_may_still_train(tmp_path: Path) -> None:
    run = make_folder(tmp_path / "run", "node1", "node2", address="192.0.2.1")
    with pytest.raises(UsageError, match=r"several nodes of .* could come back: node1, node2"):
        rejoin(run.path, None)


def test_a_node_that_listens_on_this_machine_may_still_train(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as agent:
        run = make_folder(tmp_path / "run", "node1", "node2", port=agent.getsockname()[1])
        with pytest.raises(UsageError, match=r"several nodes of .* could come back: node1, node2"):
            rejoin(run.path, None)
