"""Attacks on joining: by a malicious host, by a malicious joining machine, and by another user of that machine.

Exercises runs.invite, runs.join.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

from shoal.cli.host import read_code_file
from shoal.cluster.join import JoinedLink, JoinServer
from shoal.cluster.node import RunFiles
from shoal.cluster.transfer import PIECE_BYTES, FileSender
from shoal.config.load import build_config, merge, parse_set
from shoal.control.processes import find_processes
from shoal.data.prepare import create_run
from shoal.data.tokens import open_tokens, write_tokens
from shoal.errors import ControlError, UsageError
from shoal.run_folder import RunFolder
from shoal.runs.manage import end_processes
from shoal.runs.supervisor import training_files
from tests.support.join_attacks import CODE, Change, MaliciousGuest, MaliciousHost, joining, make_training
from tests.support.programs import TINY, set_flags, shoal, shoal_command
from tests.support.waiting import wait_until

KEY = b"PRIVATE KEY of the machine that joins"
BIG = 2**62


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_training(tmp_path_factory.mktemp("hosted") / "run")


class Machine:
    """Hold the folders of the joining machine: a home with a key, and the run folder that shoal may write to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.out = folder / "deep" / "out"
        (self.home / ".ssh").mkdir(parents=True)
        (self.home / ".ssh" / "id_ed25519").write_bytes(KEY)

    def outside(self) -> set[str]:
        """Return all paths except those in the run folder and in the cache."""
        names = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}
        return {name for name in names if not name.startswith(("deep", "home/cache"))}


def relative_path(path: Path, start: Path) -> str:
    return os.path.relpath(path, start)


def set_to(*path: str, value: object) -> Change:
    """Return a function that changes one field of a message, at any depth."""

    def change(message: dict[str, Any]) -> None:
        target: Any = message
        for name in path[:-1]:
            target = target[int(name) if isinstance(target, list) else name]
        target[int(path[-1]) if isinstance(target, list) else path[-1]] = value

    return change


def attack(machine: Machine, host: MaliciousHost) -> subprocess.CompletedProcess[str]:
    """Let the machine join, and check that it writes nothing outside and that the host gets no key."""
    before = machine.outside()
    with joining(f"127.0.0.1:{host.port}", machine.home, machine.out) as process:
        try:
            out, err = process.communicate(timeout=60)
        finally:
            end_processes([running for running in find_processes() if running.run.is_relative_to(machine.folder)])
    assert machine.outside() == before, "something was written outside the run folder"
    assert not host.heard(KEY), "the host got the key"
    assert "Traceback" not in err
    return subprocess.CompletedProcess([], process.returncode, out, err)


def test_a_host_does_not_get_a_key_through_a_node_name(tmp_path: Path, training: RunFolder) -> None:
    """In version 0.1 a host could get a private key: the name became `logs/NAME/`, which is sent to the host."""
    machine = Machine(tmp_path)
    name = relative_path(machine.home / ".ssh", machine.out / "logs")
    with MaliciousHost(training, {"welcome": set_to("node", value=name)}) as host:
        done = attack(machine, host)
    assert done.returncode == 3, done.stderr
    assert "error: the host sent what this machine does not accept" in done.stderr
    assert "cannot be used as a file name" in done.stderr
    assert host.kinds() == ["facts", "failed"]
    assert not machine.out.exists()


WELCOMES: list[tuple[str, tuple[str, ...], object]] = [
    *((f"node {value!r:.20}", ("node",), value) for value in ("..", "/root", "a/b", "", ".x", "-x", "x" * 300, "a\nb")),
    ("node number", ("node",), 7),
    ("text elsewhere", ("files",), {"../../x": 3}),
    ("size negative", ("files",), {"0" * 64 + "-train": -1}),
    ("size huge", ("files",), {"0" * 64 + "-train": BIG}),
    ("size of another type", ("files",), {"0" * 64 + "-train": "3"}),
    ("many texts", ("files",), {f"{number:064x}-train": 3 for number in range(3)}),
    ("one file", ("files",), {"0" * 64 + "-train": 3}),
    ("two digests", ("files",), {"0" * 64 + "-train": 3, "1" * 64 + "-val": 3}),
    ("no room", ("files",), {"0" * 64 + "-train": 1 << 40, "0" * 64 + "-val": 3}),
    ("configuration", ("texts", "config.toml"), "[run]\npreset = 'x'\n"),
    ("configuration no TOML", ("texts", "config.toml"), "[" * 5000),
    ("data elsewhere", ("texts", "data.json"), json.dumps(dict.fromkeys(("train", "val", "digest", "source"), "/x"))),
    ("tokenizer", ("texts", "tokenizer.json"), "[" * 200_000),
    ("late no flag", ("late",), "yes"),
]  # fmt: skip


# One case of each kind for the long tests; the others run with the exhaustive ones.
LONG_CASES = {
    "node '..'",
    "text elsewhere",
    "size huge",
    "data elsewhere",
    "member huge",
    "roster elsewhere",
    "piece too long",
    "piece of another file",
}


def make_case(name: str, *values: object) -> ParameterSet:
    return pytest.param(*values, id=name, marks=pytest.mark.long if name in LONG_CASES else pytest.mark.exhaustive)


@pytest.mark.parametrize(("path", "value"), [make_case(*case) for case in WELCOMES])
def test_a_false_welcome_is_refused(path: tuple[str, ...], value: object, tmp_path: Path, training: RunFolder) -> None:
    machine = Machine(tmp_path)
    with MaliciousHost(training, {"welcome": set_to(*path, value=value)}) as host:
        done = attack(machine, host)
    assert done.returncode in (2, 3), done.stderr
    assert done.stderr.startswith("error: ")
    assert host.kinds()[-1] == "failed", "the host receives the failure"
    assert not machine.out.exists()
    assert not list(machine.home.rglob("*.part"))


ORDERS: list[tuple[str, str, tuple[str, ...], object]] = [
    ("piece too long", "piece", ("data",), "AAAA" * 400_000),
    ("piece of nothing", "piece", ("data",), ""),
    ("piece no base64", "piece", ("data",), "é"),
    ("piece of another file", "piece", ("path",), "../x"),
    ("piece with a gap", "piece", ("offset",), 7),
    ("member negative", "meet", ("member",), -1),
    ("member huge", "meet", ("member",), BIG),
    ("launch", "meet", ("launch",), "../x"),
    ("time", "meet", ("launched_at",), "now"),
    ("token", "meet", ("sealed",), "00"),
    ("roster elsewhere", "roster", ("roster", "0", "node"), "../../x"),
    ("roster rank", "roster", ("roster", "0", "ranks"), [-1]),
    ("roster port", "roster", ("roster", "0", "port"), 2**16),
    ("roster empty", "roster", ("roster",), []),
    ("members", "roster", ("members",), {"settings": {}, "restarts": BIG}),
]


@pytest.mark.parametrize(("kind", "path", "value"), [make_case(*case) for case in ORDERS])
def test_false_pieces_and_orders_are_refused(
    kind: str, path: tuple[str, ...], value: object, tmp_path: Path, training: RunFolder
) -> None:
    machine = Machine(tmp_path)
    with MaliciousHost(training, {kind: set_to(*path, value=value)}) as host:
        done = attack(machine, host)
    assert done.returncode == 3, done.stderr
    assert "error: the host" in done.stderr
    assert not list(machine.home.rglob("*.part"))
    if kind != "piece":
        assert "prepared" in host.kinds()


@pytest.mark.long
def test_a_host_does_not_start_more_ranks_than_one(tmp_path: Path, training: RunFolder) -> None:
    def many(message: dict[str, Any]) -> None:
        message["roster"] += [message["roster"][1]] * 50

    machine = Machine(tmp_path)
    with MaliciousHost(training, {"roster": many}) as host:
        done = attack(machine, host)
    assert done.returncode == 3
    assert "does not name this one exactly once" in done.stderr
    assert not (machine.out / "events").exists() or not list((machine.out / "events").iterdir())


@pytest.mark.long
def test_a_late_joining_machine_refuses_the_member_id_of_another(tmp_path: Path, training: RunFolder) -> None:
    machine = Machine(tmp_path)
    with MaliciousHost(training, {"meet": set_to("member", value=0)}, late=True) as host:
        done = attack(machine, host)
    assert done.returncode == 3
    assert "the place of another machine" in done.stderr


@pytest.mark.long
def test_paths_in_a_hosts_configuration_are_ignored(tmp_path: Path, training: RunFolder) -> None:
    """Neither as a cache to write to, nor as a text to read at a resume on this machine."""
    machine, evil = Machine(tmp_path), tmp_path / "evil"
    text = training.config.read_text().replace(
        "[data]\n", f'[data]\npath = "{machine.home}/.ssh/id_ed25519"\ncache_dir = "{evil}"\n'
    )
    changes = {"welcome": set_to("texts", "config.toml", value=text), "roster": set_to("roster", value=[])}
    with MaliciousHost(training, changes) as host:
        done = attack(machine, host)
    assert "prepared" in host.kinds(), done.stderr
    kept = (machine.out / "config.toml").read_text()
    assert "id_ed25519" not in kept
    assert "evil" not in kept
    assert not evil.exists()


class Cache:
    """Hold the cached texts of earlier runs on the joining machine: here that of `training`."""

    def __init__(self, machine: Machine, training: RunFolder) -> None:
        self.folder = machine.home / "cache" / "shoal" / "joined"
        self.folder.mkdir(parents=True)
        for name, path in training_files(training).files.items():
            shutil.copy(path, self.folder / name)

    def content(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.folder.iterdir()}

    def place(self, part: str) -> Path:
        return next(self.folder.glob(f"*-{part}"))


NOT_NAMED = "the text that the host sent is not the one that it names"


def make_other_text(folder: Path, training: RunFolder) -> RunFiles:
    """Make a valid text of another size, under the file names of the one in `training`."""
    config = build_config(flags=merge(map(parse_set, (*TINY, "data.sentences=900", "data.seed=9"))))
    files = training_files(create_run(config, folder, 2)).files
    by_part = {name.rpartition("-")[2]: path for name, path in files.items()}
    true = training_files(training)
    return RunFiles(files={name: by_part[name.rpartition("-")[2]] for name in true.files}, texts=true.texts)


def end_before(part: int) -> Change:
    """Return a change that closes the connection when the host should send this piece."""
    count = 0

    def change(_: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        if count == part:
            raise EOFError

    return change


@pytest.mark.long
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_host_does_not_replace_the_text_of_another_run(pieces: int, tmp_path: Path, training: RunFolder) -> None:
    """The host names a text that this machine has. With the tokenizer of another text that one seems to be missing, and
    the host sends other bytes. It closes the connection after one file, or sends both."""
    machine = Machine(tmp_path)
    cache = Cache(machine, training)
    before = cache.content()
    changes: dict[str, Change] = {"piece": end_before(2)} if pieces == 1 else {}
    changes["welcome"] = set_to("texts", "tokenizer.json", value='{"kind": "byte"}')
    with MaliciousHost(training, changes) as host:
        host.cargo = make_other_text(tmp_path / "other", training)
        sizes = {name: path.stat().st_size for name, path in host.cargo.files.items()}
        assert sizes != {name: len(content) for name, content in before.items()}
        done = attack(machine, host)
    assert done.returncode == 3, done.stderr
    assert ("the host closed the connection" if pieces == 1 else NOT_NAMED) in done.stderr
    assert cache.content() == before
    assert not machine.out.exists()


@pytest.mark.long
def test_a_cached_text_is_identified_by_its_content_and_not_by_the_size_from_the_host(
    tmp_path: Path, training: RunFolder
) -> None:
    """With the right tokenizer and another size no text is requested, so that none can be replaced."""
    machine = Machine(tmp_path)
    cache = Cache(machine, training)
    before = cache.content()
    with MaliciousHost(training, {"roster": set_to("roster", value=[])}) as host:
        host.cargo = make_other_text(tmp_path / "other", training)
        attack(machine, host)
    assert next(message for message in host.received if message.get("type") == "need")["need"] == []
    assert "prepared" in host.kinds()
    assert cache.content() == before


@pytest.mark.long
def test_a_host_does_not_remove_the_text_of_another_run(tmp_path: Path, training: RunFolder) -> None:
    """The host sends the right names and sizes, and the tokenizer of another text."""
    machine = Machine(tmp_path)
    cache = Cache(machine, training)
    before = cache.content()
    other = set_to("texts", "tokenizer.json", value='{"kind": "byte"}')
    with MaliciousHost(training, {"welcome": other}) as host:
        done = attack(machine, host)
    assert done.returncode == 3, done.stderr
    assert NOT_NAMED in done.stderr
    assert cache.content() == before


@pytest.mark.long
@pytest.mark.parametrize("part", ["train", "val"])
def test_a_damaged_text_in_the_cache_is_fetched_again(part: str, tmp_path: Path, training: RunFolder) -> None:
    """The damaged text has the right size."""
    machine = Machine(tmp_path)
    cache = Cache(machine, training)
    before = cache.content()
    content = cache.place(part).read_bytes()
    cache.place(part).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with MaliciousHost(training, {"roster": set_to("roster", value=[])}) as host:
        done = attack(machine, host)
    assert "prepared" in host.kinds(), done.stderr
    assert cache.place(part).name in next(m for m in host.received if m.get("type") == "need")["need"]
    assert cache.content() == before


@pytest.mark.long
def test_a_text_with_a_false_header_is_refused(tmp_path: Path, training: RunFolder) -> None:
    """The digest covers the payload: with another type in the header it is another text under the same name."""
    machine, true = Machine(tmp_path), training_files(training)
    name, path = next((name, path) for name, path in true.files.items() if name.endswith("-train"))
    text, forged = open_tokens(path), tmp_path / "forged"
    about = text.header
    header = write_tokens(forged, text.tokens.view("<u4"), vocab_size=about.vocab_size, tokenizer=about.tokenizer)
    assert (header.sha256, header.dtype) == (about.sha256, "<u4")
    with MaliciousHost(training, {}) as host:
        host.cargo = RunFiles(files={**true.files, name: forged}, texts=true.texts)
        done = attack(machine, host)
    assert done.returncode == 3, done.stderr
    assert "does not match the tokenizer" in done.stderr
    assert not list((machine.home / "cache").rglob("*-train"))


@pytest.mark.long
def test_a_text_that_does_not_match_its_name_is_not_left_in_the_cache(tmp_path: Path, training: RunFolder) -> None:
    """The next run with this text would use the wrong one."""

    def rename(message: dict[str, Any]) -> None:
        message["files"] = {"0" * 64 + name[64:]: size for name, size in message["files"].items()}
        facts = json.loads(message["texts"]["data.json"])
        named = {"train": "0" * 64 + "-train", "val": "0" * 64 + "-val", "digest": "0" * 64}
        message["texts"]["data.json"] = json.dumps({**facts, **named})

    machine = Machine(tmp_path)
    with MaliciousHost(training, {"welcome": rename}) as host:
        host.cargo = RunFiles(
            files={"0" * 64 + name[64:]: path for name, path in training_files(training).files.items()},
            texts=lambda places: training_files(training).texts(
                {name: name for name in training_files(training).files}
            ),
        )
        done = attack(machine, host)
    assert done.returncode == 3
    assert NOT_NAMED in done.stderr
    assert not list((machine.home / "cache").rglob("0000*"))


@pytest.mark.long
@pytest.mark.parametrize("field", ["digest", "train"])
def test_facts_about_another_text_than_the_one_sent_are_refused(
    field: str, tmp_path: Path, training: RunFolder
) -> None:
    def falsify(message: dict[str, Any]) -> None:
        facts = json.loads(message["texts"]["data.json"])
        message["texts"]["data.json"] = json.dumps({**facts, field: facts["val"] if field == "train" else "0" * 64})

    machine = Machine(tmp_path)
    with MaliciousHost(training, {"welcome": falsify}) as host:
        done = attack(machine, host)
    assert done.returncode == 3, done.stderr
    assert "data.json is about another text" in done.stderr
    assert not machine.out.exists()


@pytest.mark.long
def test_an_interrupted_join_leaves_no_part_file_and_removes_abandoned_ones(
    tmp_path: Path, training: RunFolder
) -> None:
    machine = Machine(tmp_path)
    folder = machine.home / "cache" / "shoal" / "joined"
    folder.mkdir(parents=True)
    (folder / "x.99999999.part").write_bytes(b"left by a process that was killed")

    def stall(message: dict[str, Any]) -> None:
        """Make both pieces parts of the first file, which then never comes to its end."""
        train = message["path"].replace("-val", "-train")
        message.update(path=train, offset=0 if train == message["path"] else 300, data=message["data"][:400])

    with (
        MaliciousHost(training, {"piece": stall}) as host,
        joining(f"127.0.0.1:{host.port}", machine.home, machine.out) as process,
    ):
        wait_until(lambda: list(folder.glob("*-train.*.part")), 60)
        assert not (folder / "x.99999999.part").exists()
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert not list(folder.glob("*.part"))
    assert not machine.out.exists()


# A malicious joining machine


class RunningServer:
    """Run a real `JoinServer` on loopback; keep its notes and the codes that it showed."""

    def __init__(self, run: RunFolder, **options: Any) -> None:
        self.notes: list[str] = []
        self.join_server = JoinServer("127.0.0.1", 0, training_files(run), self.notes.append, **options)

    def codes(self) -> list[str]:
        return [note.split()[-1] for note in self.notes if "works once" in note]

    async def place(self, count: int = 1) -> tuple[int, str]:
        """Return the port and the newest code, once so many codes have been shown."""
        while len(self.codes()) < count:
            await asyncio.sleep(0.01)
        port = next(int(note.rpartition(":")[2]) for note in self.notes if "shoal join" in note)
        return port, self.codes()[-1].replace("-", "")

    async def receive(self) -> JoinedLink:
        return await asyncio.wait_for(self.join_server.receive_one(lambda: {"host"}, lambda: None), 30)


async def join_attacker(server: RunningServer, **facts: Any) -> tuple[JoinedLink, MaliciousGuest]:
    receiving = asyncio.ensure_future(server.receive())
    attacker = await MaliciousGuest.dial(*await server.place(), **facts)
    await attacker.settle()
    return await receiving, attacker


def send_pieces(run: Path, training: RunFolder, pieces: list[tuple[object, object, bytes | str]]) -> RunningServer:
    """Send pieces from a machine that has rank 1, between two valid ones."""
    server = RunningServer(training)

    async def run_attack() -> None:
        guest, attacker = await join_attacker(server)
        guest.listen(run, [1], server.notes.append)
        await attacker.send_piece("events/rank-1.jsonl", 0, b"first\n")
        for piece in pieces:
            await attacker.send_piece(*piece)
        await attacker.send_piece("events/rank-1.jsonl", 6, b"last\n")
        await attacker.channel.send({"type": "end"})
        while guest.ended() is None:
            await asyncio.sleep(0.01)
        assert guest.ended() == "its agent ended", "a refused piece ended the connection"
        attacker.channel.close()
        guest.channel.close()

    asyncio.run(run_attack())
    return server


REFUSED_PIECES: list[tuple[object, object, bytes | str]] = [
    ("events/rank-0.jsonl", 0, b"x"),
    ("events/rank-11.jsonl", 0, b"x"),
    ("agents/host.jsonl", 0, b"x"),
    ("agents/den.orders", 0, b"x"),
    ("logs/host/rank-0.log", 0, b"x"),
    ("logs/den/rank-0.log", 0, b"x"),
    ("logs/den/../../token", 0, b"x"),
    ("logs/den/many.log", 0, b"x"),
    ("config.toml", 0, b"x"),
    ("commits.jsonl", 0, b"x"),
    ("checkpoints/step-00000001/model.safetensors", 0, b"x"),
    ("/etc/shoal-was-here", 0, b"x"),
    ("events/rank-1.jsonl", -1, b"x"),
    ("events/rank-1.jsonl", 7, b"x"),
    ("events/rank-1.jsonl", 1 << 30, b"x"),
    ("events/rank-1.jsonl", BIG * 8, b"x"),
    ("events/rank-1.jsonl", "0", b"x"),
    ("events/rank-1.jsonl", True, b"x"),
    ("events/rank-1.jsonl", 0, b"x" * (PIECE_BYTES + 1)),
    ("events/rank-1.jsonl", 0, "no base64"),
    (7, 0, b"x"),
    ("x" * 10_000, 0, b"x"),
]


@pytest.mark.parametrize("piece", REFUSED_PIECES, ids=lambda piece: f"{piece[0]!s:.30} {piece[1]!s:.8} {len(piece[2])}")
def test_a_joining_machine_can_write_only_the_files_of_its_own_ranks(
    piece: tuple[object, object, bytes | str], tmp_path: Path, training: RunFolder
) -> None:
    """Other pieces are refused and noted once, and later valid ones are still written."""
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    (run / "token").write_text("secret")
    server = send_pieces(run, training, [piece, piece])
    assert {str(path.relative_to(run)) for path in run.rglob("*")} == {"events", "events/rank-1.jsonl", "token"}
    assert (run / "events/rank-1.jsonl").read_text() == "first\nlast\n"
    assert (run / "token").read_text() == "secret"
    assert sum(note.startswith("refused: den") for note in server.notes) == 1, server.notes
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.parametrize("link", ["logs", "logs/den", "logs/den/rank-1.log", "agents/den.log"])
def test_no_piece_of_a_joining_machine_is_written_through_a_link(
    link: str, tmp_path: Path, training: RunFolder
) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / link).parent.mkdir(parents=True)
    outside.mkdir()
    (outside / "rank-1.log").write_text("before")
    (run / link).symlink_to(outside / "rank-1.log" if "." in link else outside)
    server = send_pieces(run, training, [("logs/den/rank-1.log", 0, b"x"), ("agents/den.log", 0, b"x")])
    assert [path.name for path in outside.iterdir()] == ["rank-1.log"]
    assert (outside / "rank-1.log").read_text() == "before"
    assert sum("something else lies at its place" in note for note in server.notes) == 1, server.notes


def test_links_are_not_sent_to_the_host(tmp_path: Path) -> None:
    """Neither files nor folders: through a link in the run folder the host could get any file of the machine."""
    run, secret = RunFolder(tmp_path / "run"), tmp_path / "secret"
    secret.mkdir()
    (secret / "rank-1.log").write_bytes(KEY)
    for folder in ("agents", "events", "logs/den", "checkpoints/step-00000001"):
        (run.path / folder).mkdir(parents=True)
    run.journal("den").write_text("true\n")
    run.agent_log("den").symlink_to(secret / "rank-1.log")
    run.events(1).symlink_to(secret / "rank-1.log")
    (run.logs("den") / "rank-1.log").symlink_to(secret / "rank-1.log")
    (run.logs("den") / "rank-1.times").write_text("1 2\n")
    os.mkfifo(run.logs("den") / "spawn.log")
    run.commits.symlink_to(secret / "rank-1.log")
    (run.checkpoints / "step-00000002").symlink_to(secret)
    sent: dict[str, bytes] = {}
    sender = FileSender(run, "den", {1}, {}, True, lambda name, offset, piece: sent.update({name: piece}))
    sender.reset()
    sender.add_newest_checkpoint()
    sender.send_new()
    assert sent == {"agents/den.jsonl": b"true\n", "logs/den/rank-1.times": b"1 2\n"}
    (run.path / "logs/den").rename(run.path / "logs/other")
    (run.path / "logs/den").symlink_to(secret)
    sender.send_new()
    assert KEY not in sent.values()


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        ({"address": "10.0.0.1; rm -rf /"}, "its address is"),
        ({"address": BIG}, "its address is"),
        ({"address": None}, "its address is"),
        ({"hello": None}, "a hello that is none"),
        ({"hello": {}}, "a hello without"),
    ],
)
def test_a_joining_machine_with_invalid_facts_is_refused(facts: dict[str, Any], seen: str, training: RunFolder) -> None:
    server = RunningServer(training)

    async def run_attack() -> None:
        receiving = asyncio.ensure_future(server.receive())
        attacker = await MaliciousGuest.dial(*await server.place(), **facts)
        with pytest.raises(EOFError):
            await attacker.channel.receive()
        attacker.channel.close()
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiving

    asyncio.run(run_attack())
    assert any(note.startswith("refused 127.0.0.1") and seen in note for note in server.notes), server.notes


def test_unverified_claims_of_a_joining_machine_are_marked_as_claims(training: RunFolder) -> None:
    server = RunningServer(training)

    async def run_attack() -> str:
        user = "root\x1b[2J\n' (10.0.0.1) has joined" + "x" * 500
        guest, attacker = await join_attacker(server, name="../../\x1b[31mden", user=user, address="10.9.9.9")
        attacker.channel.close()
        guest.channel.close()
        return str(guest)

    shown = asyncio.run(run_attack())
    assert shown.isprintable()
    assert shown.startswith("31mden (10.9.9.9, connected from 127.0.0.1; it says its user is "), shown
    assert len(shown) < 150


def test_the_owner_confirms_each_joining_machine(training: RunFolder) -> None:
    """The question comes before any file is sent. After a no the code is invalid: it may be stolen."""
    asked: list[str] = []

    async def confirm(question: str) -> bool:
        asked.append(question)
        return len(asked) > 1

    server = RunningServer(training, confirm=confirm)

    async def run_attack() -> None:
        receiving = asyncio.ensure_future(server.receive())
        port, code = await server.place()
        thief = await MaliciousGuest.dial(port, code, user="mallory")
        assert (await thief.channel.receive())["type"] == "refused"
        _, newer = await server.place(2)
        assert newer != code
        with pytest.raises(ControlError):
            await MaliciousGuest.dial(port, code)
        owner = await MaliciousGuest.dial(port, newer)
        assert (await owner.settle())["type"] == "welcome"
        guest = await receiving
        for channel in (thief.channel, owner.channel, guest.channel):
            channel.close()

    asyncio.run(run_attack())
    assert "may den (127.0.0.1; it says its user is 'mallory') take part in this run?" in asked
    assert any("did not let den in" in note for note in server.notes)


# Another user of the joining machine

# Reads the secrets from its standard input, searches until that is closed, and prints the names of files with one.
SEARCH = """
import glob, os, select, sys
user = int(sys.argv[1])
if user:
    # Only after the interpreter has started: its file may be readable by root alone.
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
secrets, names, rounds = sys.stdin.readline().encode().split(), set(), 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for name in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(name, "rb") as file:
                text = file.read()
        except OSError:
            continue
        if any(secret in text for secret in secrets):
            names.add(os.path.basename(name))
    rounds += 1
print(",".join(sorted(names)) or "nothing", rounds)
"""


class CodeSearch:
    """Search /proc for the code, as an unprivileged user or as root."""

    def __init__(self, user: int) -> None:
        words: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-I", "-c", SEARCH, str(user)], **words
        )
        assert self._process.stdin is not None
        self._process.stdin.write(f"{CODE} {'-'.join(re.findall('....', CODE))}\n")
        self._process.stdin.flush()

    def result(self) -> str:
        out, _ = self._process.communicate(timeout=60)
        what, rounds = out.split()
        assert int(rounds) > 1, "/proc was searched at most once"
        return str(what)


@contextlib.contextmanager
def joining_with_code(way: str, port: int, machine: Machine) -> Iterator[subprocess.Popen[bytes]]:
    """Run a real `shoal join` that gets the code in one of the possible ways."""
    env = {**os.environ, "PYTHONWARNINGS": "", "HOME": str(machine.home), "XDG_CACHE_HOME": str(machine.home / "cache")}
    file, err = machine.folder / "code", machine.folder / "err"
    file.write_text(f"{CODE}\n")
    file.chmod(0o600)
    place = f"127.0.0.1:{port}" + (f"#{CODE}" if way == "argument" else "")
    words = shoal_command("join", place, "--out", machine.out, *(("--code-file", file) if way == "file" else ()))
    input_fd, stdin_fd = os.openpty() if way == "terminal" else os.pipe()[::-1]
    env |= {"SHOAL_JOIN_CODE": CODE} if way == "environment" else {}
    with err.open("wb") as errors:
        process = subprocess.Popen(words, env=env, stdin=stdin_fd, stderr=errors, start_new_session=True)
    os.close(stdin_fd)
    try:
        if way == "terminal":
            wait_until(lambda: b"code: " in err.read_bytes(), 60)
        if way in ("terminal", "stdin"):
            os.write(input_fd, f"{CODE}\n".encode())
        yield process
    finally:
        process.kill()
        process.wait(20)
        os.close(input_fd)
        end_processes([running for running in find_processes() if running.run.is_relative_to(machine.folder)])


@pytest.mark.long
@pytest.mark.parametrize("way", ["argument", "stdin", "environment", "file", "terminal"])
def test_another_user_cannot_find_the_code(way: str, tmp_path: Path, training: RunFolder) -> None:
    """During all of `shoal join`. As an argument the code is found, which proves that the search works."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    machine, other = Machine(tmp_path), CodeSearch(65534)
    with (
        MaliciousHost(training, {"roster": set_to("roster", value=[])}) as host,
        joining_with_code(way, host.port, machine) as process,
    ):
        wait_until(host.greeted.is_set, 60, why=lambda: (tmp_path / "err").read_text())
        assert process.wait(60) == 3
    assert other.result() == ("cmdline" if way == "argument" else "nothing")
    error_text = (tmp_path / "err").read_text()
    assert ("other users of this machine can read a code" in error_text) is (way == "argument")
    assert CODE not in error_text, "the code was shown on the terminal"


@pytest.mark.long
def test_no_process_of_the_run_inherits_the_code(tmp_path: Path, training: RunFolder) -> None:
    """Search as root from the time when the host has accepted the code until the agent has ended."""
    machine = Machine(tmp_path)
    with (
        MaliciousHost(training, {}, hold_s=1.0) as host,
        joining_with_code("environment", host.port, machine) as process,
    ):
        wait_until(host.greeted.is_set, 60)
        root = CodeSearch(0)
        agents = wait_until(lambda: [running for running in find_processes(machine.out) if running.part == "agent"], 60)
        variables = (
            Path(f"/proc/{agents[0].pid}/environ").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
        )
    assert root.result() == "nothing"
    assert b"SHOAL_JOIN_CODE" not in Path("/proc/self/environ").read_bytes()
    assert CODE.encode() not in variables


def test_a_code_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_text(CODE)
    for mode in (0o644, 0o640, 0o602):
        file.chmod(mode)
        with pytest.raises(UsageError, match="other users can read or change the code") as caught:
            read_code_file(file)
        assert f"mode is {mode:04o}" in caught.value.why
        assert f"or: shoal join ADDRESS:PORT < {file}" in caught.value.fix
    file.chmod(0o600)
    assert read_code_file(file) == CODE
    with pytest.raises(UsageError, match="cannot read the code"):
        read_code_file(tmp_path / "none")


def test_confirm_needs_a_terminal_and_machines_that_join(tmp_path: Path) -> None:
    for words in (("host", "--confirm"), ("train", "--on", "join:2", "--confirm")):
        done = shoal(*words, "--out", tmp_path / "run")
        assert done.returncode == 2
        assert "error: --confirm needs a terminal to ask at" in done.stderr
    done = shoal("train", "--on", "local:2", "--confirm", "--out", tmp_path / "run")
    assert "error: --confirm does not go with --on local:2" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_owner_is_asked_at_the_terminal_of_shoal_host(tmp_path: Path) -> None:
    """The question passes through the supervisor, which has no terminal. Answer no, then yes."""
    run = tmp_path / "run"
    terminal_fd, command_fd = os.openpty()
    words = ("host", "--address", "127.0.0.1", "--confirm", "--out", str(run), *set_flags(*TINY))
    shown = bytearray()

    def screen() -> str:
        while select.select([terminal_fd], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                shown.extend(os.read(terminal_fd, 4096))
        return shown.decode(errors="replace")

    def read(pattern: str) -> list[str]:
        return wait_until(lambda: re.findall(pattern, screen()), 90, why=screen)

    async def join_and_answer(port: str, code: str, answer: bytes, user: str) -> str:
        guest = await MaliciousGuest.dial(int(port), code.replace("-", ""), user=user)
        await asyncio.to_thread(read, rf"may den \(127.0.0.1; it says its user is '{user}'\) take part.*\[y/N\]")
        os.write(terminal_fd, answer)
        message = await asyncio.wait_for(guest.channel.receive(), 30)
        guest.channel.close()
        return str(message["type"])

    env = {**os.environ, "PYTHONWARNINGS": "", "COLUMNS": "200", "TERM": "dumb"}
    process = subprocess.Popen(
        shoal_command(*words), env=env, stdin=command_fd, stdout=command_fd, stderr=command_fd, start_new_session=True
    )
    os.close(command_fd)
    try:
        port = read(r"shoal join 127.0.0.1:(\d+)")[0]
        first = read(r"works once: (\S+)")[0]
        assert asyncio.run(join_and_answer(port, first, b"n\n", "mallory")) == "refused"
        wait_until(lambda: len(read(r"works once: (\S+)")) > 1, 60, why=screen)
        assert asyncio.run(join_and_answer(port, read(r"works once: (\S+)")[-1], b"y\n", "anna")) == "welcome"
        assert (run / "supervisor.jsonl").stat().st_mode & 0o777 == 0o600
    finally:
        process.send_signal(signal.SIGINT)
        end_processes(find_processes(run))
        process.kill()
        process.wait(20)
        os.close(terminal_fd)
