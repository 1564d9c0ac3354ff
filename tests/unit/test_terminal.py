"""The line that moves on a terminal until a command prints something."""

from __future__ import annotations

import io
import sys

import pytest

from shoal.cli.output import make_console
from shoal.terminal import PrintableStream, begin_stage, end_stage


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in the place of stderr. No fixture: pytest replaces stderr between a fixture and its test."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", PrintableStream(stream))
    monkeypatch.setattr(sys, "stdout", PrintableStream(io.StringIO()))
    monkeypatch.setenv("TERM", "xterm")
    return stream


def test_a_stage_is_shown_at_once_and_erased_by_the_first_output(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    begin_stage("shoal plan: starting")
    assert "shoal plan: starting" in terminal.getvalue()
    sys.stdout.write("the answer\n")
    assert terminal.getvalue().endswith("\r\x1b[K")
    length = len(terminal.getvalue())
    end_stage()
    assert len(terminal.getvalue()) == length


def test_a_console_ends_the_stage_before_it_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    begin_stage("working")
    make_console(stderr=True).print("done")
    assert terminal.getvalue().partition("\r\x1b[K")[2].strip().endswith("done")


def test_no_stage_is_shown_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", PrintableStream(stream))
    begin_stage("working")
    end_stage()
    assert stream.getvalue() == ""
