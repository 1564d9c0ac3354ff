"""When which rank completed which step, and what follows from that for a fault. Pure but for reading the files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.events import EventLog, read_events
from shoal.run_folder import RunFolder


@dataclass(frozen=True)
class Done:
    """A completed step. `group` names the process group that it was exchanged in, the same for all its ranks; `world`
    is how many ranks that had."""

    node: str
    time: float
    step: int
    world: int
    group: str


class Journal:
    """A rival's rank writes here, one line a step, into a file of its node's own."""

    def __init__(self, folder: Path, node: str) -> None:
        self._log = EventLog(folder / f"{node}.jsonl", rank=0)
        self._node = node

    def done(self, step: int, world: int, group: str) -> None:
        self._log.write("step", node=self._node, step=step, world=world, group=group)


def read_journals(folder: Path) -> list[Done]:
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in read_events(path)]
    return [Done(event["node"], event["time"], event["step"], event["world"], event["group"]) for event in events]


def read_run(run: RunFolder) -> list[Done]:
    """The same of a run of shoal's own, from its events."""
    return [done for path in run.event_files().values() for done in _of_rank(read_events(path))]


def _of_rank(events: Iterable[dict[str, Any]]) -> Iterator[Done]:
    node, world, group = "", 0, "0-0"
    for event in events:
        if event["event"] == "start":
            node, world = event["node"], event["world_size"]
        elif event["event"] == "membership":
            world, group = event["size"], event["generation"]
        elif event["event"] == "step":
            yield Done(node, event["time"], event["step"], world, group)


@dataclass(frozen=True)
class Recovery:
    """`seconds` from the fault to a step of the survivors that it could have prevented; `redone` steps had been
    completed before and were lost."""

    seconds: float
    redone: int
    world: int


def last_before(steps: Iterable[Done], when: float) -> dict[str, Done]:
    """Each node's last step up to then."""
    return {each.node: each for each in sorted(steps, key=lambda each: each.time) if each.time <= when}


def recovery(steps: Collection[Done], fault: float, survivors: Collection[str]) -> Recovery | None:
    """The step in flight may still complete, since whoever is gone has given its part: it shows no recovery. The one
    after it, or any step of another group, does."""
    before = last_before(steps, fault)
    after = [each for each in steps if each.time > fault and each.node in survivors and _is_news(each, before)]
    if not after:
        return None
    first = min(after, key=lambda each: each.time)
    reached = max((done.step for node, done in before.items() if node in survivors), default=0)
    return Recovery(first.time - fault, max(0, reached - first.step + 1), first.world)


def _is_news(done: Done, before: dict[str, Done]) -> bool:
    last = before.get(done.node)
    return last is None or done.group != last.group or done.step >= last.step + 2


@dataclass(frozen=True)
class Return:
    """What a node did that was away. `rejoined_s`: until its first step in a group of the survivors; None if it came
    to none. `stale_steps`: those it completed in a group that no survivor was in by then."""

    rejoined_s: float | None
    stale_steps: int


def coming_back(steps: Collection[Done], node: str, woke: float, survivors: Collection[str]) -> Return:
    groups = {each.group for each in steps if each.node in survivors and each.time > woke}
    own = sorted((each for each in steps if each.node == node and each.time > woke), key=lambda each: each.time)
    joined = next((each.time - woke for each in own if each.group in groups and each.world > 1), None)
    return Return(joined, sum(each.group not in groups for each in own))
