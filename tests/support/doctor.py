"""Doctor as a user runs it, and its commands as a user pastes them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.cluster.lab.lab import Lab
from tests.support.programs import shoal

Found = list[dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """What `shoal doctor --json` said, and its exit code."""

    code: int
    said: dict[str, Any]

    @property
    def findings(self) -> Found:
        found: Found = self.said["findings"]
        return found

    @property
    def alarms(self) -> Found:
        """What is more than worth knowing."""
        return [finding for finding in self.findings if finding["severity"] != "info"]

    @property
    def named(self) -> set[tuple[str, str]]:
        return {(finding["id"], finding["node"]) for finding in self.alarms}

    def one(self, check: str, node: str) -> dict[str, Any]:
        (finding,) = [each for each in self.findings if (each["id"], each["node"]) == (check, node)]
        return finding


def verdict(done: subprocess.CompletedProcess[str]) -> Verdict:
    assert done.returncode in (0, 1), done.stderr
    return Verdict(done.returncode, json.loads(done.stdout))


def doctor(lab: Lab, *words: str) -> Verdict:
    return verdict(shoal("doctor", "--on", f"lab:{lab.name}", "--json", *words, timeout_s=110))


def assert_healthy(found: Verdict) -> None:
    assert found.alarms == []
    assert (found.code, found.said["healthy"]) == (0, True)


def assert_sick(found: Verdict, *expected: tuple[str, str]) -> None:
    assert found.named == set(expected), found.findings
    assert (found.code, found.said["healthy"]) == (1, False)
    assert all(finding[part] for finding in found.findings for part in ("evidence", "meaning", "retest"))


def run_on(lab: Lab, node: str, command: str, folder: Path) -> None:
    """As pasted into a shell there. Where sudo is not installed, one that changes nothing stands in for it."""
    variables = dict(os.environ)
    if shutil.which("sudo") is None:
        (folder / "bin").mkdir(exist_ok=True)
        stand_in = folder / "bin/sudo"
        stand_in.write_text('#!/bin/sh\nexec "$@"\n')
        stand_in.chmod(0o755)
        variables["PATH"] = f"{stand_in.parent}:{variables['PATH']}"
    words = lab.command(node, ["sh", "-c", command])
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, env=variables)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def run_here(command: str) -> None:
    """A command of shoal itself, with the one under test."""
    _, *words = shlex.split(command)
    subprocess.run([sys.executable, "-m", "shoal", *words], check=True, capture_output=True, timeout=30)


def follow(lab: Lab, found: Verdict, folder: Path) -> None:
    """Every command, on the node it is meant for."""
    for finding in found.alarms:
        if finding["fix"]:
            run_on(lab, finding["node"], finding["fix"], folder)
