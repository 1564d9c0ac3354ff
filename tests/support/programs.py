"""Run the shoal command in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Small enough that process start dominates the time.
TINY = ("model.layers=1", "model.heads=2", "model.width=16", "model.seq_len=16", "data.sentences=400")


def shoal_command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "shoal", *map(str, arguments)]


def shoal(
    *arguments: str | Path, cwd: Path | None = None, timeout_s: float = 90.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        shoal_command(*arguments),
        cwd=cwd,
        env={**os.environ, "PYTHONWARNINGS": "", **variables},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def train_tiny(out: Path, *arguments: str | Path, sets: Sequence[str] = (), **options: Any) -> dict[str, Any]:
    """Train the smallest model; return the manifest of the run."""
    done = shoal("train", "--out", out, "--json", *arguments, *set_flags(*TINY, *sets), **options)
    assert done.returncode == 0, done.stderr
    manifest: dict[str, Any] = json.loads(done.stdout)
    return manifest


def set_flags(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    return [event for event in read_jsonl(run / "events" / f"rank-{rank}.jsonl") if event["event"] == "step"]
