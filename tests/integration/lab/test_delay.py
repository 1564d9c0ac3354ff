"""Delays without netem: a process delays the packets. Tested on every kernel, also on one that has netem.

Exercises `shoal lab`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from shoal_lab import lab as lab_lab
from shoal_lab import state
from shoal_lab.errors import LabError
from shoal_lab.kernel import Features, find_features
from shoal_lab.lab import Lab
from shoal_lab.processes import first_process
from shoal_lab.spec import make_spec
from tests.support.labs import need_lab, new_name, run_on, running_lab
from tests.support.needs import need_tool


@pytest.fixture
def no_netem(monkeypatch: pytest.MonkeyPatch) -> None:
    need_lab()
    without = replace(find_features(), netem=False, delay_line=True)
    monkeypatch.setattr(lab_lab, "find_features", lambda: without)


@pytest.fixture
def lab(no_netem: None) -> Iterator[Lab]:
    need_tool("ping")
    with running_lab(2, delay="10ms") as lab:
        yield lab


def shortest_ms(lab: Lab) -> float:
    """Return the shortest of several round trips: on a busy machine single ones are late."""
    output = run_on(lab, "node1", "ping", "-q", "-c", "8", "-i", "0.05", "node2").stdout
    summary = re.search(r"= ([0-9.]+)/", output)
    assert summary, output
    return float(summary[1])


def test_a_delay_applies_can_be_changed_and_removed_and_survives_a_restart(lab: Lab) -> None:
    assert "a process" in lab.state.notes[0]
    first_ms = shortest_ms(lab)
    assert first_ms >= 20
    lab.node("node2").set_link(delay="30ms")
    longer_ms = shortest_ms(lab)
    assert longer_ms >= 40
    assert longer_ms > first_ms
    for name in ("node1", "node2"):
        lab.node(name).set_link(delay="0ms")
    assert shortest_ms(lab) < 20, "the delay is still there"
    assert first_process(lab.folder, "node2-delay") is None
    lab.node("node2").set_link(delay="20ms")
    lab.node("node2").kill(silent=True)
    lab.node("node2").restart()
    assert 20 <= shortest_ms(lab) < longer_ms


def test_large_frames_arrive_whole_over_a_delayed_link(lab: Lab) -> None:
    """Frames of 64 kB with partial checksums pass through the process unchanged."""
    program = (
        "import hashlib, socket, sys\n"
        "data = bytes(range(256)) * 40000\n"
        "if sys.argv[1] == 'serve':\n"
        "    peer = socket.create_server(('0.0.0.0', 7001)).accept()[0]\n"
        "    peer.sendall(data)\n"
        "else:\n"
        "    link = socket.create_connection(('node2', 7001)); got = b''.join(iter(lambda: link.recv(1 << 20), b''))\n"
        "    assert got == data, len(got)\n"
    )
    log = lab.folder / "serve.log"
    server = lab.start("node2", ["python3", "-c", program, "serve"], dict(os.environ), log)
    try:
        run_on(lab, "node1", "sh", "-c", 'until python3 -c "$0" ask; do sleep 0.1; done', program)
    finally:
        server.kill()
        server.wait()


def test_a_lab_of_a_run_that_cannot_be_built_as_specified_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    need_lab()
    poor: Features = replace(find_features(), netem=False, delay_line=False)
    monkeypatch.setattr(lab_lab, "find_features", lambda: poor)
    spec = make_spec(2, name=new_name(), delay="5ms")
    with pytest.raises(LabError, match="cannot build that lab: no delay") as refused:
        Lab.build(spec, owner=os.getpid())
    assert "--on" in refused.value.fix
    assert not state.lab_folder(spec.name).exists()
