"""Run `shoal doctor` and the commands that it prints."""

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

from shoal_lab.lab import Lab
from tests.support.programs import shoal

Findings = list[dict[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """The output of `shoal doctor --json`, and its exit code."""

    code: int
    document: dict[str, Any]

    @property
    def findings(self) -> Findings:
        findings: Findings = self.document["findings"]
        return findings

    @property
    def alarms(self) -> Findings:
        """Findings of a higher severity than info."""
        return [finding for finding in self.findings if finding["severity"] != "info"]

    @property
    def named(self) -> set[tuple[str, str]]:
        return {(finding["id"], finding["node"]) for finding in self.alarms}

    def one(self, check: str, node: str) -> dict[str, Any]:
        (finding,) = [item for item in self.findings if (item["id"], item["node"]) == (check, node)]
        return finding


def parse_verdict(done: subprocess.CompletedProcess[str]) -> Verdict:
    assert done.returncode in (0, 1), done.stderr
    return Verdict(done.returncode, json.loads(done.stdout))


def run_doctor(lab: Lab, *words: str) -> Verdict:
    return parse_verdict(shoal("doctor", "--on", f"lab:{lab.name}", "--json", *words, timeout_s=110))


def assert_healthy(verdict: Verdict) -> None:
    assert verdict.alarms == []
    assert (verdict.code, verdict.document["healthy"]) == (0, True)


def assert_alarms(verdict: Verdict, *expected: tuple[str, str]) -> None:
    assert verdict.named == set(expected), verdict.findings
    assert (verdict.code, verdict.document["healthy"]) == (1, False)
    assert all(finding[part] for finding in verdict.findings for part in ("evidence", "meaning", "retest"))


def run_on(lab: Lab, node: str, command: str, folder: Path) -> None:
    """Run a command in a shell of the node. If sudo is missing, a script that only runs its arguments replaces it."""
    variables = dict(os.environ)
    if shutil.which("sudo") is None:
        (folder / "bin").mkdir(exist_ok=True)
        fake_sudo = folder / "bin/sudo"
        fake_sudo.write_text('#!/bin/sh\nexec "$@"\n')
        fake_sudo.chmod(0o755)
        variables["PATH"] = f"{fake_sudo.parent}:{variables['PATH']}"
    words = lab.command(node, ["sh", "-c", command])
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, env=variables)
    assert done.returncode == 0, f"{command}: {done.stderr}"


def run_here(command: str) -> None:
    """Run a shoal command with the shoal under test."""
    _, *words = shlex.split(command)
    subprocess.run([sys.executable, "-m", "shoal", *words], check=True, capture_output=True, timeout=30)


def run_fixes(lab: Lab, verdict: Verdict, folder: Path) -> None:
    """Run the fix of every finding on its node."""
    for finding in verdict.alarms:
        if finding["fix"]:
            run_on(lab, finding["node"], finding["fix"], folder)
