"""Verbs of `shoal lab` confirm what they did, and how to undo it."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cli.lab import split_exec_words
from shoal.cli.main import run
from shoal_lab import kernel
from shoal_lab import lab as labs


class RecordingLab:
    """Stand in for a lab that is up; keep the changes instead of making them."""

    name = "mine"

    def __init__(self) -> None:
        self.changes: list[Any] = []

    def perform(self, change: Any) -> None:
        self.changes.append(change)


@pytest.mark.parametrize(
    ("words", "name", "command"),
    [
        ("-- hostname", None, "hostname"),
        ("hostname", None, "hostname"),
        ("--name wb -- hostname -f", "wb", "hostname -f"),
        ("--name=wb hostname", "wb", "hostname"),
        ("grep --name x", None, "grep --name x"),
    ],
)
def test_exec_takes_the_name_of_the_lab_before_its_command(words: str, name: str | None, command: str) -> None:
    assert split_exec_words(None, words.split()) == (name, command.split())


@pytest.mark.parametrize(
    ("words", "confirmation"),
    [
        ("link node1 100mbit --delay 2ms --loss 1%", "the link of node1 is now 100mbit, delay 2ms, loss 1%"),
        ("link node1 none", "the link of node1 is now unlimited"),
        ("cpu node1 0.3", "node1 may keep 0.3 cores busy"),
        ("cpu node1 none", "node1 has no CPU limit"),
        ("kill node1", "node1 is killed; start it again: shoal lab start node1"),
        ("start node1", "node1 is up again, without processes"),
        ("freeze node1", "node1 is frozen; continue it: shoal lab thaw node1"),
        ("thaw node1", "node1 continues"),
        ("cut node1", "node1 is cut off from all others; undo it: shoal lab heal node1"),
        ("cut node1 node2 --one-way", "node2 receives nothing from node1; undo it: shoal lab heal node1"),
        ("heal", "all cuts are undone"),
        ("heal node1 node2", "the cuts of node1 and node2 are undone"),
        ("cut node1 --name mine", "node1 is cut off from all others; undo it: shoal lab heal node1 --name mine"),
        (
            "firewall node1 --allow 22,29500",
            "node1 accepts connections only at 22,29500; undo it: shoal lab firewall node1 --off",
        ),
        ("firewall node1 --off", "node1 has no firewall"),
    ],
)
def test_a_change_is_confirmed(
    words: str, confirmation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = RecordingLab()
    monkeypatch.setattr(labs.Lab, "open", lambda name: lab)
    monkeypatch.setattr(kernel, "need_tools", lambda tools: None)
    assert run(["lab", *words.split()], debug=False) == 0
    assert capsys.readouterr().out == f"lab mine: {confirmation}\n"
    assert len(lab.changes) == 1
