"""The agents of one run as their launcher sees them: told what to start, followed by their journals, none left."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from shoal.agent.membership import highest_generation
from shoal.agent.unjoined_ranks import awaited, left_behind, lonely, never_met
from shoal.cluster.agent_link import AgentLink
from shoal.cluster.cluster import Cluster
from shoal.cluster.node import Node, Rendezvous
from shoal.config.load import load_config
from shoal.config.schema import MembersConfig, RunConfig
from shoal.control.channel import make_token
from shoal.control.orders import END, STOP, MeetOrder, MembershipOrder, RosterEntry, membership, to_line
from shoal.control.processes import AGENT, find, is_running
from shoal.cost.batch_plan import world_batch
from shoal.cost.memory import relief
from shoal.errors import ControlError, Interrupted, PeerLost, RunFailed, ShoalError, from_dict
from shoal.events import Event, EventLog, EventTail
from shoal.launch.failure import (
    LOG_TAIL,
    ProcessEnd,
    caused,
    failure,
    first_to_fail,
    left_early,
    outlived,
    script_faults,
)
from shoal.launch.plan import RankCommand, make_go, plan_module, plan_ranks, plan_script, settings_notes
from shoal.run_folder import RunFolder
from shoal.units import format_duration

# SECTION launch/post
# One node's agent, as its launcher sees it: told what to do, ended at last, alive or gone meanwhile.


@dataclass
class AgentHandle:
    """One node's agent, as its journal shows it. `since`: when it was seen to have ended without saying so. `lost`: how
    another agent lost it. `finished`: another agent heard that all its ranks have ended well. `left`:
    we stopped waiting for it. `again`: the process of its agent's later life, which is no child of ours; 0 when
    it cannot be seen from here."""

    node: Node
    link: AgentLink
    tail: EventTail
    ready: Event | None = None
    started: bool = False
    done: bool = False
    since: float | None = None
    lost: str = ""
    finished: bool = False
    left: bool = False
    again: int | None = None

    def is_busy(self) -> bool:
        """Whether it may still have something for us."""
        return not self.left and self.gone() is None and (not self.done or self.link.is_reachable())

    def gone(self) -> str | None:
        """How it left us, if it did: by its own end, or by what the others say of a machine we cannot reach either."""
        if self.again is not None:
            return None if is_running(self.again) else "its agent, which had been started again, ended"
        how = self.link.ended()
        return self.lost if how is None and self.lost and not self.link.is_reachable() else how

    def tell(self, wish: str) -> None:
        """Two signals at once are the wish to end; see `Agent._on_signal`."""
        self.link.send(to_line(wish))
        if self.again is not None and is_running(self.again):
            for signum in (signal.SIGINT, signal.SIGTERM)[: 2 if wish == END else 1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.again, signum)

    def end(self) -> None:
        if self.link.ended() is None:
            self.link.kill()
        self.link.close()
        if self.again is not None and is_running(self.again):
            os.kill(self.again, signal.SIGKILL)


POLL_S = 0.05
# Over SSH to a slow machine Python alone may take seconds to start.
READY_WITHIN_S = 45.0
# A journal's last line may be written a moment before or after its agent's end is seen.
_LAST_WORDS_S = 1.0
# An agent that was told to end now has this long for it.
_END_WITHIN_S = 5.0
# Ranks of a script that run so much longer than the first that ended are mentioned.
LEFT_AFTER_S = 60.0

Plan = Callable[[list[Node], Rendezvous], list[RankCommand]]


@dataclass
class Launch:
    """The agents of one run. Leaving the `with` block leaves none of them, and so none of their ranks."""

    run: RunFolder
    cluster: Cluster
    log: EventLog
    launch_id: str = field(default_factory=lambda: secrets.token_hex(8))
    posts: list[AgentHandle] = field(default_factory=list)
    commands: list[RankCommand] = field(default_factory=list)
    endings: list[ProcessEnd] = field(default_factory=list)
    refused: ShoalError | None = None
    interrupts: int = 0
    is_elastic: bool = False
    broken: str = ""
    gave_up: ShoalError | None = None
    # How long the ranks of a script may take to end once they are asked to stop.
    grace_s: float | None = None
    # Keys in the store of a script's ranks at its end; None while that is not known.
    store_keys: int | None = None
    # Whether the user was told that ranks have not met.
    noted_absence: bool = False
    _met: dict[str, Event] = field(default_factory=dict)
    _meeting: Rendezvous | None = None
    _left_at: float | None = None
    _noted_left: bool = False
    _said: set[str] = field(default_factory=set)
    # Nodes whose journals were found to have lines that cannot be used.
    _noted_journals: set[str] = field(default_factory=set)
    _obeyed: int = 0
    _ended_at: float | None = None

    def launch(
        self,
        plan: Plan,
        config: str,
        data: str,
        script_port: int | None = None,
        members: Callable[[int, int], MembershipOrder] | None = None,
    ) -> None:
        """With `members`, machines may come and go: by which rules, it says for so many ranks and when told the highest
        number of a generation so far."""
        common = MeetOrder(
            folder="",
            node="",
            member=0,
            address="",
            interface=None,
            token=make_token(self.run.token),
            launch=self.launch_id,
            launched_at=time.time(),
            config=config,
            data=data,
        )
        for member, node in enumerate(self.cluster.nodes):
            tail = EventTail(self.run.journal(node.name))
            tail.skip_to_end()
            post = AgentHandle(node, self.cluster.start_agent(node, self.run.path), tail)
            self.posts.append(post)
            folder, port = self.cluster.folder(node, self.run.path), script_port if member == 0 else None
            named = replace(common, node=node.name, address=node.address, interface=node.interface)
            post.link.send(to_line(replace(named, member=member, folder=folder, script_port=port)))
        self._await_ready()
        self._send_off(plan, members)

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

    def _send_off(self, plan: Plan, members: Callable[[int, int], MembershipOrder] | None) -> None:
        nodes = []
        for post in self.posts:
            said = post.ready or {}
            found = {"interface": said["interface"], "cores": post.node.cores or said["cores"]}
            post.node = replace(post.node, **found, cpu_only=said["cpu_only"])
            nodes.append(post.node)
        head = self.posts[0].ready or {}
        meeting = self._meeting = Rendezvous(nodes[0].address, head["script_port"] or head["port"])
        if head["script_port"] and len(nodes) > 1:
            self._note(
                f"the script's store is torch's own and asks for no token: any program that reaches {meeting.address} "
                f"port {meeting.port} can write into it. Use a network you trust."
            )
        self.commands = plan(nodes, meeting)
        self.is_elastic = members is not None
        order = None if members is None else members(self.ranks, self._highest_generation())
        roster = [self._as_member(post) for post in self.posts]
        for post in self.posts:
            post.link.send(to_line(make_go(roster, self.commands, post.node.name, order, self.grace_s)))

    def _as_member(self, post: AgentHandle) -> RosterEntry:
        said, node = post.ready or {}, post.node
        ranks = [rank for command in self.commands if command.node.name == node.name for rank in command.ranks]
        return RosterEntry(node.name, node.address, said["port"], said["mark"], tuple(ranks))

    def _highest_generation(self) -> int:
        """Of all earlier launches, as far as any machine knows of it: no number is used twice."""
        promised = [int((post.ready or {})["highest"]) for post in self.posts]
        return max(highest_generation(self.run), *promised)

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        """However we leave: what is still there is asked to end, and then ended.

        After a good end everything that is still on its way home is waited for: a checkpoint may be large and a link
        slow. Only another Ctrl-C cuts that short.
        """
        patience, asked = time.monotonic() + _END_WITHIN_S, self.interrupts
        if unfinished := any(not post.done for post in self.posts):
            self._tell(END)
        while any(post.is_busy() for post in self.posts):
            if time.monotonic() > patience and (unfinished or self.interrupts > asked):
                break
            time.sleep(POLL_S / 5)
        for post in self.posts:
            post.end()

    def see_through(self) -> None:
        while not all(post.done for post in self.posts):
            self._obey()
            self._look()
            self._need_folder()
            self._leave_the_stuck()
            self._note_left_behind()
            time.sleep(POLL_S)
        if self.refused and not self.interrupts:
            raise self.refused

    def _need_folder(self) -> None:
        """Journals that were deleted say nothing any more: without this, the run would be waited for in vain."""
        if self.log.is_removed():
            raise self.run.removed()

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        self.interrupts += 1

    def _obey(self) -> None:
        while self._obeyed < self.interrupts:
            self._obeyed += 1
            self._tell(STOP if self._obeyed == 1 else END)
            if self._obeyed == 1:
                self._note(asked_to_stop(self.grace_s))
            else:
                self._ended_at = self._ended_at or time.monotonic()

    def _leave_the_stuck(self) -> None:
        """A frozen machine neither ends nor breaks its connection. Told to end, or lost to others, it has seconds."""
        stuck = [post for post in self.posts if not post.done]
        if self._ended_at is None and stuck and all(post.lost for post in stuck):
            self._tell(END)
            self._ended_at = time.monotonic()
        if self._ended_at is not None and time.monotonic() - self._ended_at > _END_WITHIN_S:
            for post in stuck:
                post.done = post.left = True
                self._lose(post, post.lost or "it did not end when it was told to")

    def _tell(self, wish: str) -> None:
        for post in self.posts:
            post.tell(wish)

    def _look(self) -> None:
        for post in self.posts:
            for event in post.tail.poll():
                if event.get("launch") != self.launch_id:
                    continue
                if self._is_of(post, event):
                    self._take(post, event)
                else:
                    self._note_bad_lines(post)
            if post.tail.unreadable:
                self._note_bad_lines(post)
        for post in self.posts:
            self._look_after(post)

    def _is_of(self, post: AgentHandle, event: Event) -> bool:
        """Whether the process that a line of a journal names is one that the node was told to start."""
        own = {command.name for command in self.commands if command.node.name == post.node.name}
        return event["event"] not in ("ended", "restart", "broken") or event["name"] in own

    def _note_bad_lines(self, post: AgentHandle) -> None:
        """Once for each node: a journal with many such lines must not fill the user's screen."""
        if post.node.name not in self._noted_journals:
            self._noted_journals.add(post.node.name)
            self._note(
                f"the journal of {post.node.name} has lines that cannot be used and are ignored: its shoal is another "
                f"version, or the file was damaged ({self.run.journal(post.node.name)})"
            )

    def _take(self, post: AgentHandle, event: Event) -> None:
        match event["event"]:
            case "ready" if event["life"]:
                self._welcome_back(post, event)
            case "ready":
                post.ready = event
            case "started":
                post.started = True
                if all(each.started for each in self.posts):
                    self.log.write("running", nodes=[each.node.name for each in self.posts], ranks=self.ranks)
            case "ended":
                self._end(post, event["name"], event["code"], event["by_us"], starved=event["starved"])
            case "note":
                self._note(f"{post.node.name}: {event['text']}")
            case "restart":
                self.endings = [ending for ending in self.endings if ending.name != event["name"]]
            case "tell" | "pause" | "abandon":
                self._note_once(event)
            case "broken":
                self.broken = self.broken or f"{event['name']}: {event['why']}"
            case "lost":
                if not self.is_elastic:
                    self._note(f"{post.node.name} lost {event['node']}: {event['how']}")
                self._lost(event["node"], event["how"])
            case "peer":
                self._take_word_for(event["node"], event["failed"])
            case "met":
                self._met[post.node.name] = event
                self._note_absence()
            case "meeting":
                self.store_keys = event["keys"]
            case "gave-up":
                self.gave_up = from_dict(event)
            case "refused" if post.again is not None:
                self._note(f"{post.node.name} could not take part again: {event['seen']}")
            case "refused":
                self._refuse(post, from_dict(event))
            case "done":
                post.done = True

    def _note_absence(self) -> None:
        """Once the agents of all nodes have looked: a rank waits for one that another node has."""
        if self._meeting is None or len(self._met) < len(self.posts):
            return
        met, missing = (
            sorted(rank for event in self._met.values() for rank in event[key]) for key in ("met", "missing")
        )
        if missing and not self.noted_absence:
            place = self._meeting.address, self._meeting.port
            after_s = max(float(event["after_s"]) for event in self._met.values())
            run = shlex.quote(str(self.run.path))
            warning = awaited(met, missing, *place, after_s, run) if met else lonely(missing, *place, after_s)
            self.noted_absence = True
            self._note(f"{warning.seen}: {warning.why} ({warning.fix})")

    def _note_left_behind(self) -> None:
        """Of a script: some ranks have ended well, and others go on for long."""
        if self.grace_s is None or self.interrupts or self._noted_left or not self.endings:
            return
        ended = [rank for ending in self.endings for rank in ending.ranks]
        running = [rank for command in self.commands for rank in command.ranks if rank not in ended]
        if any(ending.code for ending in self.endings) or not running:
            return
        now = time.monotonic()
        self._left_at = now if self._left_at is None else self._left_at
        if now - self._left_at > LEFT_AFTER_S:
            self._noted_left = True
            self._note(left_behind(ended, running, now - self._left_at, shlex.quote(str(self.run.path))))

    @property
    def ranks(self) -> int:
        return sum(len(command.ranks) for command in self.commands)

    def _note_once(self, event: Event) -> None:
        """Agents of one generation say the same of it."""
        key = event.get("generation") or event["text"]
        if key not in self._said:
            self._said.add(key)
            self._note(event["text"])

    def _welcome_back(self, post: AgentHandle, event: Event) -> None:
        """Its agent was started again, by somebody else than us: what became of its ranks before is history."""
        # Its own number of itself may be one of an emulated node.
        agents = (found.pid for found in find(self.run.path) if (found.part, found.node) == (AGENT, post.node.name))
        post.again = next(agents, 0)
        post.done, post.since, post.lost, post.finished = False, None, "", False
        self.endings = [ending for ending in self.endings if ending.node != post.node.name]

    def _note(self, text: str) -> None:
        self.log.write("note", text=text)

    def _refuse(self, post: AgentHandle, error: ShoalError) -> None:
        """Before the run began. Those who wait for the refusing one need wait no longer."""
        if self.refused is None:
            self._tell(END)
        if self.refused is None or isinstance(self.refused, PeerLost):
            self.refused = error
        if not self.commands:
            raise self.refused

    def _end(self, post: AgentHandle, name: str, code: int, by_us: bool, starved: bool = False, lost: str = "") -> None:
        command = next(command for command in self.commands if command.name == name)
        log = str(self.run.log(post.node.name, name))
        order = len(self.endings)
        self.endings.append(ProcessEnd(name, post.node.name, command.ranks, code, order, by_us, log, starved, lost))

    def _lost(self, node: str, how: str) -> None:
        """A machine that came later by itself is nobody's to wait for."""
        for post in self.posts:
            if post.node.name == node:
                post.lost = how

    def _take_word_for(self, node: str, failed: bool) -> None:
        """Enough for one whose own word does not reach us: its ranks ended, and nobody called it a failure."""
        if failed:
            self._lost(node, "its ranks ended in a failure, and their words did not reach us")
        for post in self.posts:
            post.finished |= post.node.name == node and not failed

    def _look_after(self, post: AgentHandle) -> None:
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

    def _lose(self, post: AgentHandle, how: str) -> None:
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


def asked_to_stop(grace_s: float | None) -> str:
    """What a user reads after the first Ctrl-C: what happens now, and how to end it sooner."""
    now = "a second Ctrl-C where the run was started, or shoal stop --now, ends them now"
    if grace_s is None:
        return f"the ranks finish their step and save; {now}"
    if not grace_s:
        return "the ranks are ended at once (--grace 0)"
    return (
        f"the ranks were asked to stop; those that still run in {format_duration(grace_s)} are ended (--grace); {now}"
    )


@contextlib.contextmanager
def interruptible(world: Launch) -> Iterator[None]:
    """Only counted: a handler that did more would do it in the middle of anything."""
    before = {signum: signal.signal(signum, world.interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


# SECTION launch/supervise
# Starts an agent on every node, tells them what to start, and follows their journals to the end of the run.
#
# Ctrl-C once asks every rank to finish its step and save; twice ends them now. What becomes of a failing rank's
# peers is the agents' own business, so that it happens whether or not we are still there.


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

    def rules(ranks: int, above: int) -> MembershipOrder:
        return membership(members, above, most_ranks=world_batch(load_config(run.config).train, ranks))

    news = _news_of_ranks(run, cluster)
    world = Launch(run, cluster, log)
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
    world = Launch(run, cluster, log)
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

    def plan(nodes: list[Node], meeting: Rendezvous) -> list[RankCommand]:
        for text in settings_notes(config, nodes, user_env or {}):
            log.write("note", text=text)
        return plan_script(config, argv, nodes, meeting, python, user_env)

    world = Launch(run, cluster, log, grace_s=grace_s)
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


def _fell_apart(world: Launch) -> ShoalError | None:
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


def _refuse_a_violent_end(endings: Iterable[ProcessEnd]) -> None:
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


def _log_tails(world: Launch, run: RunFolder) -> dict[str, str]:
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
