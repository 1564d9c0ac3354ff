"""A machine that is suspended announces it first, and rejoins when it has woken.

Exercises agent.sleep, agent.membership.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from shoal.agent.sleep import read_signal, watch_for_sleep
from tests.support.agents import Agent, agents
from tests.support.members import Team
from tests.support.waiting import wait_until, wait_until_async

# What gdbus prints at its start, and when a laptop's lid is closed and opened again.
OPENING = (
    "Monitoring signals on object /org/freedesktop/login1 owned by org.freedesktop.login1",
    "The name org.freedesktop.login1 is owned by :1.4",
)
SIGNAL = "/org/freedesktop/login1: org.freedesktop.login1.Manager.PrepareForSleep ({},)"
LISTENER = """#!{python} -IS
import os, sys, time
for line in {opening!r}:
    print(line, flush=True)
for state in ("sleep", "wake"):
    while not os.path.exists({folder!r} + "/" + state):
        time.sleep(0.02)
    print({signal!r}.format("true" if state == "sleep" else "false"), flush=True)
time.sleep(600)
"""
HOLDER = """#!/bin/sh
echo "$@" >> {folder}/lock
cat
echo released >> {folder}/lock
"""


def fake_logind(folder: Path) -> dict[str, str]:
    """Return variables that replace the logind tools. A file `sleep` or `wake` makes them send that signal."""
    tools = folder / "tools"
    tools.mkdir(parents=True)
    words = {"python": sys.executable, "opening": OPENING, "folder": str(folder), "signal": SIGNAL}
    for name, text in (("gdbus", LISTENER), ("systemd-inhibit", HOLDER)):
        (tools / name).write_text(text.format(**words))
        (tools / name).chmod(0o755)
    return {"PATH": f"{tools}:{os.environ['PATH']}"}


def lock(folder: Path) -> list[str]:
    path = folder / "lock"
    return [line for line in path.read_text().splitlines() if "--mode=block" not in line] if path.exists() else []


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        (SIGNAL.format("true"), True),
        (SIGNAL.format("false") + "\n", False),
        (SIGNAL.format("true").replace("PrepareForSleep", "PrepareForShutdown"), None),
        (SIGNAL.format("maybe"), None),
        (OPENING[0], None),
        ("", None),
    ],
)
def test_only_prepare_for_sleep_lines_are_read_as_signals(line: str, meaning: bool | None) -> None:
    assert read_signal(line) is meaning


def test_the_lock_is_released_after_the_sleep_signal_and_taken_again_after_the_wake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_logind(tmp_path)["PATH"])
    signals_seen: list[str] = []

    async def sleep_and_wake() -> None:
        watching = asyncio.ensure_future(
            watch_for_sleep(lambda: signals_seen.append("sleep"), lambda: signals_seen.append("wake"))
        )
        await wait_until_async(lambda: len(lock(tmp_path)) == 1)
        assert signals_seen == []
        (tmp_path / "sleep").touch()
        await wait_until_async(lambda: lock(tmp_path)[1:] == ["released"])
        assert signals_seen == ["sleep"]
        (tmp_path / "wake").touch()
        await wait_until_async(lambda: len(lock(tmp_path)) == 3)
        assert signals_seen == ["sleep", "wake"]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(sleep_and_wake())
    first = lock(tmp_path)[0]
    assert "--what=sleep" in first
    assert "--mode=delay" in first


def test_without_gdbus_the_sleep_watch_ends_without_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asyncio.run(asyncio.wait_for(watch_for_sleep(pytest.fail, pytest.fail), 10))


@pytest.mark.long
def test_the_others_train_on_without_a_node_that_sleeps_and_it_rejoins(tmp_path: Path) -> None:
    laptop_tools = fake_logind(tmp_path / "logind")
    with agents(tmp_path, tmp_path) as others:
        laptop = Agent(tmp_path, 2, laptop_tools)
        try:
            team = Team([*others, laptop], (1, 1, 1))
            team.go()
            team.await_commits(2)
            wait_until(lambda: lock(tmp_path / "logind"), why=team.everything)
            (tmp_path / "logind" / "sleep").touch()
            team.await_size(0, 2)
            announcement = others[0].said("announce")[-1]["text"]
            assert "node3 was put to sleep" in announcement
            team.await_commits(0, more=100)
            assert [len(event["ids"]) for event in team.notes(0, "enter")] == [3, 2], (
                "a sleeping node is not admitted before it wakes"
            )
            (tmp_path / "logind" / "wake").touch()
            team.await_size(2, 3)
            team.check_ledgers(0, 1, 2)
            assert laptop.said("ended") == [], "the rank kept its process"
        finally:
            laptop.close()
