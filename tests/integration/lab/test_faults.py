"""Injected faults: cuts, firewalls, frozen and killed nodes, and their removal.

Exercises `shoal lab`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal_lab.commands import ControlGroup, ControlGroups
from shoal_lab.errors import LabUsageError
from shoal_lab.lab import Lab
from tests.integration.lab.test_nodes import can_ping, on, output_of
from tests.support.labs import running_lab
from tests.support.needs import need_tool
from tests.support.waiting import wait_until

_COUNT = "import time, sys\nwhile True: print('.', end='', flush=True); time.sleep(0.01)"
_REACHES = "import socket, sys\nsocket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1).close()"
_SERVE = (
    "import socket, time\nservers = [socket.create_server(('', port)) for port in (7001, 7002)]\n"
    "print('ready', flush=True)\ntime.sleep(60)"
)


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running_lab(3, sshd=True) as built:
        yield built


@pytest.fixture(autouse=True)
def healed(lab: Lab) -> Iterator[None]:
    yield
    lab.heal()


def test_a_cut_in_both_directions_can_be_healed(lab: Lab) -> None:
    lab.node("node1").cut("node2")
    assert not can_ping(lab, "node1", "node2")
    assert not can_ping(lab, "node2", "node1")
    assert can_ping(lab, "node1", "node3")
    lab.heal("node1", "node2")
    assert can_ping(lab, "node1", "node2")


def test_a_one_way_cut_keeps_the_other_direction(lab: Lab) -> None:
    lab.node("node1").cut("node2", one_way=True)
    assert not received(lab, "node1", "node2")
    assert received(lab, "node2", "node1")


def received(lab: Lab, sender: str, receiver: str) -> bool:
    """Return whether one datagram, which needs no reply, arrives."""
    script = (
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.bind(('', 7003)); s.settimeout(1)\n"
        "print('ready', flush=True)\nprint(s.recv(9).decode(), flush=True)"
    )
    send = "import socket, sys\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'hello', (sys.argv[1], 7003))"
    words = lab.command(receiver, [sys.executable, "-c", script])
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as listener:
        assert listener.stdout is not None
        listener.stdout.readline()
        output_of(lab, sender, sys.executable, "-c", send, lab.state.spec.node(receiver).address)
        return listener.stdout.readline().strip() == "hello"


def test_a_node_can_be_cut_off_from_all_others(lab: Lab) -> None:
    lab.node("node1").cut()
    assert not can_ping(lab, "node1", "node2")
    assert not can_ping(lab, "node3", "node1")
    assert can_ping(lab, "node2", "node3")


def test_a_firewall_blocks_new_connections_and_passes_replies(lab: Lab, tmp_path: Path) -> None:
    lab.node("node2").set_firewall("7001")
    reach = (sys.executable, "-c", _REACHES)
    servers = [lab.start(node, [sys.executable, "-c", _SERVE], {}, tmp_path / node) for node in ("node1", "node2")]
    wait_until(lambda: all((tmp_path / node).read_text() == "ready\n" for node in ("node1", "node2")))
    assert on(lab, "node1", *reach, "10.77.0.2", "7001").returncode == 0
    assert on(lab, "node1", *reach, "10.77.0.2", "7002").returncode != 0
    assert on(lab, "node2", *reach, "10.77.0.1", "7002").returncode == 0
    lab.node("node2").remove_firewall()
    assert on(lab, "node1", *reach, "10.77.0.2", "7002").returncode == 0
    for server in servers:
        server.kill()
        server.wait(30)


def test_freezing_stops_a_counter_and_thawing_resumes_it(lab: Lab, tmp_path: Path) -> None:
    check_freezing(lab, tmp_path / "count", "node3")


def check_freezing(lab: Lab, log: Path, node: str) -> None:
    process = lab.start(node, [sys.executable, "-c", _COUNT], {}, log)
    wait_until(lambda: log.stat().st_size > 5)
    lab.node(node).freeze()
    time.sleep(0.1)
    frozen_size = log.stat().st_size
    time.sleep(0.3)
    assert log.stat().st_size == frozen_size
    with pytest.raises(LabUsageError, match="frozen"):
        lab.command(node, ["true"])
    lab.node(node).thaw()
    wait_until(lambda: log.stat().st_size > frozen_size + 5)
    process.kill()
    process.wait(30)


def test_the_version_2_freezer_freezes_a_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Version 2 is mounted beside version 1, without controllers; freezing needs none."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    places = [fields[1] for fields in mounts if fields[2] == "cgroup2" and os.access(fields[1], os.W_OK)]
    if not places:
        pytest.skip("no writable version 2 control groups are mounted")
    groups = ControlGroups(freezer=ControlGroup(parent=Path(places[0]), version=2))
    monkeypatch.setattr("shoal_lab.kernel.read_groups", lambda: groups)
    with running_lab(1) as lab:
        assert lab.state.groups == groups
        check_freezing(lab, tmp_path / "count", "node1")
        lab.node("node1").freeze()


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_node_is_restarted_with_its_settings(lab: Lab, tmp_path: Path, silent: bool, frozen: bool) -> None:
    process = lab.start("node2", ["sleep", "60"], {}, tmp_path / "log")
    wait_until(lambda: any("sleep" in command for _, command in lab.processes("node2")))
    if frozen:
        lab.node("node2").freeze()
    lab.node("node2").kill(silent)
    assert process.wait(30) != 0
    assert not lab.is_alive("node2")
    assert not can_ping(lab, "node1", "node2")
    with pytest.raises(LabUsageError, match="not running"):
        lab.node("node2").kill(silent)
    lab.node("node2").restart()
    assert can_ping(lab, "node1", "node2")
    assert "tbf" in output_of(lab, "node2", "tc", "qdisc", "show", "dev", "eth0")


def test_a_silent_kill_closes_no_connection(lab: Lab) -> None:
    """The peer of a killed process reads the end of the stream; after a silent kill it reads nothing."""
    assert end_seen(lab, silent=False)
    assert not end_seen(lab, silent=True)


def test_a_kill_closes_the_connections_of_a_process_that_exits_slowly(lab: Lab) -> None:
    """A killed process frees its memory before it closes its files."""
    assert end_seen(lab, silent=False, memory_bytes=1_000_000_000)


def end_seen(lab: Lab, silent: bool, memory_bytes: int = 0) -> bool:
    serve = (
        f"memory = b'1' * {memory_bytes}\nimport socket\n"
        "s = socket.create_server(('', 7004)); print('ready', flush=True); s.accept()[0].recv(1)"
    )
    watch = (
        "import socket\ns = socket.create_connection(('10.77.0.2', 7004)); print('joined', flush=True)\n"
        f"s.settimeout({1.5 if silent else 30})\ntry: s.recv(1); print('end', flush=True)\n"
        "except TimeoutError: print('nothing', flush=True)\nexcept OSError: print('end', flush=True)"
    )
    commands = (lab.command(node, [sys.executable, "-c", code]) for node, code in (("node2", serve), ("node1", watch)))
    with subprocess.Popen(next(commands), stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        server.stdout.readline()
        with subprocess.Popen(next(commands), stdout=subprocess.PIPE, text=True) as watcher:
            assert watcher.stdout is not None
            watcher.stdout.readline()
            lab.node("node2").kill(silent)
            seen = watcher.stdout.readline().strip()
    lab.node("node2").restart()
    return seen == "end"


def test_ssh_logs_in_to_a_node(lab: Lab) -> None:
    need_tool("sshd")
    if not lab.state.spec.sshd:
        pytest.skip("; ".join(lab.state.notes))
    ssh = ("ssh", "-F", str(lab.folder / "ssh/config"))
    assert output_of(lab, "switch", *ssh, "node1", "hostname") == "node1"
    assert output_of(lab, "node1", *ssh, "node3", "hostname") == "node3"
    assert on(lab, "node1", *ssh, "node3", "exit 9").returncode == 9
    modes = {path.stat().st_mode & 0o777 for path in (lab.folder / "ssh/id", lab.folder / "ssh/host")}
    assert modes == {0o600}
