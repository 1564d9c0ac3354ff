"""What the supervisor does before and after a launch."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shoal.run_folder import RunFolder
from shoal.runs.supervisor import remove_dead_sockets


def test_the_sockets_of_killed_agents_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A path of a socket has at most 107 bytes.
    monkeypatch.chdir(tmp_path)
    Path("agents").mkdir()
    with socket.socket(socket.AF_UNIX) as alive, socket.socket(socket.AF_UNIX) as dead:
        for agent, name in ((alive, "node1"), (dead, "node2")):
            agent.bind(f"agents/{name}.sock")
            agent.listen()
        dead.close()
        remove_dead_sockets(RunFolder(Path()))
        assert sorted(path.name for path in Path("agents").iterdir()) == ["node1.sock"]
