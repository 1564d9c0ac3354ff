"""A run whose supervisor was killed is listed, cannot be resumed, and is ended with --clean.

Exercises runs.manage.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.needs import need_tool
from tests.support.paths import ROOT

pytestmark = pytest.mark.long


def in_own_namespace() -> list[str]:
    """Return a command prefix for a process namespace: its processes see no others and end with it."""
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    prefix = [need_tool("unshare"), *as_root, "--pid", "--fork", "--mount-proc", "--kill-child"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode and os.environ.get("SHOAL_REQUIRE_ALL") == "1":
        pytest.fail(tried.stderr)
    if tried.returncode:
        pytest.skip(f"no process namespaces here: {tried.stderr.strip()}")
    # The first process there adopts orphans. Its command line must not contain a word that marks shoal's processes.
    return [*prefix, "sh", "-c", 'eval "$PROGRAM"; exit $?']


def test_processes_of_a_killed_supervisor_are_listed_and_ended_with_clean(tmp_path: Path) -> None:
    program = shlex.join([sys.executable, "-m", "tests.support.without_supervisor", str(tmp_path)])
    variables = {**os.environ, "PROGRAM": program}
    done = subprocess.run(
        in_own_namespace(), cwd=ROOT, env=variables, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    run, pids = tmp_path / "run", report["pids"]
    assert pids.keys() == {"agent", "template", "rank-0", "rank-1"}
    assert report["state"] == "unsupervised"

    code, words = report["resumed"]
    assert code == 3
    listed = words.index("error: an earlier launch of")
    assert words.startswith("left over from earlier runs (--clean ends them):\n")
    # The template ends with its agent, and writes nothing.
    writers = sorted(pid for part, pid in pids.items() if part != "template")
    assert f"still works on local: process {', '.join(map(str, writers))}\n" in words[listed:]
    assert f"next: end it first: shoal stop {run}\n" in words[listed:]
    assert report["still_there"] == pids

    for name, title in (("warned", "left over from earlier runs (--clean ends them):\n"), ("cleaned", "ended:\n")):
        code, words = report[name]
        assert code == 0
        assert words.startswith(title)
        assert [f"{pid:>8}  {part}" in words for part, pid in pids.items()] == [True] * 4
        assert "-m shoal.agent.agent\n" in words
    assert report["left"] == []
    assert report["ps"] == "no run is active on this machine\n"
