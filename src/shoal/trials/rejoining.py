"""`shoal join RUN`: a machine whose agent has died takes part in its run again, as a guest that the others let in."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from shoal.cluster.link import PipeLink, agent_command
from shoal.errors import RunFailed, UsageError, from_dict
from shoal.events import Event, EventTail
from shoal.launch.found import AGENT, find
from shoal.runfolder import RunFolder

# Its ranks have to import torch first; afterwards the others take it in at the end of a step. Longer than an agent that
# reaches nobody tries.
_LET_IN_WITHIN_S = 75.0
_POLL_S = 0.1


def rejoin(path: Path, node: str | None) -> str:
    """Starts the agent again, and leaves it to itself once the others have let it in. Says what came of it."""
    run = RunFolder.find(path)
    node = choose_node(run, node)
    tail = EventTail(run.journal(node))
    tail.skip_to_end()
    agent = PipeLink((*agent_command(run.path, node), "--again", str(run.path), node), run.path, node)
    try:
        event = _await(tail, agent, lambda event: event["event"] in ("generation", "refused", "gave-up", "done"))
    finally:
        agent.close()
    if event is None:
        return f"{node} asks to be let in, and goes on asking: shoal ps shows it, agents/{node}.jsonl says what it sees"
    if event["event"] in ("refused", "gave-up"):
        raise from_dict(event)
    if event["event"] == "done":
        raise RunFailed(
            f"{node} was not let in: the run has ended, or its ranks could not be started",
            fix=f"look at {run.journal(node)} and {run.path / 'logs' / node}",
        )
    members = ", ".join(event["members"])
    return f"{node} takes part again: {members} train on from step {event['step']} with {event['ranks']} ranks"


def choose_node(run: RunFolder, wanted: str | None) -> str:
    """The one node of this folder whose agent has died, or the one that was named."""
    alive = {found.node for found in find(run.path) if found.part == AGENT}
    known = sorted(path.stem for path in (run.path / "agents").glob("*.orders"))
    dead = [node for node in known if node not in alive]
    shown = shlex.quote(str(run.path))
    if wanted in alive:
        raise UsageError(
            f"{wanted} takes part in {run.path} already", why="its agent works", fix=f"shoal attach {shown}"
        )
    if wanted is not None and wanted not in known:
        raise UsageError(
            f"{run.path} knows no node {wanted} that could come back",
            why=f"those are: {', '.join(dead) or 'none'}",
            fix="to take part as a new machine, ask for an invitation: shoal host RUN, on another one",
        )
    if wanted is not None or len(dead) == 1:
        return wanted or dead[0]
    if dead:
        raise UsageError(
            f"several nodes of {run.path} could come back: {', '.join(dead)}",
            why="their agents have died",
            fix=f"say which one: shoal join {shown} --node {dead[0]}",
        )
    raise UsageError(
        f"nothing of {run.path} can come back on this machine",
        why="only a machine whose agent was killed while the others went on; after its end a run is resumed",
        fix=f"shoal train --resume {shown}",
    )


def _await(tail: EventTail, agent: PipeLink, is_it: Callable[[Event], bool]) -> Event | None:
    """None when it has not happened, and may still."""
    deadline = time.monotonic() + _LET_IN_WITHIN_S
    while time.monotonic() < deadline:
        how = agent.ended()
        for event in tail.poll():
            if is_it(event):
                return event
        if how is not None:
            raise RunFailed("the agent could not be started again", why=how)
        time.sleep(_POLL_S)
    return None
