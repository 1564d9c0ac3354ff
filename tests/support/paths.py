"""Folders that tests read from."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
FAILURE_LOGS = SUPPORT / "failures"
GOLDEN = SUPPORT / "golden"
SCRIPTS = SUPPORT / "scripts"
