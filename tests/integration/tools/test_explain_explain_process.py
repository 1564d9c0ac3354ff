"""`shoal explain`: every stored log of a real failure is explained by its own cause, and not: what starts processes."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.programs import shoal
from tests.unit.tools.explain.test_explain import LOGS


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
