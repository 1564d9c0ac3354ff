"""A machine that joins a run by itself: `shoal join ADDRESS:PORT#CODE`.

It is told who takes part and what is trained, and fetches the text; it plans and starts its own rank. The host learns
what the rank writes; it can make this machine run nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.cluster.join.invitation import Invitation
from shoal.cluster.link import PipeLink, agent_command
from shoal.cluster.node import Meeting, Node
from shoal.config.load import load_config, to_toml
from shoal.control.channel import Channel, Message, dial
from shoal.control.hello import introduce
from shoal.control.machine import physical_cores
from shoal.control.route import interface_for, source_address
from shoal.control.token import unseal
from shoal.data.cache import cache_root
from shoal.data.prepare import digest_of
from shoal.data.run_setup import DataFacts, read_facts, to_json
from shoal.errors import ControlError, Interrupted, RunFailed, ShoalError, Stranger, UsageError, from_dict
from shoal.events import read_events
from shoal.launch.orders import END, STOP, Go, Meet, make_go, read_member, read_membership, to_line
from shoal.launch.outpost import Freight, send_while
from shoal.launch.plan import plan_guest, plan_ranks
from shoal.launch.seating import Seating
from shoal.launch.supervise import tail_of
from shoal.runfolder import RunFolder, write_atomically

_POLL_S = 0.1
_TEXT_NAME = re.compile(r"[0-9a-f]{64}-(?:train|val)")


@dataclass(frozen=True)
class Joined:
    """A place in somebody's run: our name there, our folder of it, and digests of what it trains and on which text.
    `late`: the run goes on already."""

    run: RunFolder
    node: str
    address: str
    config: str
    data: str
    late: bool


def join(invitation: Invitation, out: Path, said: Callable[[str], None], watch: Callable[[RunFolder], None]) -> Joined:
    """To the end of the run. Raises what went wrong here; what the run is, is told to `said` and shown by `watch`."""
    return asyncio.run(_join(invitation, out, said, watch))


async def _join(
    invitation: Invitation, out: Path, said: Callable[[str], None], watch: Callable[[RunFolder], None]
) -> Joined:
    channel = await _reach(invitation)
    try:
        joined = await _arrive(channel, invitation, out)
        follows = (
            "the others let it in at the end of a step" if joined.late else "the run begins when everybody is there"
        )
        said(f"joined {invitation.address} as {joined.node}; {follows}")
        await _take_part(channel, invitation.code, joined, said, watch)
    finally:
        channel.close()
    return joined


async def _reach(invitation: Invitation) -> Channel:
    where = f"{invitation.address}:{invitation.port}"
    try:
        async with asyncio.timeout(10):
            return await dial(invitation.address, invitation.port, invitation.code)
    except Stranger:
        raise ControlError(
            f"{where} did not accept the code", why="it was used before, or mistyped", fix="ask there for a new line"
        ) from None
    except (OSError, EOFError, TimeoutError) as error:
        raise ControlError(
            f"nobody answers at {where}",
            why=f"{getattr(error, 'strerror', None) or 'no answer in 10 s'}: shoal host has ended there, "
            "or a firewall stands between",
            fix=f"try: ping {invitation.address}; then ask for a new line",
        ) from None


async def _arrive(channel: Channel, invitation: Invitation, out: Path) -> Joined:
    address = source_address(invitation.address)
    hello = introduce(0, socket.gethostname(), "", "", "").as_dict()
    facts = {"hello": hello, "name": socket.gethostname(), "address": address, "cores": physical_cores()}
    await channel.send(facts)
    welcome = await _hear(channel, "welcome")
    try:
        with _understood():
            places = await _fetch(channel, welcome["files"])
            run = _make_folder(out, welcome["texts"], places)
            config = hashlib.sha256(welcome["texts"][run.config.name].encode()).hexdigest()
            joined = Joined(run, str(welcome["node"]), address, config, "", bool(welcome["late"]))
        joined = replace(joined, data=_check_text(run, places.values()))
    except ShoalError as error:
        await channel.send({"type": "failed", **error.as_dict()})
        raise
    await channel.send({"type": "prepared"})
    return joined


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    """Around what is done with the host's words: a field that is missing, or another type."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ControlError(
            f"the host said what this machine does not understand ({type(error).__name__}: {error})",
            why="its shoal is another",
            fix="install the same shoal on both machines: shoal --version",
        ) from error


async def _fetch(channel: Channel, sizes: Mapping[str, int]) -> dict[str, Path]:
    """What an earlier run brought already is not sent again."""
    if wrong := [name for name in sizes if not _TEXT_NAME.fullmatch(name)]:
        raise ControlError(f"the host offers {wrong[0]!r} where a text was due", why="its shoal is another")
    folder = cache_root(None) / "joined"
    folder.mkdir(parents=True, exist_ok=True)
    places = {name: folder / name for name in sizes}
    need = [name for name, place in places.items() if not place.exists() or place.stat().st_size != sizes[name]]
    await channel.send({"type": "need", "need": need})
    for name in need:
        temporary = places[name].with_suffix(f".{os.getpid()}.part")
        with temporary.open("wb") as file:
            while file.tell() < sizes[name]:
                file.write(base64.b64decode((await _hear(channel, "piece"))["data"]))
        temporary.replace(places[name])
    return places


def _make_folder(out: Path, texts: Mapping[str, str], places: Mapping[str, Path]) -> RunFolder:
    run = RunFolder.create(out)
    write_atomically(run.tokenizer, texts[run.tokenizer.name])
    write_atomically(run.config, texts[run.config.name])
    # Where it runs and by whom it is started is ours to say, whatever the host wrote there.
    config = load_config(run.config)
    ours = config.run.model_copy(update={"on": "local:1", "launcher": "shoal", "threads": None})
    write_atomically(run.config, to_toml(config.model_copy(update={"run": ours})))
    facts = DataFacts(**json.loads(texts[run.data.name]))
    write_atomically(run.data, to_json(replace(facts, train=str(places[facts.train]), val=str(places[facts.val]))))
    return run


def _check_text(run: RunFolder, places: Iterable[Path]) -> str:
    """Its digest, from its own bytes. What is damaged is thrown away, so that the next try fetches it anew."""
    facts = read_facts(run)
    try:
        return digest_of(run.tokenizer, Path(facts.train), Path(facts.val))
    except ShoalError:
        for place in places:
            place.unlink(missing_ok=True)
        raise


async def _hear(channel: Channel, kind: str) -> Message:
    try:
        message = await channel.receive()
    except (OSError, EOFError):
        raise ControlError("the host closed the connection", why="it has ended, or was interrupted") from None
    if message.get("type") == "refused":
        raise from_dict(message)
    if message.get("type") != kind:
        raise ControlError(f"the host said {message.get('type')!r} where {kind!r} was due", why="its shoal is another")
    return message


async def _take_part(
    channel: Channel, code: str, joined: Joined, said: Callable[[str], None], watch: Callable[[RunFolder], None]
) -> None:
    meet = await _hear(channel, "meet")
    with _understood():
        joined = _in_the_run(meet, joined) if joined.late else joined
        order = _order(meet, unseal(meet["sealed"], code), joined)
    agent = PipeLink(agent_command(joined.run.path, joined.node), joined.run.path, joined.node)
    try:
        agent.send(to_line(order))
        shipping = asyncio.ensure_future(asyncio.to_thread(_ship, channel, joined, agent, asyncio.get_running_loop()))
        _pass_signals_to(agent, said)
        roster = await _hear(channel, "roster")
        with _understood():
            go = _plan_late(roster, order, joined) if joined.late else _plan(roster, joined)
        agent.send(to_line(go))
        while agent.ended() is None:
            watch(joined.run)
            await asyncio.sleep(_POLL_S)
        watch(joined.run)
        await shipping
    finally:
        if agent.ended() is None:
            agent.send(to_line(END))
        agent.close()
    _raise_failure(joined)


def _order(meet: Message, token: str, joined: Joined) -> Meet:
    """Everything but its place in the run is this machine's own knowledge."""
    return Meet(
        folder=str(joined.run.path),
        node=joined.node,
        member=int(meet["member"]),
        address=joined.address,
        interface=interface_for(joined.address, None, joined.node),
        token=token,
        launch=str(meet["launch"]),
        launched_at=float(meet["launched_at"]),
        config=joined.config,
        data=joined.data,
    )


def _plan(message: Message, joined: Joined) -> Go:
    roster = [read_member(entry) for entry in message["roster"]]
    interface = interface_for(joined.address, None, joined.node)
    nodes = [Node(member.node, member.address, interface, 1, physical_cores()) for member in roster]
    config = load_config(joined.run.config)
    meeting = Meeting(roster[0].address, roster[0].port)
    commands = plan_ranks(config.run, lambda node: str(joined.run.path), nodes, meeting, bool(message["resume"]))
    return make_go(roster, commands, joined.node, read_membership(message["members"]))


def _in_the_run(meet: Message, joined: Joined) -> Joined:
    """Whoever invited us may have joined itself, and then its configuration differs from the run's in where it runs."""
    if meet["data"] != joined.data:
        raise ControlError(
            "the text that was sent is not the one that the run trains on",
            why="whoever sent it has another one in its cache",
            fix="ask another machine of the run for an invitation: shoal host RUN, there",
        )
    return replace(joined, config=str(meet["config"]))


def _plan_late(message: Message, order: Meet, joined: Joined) -> Go:
    """One rank, whose number nobody else has."""
    roster = [read_member(entry) for entry in message["roster"]]
    guests = {int(member): read_member(entry) for member, entry in message["guests"].items()}
    here = Node(joined.node, joined.address, order.interface, 1, physical_cores())
    first = Seating(order.member, roster).number(order.member, 0)
    commands = plan_guest(load_config(joined.run.config).run, str(joined.run.path), here, first)
    return replace(make_go(roster, commands, joined.node, read_membership(message["members"])), guests=guests)


def _ship(channel: Channel, joined: Joined, agent: PipeLink, loop: asyncio.AbstractEventLoop) -> None:
    """In a thread of its own. A host that is gone is told nothing; the run may go on without its keeper. Whoever comes
    late keeps what it writes: its host does not stay to the end."""
    if joined.late:
        return

    def tell(message: Message) -> None:
        asyncio.run_coroutine_threadsafe(channel.send(message), loop).result()

    def put(name: str, offset: int, piece: bytes) -> None:
        tell({"type": "piece", "path": name, "offset": offset, "data": base64.b64encode(piece).decode()})

    try:
        send_while(lambda: agent.ended() is None, Freight(joined.run, joined.node, {}, False, put))
        tell({"type": "end"})
    except (OSError, RuntimeError):
        return


def _pass_signals_to(agent: PipeLink, said: Callable[[str], None]) -> None:
    """Ctrl-C is a wish for the whole run. SIGTERM is about this machine alone: it is being switched off."""
    asked = threading.Event()

    def pass_on() -> None:
        with contextlib.suppress(OSError):
            said("ending now" if asked.is_set() else "asked everybody to finish the step and save")
        agent.send(to_line(END if asked.is_set() else STOP))
        asked.set()

    def leave() -> None:
        with contextlib.suppress(OSError):
            said("this machine leaves")
        agent.ask_to_leave()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, pass_on)
    loop.add_signal_handler(signal.SIGTERM, leave)
    # A closed terminal does not end our part.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _raise_failure(joined: Joined) -> None:
    journal = list(read_events(joined.run.journal(joined.node)))
    if refused := [event for event in journal if event["event"] in ("refused", "gave-up")]:
        raise from_dict(refused[0])
    lives = [event["event"] for event in journal if event["event"] in ("ready", "left")]
    if lives[-1:] == ["left"]:
        raise Interrupted(
            "this machine has left the run", why="the others train on", fix=f"come back: shoal join {joined.run.path}"
        )
    if joined.late and not any(event["event"] == "generation" for event in journal):
        raise RunFailed(
            "the run ended before this machine was let in",
            why="the others had finished, or never all heard it",
            fix=f"what it saw is in {joined.run.journal(joined.node)}",
        )
    codes = {event["name"]: event["code"] for event in journal if event["event"] == "ended"}
    if any(code == Interrupted.exit_code for code in codes.values()):
        raise Interrupted("the run was stopped; what was done is saved")
    for name, code in codes.items():
        if code:
            log = joined.run.log(joined.node, name)
            lost = [event for event in journal if event["event"] == "lost"]
            why = f"{lost[0]['node']} is gone: {lost[0]['how']}" if lost else f"the end of its log:\n{tail_of(log)}"
            raise RunFailed(f"{name} on {joined.node} ended with {code}", why=why, fix=f"less {log}")
    if not codes:
        raise UsageError("the run ended before our rank was started", fix="ask at the host")
