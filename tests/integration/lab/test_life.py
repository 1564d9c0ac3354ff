"""How labs are built and removed: several at once, interrupted, owned by a run, without root, by hand.

Exercises `shoal lab`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.cli import lab as lab_cli
from shoal_lab import lab as lab_module
from shoal_lab import state as lab_state
from shoal_lab.commands import ControlGroups
from shoal_lab.errors import LabError, LabUsageError
from shoal_lab.lab import Lab, choose_lab, remove_lab
from shoal_lab.processes import first_process, start_ticks
from shoal_lab.spec import make_spec
from shoal_lab.state import LabOwner, LabState
from tests.integration.lab.test_nodes import can_ping, nearly, on, output_of
from tests.support.labs import Traces, as_ordinary_user, assert_gone, need_lab, new_name, running_lab, shoal
from tests.support.waiting import wait_until

_UP = "import sys\nfrom shoal_lab.lab import Lab\nfrom shoal_lab.spec import make_spec\n"
_UP_AND_STAY = _UP + "import os, time\nLab.build(make_spec(2, name=sys.argv[1]), owner=os.getpid())\ntime.sleep(60)"


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def test_two_labs_with_the_same_addresses_exist_side_by_side() -> None:
    with running_lab(2) as one, running_lab(2, link="100mbit") as other:
        assert one.nodes[0].address == other.nodes[0].address
        one.close()
        assert can_ping(other, "node1", "node2")
        assert one.name not in lab_state.list_labs()


def test_a_lab_name_in_use_is_refused() -> None:
    with running_lab(1) as lab:
        with pytest.raises(LabUsageError, match="already up"):
            Lab.build(make_spec(1, name=lab.name))
        assert lab.is_alive("node1")


@pytest.mark.parametrize("file", ["lab.json", "switch.pid", "node1.pid", "node4.pid"])
def test_an_up_killed_half_way_is_cleaned_by_down(file: str) -> None:
    need_lab()
    name = new_name()
    builder = subprocess.Popen([sys.executable, "-c", _UP + "Lab.build(make_spec(5, name=sys.argv[1]))", name])
    wait_until(lambda: (lab_state.lab_folder(name) / file).exists())
    builder.send_signal(signal.SIGKILL)
    builder.wait(30)
    traces = Traces(name)
    traces.note()
    with pytest.raises(LabError, match="broken"):
        Lab.open(name)
    remove_lab(name)
    assert_gone(traces)
    remove_lab(name)


def test_the_rest_of_an_interrupted_up_does_not_block_the_next() -> None:
    need_lab()
    name = new_name()
    builder = subprocess.Popen([sys.executable, "-c", _UP + "Lab.build(make_spec(5, name=sys.argv[1]))", name])
    wait_until(lambda: (lab_state.lab_folder(name) / "node1.pid").exists())
    builder.send_signal(signal.SIGKILL)
    builder.wait(30)
    lab = Lab.build(make_spec(2, name=name))
    assert can_ping(lab, "node1", "node2")
    lab.close()
    assert_gone(Traces(name))


def test_a_step_that_fails_removes_the_whole_lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    need_lab()
    broken = tmp_path / "tc"
    broken.write_text(
        '#!/bin/sh\ncase "$*" in *node2*) echo failed by the test >&2; exit 1; esac\nexec /sbin/tc "$@"\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    name = new_name()
    with pytest.raises(LabError, match="failed by the test"):
        Lab.build(make_spec(2, name=name))
    assert_gone(Traces(name))


def test_a_lab_whose_switch_died_is_reported_as_broken_and_can_be_removed() -> None:
    with running_lab(2) as lab:
        switch = first_process(lab.folder, "switch")
        assert switch is not None
        os.kill(switch, signal.SIGKILL)
        wait_until(lambda: not lab.is_alive("node1"))
        with pytest.raises(LabError, match="switch is gone"):
            Lab.open(lab.name)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_owned_lab_is_removed_when_its_owner_ends(how: signal.Signals) -> None:
    need_lab()
    name = new_name()
    owner = subprocess.Popen([sys.executable, "-c", _UP_AND_STAY, name])
    wait_until(lambda: (state := lab_state.read_state(name)) is not None and state.ready)
    traces = Traces(name)
    traces.note()
    assert traces.namespaces
    owner.send_signal(how)
    owner.wait(30)
    assert_gone(traces)


def test_a_lab_with_an_unreadable_state_file_can_be_removed() -> None:
    with running_lab(1) as lab:
        (lab.folder / "lab.json").write_bytes(b"\xff{")
        with pytest.raises(LabError, match="unreadable"):
            Lab.open(lab.name)


# Labs of the user and labs of runs


def note_lab(name: str, owner: int | None = None) -> None:
    """Write the state file of a lab that does not exist."""
    lab_state.lab_folder(name).mkdir(parents=True)
    held_by = None if owner is None else LabOwner(pid=owner, started=start_ticks(owner) or 0)
    lab_state.write_state(
        LabState(
            spec=make_spec(2, name=name), rootless=False, netem=True, groups=ControlGroups(), owner=held_by, ready=True
        )
    )


@pytest.fixture
def no_labs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_state, "runtime_folder", lambda: tmp_path)


@pytest.mark.usefixtures("no_labs")
def test_the_lab_of_a_run_is_never_chosen_without_its_name() -> None:
    note_lab("run-77", owner=os.getpid())
    with pytest.raises(LabUsageError, match="no lab is up") as none:
        choose_lab(lab_state.list_labs())
    assert "belong to runs: run-77" in none.value.why
    note_lab("mine")
    assert choose_lab(lab_state.list_labs()) == "mine"
    note_lab("other")
    with pytest.raises(LabUsageError, match="which lab") as two:
        choose_lab(lab_state.list_labs())
    assert two.value.why == "up are: mine, other"
    note_lab("default")
    assert choose_lab(lab_state.list_labs()) == "default"


@pytest.mark.usefixtures("no_labs")
def test_status_without_a_name_shows_every_lab_and_its_owner(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab_module, "first_process", lambda folder, node: os.getpid())
    note_lab("mine")
    note_lab("run-77", owner=os.getpid())
    note_lab("run-78", owner=os.getpid())
    (lab_state.lab_folder("run-78") / "lab.json").write_text("{}")
    lab_cli.status(name=None, json=True)
    labs = {lab["name"]: lab for lab in json.loads(capsys.readouterr().out)["labs"]}
    assert labs["mine"]["belongs_to"] is None
    assert labs["run-77"]["belongs_to"].startswith(f"process {os.getpid()} (")
    assert labs["run-78"]["broken"] == "its state file is missing or unreadable"
    lab_cli.status(name=None, json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert f"it belongs to process {os.getpid()} (" in text
    assert "remove it: shoal lab down --name run-78" in text


@pytest.mark.usefixtures("no_labs")
def test_all_labs_but_those_of_running_runs_are_taken_down(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    removed: list[str] = []
    monkeypatch.setattr(lab_module, "first_process", lambda folder, node: os.getpid())
    monkeypatch.setattr(lab_module, "remove_lab", removed.append)
    note_lab("mine")
    note_lab("run-77", owner=os.getpid())
    lab_cli.down(name=None, all_=True)
    assert removed == ["mine"]
    assert "lab 'run-77' is kept: it belongs to a running run" in capsys.readouterr().err
    lab_cli.down(name=None)
    lab_cli.down(name="run-77")
    assert removed == ["mine", "mine", "run-77"]


def test_the_printed_commands_build_a_lab_by_hand() -> None:
    need_lab()
    name = new_name()
    script = run(*shoal("lab", "up", "2", "--name", name, "--link", "100mbit", "--cpu", "0.5", "--dry-run")).stdout
    assert not lab_state.lab_folder(name).exists()
    try:
        done = run("sh", "-ec", script)
        assert done.returncode == 0, done.stderr
        node1 = (lab_state.lab_folder(name) / "node1.pid").read_text().strip()
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        assert run("nsenter", "--target", node1, *user, "--net", "ping", "-c", "1", "10.77.0.2").returncode == 0
    finally:
        remove_lab(name)
    assert_gone(Traces(name))


def test_the_printed_commands_take_a_lab_down_by_hand() -> None:
    with running_lab(2) as lab:
        script = run(*shoal("lab", "down", "--name", lab.name, "--dry-run")).stdout
        assert lab.is_alive("node1")
        done = run("sh", "-ec", script)
        assert done.returncode == 0, done.stderr
        assert_gone(Traces(lab.name))


def test_lab_commands_from_up_to_down() -> None:
    need_lab()
    name = ("--name", new_name())
    assert "node3" in run(*shoal("lab", "up", "3", *name)).stdout
    again = run(*shoal("lab", "up", "3", *name))
    assert (again.returncode, "already up" in again.stderr) == (2, True)
    assert run(*shoal("lab", "cut", "node1", "node2", *name)).returncode == 0
    assert "node2 no longer receives from node1" in run(*shoal("lab", "status", *name)).stdout
    assert run(*shoal("lab", "kill", "node3", *name)).returncode == 0
    assert "dead" in run(*shoal("lab", "status", *name)).stdout
    assert run(*shoal("lab", "down", *name)).returncode == 0
    gone = run(*shoal("lab", "status", *name))
    assert (gone.returncode, "there is no lab" in gone.stderr) == (2, True)
    assert run(*shoal("lab", "down", *name)).returncode == 0
    assert_gone(Traces(name[1]))


_ROOTLESS = """
import subprocess, sys
from pathlib import Path
from shoal_lab import lab as changes
from shoal_lab.lab import Lab
from shoal_lab.spec import make_spec
lab = Lab.build(make_spec(2, name=sys.argv[1], cpu="0.5", link="100mbit", delay="20ms"))
try:
    on_node1 = lambda *argv: subprocess.run(lab.command("node1", argv), capture_output=True, text=True)
    assert lab.state.rootless
    assert on_node1("hostname").stdout == "node1\\n", on_node1("hostname").stderr
    first = on_node1("ping", "-q", "-c", "2", "-W", "1", "node2")
    assert first.returncode == 0, first
    # In a user namespace root's Python may be unreadable, and then no process delays packets.
    least_ms = 40 if lab.state.netem or lab.state.delay_line else 0
    assert float(first.stdout.rpartition("= ")[2].split("/")[0]) >= least_ms, first
    lab.node("node1").cut()
    assert on_node1("ping", "-c", "1", "-W", "1", "node2").returncode != 0
    assert "tbf" in on_node1("tc", "qdisc", "show", "dev", "eth0").stdout
    sleepers = [lab.start(node, ["sleep", "60"], {}, Path("/dev/null")) for node in ("node1", "node2")]
    while len(lab.processes("node1") + lab.processes("node2")) < 2: pass
    lab.node("node1").freeze()
    lab.node("node1").thaw()
    sleepers[0].terminate()
    assert sleepers[0].wait(30) == -15
    lab.node("node2").freeze()
    lab.node("node2").kill(silent=True)
    assert sleepers[1].wait(30) == -9
    lab.node("node2").restart()
    print(lab.folder, *lab.state.notes)
finally:
    lab.close()
"""


def test_a_lab_works_without_root() -> None:
    need_lab()
    name = new_name()
    done = run(*as_ordinary_user([sys.executable, "-c", _ROOTLESS, name]))
    if "no network namespaces can be made" in done.stderr and os.environ.get("SHOAL_REQUIRE_ALL") != "1":
        pytest.skip("this machine gives ordinary users no namespaces")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.split()[0])
    assert folder.name == name
    assert not folder.parent.exists() or not folder.exists()


@pytest.mark.long
def test_many_labs_one_after_another_leave_nothing() -> None:
    for _ in range(15):
        with running_lab(4) as lab:
            assert can_ping(lab, "node1", "node4")


@pytest.mark.long
def test_an_up_killed_at_any_moment_is_cleaned() -> None:
    need_lab()
    for step in range(25):
        name = new_name()
        builder = subprocess.Popen([sys.executable, "-c", _UP + "Lab.build(make_spec(4, name=sys.argv[1]))", name])
        time.sleep(0.25 + 0.03 * step)
        builder.send_signal(signal.SIGKILL)
        builder.wait(30)
        traces = Traces(name)
        traces.note()
        remove_lab(name)
        assert_gone(traces)


@pytest.mark.long
def test_a_gigabit_link_carries_a_gigabit() -> None:
    with running_lab(2) as lab:
        assert nearly(lab, "node1", "node2", 1e9)
        assert nearly(lab, "node2", "node1", 1e9)


@pytest.mark.long
def test_a_loss_rate_drops_packets_in_both_directions() -> None:
    need_lab()
    lab = Lab.build(make_spec(2, name=new_name(), loss="20%"))
    try:
        text = on(lab, "node1", "ping", "-q", "-c", "200", "-i", "0.01", "-W", "1", "node2").stdout
        lost = float(text.split("% packet loss")[0].split()[-1])
        assert 20 < lost < 52, "each way loses a fifth: 36% of the round trips"
        assert output_of(lab, "node1", "hostname") == "node1"
    finally:
        lab.close()
