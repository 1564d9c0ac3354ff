"""Starts an agent on every node, tells them what to start, and follows their journals to the end of the run.

Ctrl-C once asks every rank to finish its step and save; twice ends them now. What becomes of a failing rank's peers is
the agents' own business, so that it happens whether or not we are still there.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from shoal.cluster.cluster import Cluster
from shoal.cluster.node import Meeting, Node
from shoal.config.load import load_config
from shoal.config.schema import MembersConfig, RunConfig
from shoal.cost.batch import world_batch
from shoal.cost.relief import relief
from shoal.errors import Interrupted, RunFailed, ShoalError
from shoal.events import Event, EventLog, EventTail
from shoal.launch.joined import never_met
from shoal.launch.orders import Membership, membership
from shoal.launch.plan import Command, plan_module, plan_ranks, plan_script, settings_notes
from shoal.launch.verdict import LOG_TAIL, Ending, caused, failure, first_to_fail, left_early, outlived, script_faults
from shoal.launch.world import World, interruptible
from shoal.runfolder import RunFolder

# What torchrun gives its workers between the signal and SIGKILL.
GRACE_S = 30.0


def run_ranks(
    config: RunConfig,
    members: MembersConfig,
    run: RunFolder,
    cluster: Cluster,
    log: EventLog,
    data: str,
    resume: bool = False,
) -> int:
    """Runs the world to its end. Raises what went wrong, or `Interrupted`; when it ended well, the number of ranks.

    `log` gets what a person should hear of meanwhile."""

    def folder_of(node: Node) -> str:
        return cluster.folder(node, run.path)

    def rules(ranks: int, above: int) -> Membership:
        return membership(members, above, most_ranks=world_batch(load_config(run.config).train, ranks))

    news = _news_of_ranks(run, cluster)
    world = World(run, cluster, log)
    with interruptible(world), world:
        world.launch(
            lambda nodes, meeting: plan_ranks(config, folder_of, nodes, meeting, resume),
            config=digest_of_config(run),
            data=data,
            members=rules if config.launcher == "shoal" and members.on_loss == "go-on" else None,
        )
        world.see_through()
    faults = _faults(news)
    endings = outlived(world.endings) if world.is_elastic else world.endings
    helps = relief(load_config(run.config), world.ranks)
    error = failure(endings, faults, _log_tails(world, run), helps) or _fell_apart(world)
    if world.interrupts and not (world.interrupts == 1 and caused(faults)):
        raise _interrupted(run, at_once=world.interrupts > 1)
    if error:
        raise error
    if any(ending.code == Interrupted.exit_code for ending in endings):
        # Somebody asked a rank itself, and all agreed to stop.
        raise _interrupted(run, at_once=False)
    _refuse_a_violent_end(endings)
    return sum(len(ending.ranks) for ending in endings)


def run_module(
    config: RunConfig, module: str, words: Sequence[str], run: RunFolder, cluster: Cluster, log: EventLog
) -> None:
    """One of our own worker programs on every slot, to its end; what it found it wrote into its events."""

    def folder_of(node: Node) -> str:
        return cluster.folder(node, run.path)

    news = _news_of_ranks(run, cluster)
    world = World(run, cluster, log)
    with interruptible(world), world:
        digest = hashlib.sha256("\0".join((module, *words)).encode()).hexdigest()
        world.launch(
            lambda nodes, meeting: plan_module(config, module, words, folder_of, nodes, meeting), config=digest, data=""
        )
        world.see_through()
    if world.interrupts:
        raise Interrupted("interrupted")
    if error := failure(world.endings, _faults(news), _log_tails(world, run)):
        raise error
    _refuse_a_violent_end(world.endings)


def run_script(
    config: RunConfig,
    argv: Sequence[str],
    run: RunFolder,
    cluster: Cluster,
    log: EventLog,
    is_consequence: Callable[[str], bool],
    port: int = 0,
    grace_s: float = GRACE_S,
    python: str = "",
    user_env: Mapping[str, str] | None = None,
) -> None:
    """Runs anybody's script on every slot. The error that is raised carries the script's own exit code: that of the
    first rank to fail. `is_consequence` knows the messages of ranks that only lost a peer. Once asked to stop, the
    ranks have `grace_s` for it. `python` runs the script, where it is not each machine's own; the variables of
    `user_env` stay as the user set them."""

    def plan(nodes: list[Node], meeting: Meeting) -> list[Command]:
        for text in settings_notes(config, nodes, user_env or {}):
            log.write("note", text=text)
        return plan_script(config, argv, nodes, meeting, python, user_env)

    world = World(run, cluster, log, grace_s=grace_s)
    with interruptible(world), world:
        digest = hashlib.sha256("\0".join(argv).encode()).hexdigest()
        world.launch(plan, config=digest, data="", script_port=port)
        world.see_through()
    if world.interrupts:
        killed = sorted(rank for ending in world.endings if ending.by_us for rank in ending.ranks)
        late = f"rank {', '.join(map(str, killed))} had to be ended" if killed else ""
        raise Interrupted("interrupted", why=late, fix=f"what the ranks printed is in {run.path / 'logs'}")
    faults = script_faults(world.endings, lambda ending: tail_of(Path(ending.log), 1000, 1 << 16), is_consequence)
    error, first = failure(world.endings, faults, _log_tails(world, run)), first_to_fail(world.endings, faults)
    if error and first:
        joint = "\n" if error.why.startswith(LOG_TAIL) else "; "
        error.why = joint.join(filter(None, (left_early(world.endings, faults), error.why)))
        error.exit_code = first.code if first.code > 0 else 128 - first.code
        raise error
    if any(ending.code == Interrupted.exit_code for ending in world.endings):
        raise Interrupted("a rank says that it was interrupted", fix=f"look at {run.path / 'logs'}")
    _refuse_a_violent_end(world.endings)
    if world.ranks > 1 and world.store_keys == 0 and not world.noted_absence:
        log.write("note", text=never_met(world.ranks))


def _fell_apart(world: World) -> ShoalError | None:
    """Agents ended their ranks: nobody had the state any more, or they could not even meet."""
    if any(ending.code in (0, Interrupted.exit_code) for ending in world.endings):
        return None
    if world.gave_up or not world.broken:
        return world.gave_up
    return RunFailed(
        f"the ranks did not meet: {world.broken}",
        why="the machines reach each other, but not by the interface or the ports that the ranks use",
        fix="find out what is in the way: shoal doctor",
    )


def _refuse_a_violent_end(endings: Iterable[Ending]) -> None:
    """Ranks that an agent killed, and nobody here asked for it: somebody told the agent itself, on its machine."""
    if nodes := {ending.node for ending in endings if ending.by_us}:
        names = ", ".join(sorted(nodes))
        raise Interrupted(f"the ranks on {names} were ended from outside", why="somebody told an agent to end at once")


def digest_of_config(run: RunFolder) -> str:
    return hashlib.sha256(run.config.read_bytes()).hexdigest()


def _interrupted(run: RunFolder, at_once: bool) -> Interrupted:
    if not run.checkpoints.is_dir():
        return Interrupted("interrupted before the first checkpoint", fix="start anew with another --out")
    how = "ended at once" if at_once else "saved what was done"
    return Interrupted(
        f"interrupted: {how}", fix=f"go on from the last checkpoint: shoal train --resume {shlex.quote(str(run.path))}"
    )


def _news_of_ranks(run: RunFolder, cluster: Cluster) -> list[EventTail]:
    """What the ranks write from now on: a resumed run's older events are history."""
    tails = [EventTail(run.events(rank)) for rank in range(sum(node.slots for node in cluster.nodes))]
    for tail in tails:
        tail.skip_to_end()
    return tails


def _faults(news: list[EventTail]) -> dict[int, Event]:
    """The first fault each rank wrote."""
    faults: dict[int, Event] = {}
    for rank, tail in enumerate(news):
        for event in tail.poll():
            if event.get("event") == "fault":
                faults.setdefault(rank, event)
    return faults


def _log_tails(world: World, run: RunFolder) -> dict[str, str]:
    return {command.name: tail_of(run.log(command.node.name, command.name)) for command in world.commands}


def tail_of(log: Path, lines: int = 12, most_bytes: int = 8192) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - most_bytes))
            text = file.read().decode(errors="replace").replace("\r\n", "\n")
            # Of a progress bar only the state that was last on the screen.
            shown = (line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))
            return "\n".join("\n".join(shown).splitlines()[-lines:])
    except OSError:
        return ""
