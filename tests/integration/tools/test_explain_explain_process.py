"""`shoal explain` on files, pipes and failures produced by the test.

Exercises explain.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

from shoal.explain.explain import explain_text
from tests.support.failures.bench import Bench, place, wrong
from tests.support.programs import shoal
from tests.unit.explain.test_explain import LOGS, ids


def test_explain_reads_a_file_a_pipe_and_empty_input(tmp_path: Path) -> None:
    log = LOGS["gloo.connect-timeout"]
    done = shoal("explain", log)
    assert done.returncode == 0
    assert done.stdout.startswith("likely cause: gloo.connect-timeout\n  means:  two ranks could not connect")
    assert "  seen:   line 2 (and 3 more): [E" in done.stdout
    assert "  before: shoal doctor checks this as reach.pair" in done.stdout
    assert "harmless: store.reverse-dns, line 1: " in done.stdout
    document = json.loads(shoal("explain", log, "--json").stdout)
    first = document["explanations"][0]
    assert {"id", "cause", "evidence", "line", "fix", "check"} <= first.keys()
    assert (first["id"], first["line"], first["certainty"]) == ("gloo.connect-timeout", 2, "likely")
    unknown = tmp_path / "log"
    unknown.write_text("Traceback (most recent call last):\nZeroDivisionError: division by zero\n")
    done = shoal("explain", unknown)
    assert done.returncode == 1
    first_error = "first error that shoal does not know: line 2\n  ZeroDivisionError: division by zero\n"
    assert done.stdout.startswith(first_error)
    assert done.stdout.endswith("check the machines: shoal doctor\n")
    assert shoal("explain", tmp_path / "none").returncode == 2
    assert "is not a run folder" in shoal("explain", tmp_path).stderr


@pytest.mark.long
def test_failures_of_the_installed_torch_are_explained(tmp_path: Path) -> None:
    """Produce them with the installed torch: a program alone, a taken port, and two ranks that differ."""
    (tmp_path / "alone").mkdir()
    (tmp_path / "pair").mkdir()
    alone, pair = Bench(tmp_path / "alone"), Bench(tmp_path / "pair")
    try:
        pair.ranks("different_models")
        with socket.create_server(("", 0)) as holder:
            port = str(holder.getsockname()[1])
            alone.run(wrong("healthy"), {**place(0, 2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
        taken = explain_text(alone.text())
        pair.wait(30)
        disagree = explain_text(pair.text())
    finally:
        alone.close()
        pair.close()
    assert ids(taken) == ["store.port-taken"]
    assert f"port {port} of this machine" in taken.explanations[0].cause
    assert ids(disagree)[0] == "ddp.different-models"


@pytest.mark.long
def test_the_corrected_port_in_a_message_belonged_to_the_killed_peer(tmp_path: Path) -> None:
    """Kill a rank: the survivor's message, with the port corrected, leads to the killed process's socket."""
    bench = Bench(tmp_path)
    try:
        ranks = bench.ranks("work_for_ever")
        bench.wait_for("is at work", 2)
        sockets = psutil.Process(ranks[1].pid).net_connections("tcp")
        ports = {connection.laddr.port for connection in sockets}
        os.kill(ranks[1].pid, signal.SIGKILL)
        bench.wait(20)
        findings = explain_text(bench.text())
    finally:
        bench.close()
    assert findings.best is not None
    assert findings.best.id in ("gloo.peer-reset", "gloo.peer-closed")
    printed, really = map(int, re.findall(r"\]:(\d+) \(really port (\d+)\)", findings.best.evidence.text)[0])
    assert really in ports
    assert printed not in ports
