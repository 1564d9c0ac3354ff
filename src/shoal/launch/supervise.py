"""Starts an agent on every node, tells them what to start, and follows their journals to the end of the run.

Ctrl-C once asks every rank to finish its step and save; twice ends them now. What becomes of a failing rank's peers is
the agents' own business, so that it happens whether or not we are still there.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from shoal.cluster.cluster import Cluster
from shoal.cluster.link import Link
from shoal.cluster.node import Meeting, Node
from shoal.config.schema import RunConfig
from shoal.control.token import make_token
from shoal.errors import ControlError, Interrupted, PeerLost, ShoalError, from_dict
from shoal.events import Event, EventLog, EventTail
from shoal.launch.orders import END, STOP, Meet, Member, make_go, to_line
from shoal.launch.plan import Command, plan_module, plan_ranks, plan_script
from shoal.launch.verdict import Ending, caused, failure, first_to_fail
from shoal.runfolder import RunFolder

POLL_S = 0.05
# Over SSH to a slow machine Python alone may take seconds to start.
READY_WITHIN_S = 45.0
# A journal's last line may be written a moment before or after its agent's end is seen.
_LAST_WORDS_S = 1.0
_END_WITHIN_S = 5.0

Plan = Callable[[list[Node], Meeting], list[Command]]


def run_ranks(
    config: RunConfig, run: RunFolder, cluster: Cluster, log: EventLog, data: str, resume: bool = False
) -> None:
    """Runs the world to its end. Raises what went wrong, or `Interrupted`; returns when every rank ended well.

    `log` gets what a person should hear of meanwhile."""

    def folder_of(node: Node) -> str:
        return cluster.folder(node, run.path)

    news = _news_of_ranks(run, cluster)
    world = _World(run, cluster, log)
    with _signals(world), world:
        world.launch(
            lambda nodes, meeting: plan_ranks(config, folder_of, nodes, meeting, resume),
            config=digest_of_config(run),
            data=data,
        )
        world.see_through()
    faults = _faults(news)
    error = failure(world.endings, faults, _log_tails(world, run))
    if world.interrupts and not (world.interrupts == 1 and caused(faults)):
        raise _interrupted(run, at_once=world.interrupts > 1)
    if error:
        raise error
    if any(ending.code == Interrupted.exit_code for ending in world.endings):
        # Somebody asked a rank itself, and all agreed to stop.
        raise _interrupted(run, at_once=False)


def run_module(
    config: RunConfig, module: str, words: Sequence[str], run: RunFolder, cluster: Cluster, log: EventLog
) -> None:
    """One of our own worker programs on every slot, to its end; what it found it wrote into its events."""

    def folder_of(node: Node) -> str:
        return cluster.folder(node, run.path)

    news = _news_of_ranks(run, cluster)
    world = _World(run, cluster, log)
    with _signals(world), world:
        digest = hashlib.sha256("\0".join((module, *words)).encode()).hexdigest()
        world.launch(
            lambda nodes, meeting: plan_module(config, module, words, folder_of, nodes, meeting), config=digest, data=""
        )
        world.see_through()
    if world.interrupts:
        raise Interrupted("interrupted")
    if error := failure(world.endings, _faults(news), _log_tails(world, run)):
        raise error


def run_script(
    config: RunConfig, argv: Sequence[str], run: RunFolder, cluster: Cluster, log: EventLog, port: int = 0
) -> None:
    """Runs anybody's script on every slot. The error that is raised carries the script's own exit code: that of the
    first rank to fail."""
    world = _World(run, cluster, log)
    with _signals(world), world:
        digest = hashlib.sha256("\0".join(argv).encode()).hexdigest()
        world.launch(
            lambda nodes, meeting: plan_script(config, argv, nodes, meeting), config=digest, data="", script_port=port
        )
        world.see_through()
    if world.interrupts:
        raise Interrupted("interrupted", fix=f"what the ranks printed is in {run.path / 'logs'}")
    error, first = failure(world.endings, {}, {}), first_to_fail(world.endings, {})
    if error and first:
        error.exit_code = first.code if first.code > 0 else 128 - first.code
        raise error
    if any(ending.code == Interrupted.exit_code for ending in world.endings):
        raise Interrupted("a rank says that it was interrupted", fix=f"look at {run.path / 'logs'}")


def digest_of_config(run: RunFolder) -> str:
    return hashlib.sha256(run.config.read_bytes()).hexdigest()


def _interrupted(run: RunFolder, at_once: bool) -> Interrupted:
    if not run.checkpoints.is_dir():
        return Interrupted("interrupted before the first checkpoint", fix="start anew with another --out")
    how = "ended at once" if at_once else "saved what was done"
    return Interrupted(
        f"interrupted: {how}", fix=f"go on from the last checkpoint: shoal train --resume {shlex.quote(str(run.path))}"
    )


@dataclass
class _Post:
    """One node's agent, as its journal shows it. `since`: when it was seen to have ended without saying so. `lost`: how
    another agent lost it. `finished`: another agent heard that all its ranks have ended."""

    node: Node
    link: Link
    tail: EventTail
    ready: Event | None = None
    started: bool = False
    done: bool = False
    since: float | None = None
    lost: str = ""
    finished: bool = False

    def gone(self) -> str | None:
        """How it left us, if it did: by its own end, or by what the others say of a machine we cannot reach either."""
        how = self.link.ended()
        return self.lost if how is None and self.lost and not self.link.is_reachable() else how


@dataclass
class _World:
    """The agents of one run. Leaving the `with` block leaves none of them, and so none of their ranks."""

    run: RunFolder
    cluster: Cluster
    log: EventLog
    launch_id: str = field(default_factory=lambda: secrets.token_hex(8))
    posts: list[_Post] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)
    refused: ShoalError | None = None
    interrupts: int = 0
    _obeyed: int = 0
    _ended_at: float | None = None

    def launch(self, plan: Plan, config: str, data: str, script_port: int | None = None) -> None:
        token, launched_at = make_token(self.run.token), time.time()
        for member, node in enumerate(self.cluster.nodes):
            tail = EventTail(self.run.journal(node.name))
            tail.skip_to_end()
            self.posts.append(_Post(node, self.cluster.start_agent(node, self.run.path), tail))
            self.posts[-1].link.send(
                to_line(
                    Meet(
                        folder=self.cluster.folder(node, self.run.path),
                        node=node.name,
                        member=member,
                        address=node.address,
                        interface=node.interface,
                        token=token,
                        launch=self.launch_id,
                        launched_at=launched_at,
                        config=config,
                        data=data,
                        script_port=script_port if member == 0 else None,
                    )
                )
            )
        self._await_ready()
        self._send_off(plan)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while waiting := [post for post in self.posts if post.ready is None]:
            self._look()
            if self.interrupts:
                raise Interrupted("interrupted before the ranks were started", fix="start anew")
            if time.monotonic() > deadline:
                raise ControlError(
                    f"the agent on {waiting[0].node.name} did not answer within {READY_WITHIN_S:.0f} s",
                    why="the machine is very slow or very busy, or lost its connection",
                    fix=f"look at {self.run.path / 'agents'}, then try again",
                )
            time.sleep(POLL_S)

    def _send_off(self, plan: Plan) -> None:
        nodes, roster = [], []
        for post in self.posts:
            said = post.ready or {}
            found = {"interface": said["interface"], "cores": post.node.cores or said["cores"]}
            post.node = replace(post.node, **found, cpu_only=said["cpu_only"])
            nodes.append(post.node)
            roster.append(Member(post.node.name, post.node.address, said["port"], said["mark"]))
        head = self.posts[0].ready or {}
        meeting = Meeting(nodes[0].address, head["script_port"] or head["port"])
        if head["script_port"] and len(nodes) > 1:
            self._note(
                f"the script's store is torch's own: it listens on every address of {nodes[0].name}, port "
                f"{meeting.port}, and whoever reaches it can write into it. Use a network you trust."
            )
        self.commands = plan(nodes, meeting)
        for post in self.posts:
            post.link.send(to_line(make_go(roster, self.commands, post.node.name)))

    def __enter__(self) -> _World:
        return self

    def __exit__(self, *_: object) -> None:
        """However we leave: what is still there is asked to end, and then ended."""
        deadline = time.monotonic() + _END_WITHIN_S
        if any(not post.done for post in self.posts):
            self._tell(END)
        while any(post.gone() is None for post in self.posts) and time.monotonic() < deadline:
            time.sleep(POLL_S / 5)
        for post in self.posts:
            if post.link.ended() is None:
                post.link.kill()
            post.link.close()

    def see_through(self) -> None:
        while not all(post.done for post in self.posts):
            self._obey()
            self._look()
            time.sleep(POLL_S)
        if self.refused and not self.interrupts:
            raise self.refused

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        self.interrupts += 1

    def _obey(self) -> None:
        while self._obeyed < self.interrupts:
            self._obeyed += 1
            self._tell(STOP if self._obeyed == 1 else END)

    def _tell(self, wish: str) -> None:
        for post in self.posts:
            post.link.send(to_line(wish))

    def _look(self) -> None:
        for post in self.posts:
            for event in post.tail.poll():
                if event.get("launch") == self.launch_id:
                    self._take(post, event)
        for post in self.posts:
            self._look_after(post)

    def _take(self, post: _Post, event: Event) -> None:
        match event["event"]:
            case "ready":
                post.ready = event
            case "started":
                post.started = True
                if all(each.started for each in self.posts):
                    self.log.write("running", nodes=[each.node.name for each in self.posts])
            case "ended":
                self._end(post, event["name"], event["code"], event["by_us"], starved=event["starved"])
            case "note":
                self._note(f"{post.node.name}: {event['text']}")
            case "lost":
                self._note(f"{post.node.name} lost {event['node']}: {event['how']}")
                self._post_of(event["node"]).lost = event["how"]
            case "peer":
                # Enough for one whose own word does not reach us: its ranks ended, and nobody called it a failure.
                self._post_of(event["node"]).finished = True
            case "refused":
                self._refuse(post, from_dict(event))
            case "done":
                post.done = True

    def _note(self, text: str) -> None:
        self.log.write("note", text=text)

    def _refuse(self, post: _Post, error: ShoalError) -> None:
        """Before the run began. Those who wait for the refusing one need wait no longer."""
        if self.refused is None:
            self._tell(END)
        if self.refused is None or isinstance(self.refused, PeerLost):
            self.refused = error
        if not self.commands:
            raise self.refused

    def _end(self, post: _Post, name: str, code: int, by_us: bool, starved: bool = False, lost: str = "") -> None:
        command = next(command for command in self.commands if command.name == name)
        log = str(self.run.log(post.node.name, name))
        order = len(self.endings)
        self.endings.append(Ending(name, post.node.name, command.ranks, code, order, by_us, log, starved, lost))

    def _post_of(self, node: str) -> _Post:
        return next(post for post in self.posts if post.node.name == node)

    def _look_after(self, post: _Post) -> None:
        """An agent that ended without a word was killed, or its machine is gone."""
        if post.finished and not post.link.is_reachable():
            post.done = True
        if post.done or (how := post.gone()) is None:
            return
        if post.since is None:
            post.since = time.monotonic()
        elif time.monotonic() - post.since > _LAST_WORDS_S:
            post.done = True
            self._lose(post, how)

    def _lose(self, post: _Post, how: str) -> None:
        if not self.commands:
            raise ControlError(
                f"{post.node.name} did not start: {how}",
                why="the agent that starts its ranks ended before it could",
                fix=f"look at {self.run.path / 'agents'}",
            )
        ended = {ending.name for ending in self.endings}
        for command in self.commands:
            if command.node.name == post.node.name and command.name not in ended:
                self._end(post, command.name, -int(signal.SIGKILL), by_us=False, lost=how)


@contextlib.contextmanager
def _signals(world: _World) -> Iterator[None]:
    """Only counted: a handler that did more would do it in the middle of anything."""
    before = {signum: signal.signal(signum, world.interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


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


def _log_tails(world: _World, run: RunFolder) -> dict[str, str]:
    return {command.name: tail_of(run.log(command.node.name, command.name)) for command in world.commands}


def tail_of(log: Path, lines: int = 12, most_bytes: int = 8192) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - most_bytes))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
