"""Attacks on joining: a host that lies to a machine, a machine that lies to its host, another user who looks."""

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
from shoal.cluster.agent_link import PIECE_BYTES
from shoal.cluster.hosts.messenger import FileSender
from shoal.cluster.join import JoinedLink, JoinServer
from shoal.cluster.node import RunFiles
from shoal.config.load import build_config, merge, parse_set
from shoal.control.processes import find_processes
from shoal.data.prepare import create_run
from shoal.data.sampling import open_tokens, write_tokens
from shoal.errors import ControlError, UsageError
from shoal.run_folder import RunFolder
from shoal.runs.manage import end_processes
from shoal.runs.supervisor import training_files
from tests.support.join_attacks import CODE, Change, LyingGuest, LyingHost, joining, make_training
from tests.support.programs import TINY, set_flags, shoal, shoal_command
from tests.support.runs import wait_until

KEY = b"PRIVATE KEY of the machine that joins"
BIG = 2**62


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_training(tmp_path_factory.mktemp("hosted") / "run")


class Machine:
    """The machine that joins: a home with a key in it, and what lies outside the places that shoal may write to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.out = folder / "deep" / "out"
        (self.home / ".ssh").mkdir(parents=True)
        (self.home / ".ssh" / "id_ed25519").write_bytes(KEY)

    def outside(self) -> set[str]:
        """Everything but the run folder and the cache."""
        found = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*")}
        return {name for name in found if not name.startswith(("deep", "home/cache"))}


def lead_to(path: Path, start: Path) -> str:
    return os.path.relpath(path, start)


def set_to(*path: str, value: object) -> Change:
    """Change one field of a message, however deep."""

    def change(message: dict[str, Any]) -> None:
        place: Any = message
        for name in path[:-1]:
            place = place[int(name) if isinstance(place, list) else name]
        place[int(path[-1]) if isinstance(place, list) else path[-1]] = value

    return change


def attack(machine: Machine, host: LyingHost) -> subprocess.CompletedProcess[str]:
    """Let the machine join, and see what the host got out of it."""
    before = machine.outside()
    with joining(f"127.0.0.1:{host.port}", machine.home, machine.out) as process:
        try:
            out, err = process.communicate(timeout=60)
        finally:
            end_processes([found for found in find_processes() if found.run.is_relative_to(machine.folder)])
    assert machine.outside() == before, "something was written outside the run folder"
    assert not host.heard(KEY), "the host got the key"
    assert "Traceback" not in err
    return subprocess.CompletedProcess([], process.returncode, out, err)


def test_a_host_does_not_reach_a_key_by_the_name_it_gives(tmp_path: Path, training: RunFolder) -> None:
    """The host of version 0.1 received a private key: the name became `logs/NAME/`, which is sent home."""
    machine = Machine(tmp_path)
    name = lead_to(machine.home / ".ssh", machine.out / "logs")
    with LyingHost(training, {"welcome": set_to("node", value=name)}) as host:
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


# These stand for the others, which are tried now and then.
OFTEN = {
    "node '..'",
    "text elsewhere",
    "size huge",
    "data elsewhere",
    "member huge",
    "roster elsewhere",
    "piece too long",
}


def marked(name: str, *values: object) -> ParameterSet:
    return pytest.param(*values, id=name, marks=pytest.mark.long if name in OFTEN else pytest.mark.exhaustive)


@pytest.mark.parametrize(("path", "value"), [marked(*each) for each in WELCOMES])
def test_a_welcome_that_lies_is_refused(
    path: tuple[str, ...], value: object, tmp_path: Path, training: RunFolder
) -> None:
    machine = Machine(tmp_path)
    with LyingHost(training, {"welcome": set_to(*path, value=value)}) as host:
        done = attack(machine, host)
    assert done.returncode in (2, 3), done.stderr
    assert done.stderr.startswith("error: ")
    assert host.kinds()[-1] == "failed", "the host is told"
    assert not machine.out.exists()
    assert not list(machine.home.rglob("*.part"))


PLACES: list[tuple[str, str, tuple[str, ...], object]] = [
    ("piece too long", "piece", ("data",), "AAAA" * 400_000),
    ("piece of nothing", "piece", ("data",), ""),
    ("piece no base64", "piece", ("data",), "é"),
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


@pytest.mark.parametrize(("kind", "path", "value"), [marked(*each) for each in PLACES])
def test_a_place_that_lies_is_refused(
    kind: str, path: tuple[str, ...], value: object, tmp_path: Path, training: RunFolder
) -> None:
    machine = Machine(tmp_path)
    with LyingHost(training, {kind: set_to(*path, value=value)}) as host:
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
    with LyingHost(training, {"roster": many}) as host:
        done = attack(machine, host)
    assert done.returncode == 3
    assert "does not name this one exactly once" in done.stderr
    assert not (machine.out / "events").exists() or not list((machine.out / "events").iterdir())


@pytest.mark.long
def test_a_late_guest_refuses_the_place_of_another(tmp_path: Path, training: RunFolder) -> None:
    machine = Machine(tmp_path)
    with LyingHost(training, {"meet": set_to("member", value=0)}, late=True) as host:
        done = attack(machine, host)
    assert done.returncode == 3
    assert "the place of another machine" in done.stderr


@pytest.mark.long
def test_paths_in_a_hosts_configuration_count_for_nothing(tmp_path: Path, training: RunFolder) -> None:
    """Neither as a cache to write to, nor as a text to read when the run is resumed here."""
    machine, evil = Machine(tmp_path), tmp_path / "evil"
    text = training.config.read_text().replace(
        "[data]\n", f'[data]\npath = "{machine.home}/.ssh/id_ed25519"\ncache_dir = "{evil}"\n'
    )
    changes = {"welcome": set_to("texts", "config.toml", value=text), "roster": set_to("roster", value=[])}
    with LyingHost(training, changes) as host:
        done = attack(machine, host)
    assert "prepared" in host.kinds(), done.stderr
    kept = (machine.out / "config.toml").read_text()
    assert "id_ed25519" not in kept
    assert "evil" not in kept
    assert not evil.exists()


class Cache:
    """The texts of earlier runs on the machine that joins: here that of `training`."""

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
    """A usable text of another size, under the names of the one in `training`."""
    config = build_config(flags=merge(map(parse_set, (*TINY, "data.sentences=900", "data.seed=9"))))
    files = training_files(create_run(config, folder, 2)).files
    by_part = {name.rpartition("-")[2]: path for name, path in files.items()}
    true = training_files(training)
    return RunFiles(files={name: by_part[name.rpartition("-")[2]] for name in true.files}, texts=true.texts)


def end_before(part: int) -> Change:
    """The host goes away when it should send this piece."""
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
    """It names the text that this machine trains on, gives the tokenizer of another one so that the text seems to be
    missing, and sends other bytes. Then it closes after one file, or ends properly after both."""
    machine = Machine(tmp_path)
    cache = Cache(machine, training)
    before = cache.content()
    changes: dict[str, Change] = {"piece": end_before(2)} if pieces == 1 else {}
    changes["welcome"] = set_to("texts", "tokenizer.json", value='{"kind": "byte"}')
    with LyingHost(training, changes) as host:
        host.cargo = make_other_text(tmp_path / "other", training)
        sizes = {name: path.stat().st_size for name, path in host.cargo.files.items()}
        assert sizes != {name: len(content) for name, content in before.items()}
        done = attack(machine, host)
    assert done.returncode == 3, done.stderr
    assert ("the host closed the connection" if pieces == 1 else NOT_NAMED) in done.stderr
    assert cache.content() == before
    assert not machine.out.exists()


@pytest.mark.long
def test_a_cached_text_is_known_by_its_content_and_not_by_the_size_that_a_host_gives(
    tmp_path: Path, training: RunFolder
) -> None:
    """The right tokenizer and another size: nothing is asked for, so that nothing can be put in its place."""
    machine = Machine(tmp_path)
    cache = Cache(machine, training)
    before = cache.content()
    with LyingHost(training, {"roster": set_to("roster", value=[])}) as host:
        host.cargo = make_other_text(tmp_path / "other", training)
        attack(machine, host)
    assert next(message for message in host.received if message.get("type") == "need")["need"] == []
    assert "prepared" in host.kinds()
    assert cache.content() == before


@pytest.mark.long
def test_a_host_does_not_remove_the_text_of_another_run(tmp_path: Path, training: RunFolder) -> None:
    """Right names and sizes, and the tokenizer of another text."""
    machine = Machine(tmp_path)
    cache = Cache(machine, training)
    before = cache.content()
    other = set_to("texts", "tokenizer.json", value='{"kind": "byte"}')
    with LyingHost(training, {"welcome": other}) as host:
        done = attack(machine, host)
    assert done.returncode == 3, done.stderr
    assert NOT_NAMED in done.stderr
    assert cache.content() == before


@pytest.mark.long
@pytest.mark.parametrize("part", ["train", "val"])
def test_a_damaged_text_in_the_cache_is_fetched_again(part: str, tmp_path: Path, training: RunFolder) -> None:
    """Also when it has the right size."""
    machine = Machine(tmp_path)
    cache = Cache(machine, training)
    before = cache.content()
    content = cache.place(part).read_bytes()
    cache.place(part).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with LyingHost(training, {"roster": set_to("roster", value=[])}) as host:
        done = attack(machine, host)
    assert "prepared" in host.kinds(), done.stderr
    assert cache.place(part).name in next(m for m in host.received if m.get("type") == "need")["need"]
    assert cache.content() == before


@pytest.mark.long
def test_a_text_whose_header_lies_is_refused(tmp_path: Path, training: RunFolder) -> None:
    """The digest is of the payload: read with another type it would be another text under the same name."""
    machine, true = Machine(tmp_path), training_files(training)
    name, path = next((name, path) for name, path in true.files.items() if name.endswith("-train"))
    text, forged = open_tokens(path), tmp_path / "forged"
    about = text.header
    header = write_tokens(forged, text.tokens.view("<u4"), vocab_size=about.vocab_size, tokenizer=about.tokenizer)
    assert (header.sha256, header.dtype) == (about.sha256, "<u4")
    with LyingHost(training, {}) as host:
        host.cargo = RunFiles(files={**true.files, name: forged}, texts=true.texts)
        done = attack(machine, host)
    assert done.returncode == 3, done.stderr
    assert "does not match the tokenizer" in done.stderr
    assert not list((machine.home / "cache").rglob("*-train"))


@pytest.mark.long
def test_a_text_that_is_not_what_it_is_called_is_not_left_in_the_cache(tmp_path: Path, training: RunFolder) -> None:
    """Else the next run that has this text would find a wrong one there."""

    def rename(message: dict[str, Any]) -> None:
        message["files"] = {"0" * 64 + name[64:]: size for name, size in message["files"].items()}
        facts = json.loads(message["texts"]["data.json"])
        named = {"train": "0" * 64 + "-train", "val": "0" * 64 + "-val", "digest": "0" * 64}
        message["texts"]["data.json"] = json.dumps({**facts, **named})

    machine = Machine(tmp_path)
    with LyingHost(training, {"welcome": rename}) as host:
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
def test_the_facts_about_a_text_are_those_of_the_text_that_was_sent(
    field: str, tmp_path: Path, training: RunFolder
) -> None:
    def lie(message: dict[str, Any]) -> None:
        facts = json.loads(message["texts"]["data.json"])
        message["texts"]["data.json"] = json.dumps({**facts, field: facts["val"] if field == "train" else "0" * 64})

    machine = Machine(tmp_path)
    with LyingHost(training, {"welcome": lie}) as host:
        done = attack(machine, host)
    assert done.returncode == 3, done.stderr
    assert "data.json is about another text" in done.stderr
    assert not machine.out.exists()


@pytest.mark.long
def test_an_interrupted_join_leaves_no_part_and_sweeps_those_of_others(tmp_path: Path, training: RunFolder) -> None:
    machine = Machine(tmp_path)
    folder = machine.home / "cache" / "shoal" / "joined"
    folder.mkdir(parents=True)
    (folder / "x.99999999.part").write_bytes(b"left by a process that was killed")

    def stall(message: dict[str, Any]) -> None:
        message["data"] = message["data"][:400]

    with (
        LyingHost(training, {"piece": stall}) as host,
        joining(f"127.0.0.1:{host.port}", machine.home, machine.out) as process,
    ):
        wait_until(lambda: list(folder.glob("*-train.*.part")), 60)
        assert not (folder / "x.99999999.part").exists()
        process.terminate()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert not list(folder.glob("*.part"))
    assert not machine.out.exists()


# A guest that lies


class Reception:
    """A real doorstep on loopback; what it notes, and the last code that it showed."""

    def __init__(self, run: RunFolder, **options: Any) -> None:
        self.notes: list[str] = []
        self.doorstep = JoinServer("127.0.0.1", 0, training_files(run), self.notes.append, **options)

    def codes(self) -> list[str]:
        return [note.split()[-1] for note in self.notes if "works once" in note]

    async def place(self, count: int = 1) -> tuple[int, str]:
        """The port, and the newest code once so many have been shown."""
        while len(self.codes()) < count:
            await asyncio.sleep(0.01)
        port = next(int(note.rpartition(":")[2]) for note in self.notes if "shoal join" in note)
        return port, self.codes()[-1].replace("-", "")

    async def receive(self) -> JoinedLink:
        return await asyncio.wait_for(self.doorstep.receive_one(lambda: {"host"}, lambda: None), 30)


async def guest_of(reception: Reception, **facts: Any) -> tuple[JoinedLink, LyingGuest]:
    receiving = asyncio.ensure_future(reception.receive())
    liar = await LyingGuest.dial(*await reception.place(), **facts)
    await liar.settle()
    return await receiving, liar


def send_pieces(run: Path, training: RunFolder, pieces: list[tuple[object, object, bytes | str]]) -> Reception:
    """From a machine that has rank 1, after a true piece and before another one."""
    reception = Reception(training)

    async def play() -> None:
        guest, liar = await guest_of(reception)
        guest.listen(run, [1], reception.notes.append)
        await liar.send_piece("events/rank-1.jsonl", 0, b"first\n")
        for piece in pieces:
            await liar.send_piece(*piece)
        await liar.send_piece("events/rank-1.jsonl", 6, b"last\n")
        await liar.channel.send({"type": "end"})
        while guest.ended() is None:
            await asyncio.sleep(0.01)
        assert guest.ended() == "its agent ended", "a lie ended the connection"
        liar.channel.close()
        guest.channel.close()

    asyncio.run(play())
    return reception


LIES: list[tuple[object, object, bytes | str]] = [
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


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: f"{lie[0]!s:.30} {lie[1]!s:.8} {len(lie[2])}")
def test_a_guest_writes_its_own_ranks_files_and_nothing_else(
    lie: tuple[object, object, bytes | str], tmp_path: Path, training: RunFolder
) -> None:
    """What it may not write is refused and noted once, and what it may write still comes."""
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    (run / "token").write_text("secret")
    reception = send_pieces(run, training, [lie, lie])
    assert {str(path.relative_to(run)) for path in run.rglob("*")} == {"events", "events/rank-1.jsonl", "token"}
    assert (run / "events/rank-1.jsonl").read_text() == "first\nlast\n"
    assert (run / "token").read_text() == "secret"
    assert sum(note.startswith("refused: den") for note in reception.notes) == 1, reception.notes
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.parametrize("link", ["logs", "logs/den", "logs/den/rank-1.log", "agents/den.log"])
def test_no_piece_of_a_guest_follows_a_link(link: str, tmp_path: Path, training: RunFolder) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / link).parent.mkdir(parents=True)
    outside.mkdir()
    (outside / "rank-1.log").write_text("before")
    (run / link).symlink_to(outside / "rank-1.log" if "." in link else outside)
    reception = send_pieces(run, training, [("logs/den/rank-1.log", 0, b"x"), ("agents/den.log", 0, b"x")])
    assert [path.name for path in outside.iterdir()] == ["rank-1.log"]
    assert (outside / "rank-1.log").read_text() == "before"
    assert sum("something else lies at its place" in note for note in reception.notes) == 1, reception.notes


def test_files_that_are_sent_home_are_no_links(tmp_path: Path) -> None:
    """Neither a file nor a folder: a link in the run folder would make any file of the machine the host's."""
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
    freight = FileSender(run, "den", {1}, {}, True, lambda name, offset, piece: sent.update({name: piece}))
    freight.reset()
    freight.add_newest_checkpoint()
    freight.send_new()
    assert sent == {"agents/den.jsonl": b"true\n", "logs/den/rank-1.times": b"1 2\n"}
    (run.path / "logs/den").rename(run.path / "logs/other")
    (run.path / "logs/den").symlink_to(secret)
    freight.send_new()
    assert KEY not in sent.values()


@pytest.mark.parametrize(
    ("facts", "seen"),
    [
        ({"cores": -1}, "cores"),
        ({"cores": BIG}, "cores"),
        ({"cores": "2"}, "cores"),
        ({"address": "10.0.0.1; rm -rf /"}, "cores"),
        ({"hello": None}, "a hello that is none"),
        ({"hello": {}}, "a hello without"),
    ],
)
def test_a_guest_whose_facts_are_none_is_refused(facts: dict[str, Any], seen: str, training: RunFolder) -> None:
    reception = Reception(training)

    async def play() -> None:
        receiving = asyncio.ensure_future(reception.receive())
        liar = await LyingGuest.dial(*await reception.place(), **facts)
        with pytest.raises(EOFError):
            await liar.channel.receive()
        liar.channel.close()
        receiving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await receiving

    asyncio.run(play())
    assert any(note.startswith("refused 127.0.0.1") and seen in note for note in reception.notes), reception.notes


def test_a_guest_is_shown_with_its_own_claims_marked_as_such(training: RunFolder) -> None:
    reception = Reception(training)

    async def play() -> str:
        user = "root\x1b[2J\n' (10.0.0.1) has joined" + "x" * 500
        guest, liar = await guest_of(reception, name="../../\x1b[31mden", user=user, address="10.9.9.9")
        liar.channel.close()
        guest.channel.close()
        return str(guest)

    shown = asyncio.run(play())
    assert shown.isprintable()
    assert shown.startswith("31mden (10.9.9.9, connected from 127.0.0.1; it says its user is "), shown
    assert len(shown) < 150


def test_the_owner_says_who_joins(training: RunFolder) -> None:
    """Before anything is sent. After a no the code counts no more: it is in the wrong hands."""
    asked: list[str] = []

    async def confirm(question: str) -> bool:
        asked.append(question)
        return len(asked) > 1

    reception = Reception(training, confirm=confirm)

    async def play() -> None:
        receiving = asyncio.ensure_future(reception.receive())
        port, code = await reception.place()
        thief = await LyingGuest.dial(port, code, user="mallory")
        assert (await thief.channel.receive())["type"] == "refused"
        _, newer = await reception.place(2)
        assert newer != code
        with pytest.raises(ControlError):
            await LyingGuest.dial(port, code)
        owner = await LyingGuest.dial(port, newer)
        assert (await owner.settle())["type"] == "welcome"
        guest = await receiving
        for channel in (thief.channel, owner.channel, guest.channel):
            channel.close()

    asyncio.run(play())
    assert "may den (127.0.0.1; it says its user is 'mallory') take part in this run?" in asked
    assert any("did not let den in" in note for note in reception.notes)


# Another user of the machine that joins

# Reads the secrets from its standard input, looks until that is closed, and prints in which files it found one.
LOOK = """
import glob, os, select, sys
user = int(sys.argv[1])
if user:
    # Not before the interpreter runs: it may lie where only root can read.
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
secrets, found, rounds = sys.stdin.readline().encode().split(), set(), 0
while not select.select([sys.stdin], [], [], 0)[0]:
    for name in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(name, "rb") as file:
                text = file.read()
        except OSError:
            continue
        if any(secret in text for secret in secrets):
            found.add(os.path.basename(name))
    rounds += 1
print(",".join(sorted(found)) or "nothing", rounds)
"""


class Looker:
    """Somebody who looks through /proc for the code, as a user without rights or as root."""

    def __init__(self, user: int) -> None:
        words: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: subprocess.Popen[str] = subprocess.Popen([sys.executable, "-I", "-c", LOOK, str(user)], **words)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{CODE} {'-'.join(re.findall('....', CODE))}\n")
        self._process.stdin.flush()

    def found(self) -> str:
        out, _ = self._process.communicate(timeout=60)
        what, rounds = out.split()
        assert int(rounds) > 1, "it has hardly looked"
        return str(what)


@contextlib.contextmanager
def typed(way: str, port: int, machine: Machine) -> Iterator[subprocess.Popen[bytes]]:
    """A real `shoal join` that gets the code in one of the ways there are."""
    env = {**os.environ, "PYTHONWARNINGS": "", "HOME": str(machine.home), "XDG_CACHE_HOME": str(machine.home / "cache")}
    file, err = machine.folder / "code", machine.folder / "err"
    file.write_text(f"{CODE}\n")
    file.chmod(0o600)
    place = f"127.0.0.1:{port}" + (f"#{CODE}" if way == "argument" else "")
    words = shoal_command("join", place, "--out", machine.out, *(("--code-file", file) if way == "file" else ()))
    ours, theirs = os.openpty() if way == "terminal" else os.pipe()[::-1]
    env |= {"SHOAL_JOIN_CODE": CODE} if way == "environment" else {}
    with err.open("wb") as errors:
        process = subprocess.Popen(words, env=env, stdin=theirs, stderr=errors, start_new_session=True)
    os.close(theirs)
    try:
        if way == "terminal":
            wait_until(lambda: b"code: " in err.read_bytes(), 60)
        if way in ("terminal", "stdin"):
            os.write(ours, f"{CODE}\n".encode())
        yield process
    finally:
        process.kill()
        process.wait(20)
        os.close(ours)
        end_processes([found for found in find_processes() if found.run.is_relative_to(machine.folder)])


@pytest.mark.long
@pytest.mark.parametrize("way", ["argument", "stdin", "environment", "file", "terminal"])
def test_another_user_does_not_find_the_code(way: str, tmp_path: Path, training: RunFolder) -> None:
    """In the whole life of `shoal join`. As an argument it is found, which proves that the other user can look."""
    if os.geteuid() != 0:
        pytest.skip("to be another user takes root")
    machine, other = Machine(tmp_path), Looker(65534)
    with LyingHost(training, {"roster": set_to("roster", value=[])}) as host, typed(way, host.port, machine) as process:
        wait_until(host.greeted.is_set, 60, why=lambda: (tmp_path / "err").read_text())
        assert process.wait(60) == 3
    assert other.found() == ("cmdline" if way == "argument" else "nothing")
    said = (tmp_path / "err").read_text()
    assert ("other users of this machine can read a code" in said) is (way == "argument")
    assert CODE not in said, "it was shown on the terminal"


@pytest.mark.long
def test_no_process_of_the_run_inherits_the_code(tmp_path: Path, training: RunFolder) -> None:
    """Root looks from the moment on when the host has accepted the code, until the agent has started and ended."""
    machine = Machine(tmp_path)
    with LyingHost(training, {}, hold_s=1.0) as host, typed("environment", host.port, machine) as process:
        wait_until(host.greeted.is_set, 60)
        root = Looker(0)
        agents = wait_until(lambda: [found for found in find_processes(machine.out) if found.part == "agent"], 60)
        variables = (
            Path(f"/proc/{agents[0].pid}/environ").read_bytes() + Path(f"/proc/{process.pid}/environ").read_bytes()
        )
    assert root.found() == "nothing"
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
    """Through the supervisor, which has none: a no, then a yes."""
    run = tmp_path / "run"
    ours, theirs = os.openpty()
    words = ("host", "--address", "127.0.0.1", "--confirm", "--out", str(run), *set_flags(*TINY))
    shown = bytearray()

    def screen() -> str:
        while select.select([ours], [], [], 0)[0]:
            with contextlib.suppress(OSError):
                shown.extend(os.read(ours, 4096))
        return shown.decode(errors="replace")

    def read(pattern: str) -> list[str]:
        return wait_until(lambda: re.findall(pattern, screen()), 90, why=screen)

    async def come(port: str, code: str, answer: bytes, user: str) -> str:
        guest = await LyingGuest.dial(int(port), code.replace("-", ""), user=user)
        await asyncio.to_thread(read, rf"may den \(127.0.0.1; it says its user is '{user}'\) take part.*\[y/N\]")
        os.write(ours, answer)
        message = await asyncio.wait_for(guest.channel.receive(), 30)
        guest.channel.close()
        return str(message["type"])

    env = {**os.environ, "PYTHONWARNINGS": "", "COLUMNS": "200", "TERM": "dumb"}
    process = subprocess.Popen(
        shoal_command(*words), env=env, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    try:
        port = read(r"shoal join 127.0.0.1:(\d+)")[0]
        first = read(r"works once: (\S+)")[0]
        assert asyncio.run(come(port, first, b"n\n", "mallory")) == "refused"
        wait_until(lambda: len(read(r"works once: (\S+)")) > 1, 60, why=screen)
        assert asyncio.run(come(port, read(r"works once: (\S+)")[-1], b"y\n", "anna")) == "welcome"
        assert (run / "supervisor.jsonl").stat().st_mode & 0o777 == 0o600
    finally:
        process.send_signal(signal.SIGINT)
        end_processes(find_processes(run))
        process.kill()
        process.wait(20)
        os.close(ours)
