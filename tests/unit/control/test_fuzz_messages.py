"""Fuzz every reader of network messages: only shoal's own errors may be raised, in bounded time."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import strategies as st

from shoal.agent.kv_store import KvStore
from shoal.cluster.transfer import FileReceiver
from shoal.control.channel import Channel, accept, unseal
from shoal.control.handshake import Hello, describe_cpu_difference, find_mismatch, make_hello
from shoal.control.invitation import Invitation, make_code, parse_invitation
from shoal.control.membership.messages import Heartbeat, Promise, decode, encode
from shoal.control.membership.types import Ballot, State
from shoal.control.orders import (
    GoOrder,
    MeetOrder,
    RosterEntry,
    StartProcess,
    read_go,
    read_meet,
    read_request_line,
    to_line,
)
from shoal.control.rank_messages import LeaveGeneration, RankReady, read_to_agent, read_to_rank
from shoal.errors import ShoalError
from tests.support.fuzzing import JSON, MANY, NOISE, ODD_TEXTS, QUICK, TEXT, Reader, around, bent, torn

TOKEN = "t" * 64
ME = make_hello(0, "node1", "m", "c", "d")
MEET = MeetOrder("/run", "node1", 0, "127.0.0.1", "lo", TOKEN, "this", 1.0, "c", "d")
GO = GoOrder((RosterEntry("node1", "127.0.0.1", 9, "m"),), (StartProcess("rank-0", (0,), ("true",), {"A": "b"}),))
BEAT = Heartbeat(
    generation=Ballot(7, 2), lineage=Ballot(1, 0), committed=5, reachable=(1, 2), can_vote=True, has_state=True
)
PROMISE = Promise(generation=Ballot(1, 0), ballot=Ballot(2, 1), state=State(step=3), ranks=(0,), reachable=(0,))
REQUEST = {"op": "swap", "key": "k", "expected": "", "value": "dmFsdWU=", "wait_s": 0.0}
INVITATION = str(Invitation("192.168.1.5", 41234, make_code()))


class Pipe:
    """A writer whose other end reads everything."""

    def write(self, _: bytes) -> None:
        pass

    def get_extra_info(self, _: str) -> Any:
        return self

    def setsockopt(self, *_: Any) -> None:
        pass

    async def drain(self) -> None:
        pass


def stream(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


def accept_noise(data: bytes, _: Path) -> None:
    async def run() -> Channel:
        return await accept(stream(data), cast(asyncio.StreamWriter, Pipe()), TOKEN)

    asyncio.run(run())
    raise AssertionError("noise was accepted as a handshake")


def receive(data: bytes, _: Path) -> None:
    async def run() -> None:
        channel = Channel(stream(data), cast(asyncio.StreamWriter, Pipe()), b"k" * 32, b"l" * 32)
        await channel.receive()

    asyncio.run(run())
    raise AssertionError("noise was taken for a message")


def meet_hello(document: Any, _: Path) -> None:
    hello = Hello.from_dict(document)
    find_mismatch(ME, hello)
    describe_cpu_difference(ME, hello)
    assert type(hello.member) is int


def ask_store(request: Any, _: Path) -> None:
    async def ask() -> None:
        store = KvStore()
        for _ in range(2):
            json.dumps(await asyncio.wait_for(store.answer(request), 3))

    asyncio.run(ask())


def receive_files(pieces: Sequence[tuple[str, int, bytes]], folder: Path) -> None:
    """Check that no file name and no symlink makes the receiver write outside the run folder."""
    run, outside = folder / "run", folder / "outside"
    (run / "logs").mkdir(parents=True, exist_ok=True)
    outside.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (run / "logs" / "attic").symlink_to(outside)
    with contextlib.suppress(FileExistsError):
        (run / "commits.jsonl").symlink_to(outside / "elsewhere")
    receiver = FileReceiver(run, "attic", (0,), keeps=True)
    try:
        for name, offset, piece in pieces:
            receiver.write(name, offset, piece)
    finally:
        assert list(outside.iterdir()) == []
        assert {path.name for path in folder.iterdir()} <= {"run", "outside"}


NAMES = st.sampled_from(
    [
        "agents/attic.jsonl",
        "events/rank-0.jsonl",
        "logs/attic/rank-0.log",
        "logs/attic/..",
        "commits.jsonl",
        "checkpoints/step-00000001/../../../x",
        "checkpoints/step-00000001/..",
        "checkpoints/step-00000001/model.safetensors",
        "events/rank-0.jsonl\n",
        "../outside/x",
        "token",
        "config.toml",
        "/etc/x",
    ]
)

READERS = {
    "handshake": Reader(
        NOISE
        | around({"nonce": "1" * 32, "proof": "2" * 64}).map(lambda text: len(text).to_bytes(4, "big") + text)
        | torn(b'\0\0\0\x10{"nonce": "1"}   '),
        accept_noise,
        (EOFError,),
    ),
    "message": Reader(NOISE | torn(b"\0\0\0\x02" + b"t" * 16 + b"{}"), receive, (EOFError,)),
    "hello": Reader(bent(asdict(ME)) | JSON, meet_hello),
    "beat": Reader(bent(encode(BEAT)) | st.dictionaries(st.text(), JSON), lambda document, _: decode(document)),
    "promise": Reader(bent(encode(PROMISE)), lambda document, _: decode(document)),
    "to rank": Reader(
        around(LeaveGeneration(generation=Ballot(1, 0), after_step=True).model_dump(mode="json")),
        lambda payload, _: read_to_rank(payload),
    ),
    "to agent": Reader(
        around(RankReady(committed=1).model_dump(mode="json")), lambda payload, _: read_to_agent(payload)
    ),
    "store": Reader(bent(REQUEST) | st.dictionaries(st.text(), JSON), ask_store),
    "meet": Reader(around(json.loads(to_line(MEET))), lambda line, _: read_meet(line)),
    "go": Reader(around(json.loads(to_line(GO))), lambda line, _: read_go(line)),
    "request": Reader(around({"request": "stop"}), lambda line, _: read_request_line(line)),
    "invitation": Reader(
        TEXT | torn(INVITATION.encode()).map(lambda text: text.decode(errors="replace")),
        lambda text, _: parse_invitation(text),
    ),
    "sealed": Reader(TEXT | JSON, lambda sealed, _: unseal(sealed, "code")),
    "files": Reader(
        st.lists(
            st.tuples(NAMES | TEXT | ODD_TEXTS, st.integers(-5, 100) | st.just(2**70), st.binary(max_size=5)),
            max_size=4,
        ),
        receive_files,
    ),
}

# Inputs that once were accepted, or raised an error that is not shoal's.
SEEN: list[tuple[str, Any]] = [
    ("meet", b"null"),
    ("meet", b"{}"),
    ("go", b'{"GoOrder": {"roster": [], "starts": [null]}}'),
    ("go", b"9" * 5000),
    ("request", b"0"),
    ("request", b"[" * 100_000),
    ("sealed", None),
    ("sealed", "0"),
    ("files", [("agents/attic.jsonl", -1, b"")]),
    ("files", [("agents/attic.jsonl", 2**70, b"")]),
    ("files", [("checkpoints/step-00000001/model", 0, b""), ("checkpoints/step-00000001/..", 0, b"")]),
    ("files", [("logs/attic/" + "é" * 200, 0, b"")]),
    ("files", [("events/rank-" + "1" * 300 + ".jsonl", 0, b"")]),
    ("hello", {**asdict(ME), "member": "0"}),
    ("hello", {**asdict(ME), "avx2": "yes"}),
    ("hello", None),
]


@pytest.mark.parametrize("name", READERS)
def test_readers_survive_a_little_noise(name: str, tmp_path: Path) -> None:
    READERS[name].try_out(QUICK, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", READERS)
def test_readers_survive_much_noise(name: str, tmp_path: Path) -> None:
    READERS[name].try_out(MANY, tmp_path)


@pytest.mark.parametrize(("name", "value"), SEEN)
def test_readers_survive_inputs_that_failed_before(name: str, value: Any, tmp_path: Path) -> None:
    READERS[name].holds(value, tmp_path)


def test_valid_messages_are_read() -> None:
    """Otherwise the fuzz tests above would prove nothing."""
    assert Hello.from_dict(json.loads(json.dumps(asdict(ME)))) == ME
    assert decode(json.loads(json.dumps(encode(BEAT)))) == BEAT
    assert read_meet(to_line(MEET)) == MEET
    assert read_go(to_line(GO)) == GO
    assert parse_invitation(INVITATION).port == 41234
    with pytest.raises(ShoalError):
        Hello.from_dict({**asdict(ME), "member": True})
