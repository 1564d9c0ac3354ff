"""Names, lines and sizes from other machines and from ranks: malformed ones are refused, valid ones are processed.

Exercises cluster.agent_link, events, run_folder.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.agent.kv_store import MAX_REQUEST_BYTES, read_request
from shoal.cluster.hosts import cluster as hosts_link
from shoal.cluster.hosts.cluster import SshLink
from shoal.cluster.hosts.messenger import _text_file, parse_order
from shoal.cluster.hosts.setup import ReadyHost
from shoal.cluster.hosts.spec import Host, HostsSpec
from shoal.cluster.node import Node, ranks_of
from shoal.cluster.node_program import LocalProgram, RemoteProgram, closing_all
from shoal.cluster.transfer import LINE_BYTES, PIECE_BYTES
from shoal.control.channel import is_equal_secret
from shoal.control.orders import read_member, read_places
from shoal.errors import ControlError
from shoal.event_schema import AGENT_EVENTS, parse_event
from shoal.events import EventLog, EventTail, read_events
from shoal.launch.launcher import AgentHandle, Launch
from shoal.launch.plan import RankCommand
from shoal.run_folder import RunFolder, check_name, open_below
from tests.support.waiting import wait_until

# Names

NASTY = st.sampled_from(
    [
        "..",
        ".",
        "",
        "/",
        "a/b",
        "../x",
        "a\0b",
        "a\nb",
        "-rf",
        ".ssh",
        "~",
        "*",
        "a b",
        "é",
        "x" * 101,
        "a/../b",
        "\ud800",
    ]
)
ANYTHING = st.none() | st.integers() | st.booleans() | st.text(max_size=120) | NASTY | st.just("node1") | st.just(2**40)
METHODS = ("journal", "votes", "orders", "invite_socket", "agent_log", "logs", "events", "state")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(METHODS), ANYTHING)
def test_no_name_escapes_the_run_folder(method: str, name: Any) -> None:
    """A name is refused or becomes one component of a path below the folder."""
    run = RunFolder(Path("/run/of/shoal"))
    try:
        paths = [getattr(run, method)(name)] if isinstance(name, str | int) else []
        paths += [run.log(name, 0), run.log("node1", name)] if isinstance(name, str) else []
    except ControlError:
        return
    for path in paths:
        assert Path(os.path.normpath(path)) == path
        assert path.is_relative_to(run.path)
        assert len(path.relative_to(run.path).parts) <= 3
        assert not path.name.startswith((".", "-"))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=120) | NASTY | st.sampled_from(["config.toml", "tokenizer.json", "data.json"]))
def test_only_the_small_files_of_a_run_are_sent_as_texts(name: str) -> None:
    run = RunFolder(Path("/run/of/shoal"))
    try:
        assert _text_file(run, name) in (run.config, run.tokenizer, run.data)
    except ControlError:
        assert name not in ("config.toml", "tokenizer.json", "data.json")


@pytest.mark.parametrize("name", ["node1", "laptop-b.lan", "_x", "192.168.1.9", "A" * 100])
def test_usual_machine_names_are_accepted(name: str) -> None:
    assert check_name(name) == name
    assert RunFolder(Path("/r")).log(name, "torchrun") == Path(f"/r/logs/{name}/torchrun.log")


def test_members_are_validated_when_read() -> None:
    member = {"node": "den", "address": "10.0.0.1", "port": 9, "mark": "m", "ranks": [0], "life": 0}
    assert read_places({"7": member})[7].node == "den"
    for change in ({"node": "../x"}, {"port": 2**16}, {"port": -1}, {"ranks": [-1]}, {"ranks": [2**31]}, {"life": -1}):
        with pytest.raises(ValueError):  # noqa: PT011 - pydantic's own
            read_member({**member, **change})
    too_many = {str(number): member for number in range(4097)}
    tables: list[Any] = [{"-1": member}, {"x": member}, {str(2**31): member}, [], too_many]
    for table in tables:
        with pytest.raises(ValueError):  # noqa: PT011
            read_places(table)


def test_ranks_are_counted_through_the_nodes() -> None:
    nodes = [Node(name, "", None, slots, 1) for name, slots in (("a", 2), ("b", 1), ("c", 3))]
    assert [list(ranks_of(nodes, node)) for node in nodes] == [[0, 1], [2], [3, 4, 5]]


def test_an_invalid_order_is_refused(tmp_path: Path) -> None:
    order = {"folder": str(tmp_path), "node": "den", "ranks": [1], "texts": {}, "have": {"commits.jsonl": 3}}
    assert parse_order(json.dumps(order).encode()).ranks == (1,)
    changes: list[dict[str, Any]] = [
        {"node": "../x"},
        {"ranks": [-1]},
        {"have": {"commits.jsonl": -1}},
        {"have": {"commits.jsonl": "3"}},
        {"texts": {"config.toml": 7}},
        {"keeps": "yes"},
    ]
    for change in changes:
        with pytest.raises(ControlError, match="an order that it cannot read"):
            parse_order(json.dumps({**order, **change}).encode())


def test_no_link_is_followed_below_a_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").write_text("secret")
    (tmp_path / "in" / "file").symlink_to(tmp_path / "out")
    (tmp_path / "in" / "folder").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "in" / "pipe")
    for name in ("file", "folder/out", "pipe", "missing"):
        with pytest.raises(OSError):  # noqa: PT011
            open_below(tmp_path / "in", name, os.O_RDONLY)
    for name in ("../out", "/etc/passwd", "", "a//b", "./file"):
        with pytest.raises(ControlError, match="leads out of"):
            open_below(tmp_path / "in", name, os.O_RDONLY)


# A misbehaving messenger: the real link, and a program in place of the messenger on the other machine


def make_misbehaving_link(folder: Path, *streams: bytes) -> tuple[SshLink, list[str]]:
    """Return a link whose connections get these byte streams in order; the last one is repeated."""
    for number, stream in enumerate(streams):
        (folder / f"stream-{number}").write_bytes(stream)
    program = folder / "python"
    program.write_text(
        f"""#!{sys.executable} -ISu
import os, sys
sys.stdin.buffer.raw.readline()
count = len([name for name in os.listdir({str(folder)!r}) if name.startswith("was-")])
open(f"{folder}/was-{{count}}", "x").close()
sys.stdout.buffer.write(open(f"{folder}/stream-{{min(count, {len(streams) - 1})}}", "rb").read())
"""
    )
    program.chmod(0o755)
    return make_link(folder, str(program))


def make_link(base: Path, python: str, **order: Any) -> tuple[SshLink, list[str]]:
    """Return a link to a messenger on this machine, started by a local shell instead of SSH."""
    host = Host(host="localhost", name="den")
    about: dict[str, Any] = {"interface": "lo", "link_mbps": None, "project": None, "files": {}}
    path = str(Path(shoal.__file__).parent.parent)
    ready = ReadyHost(
        host,
        True,
        "127.0.0.1",
        **about,
        python=python,
        pythonpath=path,
        runs=str(base / "d/runs"),
        facts=None,  # type: ignore[arg-type]
    )
    common = {"folder": "/nowhere", "node": "den", "ranks": [1], "texts": {}, "keeps": False, "follow": False}
    notes: list[str] = []
    run = base / "run"
    (run / "events").mkdir(parents=True, exist_ok=True)
    spec = HostsSpec(path=base / "hosts.toml", hosts=(host,))
    return SshLink(ready, spec, run, None, {**common, "discard": False, **order}, notes.append), notes


def head(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


GOOD = head(path="events/rank-1.jsonl", offset=0, size=5) + b"true\n" + head(end=True)


@pytest.mark.parametrize(
    "data",
    [
        b"no JSON\n",
        b"[1]\n",
        b"[" * 100_000 + b"\n",
        head(path="events/rank-1.jsonl", offset=0, size=PIECE_BYTES + 1),
        head(path="events/rank-1.jsonl", offset=0, size=-1),
        head(path="events/rank-1.jsonl", offset=-1, size=1),
        head(path="events/rank-1.jsonl", offset=2**70, size=1),
        head(path=7, offset=0, size=1),
        head(begins={"events/rank-1.jsonl": -1}),
        head(begins=[1]),
        head(path="events/rank-1.jsonl"),
        b"x" * (LINE_BYTES + 70_000),
    ],
    ids=lambda data: repr(data[:40]),
)
def test_a_messenger_that_sends_invalid_data_is_restarted(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_link, "RECONNECT_S", 0.05)
    link, notes = make_misbehaving_link(tmp_path, data, data, GOOD)
    try:
        assert wait_until(link.ended, 30, why=lambda: notes) == "its agent ended"
    finally:
        link.close()
    assert (tmp_path / "run/events/rank-1.jsonl").read_text() == "true\n"
    assert len([note for note in notes if note.startswith("refused: den sent")]) == 1, notes


def test_forbidden_pieces_from_a_messenger_are_dropped(tmp_path: Path) -> None:
    names = ["events/rank-0.jsonl", "token", "../x", "agents/other.jsonl", "commits.jsonl"]
    forbidden = b"".join(head(path=name, offset=0, size=1) + b"x" for name in names * 2)
    link, notes = make_misbehaving_link(tmp_path, forbidden + GOOD)
    try:
        assert wait_until(link.ended, 30, why=lambda: notes) == "its agent ended"
    finally:
        link.close()
    assert [path.name for path in (tmp_path / "run").rglob("*") if path.is_file()] == ["rank-1.jsonl"]
    assert len([note for note in notes if "into the run folder" in note]) == len(names), "a note is missing or repeated"


def test_a_messenger_fetches_only_files_of_its_own_ranks(tmp_path: Path) -> None:
    """Run the real messenger in a folder shared by several nodes: other nodes' files stay, the checkpoint is whole."""
    remote = RunFolder(tmp_path / "remote")
    contents = {
        "agents/den.jsonl": "journal\n",
        "agents/den.orders": "token\n",
        "agents/other.jsonl": "other\n",
        "events/rank-0.jsonl": "other\n",
        "events/rank-1.jsonl": "first\nsecond\n",
        "logs/den/rank-1.log": "x" * (PIECE_BYTES + 5),
        "logs/other/rank-0.log": "other\n",
        "commits.jsonl": "ledger\n",
        "checkpoints/step-00000001/manifest.json": "old",
        "checkpoints/step-00000002/manifest.json": "new",
        "checkpoints/step-00000002/model.safetensors": "weights",
    }
    for name, text in contents.items():
        (remote.path / name).parent.mkdir(parents=True, exist_ok=True)
        (remote.path / name).write_text(text)
    (tmp_path / "run/events").mkdir(parents=True)
    (tmp_path / "run/events/rank-1.jsonl").write_text("first\n")
    link, notes = make_link(tmp_path, sys.executable, folder=str(remote.path), keeps=True, follow=True)
    try:
        assert wait_until(link.ended, 60, why=lambda: notes) == "its agent ended"
    finally:
        link.close()
    run = tmp_path / "run"
    fetched = {str(path.relative_to(run)): path.read_text() for path in run.rglob("*") if path.is_file()}
    own = ("agents/den.jsonl", "events/rank-1", "logs/den", "commits", "checkpoints/step-00000002")
    assert fetched == {name: text for name, text in contents.items() if name.startswith(own)}
    assert not [note for note in notes if "refused" in note]


# A journal with invalid lines


class Silent:
    """A link to an agent that keeps running."""

    sends_files = False

    def ended(self) -> None:
        return None

    def is_reachable(self) -> bool:
        return True

    def send(self, line: bytes) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"event": 7},
        {"event": ["ready"]},
        {"event": "ready"},
        {"event": "ready", "incarnation": "x"},
        {"event": "ended"},
        {"event": "ended", "name": "rank-7", "code": 0, "by_agent": False, "out_of_memory": False},
        {"event": "ended", "name": "rank-0", "code": 0, "by_agent": False, "out_of_memory": False},
        {"event": "ended", "name": "rank-1", "code": "0", "by_agent": False, "out_of_memory": False},
        {"event": "ended", "name": "../x", "code": 0, "by_agent": False, "out_of_memory": False},
        {"event": "note"},
        {"event": "note", "text": 7},
        {"event": "restart", "name": "rank-0"},
        {"event": "announce", "text": "x", "generation": [1]},
        {"event": "lost", "node": {}, "how": "x"},
        {"event": "peer-ended", "node": "node1"},
        {"event": "group-failed", "name": "rank-9", "why": "x"},
        {"event": "refused"},
    ],
    ids=lambda data: json.dumps(data)[:60],
)
def test_an_invalid_journal_line_is_refused_and_the_supervisor_continues(data: dict[str, Any], tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    nodes = [Node(f"node{number}", f"127.0.0.{number}", "lo", 1, 1) for number in (1, 2)]
    world = Launch(run, None, EventLog(run.supervisor, 0))  # type: ignore[arg-type]
    world.ranks.commands = [
        RankCommand(f"rank-{rank}", node, (rank,), ("true",), {}) for rank, node in enumerate(nodes)
    ]
    world.agents = [AgentHandle(node, Silent(), EventTail(run.journal(node.name))) for node in nodes]
    journal = EventLog(run.journal("node2"), 1)
    for _ in range(3):
        journal.append({"launch": world.launch_id, **data})
    good = {"event": "ended", "name": "rank-1", "code": 0, "by_agent": False, "out_of_memory": False}
    journal.append({"launch": world.launch_id, **good})
    world._poll()
    assert [ending.name for ending in world.ranks.ends] == ["rank-1"], "the valid line was not used"
    notes = [event["text"] for event in read_events(run.supervisor) if event["event"] == "note"]
    assert len(notes) == 1
    assert notes[0].startswith("the journal of node2 has lines that cannot be used and are ignored")
    journal.close()
    world.log.close()


def test_unknown_events_are_ignored_by_the_supervisor() -> None:
    event = parse_event(b'{"event": "something-new", "text": 7}', AGENT_EVENTS)
    assert event == {"event": "something-new", "text": 7, "rank": None, "time": None}


# Ranks and programs on other machines


@pytest.mark.parametrize("payload", [b"no JSON", b"[1]", b"[" * 100_000, b"7"])
def test_an_invalid_request_of_a_rank_is_answered_with_an_error(payload: bytes) -> None:
    async def ask(frame: bytes) -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame)
        reader.feed_eof()
        await read_request(reader)

    with pytest.raises(ControlError, match="cannot be read"):
        asyncio.run(ask(len(payload).to_bytes(4, "big") + payload))
    with pytest.raises(ControlError, match=f"has {MAX_REQUEST_BYTES + 1} bytes"):
        asyncio.run(ask((MAX_REQUEST_BYTES + 1).to_bytes(4, "big")))


def test_a_program_that_sends_an_endless_line_is_stopped() -> None:
    endless = "import sys\nsys.stdin.readline()\nwhile True: sys.stdout.write('x' * 65536)"
    programs = {"node1": RemoteProgram("node1", LocalProgram([sys.executable, "-I", "-S", "-c", endless]))}
    with closing_all(programs), pytest.raises(ControlError, match="with a line of more than 16777216 bytes"):
        programs["node1"].ask(60.0, do="look")


# Secrets


@pytest.mark.parametrize("sent", ["é", "\ud800", "", "secre", "secret\0", b"\xff"])
def test_comparing_secrets_accepts_any_input(sent: str | bytes) -> None:
    assert not is_equal_secret(sent, "secret")
    assert is_equal_secret("secret", b"secret")


def test_secrets_are_compared_in_one_place() -> None:
    """`compare_digest` raises for text that is not ASCII, which once ended a thread."""
    package = Path(shoal.__file__).parent
    users = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and node.attr == "compare_digest")
        or (isinstance(node, ast.alias) and node.name == "compare_digest")
    }
    assert users == {"control/channel.py"}


def test_a_private_log_is_created_with_private_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fchmod", lambda fd, mode: None)
    before = os.umask(0)
    try:
        EventLog(tmp_path / "supervisor.jsonl", 0, private=True).close()
        monkeypatch.undo()
        (tmp_path / "open.jsonl").touch(0o666)
        EventLog(tmp_path / "open.jsonl", 0, private=True).close()
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o600}
