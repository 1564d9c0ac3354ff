"""A run whose supervisor was killed: shown, not resumed beside itself, and ended when asked."""

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


def among_own_processes() -> list[str]:
    """For a program that sees no other processes than its own, and that none of them outlives."""
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    prefix = [need_tool("unshare"), *as_root, "--pid", "--fork", "--mount-proc", "--kill-child"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if tried.returncode and os.environ.get("SHOAL_REQUIRE_ALL") == "1":
        pytest.fail(tried.stderr)
    if tried.returncode:
        pytest.skip(f"no process namespaces here: {tried.stderr.strip()}")
    # The first process there adopts orphans, and must not be taken for shoal by a word of its command line.
    return [*prefix, "sh", "-c", 'eval "$PROGRAM"; exit $?']


def test_what_a_killed_supervisor_leaves_is_shown_and_ended_when_asked(tmp_path: Path) -> None:
    program = shlex.join([sys.executable, "-m", "tests.support.without_supervisor", str(tmp_path)])
    variables = {**os.environ, "PROGRAM": program}
    done = subprocess.run(
        among_own_processes(), cwd=ROOT, env=variables, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    saw = json.loads(done.stdout)
    run, pids = tmp_path / "run", saw["pids"]
    assert pids.keys() == {"agent", "rank-0", "rank-1"}
    assert saw["state"] == "unsupervised"

    code, words = saw["resumed"]
    assert code == 3
    listed = words.index("error: an earlier launch of")
    assert words.startswith("left over from earlier runs (--clean ends them):\n")
    assert f"still works on local: process {', '.join(map(str, sorted(pids.values())))}\n" in words[listed:]
    assert f"next: end it first: shoal stop {run}\n" in words[listed:]
    assert saw["still_there"] == pids

    for name, title in (("warned", "left over from earlier runs (--clean ends them):\n"), ("cleaned", "ended:\n")):
        code, words = saw[name]
        assert code == 0
        assert words.startswith(title)
        assert [f"{pid:>8}  {part}" in words for part, pid in pids.items()] == [True] * 3
        assert "-m shoal.agent.agent\n" in words
    assert saw["left"] == []
    assert saw["ps"] == "no run is going on here\n"
