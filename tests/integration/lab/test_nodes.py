"""Real lab nodes: separate machines, connected by links of the configured speed.

Exercises `shoal lab`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.cluster.lab import as_nodes
from shoal_lab.errors import LabUsageError
from shoal_lab.lab import Lab
from shoal_lab.spec import format_rate
from tests.support.labs import running_lab, shoal
from tests.support.waiting import wait_until

_LISTEN = """
import socket, time
with socket.create_server(("0.0.0.0", 7000)) as server:
    print("ready", flush=True)
    peer, _ = server.accept()
    received, began = len(peer.recv(1 << 20)), time.monotonic()
    while data := peer.recv(1 << 20):
        received += len(data)
    print(8 * received / (time.monotonic() - began), flush=True)
"""
_SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000)) as peer:
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        peer.sendall(bytes(1 << 16))
"""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with running_lab(3, link="100mbit/100mbit/1gbit", cpu="none/none/0.5") as built:
        yield built


def on(lab: Lab, node: str, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(lab.command(node, argv), capture_output=True, text=True, timeout=20)


def output_of(lab: Lab, node: str, *argv: str) -> str:
    done = on(lab, node, *argv)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def can_ping(lab: Lab, node: str, other: str) -> bool:
    return on(lab, node, "ping", "-c", "1", "-W", "1", other).returncode == 0


def rate_bps(lab: Lab, sender: str, receiver: str, seconds: float = 2.0) -> float:
    """Return the rate that the receiver measures."""
    address = lab.state.spec.node(receiver).address
    with subprocess.Popen(
        lab.command(receiver, [sys.executable, "-c", _LISTEN]), stdout=subprocess.PIPE, text=True
    ) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline().strip() == "ready"
        output_of(lab, sender, sys.executable, "-c", _SEND, address, str(seconds))
        return float(listener.stdout.readline())


def nearly(lab: Lab, sender: str, receiver: str, wanted_bps: float) -> bool:
    """Return whether one of three measured rates is within 5%; other work may slow single ones."""
    return any(abs(rate_bps(lab, sender, receiver) / wanted_bps - 1) < 0.05 for _ in range(3))


def test_a_node_has_its_own_hostname_network_and_processes(lab: Lab) -> None:
    assert output_of(lab, "node2", "hostname") == "node2"
    assert output_of(lab, "node2", "sh", "-c", "ls /sys/class/net").split() == ["eth0", "lo"]
    assert "10.77.0.2/24" in output_of(lab, "node2", "ip", "-brief", "address", "show", "eth0")
    assert output_of(lab, "node2", "cat", "/proc/1/comm") == "sleep"
    processes = output_of(lab, "node2", "sh", "-c", "ls /proc | grep -c '^[0-9]*$'")
    assert int(processes) < 8, "the node sees processes of others"
    assert output_of(lab, "node2", "pwd") == str(Path.cwd())


def test_every_node_can_ping_every_other_by_name(lab: Lab) -> None:
    names = [node.name for node in lab.nodes]
    assert all(can_ping(lab, one, other) for one in names for other in names)
    assert can_ping(lab, "switch", "node3")


def test_orphans_on_a_node_are_reaped(lab: Lab) -> None:
    output_of(lab, "node1", "sh", "-c", "(sleep 0.1 &)")
    time.sleep(0.4)
    assert lab.processes("node1") == []


def test_a_link_has_its_configured_rate_in_both_directions(lab: Lab) -> None:
    assert nearly(lab, "node1", "node2", 100e6)
    assert nearly(lab, "node3", "node1", 100e6)


@pytest.mark.long
def test_a_link_can_be_changed(lab: Lab) -> None:
    node = lab.node("node2")
    before = format_rate(node.spec.link.rate_bps or 0.0)
    node.set_link("20mbit")
    try:
        assert nearly(lab, "node1", "node2", 20e6)
        assert nearly(lab, "node2", "node1", 20e6)
        assert node.spec.link.rate_bps == 20e6
    finally:
        node.set_link(before)


def test_a_limit_of_a_link_can_be_removed_and_set_again() -> None:
    with running_lab(1, link="100mbit") as lab:
        for rate, shown in (("none", "unlimited"), ("none", "unlimited"), ("20mbit", "20mbit"), ("none", "unlimited")):
            changed = subprocess.run(
                shoal("lab", "link", "node1", rate, "--name", lab.name), capture_output=True, text=True, timeout=30
            )
            assert changed.returncode == 0, changed.stderr
            assert f"the link of node1 is now {shown}" in changed.stdout + changed.stderr


def test_a_link_that_becomes_slower_under_load_goes_on_carrying_packets() -> None:
    """A queued packet of 64 kB is larger than the burst of a slow link: it must not block what comes after it."""
    with running_lab(2, link="1gbit") as lab:
        address = lab.state.spec.node("node2").address
        listen, send = ([sys.executable, "-c", _LISTEN], [sys.executable, "-c", _SEND, address, "2"])
        for _ in range(3):
            with subprocess.Popen(lab.command("node2", listen), stdout=subprocess.PIPE, text=True) as listener:
                assert listener.stdout is not None
                assert listener.stdout.readline().strip() == "ready"
                with subprocess.Popen(lab.command("node1", send)):
                    time.sleep(0.7)
                    lab.node("node1").set_link(rate="20mbit")
                    try:
                        assert can_ping(lab, "node1", "node2") or can_ping(lab, "node1", "node2")
                    finally:
                        lab.node("node1").set_link(rate="1gbit")


def test_a_cpu_share_limits_a_busy_node(lab: Lab) -> None:
    if lab.state.groups.cpu is None:
        pytest.skip("; ".join(lab.state.notes))
    busy = "import time; e = time.monotonic() + 1\nwhile time.monotonic() < e: pass\nprint(time.process_time())"
    half_s = float(output_of(lab, "node3", sys.executable, "-c", busy))
    lab.node("node3").set_cpu(0.2)
    fifth_s = float(output_of(lab, "node3", sys.executable, "-c", busy))
    # Of one second. Other processes of the machine only lower them.
    assert half_s < 0.62
    assert fifth_s < 0.32
    assert fifth_s < half_s
    lab.node("node3").set_cpu(0.5)


def test_status_lists_the_processes_of_each_node(lab: Lab, tmp_path: Path) -> None:
    process = lab.start("node1", ["sleep", "30"], {}, tmp_path / "log")
    wait_until(lambda: [command for _, command in lab.processes("node1")] == ["sleep 30"])
    done = subprocess.run(
        shoal("lab", "status", "--name", lab.name, "--json"), capture_output=True, text=True, timeout=30
    )
    process.kill()
    process.wait(30)
    nodes = {node["name"]: node for node in json.loads(done.stdout)["nodes"]}
    assert [running["command"] for running in nodes["node1"]["processes"]] == ["sleep 30"]
    assert nodes["node2"] | {"processes": []} == nodes["node2"]
    assert (nodes["node3"]["link"], nodes["node3"]["address"], nodes["node3"]["state"]) == ("1gbit", "10.77.0.3", "up")


def test_exec_passes_on_input_output_and_exit_code(lab: Lab) -> None:
    words = shoal("lab", "exec", "--name", lab.name, "node1", "--", "sh", "-c", "cat; echo oops >&2; exit 7")
    done = subprocess.run(words, input="hello", capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (7, "hello", "oops\n")
    gone = subprocess.run(
        shoal("lab", "exec", "--name", lab.name, "node9", "true"), capture_output=True, text=True, timeout=30
    )
    assert gone.returncode == 2
    assert "no node 'node9'" in gone.stderr


def test_ending_exec_ends_its_command(lab: Lab) -> None:
    script = "trap 'echo ended; exit 4' TERM; echo begun; while :; do sleep 0.05; done"
    words = shoal("lab", "exec", "--name", lab.name, "node1", "--", "sh", "-c", script)
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "begun\n"
        command.terminate()
        assert command.stdout.readline() == "ended\n"
        assert command.wait(30) == 4


def test_a_command_that_cannot_run_on_a_node_is_an_error(lab: Lab) -> None:
    done = on(lab, "node1", "no-such-program")
    assert (done.returncode, done.stderr) == (
        127,
        f"cannot run no-such-program in {Path.cwd()}: No such file or directory\n",
    )
    assert on(lab, "node1", "/etc/hosts").returncode == 126


def test_a_started_process_has_its_log_its_variables_and_its_own_signals(lab: Lab, tmp_path: Path) -> None:
    script = "trap 'echo $WORD ended; exit 5' INT; echo begun; while :; do sleep 0.05; done"
    process = lab.start("node1", ["sh", "-c", script], {"WORD": "cleanly"}, tmp_path / "logs/a.log")
    wait_until(lambda: "begun" in (tmp_path / "logs/a.log").read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 5
    assert (tmp_path / "logs/a.log").read_text() == "begun\ncleanly ended\n"


def test_a_killed_process_returns_its_signal(lab: Lab, tmp_path: Path) -> None:
    process = lab.start("node1", ["sleep", "30"], {}, tmp_path / "log")
    wait_until(lambda: lab.processes("node1") != [])
    process.kill()
    assert process.wait(30) == -signal.SIGKILL
    wait_until(lambda: lab.processes("node1") == [])


def test_a_process_that_was_stopped_and_continued_still_ends(lab: Lab, tmp_path: Path) -> None:
    process = lab.start("node1", ["sleep", "30"], {}, tmp_path / "log")
    wait_until(lambda: lab.processes("node1") != [])
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(process.inner()[0]).status() == psutil.STATUS_STOPPED)
    time.sleep(0.2)
    assert psutil.Process(process.pid).status() == psutil.STATUS_SLEEPING
    process.send_signal(signal.SIGCONT)
    process.kill()
    assert process.wait(30) == -signal.SIGKILL


def test_an_open_file_is_passed_on(lab: Lab, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = lab.start(
        "node1", ["sh", "-c", f"hostname > /proc/self/fd/{writing}"], {}, tmp_path / "log", pass_fds=(writing,)
    )
    os.close(writing)
    assert process.wait(30) == 0
    assert os.read(reading, 100) == b"node1\n"
    os.close(reading)


def test_a_process_on_a_node_dies_with_the_process_that_started_it(lab: Lab, tmp_path: Path) -> None:
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom shoal_lab.lab import Lab\n"
        "Lab.open(sys.argv[1]).start('node1', ['sleep', '30'], {}, Path(sys.argv[2]))\ntime.sleep(30)"
    )
    starter = psutil.Popen([sys.executable, "-c", script, lab.name, str(tmp_path / "log")])
    wait_until(lambda: lab.processes("node1") != [])
    starter.kill()
    starter.wait(30)
    wait_until(lambda: lab.processes("node1") == [])


def test_lab_nodes_have_the_fields_of_any_node(lab: Lab) -> None:
    node = as_nodes(lab.state.spec)[2]
    assert (node.name, node.address, node.interface, node.slots) == ("node3", "10.77.0.3", "eth0", 1)
    assert (node.cores or 0) >= 1
    with pytest.raises(LabUsageError, match="no node 'node9'"):
        lab.command("node9", ["true"])
