"""Facts that doctor's collector reads on this machine.

Exercises tools.doctor.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import shoal
from shoal.host import proc
from shoal.host.facts import installed_version
from shoal.tools.doctor.collect import machine
from shoal.tools.doctor.collect import machine as collector_processes
from shoal.tools.doctor.collect import network as collector_names
from shoal.tools.doctor.collect.__main__ import observe


def test_the_collector_describes_this_machine() -> None:
    seen = observe({"peers": ["127.0.0.1"], "address": "127.0.0.1", "port": 0})
    assert seen["failed"] == {}
    own = seen["machine"]
    assert own["shoal"] == shoal.__version__
    assert own["python"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert own["torch"] == installed_version("torch")
    assert 1 <= own["cores"]["physical"] <= own["cores"]["threads"] == len(os.sched_getaffinity(0))
    assert 0 < own["memory"]["available"] <= own["memory"]["total"]
    assert {purpose for place in own["disks"] for purpose in place["for"]} == {
        "temporary files",
        "runs",
        "encoded text",
    }
    assert seen["names"]["host_name"] == socket.gethostname()


_STANDARD_ONLY = """
import importlib.util, sys
before = set(sys.modules)
import shoal.tools.doctor.collect.__main__
foreign = {name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names - {"shoal"}
print(sorted(foreign))
"""


def test_the_collector_needs_only_the_standard_library() -> None:
    done = subprocess.run([sys.executable, "-c", _STANDARD_ONLY], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_missing_package_has_no_version() -> None:
    assert installed_version("no-such-package") is None


def test_slow_look_ups_are_abandoned() -> None:
    answered = threading.Event()
    answers = collector_names.ask_all({"slow": lambda: answered.wait(30), "quick": lambda: "yes"}, timeout_s=0.5)
    answered.set()
    assert answers["slow"] == {"took_s": None}
    assert answers["quick"]["answer"] == "yes"


def test_only_an_address_of_this_machine_is_published() -> None:
    assert collector_names.published(["192.0.2.1", "127.0.0.1", "127.0.0.2"]) == "127.0.0.1"
    assert collector_names.published(["192.0.2.1"]) is None
    assert collector_names.published([]) is None


def test_hosts_files_and_name_sources_are_parsed() -> None:
    text = "127.0.0.1 localhost\n127.0.1.1 me.lan me # this one\n10.0.0.1 mean\n# 10.0.0.2 me\n"
    assert collector_names.hosts_file_addresses(text, "me") == ["127.0.1.1"]
    text = "passwd: files\nhosts:  files mdns4_minimal [NOTFOUND=return] dns myhostname\n"
    assert collector_names.host_sources(text) == ["files", "mdns4_minimal", "dns", "myhostname"]
    assert collector_names.host_sources("") == []


@contextmanager
def child(program: str = "print('ready', flush=True)", **variables: str) -> Iterator[tuple[int, str]]:
    """Run a process until the block ends; yield its pid and its first line."""
    words = [sys.executable, "-c", f"import socket, sys\n{program}\nsys.stdin.read()"]
    pipe, env = subprocess.PIPE, {**os.environ, **variables}
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=env) as process:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline()
        process.communicate()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_holder_of_a_port_is_described(family: socket.AddressFamily) -> None:
    loopback = "127.0.0.1" if family == socket.AF_INET else "::1"
    if collector_names.published([loopback]) is None:
        pytest.skip(f"this machine has no {loopback}")
    listen = f"server = socket.create_server(({loopback!r}, 0), family=socket.{family.name})"
    program = f"{listen}\nprint(server.getsockname()[1], flush=True)"
    began = time.time()
    with child(program, SHOAL_RUN="/no/such/run", SHOAL_PART="rank-3") as (pid, port):
        (holder,) = collector_processes.holders(int(port))
    assert (holder["address"], holder["pid"]) == (loopback, pid)
    assert holder["command"].startswith(sys.executable)
    # The kernel counts in hundredths of a second.
    assert 0 <= holder["age_s"] <= time.time() - began + 1
    assert (holder["run"], holder["part"], holder["has_folder"]) == ("/no/such/run", "rank-3", False)


def test_a_free_port_has_no_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert collector_processes.holders(port) == []


def test_a_child_is_no_orphan() -> None:
    with child() as (pid, _):
        assert not proc.is_orphan(pid)
        assert proc.describe_process(pid)["command"].startswith(f"{sys.executable} -c ")
    with pytest.raises(ProcessLookupError):
        proc.describe_process(pid)


def test_processes_with_the_same_run_variable_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_RUN", "/r/own")
    with child() as (same, _), child(SHOAL_RUN="/r/other") as (other, _):
        runs = {worker["pid"]: worker["run"] for worker in collector_processes.workers()["marked"]}
    assert same not in runs
    assert runs[other] == "/r/other"


def test_lid_actions_are_read() -> None:
    assert machine.lid_actions([]) == {"on_battery": "suspend", "on_mains": "suspend"}
    main = "[Login]\n#HandleLidSwitch=suspend\nHandleLidSwitchExternalPower=lock\n"
    assert machine.lid_actions([main]) == {"on_battery": "suspend", "on_mains": "lock"}
    later = "[Login]\nHandleLidSwitch=ignore\n"
    assert machine.lid_actions([main, later, "not a setting"]) == {"on_battery": "ignore", "on_mains": "lock"}


def test_missing_small_files_are_empty(tmp_path: Path) -> None:
    assert proc.read_text(tmp_path / "none") == ""
    assert proc.read_number(tmp_path / "none") is None
    (tmp_path / "cpus").write_text("0-2,5\n")
    assert proc.read_cpu_list(tmp_path / "cpus") == {0, 1, 2, 5}
    (tmp_path / "limit").write_text("max\n")
    assert proc.read_number(tmp_path / "limit") is None


def test_the_tcp_sockets_of_a_process_are_listed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            sockets = proc.tcp_sockets_of(os.getpid())
            (listening,) = [entry for entry in sockets if entry.is_listening and entry.port == port]
            (connected,) = [entry for entry in sockets if entry.port == client.getsockname()[1]]
    assert (str(listening.address), listening.peer_port, listening.uid) == ("127.0.0.1", 0, os.geteuid())
    assert (str(connected.peer), connected.peer_port, connected.is_listening) == ("127.0.0.1", port, False)
    assert str(proc.plain_address("::ffff:10.77.0.1")) == "10.77.0.1"
    with pytest.raises(OSError, match="No such file"):
        proc.tcp_sockets_of(2**22 + 1)


def test_memory_is_in_bytes() -> None:
    memory = proc.read_meminfo()
    assert 1 << 26 < memory["MemTotal"] < 1 << 50
    assert 0 < memory["MemAvailable"] <= memory["MemTotal"]


def test_every_disk_is_listed_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "not/there/yet"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (disk,) = machine.disks()
    assert (disk["path"], len(disk["for"]), disk["read_only"]) == (str(tmp_path), 3, False)


def test_an_inaccessible_folder_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No system allows such a name; an inaccessible home folder raises the same error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ("x" * 300) / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (disk,) = machine.disks()
    assert (disk["path"], len(disk["for"])) == (str(tmp_path), 3)


POWER = {
    "on mains": ({"AC": {"type": "Mains", "online": "1"}, "BAT0": {"type": "Battery", "status": "Discharging"}}, False),
    "on battery": (
        {"AC": {"type": "Mains", "online": "0"}, "BAT0": {"type": "Battery", "status": "Discharging"}},
        True,
    ),
    "full": ({"BAT0": {"type": "Battery", "status": "Full", "capacity": "100"}}, False),
    "a mouse": ({"hid": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, None),
}


@pytest.mark.parametrize("case", POWER)
def test_power_supplies_are_read(case: str, tmp_path: Path) -> None:
    supplies, on_battery = POWER[case]
    for supply, files in supplies.items():
        folder = tmp_path / "class/power_supply" / supply
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
    assert machine.power(tmp_path).get("on_battery") == on_battery
