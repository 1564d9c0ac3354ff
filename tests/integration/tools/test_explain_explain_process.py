"""`shoal explain`: every stored log of a real failure is explained by its own cause, and not: what starts processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from pathlib import Path

import psutil
import pytest

from shoal.tools.explain.explain import explain_text
from tests.support.failures.bench import Bench, place, wrong
from tests.support.programs import shoal
from tests.unit.tools.explain.test_explain import LOGS, ids


def test_the_verb_reads_a_file_a_pipe_and_nothing(tmp_path: Path) -> None:
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
    assert done.stdout == "first error that shoal does not know: line 2\n  ZeroDivisionError: division by zero\n"
    assert shoal("explain", tmp_path / "none").returncode == 2
    assert "is not a run folder" in shoal("explain", tmp_path).stderr


@pytest.mark.long
def test_failures_made_here_and_now(tmp_path: Path) -> None:
    """As torch prints them today: one program alone, a port that is taken, and two ranks that disagree."""
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
def test_the_port_that_a_rank_names_is_one_its_peer_really_had(tmp_path: Path) -> None:
    """A real kill: the survivor's message, with the port put right, leads to the killed process's own socket."""
    bench = Bench(tmp_path)
    try:
        ranks = bench.ranks("work_for_ever")
        bench.wait_for("is at work", 2)
        sockets = psutil.Process(ranks[1].pid).net_connections("tcp")
        had = {each.laddr.port for each in sockets}
        os.kill(ranks[1].pid, signal.SIGKILL)
        bench.wait(20)
        found = explain_text(bench.text())
    finally:
        bench.close()
    assert found.best is not None
    assert found.best.id in ("gloo.peer-reset", "gloo.peer-closed")
    printed, really = map(int, re.findall(r"\]:(\d+) \(really port (\d+)\)", found.best.evidence.text)[0])
    assert really in had
    assert printed not in had
