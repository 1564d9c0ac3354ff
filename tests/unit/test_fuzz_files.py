"""Fuzz every reader of files and arguments: only shoal's own errors may be raised, in bounded time."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from rich.console import Console

from shoal.cli.bench import parse_numbers
from shoal.cli.progress import PlainDisplay
from shoal.cluster.agent_link import AgentLink
from shoal.cluster.cluster import LocalCluster
from shoal.cluster.node import Node
from shoal.cluster.target import parse_on
from shoal.config.load import build_config, load_config, read_profile, to_toml
from shoal.control.membership.vote_store import VoteFile
from shoal.data.prepare import DataFacts, read_data_facts
from shoal.data.tokenizer import load_tokenizer
from shoal.data.tokens import TokenHeader, _pack, open_tokens
from shoal.engine.checkpoint import Checkpoint, CheckpointFolder, Progress, read_checkpoint
from shoal.engine.training_state import StateTree
from shoal.errors import ShoalError
from shoal.events import EventLog, EventTail, read_events
from shoal.explain.explain import explain_text
from shoal.launch.failure import diagnose
from shoal.launch.launcher import AgentHandle, Launch, _faults
from shoal.launch.plan import RankCommand
from shoal.records.final_states import open_state
from shoal.records.manifest import read_manifest, read_prediction
from shoal.records.scaling import read_scaling
from shoal.run_folder import RunFolder
from shoal.runs.follow import RunEvents, SupervisorLog
from shoal.runs.manage import describe, read_opening
from shoal.runs.supervisor import read_job
from shoal.tools.bench.levers import parse_lever
from shoal.tools.plan.request import parse_nodes
from tests.support.fuzzing import MANY, NOISE, QUICK, TEXT, Reader, around, as_json, bent, torn
from tests.support.run_samples import start, step

CONFIG = to_toml(build_config()).encode()
HOSTS = b"""
[[host]]
host = "me@laptop-b"
slots = 2
weight = 1.5
[[host]]
host = "10.0.0.7"
address = "10.0.0.7"
"""
HOSTFILE = b"laptop-b slots=2\nlaptop-c:3\n192.168.1.9 # attic\n"
EVENT = b'{"event":"step","rank":0,"time":1.5,"step":3,"loss":2.5}\n'
TOML_ODDITIES = st.sampled_from(
    [
        b"a = " + b"9" * 5000,
        b"a = " + b"[" * 20_000,
        b"a = 1e999",
        b"a = 99999-99-99",
        b"[train]\nsteps = " + b"9" * 30,
        b"[train]\nsteps = nan",
        b"[[train]]",
        b'"" = 1',
        b"a.b.c.d = 1\n" * 50,
    ]
)
ON_WORDS = st.sampled_from(
    ["local:", "lab:", "join:", "lab:3,link=", "lab:2,cpu=", "join:2,port=", "/", "~", "lab:2,loss="]
)
ON = TEXT | st.builds(str.__add__, ON_WORDS, TEXT | st.from_regex(r"[0-9/.,a-z=%]{0,12}", fullmatch=True))


def file_of(name: str, read: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    """Write the drawn bytes to the file that the reader opens."""

    def write_and_read(content: bytes, folder: Path) -> object:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        return read(folder / name)

    return write_and_read


def run_file(name: str, read: Callable[[RunFolder], object]) -> Callable[[bytes, Path], object]:
    return file_of(name, lambda path: read(RunFolder(path.parent)))


def follow(content: bytes, folder: Path) -> None:
    """Check that reading in pieces equals reading at once, and that later events are read too."""
    path = folder / "events.jsonl"
    path.write_bytes(b"")
    tail, received = EventTail(path), []
    for at in range(0, len(content), max(1, len(content) // 3)):
        with path.open("ab") as file:
            file.write(content[at : at + max(1, len(content) // 3)])
        received += tail.poll()
    log = EventLog(path, 0)
    log.write("step", step=1)
    log.close()
    received += tail.poll()
    assert json.dumps(received) == json.dumps(list(read_events(path)))
    assert received[-1]["step"] == 1


def watch_all(content: bytes, folder: Path) -> None:
    """Check that every reader of a run handles these bytes in its files."""
    run = RunFolder(folder)
    run.config.write_bytes(CONFIG)
    for path in (run.events(0), run.journal("node1"), run.supervisor):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    console = Console(file=io.StringIO(), force_terminal=False)
    display, events, supervisor_log = PlainDisplay(console, 100, "tiny"), RunEvents(run), SupervisorLog(run)
    world = watching_world(run)
    for path in (run.events(0), run.journal("node1"), run.supervisor):
        path.write_bytes(content)
    display([*supervisor_log.poll(), *events.poll()])
    display(read_opening(run))
    with contextlib.suppress(ShoalError):
        supervisor_log.raise_error()
    with contextlib.closing(world.log), contextlib.suppress(ShoalError):
        world._poll()
    tails = [EventTail(run.events(0))]
    diagnose(world.ranks.ends, _faults(tails), {})
    describe(run.path, [])
    assert all(ending.name == "rank-0" for ending in world.ranks.ends)


class LiveLink(AgentLink):
    """The link to an agent that is reachable and does nothing."""

    def send(self, line: bytes) -> None: ...
    def ended(self) -> str | None:
        return None

    def is_reachable(self) -> bool:
        return True

    def kill(self) -> None: ...
    def close(self) -> None: ...


def watching_world(run: RunFolder) -> Launch:
    """Make the launcher's view of a running run with one rank."""
    node = Node("node1", "127.0.0.1", None, slots=1, cores=1)
    world = Launch(run, LocalCluster(1), EventLog(run.path / "launcher.jsonl", 0), launch_id="L")
    world.agents = [AgentHandle(node, LiveLink(), EventTail(run.journal("node1")))]
    world.ranks.commands = [RankCommand("rank-0", node, (0,), ("python",), {})]
    return world


def checkpoint_with(name: str) -> Callable[[bytes, Path], object]:
    """Correct the checksums too: damage must not be detected only by a checksum."""

    def write_and_read(content: bytes, folder: Path) -> object:
        tensors = {"weight": torch.zeros(2)}
        saved = CheckpointFolder(folder, keep=9).save(Checkpoint(Progress(1, 2), tensors, StateTree(tensors, [])))
        (saved / name).write_bytes(content)
        if name != "manifest.json":
            manifest = json.loads((saved / "manifest.json").read_text())
            manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
            (saved / "manifest.json").write_text(json.dumps(manifest))
        read = read_checkpoint(saved)
        assert {type(number) for number in (read.progress.step, read.progress.cursor)} == {int}
        return read

    return write_and_read


def set_word(text: str, _: Path) -> object:
    return build_config(sets=[text])


# Events of agents, without the fields that every event has.
OF_AGENTS: dict[str, dict[str, Any]] = {
            "ready": {"agent_mark": "m", "port": 1, "script_port": None, "interface": "lo", "cores": 2,
                      "cpu_only": True, "incarnation": 0, "highest_generation": 0},
            "started": {"processes": {"rank-0": 7}},
            "ended": {"name": "rank-0", "code": 1, "by_agent": False, "out_of_memory": False},
            "restart": {"name": "rank-0"},
            "note": {"text": "x"},
            "announce": {"generation": "2-0", "text": "x"},
            "pause": {"text": "x"},
            "abandon": {"lineage": "1-0", "surviving": "2-0", "shared_step": 3, "text": "x"},
            "group-failed": {"name": "rank-0", "why": "x"},
            "lost": {"member": 1, "node": "node1", "how": "x"},
            "peer-ended": {"node": "node1", "failed": True},
            "stop-asked": {"at_once": False},
            "joined-group": {"met": [0], "missing": [1], "after_s": 60.5},
            "script-store-keys": {"keys": 3},
            "state-lost": {"error": "RunFailed", "seen": "x"},
            "refused": {"error": "RunFailed", "seen": "x"},
            "done": {"finished": True},
        }  # fmt: skip
# One event of each kind that a reader uses: of ranks, agents and the supervisor.
EVENTS: list[dict[str, Any]] = [
    start(),
    step(3),
    {"event": "shard", "rank": 0, "time": 1.0, "size": 1, "total": 2, "first": "x"},
    {"event": "choice", "rank": 0, "time": 1.0, "step": 5, "why": "x"},
    {"event": "eval", "rank": 0, "time": 1.0, "step": 5, "val_loss": 2.5},
    {"event": "warning", "rank": 0, "time": 1.0, "seen": "x", "fix": "y"},
    {"event": "fault", "rank": 0, "time": 1.0, "error": "RunFailed", "seen": "x", "why": "y", "fix": "z"},
    {"event": "membership", "rank": 0, "time": 1.0, "generation": "1-0", "lineage": "1-0", "ids": [0], "step": 1},
    *({"event": kind, "rank": 0, "time": 1.0, "launch": "L", **fields} for kind, fields in OF_AGENTS.items()),
    {"event": "supervising", "rank": 0, "time": 1.0, "pid": 7},
    {"event": "ended", "rank": 0, "time": 1.0, "code": 3, "error": "RunFailed", "seen": "x"},
]  # fmt: skip
EVENT_LINES = st.lists(
    st.one_of(*(as_json(bent(event)) for event in EVENTS), torn(EVENT), NOISE), min_size=1, max_size=12
).map(b"\n".join)

SAFETENSORS = (
    (64).to_bytes(8, "little") + b'{"weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}     ' + bytes(8)
)
MANIFEST = {"format": 1, "sha256": dict.fromkeys(("model.safetensors", "state.json"), "0" * 64)}
STATE = {
    "step": 1,
    "cursor": 2,
    "generation": 0,
    "parts": {"ranks": 2, "mark": 3, "step": 1, "cursor": 2},
    "values": [],
}

TOKEN_HEADER = TokenHeader("<u2", 3, 10, "0" * 64, "t")
TOKENS = _pack(TOKEN_HEADER) + bytes(6)

READERS = {
    "config": Reader(torn(CONFIG) | NOISE | TOML_ODDITIES, file_of("my.toml", load_config)),
    "--set": Reader(
        TEXT | st.builds(lambda key, value: f"{key}={value}", st.sampled_from(["train.steps", "run.on", "a.b"]), TEXT),
        set_word,
    ),
    "--on": Reader(ON, lambda text, _: parse_on(text)),
    "hosts": Reader(torn(HOSTS) | NOISE | TOML_ODDITIES, file_of("hosts.toml", lambda path: parse_on(str(path)))),
    "hostfile": Reader(torn(HOSTFILE) | NOISE, file_of("hosts.txt", lambda path: parse_on(str(path)))),
    "profile": Reader(
        torn(b'shoal_profile = 1\ncreated = "x"\n[[node]]\nname = "a"\n') | NOISE | TOML_ODDITIES,
        file_of("p.toml", read_profile),
    ),
    "events": Reader(torn(EVENT * 3) | NOISE, follow),
    "a run's events": Reader(EVENT_LINES, watch_all),
    "manifest": Reader(around(MANIFEST), checkpoint_with("manifest.json")),
    "state": Reader(around(STATE), checkpoint_with("state.json")),
    "tensors": Reader(torn(SAFETENSORS) | NOISE, checkpoint_with("model.safetensors")),
    "replica": Reader(torn(SAFETENSORS) | NOISE, file_of("state-0.safetensors", open_state)),
    "tokenizer": Reader(around({"kind": "char", "chars": ["a", "b"]}), file_of("tokenizer.json", load_tokenizer)),
    "tokens": Reader(
        NOISE
        | torn(TOKENS)
        | around(asdict(TOKEN_HEADER)).map(lambda text: TOKENS[:12] + len(text).to_bytes(4, "little") + text),
        file_of("a.tokens", open_tokens),
    ),
    "facts": Reader(around(asdict(DataFacts("a", "b", "c", "d"))), run_file("data.json", read_data_facts)),
    "promises": Reader(around({}), file_of("promises.json", lambda path: VoteFile(path).load())),
    "run manifest": Reader(around({"shoal_manifest": 1}), run_file("manifest.json", read_manifest)),
    "prediction": Reader(around({"step_s": 1.0}), run_file("prediction.json", read_prediction)),
    "scaling": Reader(around([{"ranks": 1}]), run_file("scaling.json", read_scaling)),
    "job": Reader(around({"script": []}), run_file("job.json", read_job)),
    "lever": Reader(TEXT | st.sampled_from(["diloco:" + "9" * 5000, "int8+"]), lambda text, _: parse_lever(text)),
    "--nodes": Reader(TEXT, lambda text, _: parse_nodes(text)),
    "--ranks": Reader(TEXT, lambda text, _: parse_numbers("--ranks", text)),
    "log": Reader(
        TEXT
        | torn(
            b'Traceback (most recent call last):\n  File "a.py", line 1\nRuntimeError: Connection closed by peer'
        ).map(lambda log: log.decode(errors="replace")),
        lambda text, _: explain_text(text),
    ),
}

# Inputs that once raised an error that is not shoal's.
SEEN: list[tuple[str, Any]] = [
    ("config", b"a = " + b"9" * 5000),
    ("config", b"a = " + b"[" * 50_000),
    ("--set", "train.steps=" + "9" * 5000),
    ("--on", "x" * 5000),
    ("--on", "local:" + "9" * 5000),
    ("--on", "~no-such-user/hosts.toml"),
    ("--on", "a/\0"),
    ("hosts", b"a = " + b"9" * 5000),
    ("hosts", b'ssh_config = "~no-such-user/x"\n[[host]]\nhost = "a"\n'),
    ("hostfile", b"a:" + b"9" * 5000),
    ("profile", b"a = " + b"9" * 5000),
    ("a run's events", b'{"event":"ended","rank":0,"launch":"L"}\n'),
    (
        "a run's events",
        b'{"event":"ended","rank":0,"launch":"L","name":"x","code":1,"by_agent":false,"out_of_memory":false}\n',
    ),
    ("a run's events", b'{"event":"step","rank":0,"step":1,"step_s":0,"loss":1,"tokens":1}\n'),
    ("a run's events", b'{"event":"step","rank":0,"step":1e400,"step_s":1,"loss":1,"tokens":1}\n'),
    ("a run's events", b'{"event":"step","rank":0,"step":1,"step_s":1,"tokens":1}\n'),
    ("a run's events", b'{"event":"step","rank":0,"step":1,"step_s":1,"exposed_s":[null]}\n'),
    ("a run's events", b'{"event":"note","rank":0,"launch":"L","text":"\\ud800"}\n'),
    ("a run's events", b'{"rank":0,"launch":"L"}\n'),
    ("a run's events", json.dumps({name: value for name, value in start().items() if name != "resumed_from"}).encode()),
    ("state", b'""'),
    ("state", json.dumps(STATE | {"step": None}).encode()),
    ("state", b"[" * 100_000),
    ("manifest", b"[" * 100_000),
    ("facts", json.dumps({"train": 1, "val": [], "digest": None, "source": ""}).encode()),
    ("job", b"{}"),
    ("job", b'{"script": null}'),
    ("lever", "diloco:" + "9" * 5000),
    ("--nodes", "9" * 5000),
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


def test_valid_files_are_read(tmp_path: Path) -> None:
    """Otherwise the fuzz tests above would prove nothing."""
    assert load_config(path_with(tmp_path / "my.toml", CONFIG)) == build_config()
    assert len(parse_on(str(path_with(tmp_path / "hosts.toml", HOSTS))).hosts) == 2  # type: ignore[union-attr]
    assert len(parse_on(str(path_with(tmp_path / "hosts.txt", HOSTFILE))).hosts) == 3  # type: ignore[union-attr]
    open_tokens(path_with(tmp_path / "a.tokens", TOKENS))
    checkpoint_with("state.json")(json.dumps(STATE | {"cursor": 7}).encode(), tmp_path)
    checkpoint_with("model.safetensors")(SAFETENSORS, tmp_path)


def path_with(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
