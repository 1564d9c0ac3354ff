"""Joins a run: `shoal join ADDRESS:PORT` with the code that the host printed, or `shoal join RUN` to come back.

This machine gets the roster, the configuration and the text from the host, and plans and starts its own rank. The host
receives the rank's files; it cannot make this machine run anything. A model checks names, sizes and numbers of every
message from the host, so that nothing is written or read outside the run folder and the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import getpass
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from shoal.agent.membership import RankNumbering
from shoal.cluster.agent_link import PipeLink, agent_command
from shoal.cluster.join import safe_name
from shoal.cluster.node import Rendezvous, own_node
from shoal.cluster.transfer import FileSender, piece_message, read_piece, send_while
from shoal.config.load import load_config, to_toml, validate_session
from shoal.config.presets import PRESETS
from shoal.config.schema import RunConfig
from shoal.control.channel import Channel, Message, dial, unseal
from shoal.control.handshake import make_hello
from shoal.control.invitation import Invitation
from shoal.control.orders import (
    END,
    MAX_MEMBERS_LISTED,
    STOP,
    GoOrder,
    MeetOrder,
    MembershipOrder,
    Number,
    PlainName,
    RosterEntry,
    read_member,
    read_membership,
    read_orders,
    read_places,
    to_line,
)
from shoal.control.processes import AGENT, find_processes
from shoal.data.prepare import DataFacts, cache_root, digest_token_files, facts_to_json
from shoal.data.tokenizer import Tokenizer, parse_tokenizer
from shoal.errors import (
    ControlError,
    DataError,
    Interrupted,
    RunFailed,
    ShoalError,
    UnknownSender,
    UsageError,
    from_dict,
)
from shoal.events import Event, EventTail, read_events
from shoal.host.facts import can_listen, interface_for, source_address
from shoal.launch.launcher import SessionSettings, read_log_tail
from shoal.launch.plan import make_go_order, plan_guest, plan_ranks, plan_script, plan_script_guest
from shoal.run_folder import RunFolder, check_rank, write_atomically
from shoal.runs.supervisor import SharedScript, digest_script, read_shared_script
from shoal.terminal import printable
from shoal.units import format_si, pluralize

_POLL_S = 0.1
_CONNECT_S = 10.0
# More encoded text than any such machine could train on.
_MOST_TEXT_BYTES = 1 << 40
# Room for what a run writes besides the text: a full disk would end it at its first checkpoint.
_SPARE_BYTES = 64 << 20
_PART = ".part"
# The ranks of a rejoining node have to import torch first; afterwards the others let it in at the end of a step. Longer
# than an agent tries that reaches no other.
_LET_IN_WITHIN_S = 75.0

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Model = TypeVar("Model", bound=BaseModel)
Note = Callable[[str], None]
Watch = Callable[[RunFolder], None]


class _Message(BaseModel):
    """A message of the host. Strict: nothing is converted, so that the checked value is the used one."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class _Welcome(_Message):
    node: PlainName
    # The three small files of the run folder. A message has at most 8 MiB, so they are no larger.
    texts: dict[str, str]
    # The size in bytes of each file of the encoded text.
    files: Annotated[
        dict[
            Annotated[str, Field(pattern=r"^[0-9a-f]{64}-(train|val)$")],
            Annotated[int, Field(ge=1, le=_MOST_TEXT_BYTES)],
        ],
        Field(max_length=2),
    ]
    late: bool

    @field_validator("files")
    @classmethod
    def _check_pair(cls, files: dict[str, int]) -> dict[str, int]:
        # The run of a script has none.
        if files and (len(files) != 2 or len({_digest_in(name) for name in files}) != 1):
            raise ValueError("a text has two files, DIGEST-train and DIGEST-val")
        return files

    @property
    def digest(self) -> str:
        return _digest_in(next(iter(self.files), ""))


def _digest_in(name: str) -> str:
    return name.partition("-")[0]


class _Place(_Message):
    """The message `meet`: this machine's place in the run."""

    member: Number
    sealed: str
    launch: Annotated[str, Field(pattern=r"^[0-9A-Za-z-]{1,64}$")]
    launched_at: Annotated[float, Field(ge=0, lt=1e12)]


class _PlaceWithDigests(_Place):
    config: Digest
    data: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]  # empty for a script


@dataclass(frozen=True)
class JoinedRun:
    """This machine's place in a run."""

    run: RunFolder  # its folder on this machine
    node: str
    address: str
    config: str  # the digest of the configuration
    data: str  # the digest of the text
    late: bool  # the run trains already
    words: tuple[str, ...] = ()  # of a script: Python's arguments here
    settings: str = ""  # of a script: those of the host's command line for its sessions


def join(invitation: Invitation, out: Path, note: Note, watch: Watch, script: Sequence[str] = ()) -> JoinedRun:
    """Take part in a run to its end. Raise what went wrong here; `note` gets sentences, `watch` shows the run.

    `script` is this machine's copy of the program of the run, and its arguments.
    """
    try:
        return asyncio.run(_join(invitation, out, note, watch, script))
    except asyncio.CancelledError:
        raise Interrupted("shoal join was ended by a signal before the run began here") from None


async def _join(invitation: Invitation, out: Path, note: Note, watch: Watch, script: Sequence[str]) -> JoinedRun:
    # Until the agent has started, a signal ends this command, and half-fetched files are removed.
    task = asyncio.current_task()
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, lambda: task.cancel() if task else None)
    channel = await _connect(invitation)
    try:
        joined = await _introduce(channel, invitation, out, script)
        next_step = (
            "the others let it in at the end of a step" if joined.late else "the run begins when all have joined"
        )
        note(f"joined {invitation.address} as {joined.node}; {next_step}")
        await _take_part(channel, invitation.code, joined, note, watch)
    finally:
        channel.close()
    return joined


async def _connect(invitation: Invitation) -> Channel:
    where = f"{invitation.address}:{invitation.port}"
    try:
        async with asyncio.timeout(_CONNECT_S):
            return await dial(invitation.address, invitation.port, invitation.code)
    except UnknownSender:
        raise ControlError(
            f"{where} did not accept the code",
            why="it was mistyped, or another machine has used it",
            fix="type it again, or the code that is the last one shown there",
        ) from None
    except socket.gaierror:
        raise ControlError(
            f"{invitation.address} has no address on this network",
            why="its name was mistyped, or this machine cannot look it up",
            fix="type its address instead of its name: hostname -I prints it, on the host",
        ) from None
    except (OSError, EOFError, TimeoutError) as error:
        raise ControlError(
            f"no shoal answers at {where}",
            why=_why_unanswered(error),
            fix=f"try: ping {invitation.address}; then ask for a new code",
        ) from None


def _why_unanswered(error: Exception) -> str:
    match error:
        case ConnectionRefusedError():
            return "nothing listens at that port: shoal host has ended there, or the port was mistyped"
        case TimeoutError():
            return f"no answer in {_CONNECT_S:.0f} s: the address is wrong, or a firewall blocks the connection"
        case OSError(errno=int(number)):
            return f"{os.strerror(number)}: the address is wrong, or a firewall blocks the connection"
        case EOFError():
            return "the connection was closed: shoal host has ended there, or another program listens at that port"
        case _:
            return "no connection: the address is wrong, shoal host has ended there, or a firewall blocks it"


async def _introduce(channel: Channel, invitation: Invitation, out: Path, script: Sequence[str] = ()) -> JoinedRun:
    address = source_address(invitation.address)
    name = safe_name(socket.gethostname())
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # An account may have no name.
        user = f"uid {os.getuid()}"
    hello = asdict(make_hello(0, name, "", "", ""))
    await channel.send({"hello": hello, "name": name, "address": address, "user": user})
    welcome = await _receive(channel, "welcome")
    try:
        joined = await _prepare(channel, _read(_Welcome, welcome), address, out, script)
        write_atomically(joined.run.joined, _joined_json(invitation, joined))
        return joined
    except ShoalError as error:
        await channel.send({"type": "failed", **error.as_dict()})
        raise


def _joined_json(invitation: Invitation, joined: JoinedRun) -> str:
    return json.dumps({"host": invitation.address, "node": joined.node, "late": joined.late})


async def _prepare(channel: Channel, welcome: _Welcome, address: str, out: Path, script: Sequence[str]) -> JoinedRun:
    """Fetch the text and make the run folder, which is removed again if the host's files cannot be used."""
    if (shared := welcome.texts.get(RunFolder(out).script.name)) is not None:
        return await _prepare_script(channel, welcome, shared, address, out, script)
    if script:
        raise UsageError(
            "the run to join is a training of shoal's GPT, and no script",
            why="--script names the program of a script's run",
            fix="leave it out",
        )
    with _checked():
        tokenizer = parse_tokenizer(welcome.texts[RunFolder(out).tokenizer.name], "the host's tokenizer")
    places = await _fetch(channel, welcome, tokenizer)
    is_new = not out.exists()
    run = RunFolder.create(out)
    try:
        with _checked():
            _fill_folder(run, welcome.texts, places, welcome.digest)
            config = hashlib.sha256(welcome.texts[run.config.name].encode()).hexdigest()
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        if not is_new:
            run.path.mkdir()
        raise
    await channel.send({"type": "prepared"})
    return JoinedRun(run, welcome.node, address, config, welcome.digest, welcome.late)


async def _prepare_script(
    channel: Channel, welcome: _Welcome, text: str, address: str, out: Path, script: Sequence[str]
) -> JoinedRun:
    """Make the run folder for a script, of which this machine has its own copy."""
    with _checked():
        shared = read_shared_script(text)
        settings = local_settings(shared.settings)
    words = check_script(shared, script)
    run = RunFolder.create(out, is_training=False)
    write_atomically(run.script, text)
    await channel.send({"type": "prepared"})
    return JoinedRun(run, welcome.node, address, "", "", welcome.late, words, settings)


def check_script(shared: SharedScript, script: Sequence[str]) -> tuple[str, ...]:
    """Return Python's arguments for this machine's copy of the script; refuse another program."""
    typed = shlex.join(["shoal", "join", "ADDRESS:PORT", *shared.join_words])
    if not script:
        raise UsageError(
            f"the run to join is that of a script, {printable(shared.name)}",
            why="a host can make this machine run nothing: its owner names the program",
            fix=f"copy it and the modules that it imports to this machine, look at them, then: {printable(typed)}",
        )
    path = Path(script[0]).resolve()
    if not path.is_file():
        raise UsageError(f"there is no script {script[0]}", fix=f"check the path: ls {Path(script[0]).parent}")
    if digest_script(path) != shared.sha256:
        raise UsageError(
            f"{script[0]} is not the script of the run",
            why="it has another SHA-256 than the host's, and all ranks must run the same program",
            fix="copy it from the host again, with the modules that it imports",
        )
    if tuple(script[1:]) != shared.arguments:
        raise UsageError(
            f"the script has other arguments at the host: {printable(shlex.join(shared.arguments)) or 'none'}",
            why="all ranks must run the same program",
            fix=f"type: {printable(typed)}",
        )
    return (str(path), *script[1:])


def local_settings(text: str) -> str:
    """Return the host's settings for the sessions of its script, without those about its own machine."""
    settings = json.loads(text)
    validate_session(settings, source="the host's settings")
    run = {name: value for name, value in settings.get("run", {}).items() if name not in ("launcher", "threads")}
    return json.dumps({**settings, "run": {**run, "on": "local:1"}})


def _read(kind: type[Model], message: Message) -> Model:
    """Return the checked fields of a message. Other fields are ignored: a later version may send more."""
    with _checked():
        return kind.model_validate({name: message[name] for name in kind.model_fields})


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    """Turn a missing, mistyped or out-of-range field of the host's message into a `ControlError`."""
    try:
        yield
    except ControlError:
        raise
    except (ShoalError, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        # A ShoalError comes from the reader of a configuration or another file. Pydantic's first line only counts the
        # errors; the lines after it say where and what.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        shown = " ".join(lines[1:3] if len(lines) > 2 else lines)[:300]
        raise ControlError(
            f"the host sent what this machine does not accept ({type(error).__name__}: {shown})",
            why="its shoal is another version, or the host tries to reach files outside the run folder",
            fix="compare on both machines: shoal --version; take part only in runs of people you trust",
        ) from error


async def _fetch(channel: Channel, welcome: _Welcome, tokenizer: Tokenizer) -> dict[str, Path]:
    """Fetch the encoded text into the cache, unless an earlier run has brought it already. Return its files.

    A file gets its final name only after it was hashed together with the other one and the tokenizer: ranks of other
    runs open it by this name without another check. No message of a host removes or replaces a file in the cache.
    """
    folder = cache_root(None) / "joined"
    folder.mkdir(parents=True, exist_ok=True)
    for part in folder.glob(f"*{_PART}"):
        # Left by a killed `shoal join`: one that still works holds a lock on its own.
        with contextlib.suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink(missing_ok=True)
    places = {name: folder / name for name in welcome.files}
    # Both or none: one file alone cannot be compared with the digest in its name.
    need = list(places) if _find_mismatch(places, welcome.digest, tokenizer) else []
    needed, free = sum(welcome.files[name] for name in need), shutil.disk_usage(folder).free
    if needed and needed + _SPARE_BYTES > free:
        raise UsageError(
            f"no room for the text of the run: it has {format_si(needed, 'B')}, and {format_si(free, 'B')} are free",
            why=f"it is kept in {folder}",
            fix=f"make room there: df -h {folder}; or set XDG_CACHE_HOME to a folder on another disk",
        )
    await channel.send({"type": "need", "need": need})
    if need:
        await _fetch_text(channel, places, welcome, tokenizer)
    return places


async def _fetch_text(channel: Channel, places: Mapping[str, Path], welcome: _Welcome, tokenizer: Tokenizer) -> None:
    """Receive both files under names that no run uses, check them, then rename them."""
    folder = next(iter(places.values())).parent
    parts = {name: place.with_name(f"{name}.{os.getpid()}{_PART}") for name, place in places.items()}
    try:
        with contextlib.ExitStack() as opened:
            for name, part in parts.items():
                # The kernel releases the lock with the process: a part without a lock was left by a killed one.
                file = opened.enter_context(part.open("wb"))
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                await _receive_file(channel, file, name, welcome.files[name])
                file.flush()
            if wrong := _find_mismatch(parts, welcome.digest, tokenizer):
                raise ControlError(
                    "the text that the host sent is not the one that it names",
                    why=wrong,
                    fix="try again; then check at the host whether its cache is damaged",
                )
            for name, part in parts.items():
                part.replace(places[name])
    except OSError as error:
        raise ControlError(
            f"cannot keep the text that the host sends: {error.strerror}",
            why=f"it goes to {folder}",
            fix=f"make room there: df -h {folder}",
        ) from error
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


async def _receive_file(channel: Channel, file: BinaryIO, name: str, size: int) -> None:
    while file.tell() < size:
        path, offset, piece = read_piece(await _receive(channel, "piece"), "the host")
        if (path, offset) != (name, file.tell()):
            raise ControlError(
                f"the host sent byte {offset} of {path!a:.60} where byte {file.tell()} of {name} was expected"
            )
        if not 0 < len(piece) <= size - offset:
            raise ControlError(
                f"the host sent {len(piece)} bytes where at most {size - offset} were expected",
                why=f"it had announced {name} with {size} bytes",
            )
        file.write(piece)


def _find_mismatch(files: Mapping[str, Path], digest: str, tokenizer: Tokenizer) -> str:
    """Return why the two files are not the text with this digest; empty when they are. Read all their bytes."""
    try:
        actual = digest_token_files(tokenizer, files[f"{digest}-train"], files[f"{digest}-val"])
    except DataError as error:
        return error.seen
    return "" if actual == digest else f"the digest of its files is {actual[:12]}"


def _fill_folder(run: RunFolder, texts: Mapping[str, str], places: Mapping[str, Path], digest: str) -> None:
    """Write tokenizer, configuration and the places of the text.

    Settings of the host about paths and the start of ranks are replaced: they are meant for its own machine, and must
    not make this one read, write or start anything elsewhere.
    """
    write_atomically(run.tokenizer, texts[run.tokenizer.name])
    write_atomically(run.config, texts[run.config.name])
    config = load_config(run.config)
    if config.run.preset not in PRESETS:
        raise ControlError(f"the host's configuration has the unknown preset {config.run.preset[:60]!a}")
    local = {
        "run": config.run.model_copy(update={"on": "local:1", "launcher": "shoal", "threads": None}),
        "data": config.data.model_copy(update={"path": None, "cache_dir": None}),
    }
    write_atomically(run.config, to_toml(config.model_copy(update=local)))
    facts = DataFacts(**json.loads(texts[run.data.name]))
    if (facts.train, facts.val, facts.digest) != (f"{digest}-train", f"{digest}-val", digest):
        raise ControlError("the host's data.json is about another text than the one that it sent")
    write_atomically(
        run.data, facts_to_json(replace(facts, train=str(places[facts.train]), val=str(places[facts.val])))
    )


async def _receive(channel: Channel, kind: str) -> Message:
    try:
        message = await channel.receive()
    except (OSError, EOFError):
        raise ControlError("the host closed the connection", why="it has ended, or was interrupted") from None
    if message.get("type") == "refused":
        raise from_dict(message)
    if message.get("type") != kind:
        raise ControlError(
            f"the host sent {message.get('type')!r} where {kind!r} was expected", why="its shoal is another version"
        )
    return message


async def _take_part(channel: Channel, code: str, joined: JoinedRun, note: Note, watch: Watch) -> None:
    meet = await _receive(channel, "meet")
    if joined.late or joined.words:
        joined = _adopt_digests(_read(_PlaceWithDigests, meet), joined)
    place = _read(_Place, meet)
    # Everything but its place in the run is this machine's own knowledge.
    order = MeetOrder(
        folder=str(joined.run.path),
        node=joined.node,
        member=place.member,
        address=joined.address,
        interface=interface_for(joined.address, None, joined.node),
        token=unseal(place.sealed, code),
        launch=place.launch,
        launched_at=place.launched_at,
        config=joined.config,
        data=joined.data,
    )
    agent = PipeLink(agent_command(joined.run.path, joined.node), joined.run.path, joined.node)
    ranks: set[int] = set()
    try:
        agent.send(to_line(order))
        loop = asyncio.get_running_loop()
        sending = asyncio.ensure_future(asyncio.to_thread(_send_files, channel, joined, ranks, agent, loop))
        _pass_signals_to(agent, note)
        roster = await _receive(channel, "roster")
        with _checked():
            go = _plan_late(roster, order, joined) if joined.late else _plan(roster, order, joined)
        ranks.update(rank for start in go.starts for rank in start.ranks)
        agent.send(to_line(go))
        while agent.ended() is None:
            watch(joined.run)
            await asyncio.sleep(_POLL_S)
        watch(joined.run)
        await sending
    finally:
        if agent.ended() is None:
            agent.send(to_line(END))
        agent.close()
    _raise_failure(joined)


def _plan(message: Message, order: MeetOrder, joined: JoinedRun) -> GoOrder:
    """Plan one rank here, as on every machine that joined. More roster entries with this name would start more."""
    roster, members = _read_roster(message)
    if [member.node for member in roster].count(joined.node) != 1 or order.member >= len(roster):
        raise ControlError("the host's list of machines does not name this one exactly once")
    if roster[order.member].node != joined.node:
        raise ControlError(f"the host's list has another machine at the place of {joined.node}")
    nodes = [own_node(member.node, member.address, order.interface) for member in roster]
    if joined.words:
        rendezvous = _read_script_store(message, roster)
        variables = SessionSettings(joined.settings, message["resume"] is True).variables()
        commands = plan_script(
            RunConfig(on="local:1"), joined.words, nodes, rendezvous, user_env=os.environ, session_env=variables
        )
        return replace(make_go_order(roster, commands, joined.node, members), grace_s=message["grace_s"])
    config = load_config(joined.run.config)
    rendezvous = Rendezvous(roster[0].address, roster[0].port)
    commands = plan_ranks(config.run, lambda node: str(joined.run.path), nodes, rendezvous, message["resume"] is True)
    return make_go_order(roster, commands, joined.node, members)


def _read_roster(message: Message) -> tuple[list[RosterEntry], MembershipOrder | None]:
    roster = [read_member(entry) for entry in message["roster"]]
    if not 0 < len(roster) <= MAX_MEMBERS_LISTED:
        raise ControlError(f"the host's list has {len(roster)} machines")
    return roster, read_membership(message["members"])


def _read_script_store(message: Message, roster: Sequence[RosterEntry]) -> Rendezvous:
    port = message["script_port"]
    if type(port) is not int or not 0 < port < 1 << 16:
        raise ControlError(f"the host names {port!r:.40} as the port of the script's store")
    return Rendezvous(roster[0].address, port)


def _adopt_digests(place: _PlaceWithDigests, joined: JoinedRun) -> JoinedRun:
    """Take over the run's configuration digest: an inviter that joined itself has a configuration of another place."""
    if place.data != joined.data:
        raise ControlError(
            "the text that was sent is not the one that the run trains on",
            why="the machine that sent it has another one in its cache",
            fix="ask another machine of the run for an invitation: shoal host RUN, there",
        )
    return replace(joined, config=place.config)


def _plan_late(message: Message, order: MeetOrder, joined: JoinedRun) -> GoOrder:
    """Plan one rank with a number that no other rank has."""
    roster, members = _read_roster(message)
    guests = read_places(message["guests"])
    if order.member < len(roster) or joined.node in {place.node for place in (*roster, *guests.values())}:
        raise ControlError(f"the host gave {joined.node} the place of another machine")
    here = own_node(joined.node, joined.address, order.interface)
    first = check_rank(RankNumbering(order.member, roster).number(order.member, 0))
    if joined.words:
        rendezvous, variables = _read_script_store(message, roster), SessionSettings(joined.settings).variables()
        run = RunConfig(on="local:1")
        commands = plan_script_guest(run, joined.words, here, first, rendezvous, os.environ, variables)
    else:
        commands = plan_guest(load_config(joined.run.config).run, str(joined.run.path), here, first)
    return replace(make_go_order(roster, commands, joined.node, members), guests=guests)


def _send_files(
    channel: Channel, joined: JoinedRun, ranks: Collection[int], agent: PipeLink, loop: asyncio.AbstractEventLoop
) -> None:
    """Send this node's files to the host, in a thread of its own. `ranks` is filled in once the roster has arrived.

    A late node keeps its files: its host does not stay to the end. A lost host is ignored: the run may continue
    without its supervisor.
    """
    if joined.late:
        return

    def send(message: Message) -> None:
        asyncio.run_coroutine_threadsafe(channel.send(message), loop).result()

    def send_piece(name: str, offset: int, piece: bytes) -> None:
        send(piece_message(name, offset, piece))

    try:
        send_while(lambda: agent.ended() is None, FileSender(joined.run, joined.node, ranks, {}, False, send_piece))
        send({"type": "end"})
    except (OSError, RuntimeError):
        return


def _pass_signals_to(agent: PipeLink, note: Note) -> None:
    """Pass on Ctrl-C, which stops the whole run, and SIGTERM, by which only this machine leaves: it is switched off."""
    asked = threading.Event()

    def pass_on() -> None:
        with contextlib.suppress(OSError):
            note("ending now" if asked.is_set() else "asked all machines to finish the step and save")
        agent.send(to_line(END if asked.is_set() else STOP))
        asked.set()

    def leave() -> None:
        with contextlib.suppress(OSError):
            note("this machine leaves")
        agent.ask_to_leave()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, pass_on)
    loop.add_signal_handler(signal.SIGTERM, leave)
    # A closed terminal does not end this machine's part.
    loop.remove_signal_handler(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _raise_failure(joined: JoinedRun) -> None:
    journal = list(read_events(joined.run.journal(joined.node)))
    if refused := [event for event in journal if event["event"] in ("refused", "state-lost")]:
        raise from_dict(refused[0])
    starts_and_leaves = [event["event"] for event in journal if event["event"] in ("ready", "left")]
    if starts_and_leaves[-1:] == ["left"]:
        raise Interrupted(
            "this machine has left the run", why="the others train on", fix=f"come back: shoal join {joined.run.path}"
        )
    if joined.late and not any(event["event"] == "generation" for event in journal):
        raise RunFailed(
            "the run ended before this machine was let in",
            why="the others had finished, or did not all receive its request",
            fix=f"what it saw is in {joined.run.journal(joined.node)}",
        )
    codes = {event["name"]: event["code"] for event in journal if event["event"] == "ended"}
    if any(code == Interrupted.exit_code for code in codes.values()):
        asked_here = any(event["event"] == "stop-asked" for event in journal)
        raise Interrupted(
            "the run was stopped; what was done is saved",
            why=f"{'this' if asked_here else 'the host or another'} machine asked all of them to stop",
            fix=joined.run.rejoin_advice(),
        )
    for name, code in codes.items():
        if code:
            log = joined.run.log(joined.node, name)
            lost = [event for event in journal if event["event"] == "lost"]
            why = (
                f"{lost[0]['node']} is gone: {lost[0]['how']}" if lost else f"the end of its log:\n{read_log_tail(log)}"
            )
            raise RunFailed(f"{name} on {joined.node} ended with {code}", why=why, fix=f"less {log}")
    if not codes:
        raise UsageError("the run ended before this machine's rank was started", fix="ask at the host")


def rejoin(path: Path, node: str | None) -> str:
    """Start the dead agent of a node again; return a sentence once the others have let it in.

    The agent continues in the background.
    """
    run = RunFolder.find(path)
    node = _choose_node(run, node)
    tail = EventTail(run.journal(node))
    tail.skip_to_end()
    agent = PipeLink((*agent_command(run.path, node), "--again", str(run.path), node), run.path, node)
    try:
        event = _await_event(tail, agent, ("generation", "refused", "state-lost", "done"))
    finally:
        agent.close()
    if event is None:
        return f"{node} asks to be let in, and goes on asking: shoal ps shows it, agents/{node}.jsonl has what it sees"
    if event["event"] in ("refused", "state-lost"):
        raise from_dict(event)
    if event["event"] == "done":
        raise RunFailed(
            f"{node} was not let in: the run has ended, or its ranks could not be started",
            fix=f"look at {run.journal(node)} and {run.path / 'logs' / node}",
        )
    return describe_return(node, event)


def describe_return(node: str, generation: Event) -> str:
    """Describe the generation in which a node is back. It has no step where all its ranks start anew."""
    members, step = generation["members"], generation["step"]
    start = f"from step {step:,}" if step else "from the newest checkpoint, if there is one,"
    train = f"{', '.join(members)} {'train' if len(members) > 1 else 'trains'} on"
    return f"{node} takes part again: {train} {start} with {pluralize(generation['ranks'], 'rank')}"


def _choose_node(run: RunFolder, wanted: str | None) -> str:
    """Return the named node, or the only node of this folder whose agent has died."""
    alive = {process.node for process in find_processes(run.path) if process.part == AGENT}
    known = sorted(path.stem for path in (run.path / "agents").glob("*.orders"))
    dead = [node for node in known if node not in alive]
    shown = shlex.quote(str(run.path))
    if wanted in alive:
        raise UsageError(
            f"{wanted} takes part in {run.path} already", why="its agent is running", fix=f"shoal attach {shown}"
        )
    if wanted is not None and wanted not in known:
        raise UsageError(
            f"{run.path} knows no node {wanted} that could come back",
            why=f"those are: {', '.join(dead) or 'none'}",
            fix="to take part as a new machine, ask for an invitation: shoal host RUN, on another one",
        )
    if dead and not alive and _last_members(run, known) <= set(known) and not any(_may_run(run, node) for node in dead):
        raise UsageError(
            f"no machine of {run.path} is left that could let another one in",
            why=f"all of them were here, and the agents of {', '.join(dead)} have died",
            fix=run.rejoin_advice() or f"go on from the newest checkpoint: shoal train --resume {shown}",
        )
    if wanted is not None or len(dead) == 1:
        return wanted or dead[0]
    if dead:
        raise UsageError(
            f"several nodes of {run.path} could come back: {', '.join(dead)}",
            why="their agents have died",
            fix=f"name one: shoal join {shown} --node {dead[0]}",
        )
    if alive:
        raise UsageError(
            f"{run.path} is running, and no node of it on this machine is gone",
            why=f"the agents of {', '.join(sorted(alive))} are running",
            fix=f"watch it: shoal attach {shown}",
        )
    raise UsageError(
        f"nothing of {run.path} can come back on this machine",
        why="only a machine whose agent was killed while the others went on; after its end a run is resumed",
        fix=run.rejoin_advice() or f"shoal train --resume {shown}",
    )


def _last_members(run: RunFolder, nodes: Sequence[str]) -> set[str]:
    """Return the machines that the last generations of these nodes had."""
    members: set[str] = set()
    for node in nodes:
        generations = [event for event in read_events(run.journal(node)) if event["event"] == "generation"]
        members |= set(generations[-1]["members"]) if generations else {node}
    return members


def _may_run(run: RunFolder, node: str) -> bool:
    """Return whether the agent of a node may run although no process of this machine carries its mark.

    Nodes of a lab and machines with a common file system share the run folder, but not their process lists.
    """
    try:
        address = read_orders(run, node)[0].address
    except RunFailed:
        return True
    if not can_listen(address):
        return True
    ports = [event["port"] for event in read_events(run.journal(node)) if event["event"] == "ready"]
    try:
        with socket.create_connection((address, ports[-1] if ports else 0), _CONNECT_S):
            return True
    except OSError:
        return False


def _await_event(tail: EventTail, agent: PipeLink, kinds: Collection[str]) -> Event | None:
    """Return the agent's next event of these kinds; None if it has not happened in time, and still may."""
    deadline = time.monotonic() + _LET_IN_WITHIN_S
    while time.monotonic() < deadline:
        how = agent.ended()
        for event in tail.poll():
            if event["event"] in kinds:
                return event
        if how is not None:
            raise RunFailed("the agent could not be started again", why=how)
        time.sleep(_POLL_S)
    return None
