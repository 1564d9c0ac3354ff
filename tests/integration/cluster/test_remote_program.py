"""Requests to real programs: with valid, missing and malformed replies.

Exercises cluster.
"""

from __future__ import annotations

import json
import signal
import sys
import threading

import pytest

from shoal.cluster import node_program
from shoal.cluster.node_program import Answer, LocalProgram, RemoteProgram, ask_each, closing_all
from shoal.errors import ControlError

_ECHO = "import sys, json\nfor line in sys.stdin: print(json.dumps({'request': json.loads(line)}), flush=True)"
_SILENT = "import sys\nfor line in sys.stdin: pass"
_SLEEPING = "import time\ntime.sleep(60)"
_NONSENSE = "import sys\nfor line in sys.stdin: print('Last login: today', flush=True)"
_FAILING = 'import sys\nfor line in sys.stdin: print(\'{"error": "no such thing"}\', flush=True)'
_ENDING = "import sys\nsys.stdin.readline()\nsys.exit('no module named shoal')"


def start_program(program: str, name: str = "node1") -> RemoteProgram:
    return RemoteProgram(name, LocalProgram([sys.executable, "-I", "-S", "-c", program]))


@pytest.mark.parametrize(
    ("program", "seen", "why"),
    [
        (_SILENT, "node1 gave no answer to 'look' in time", ""),
        (_NONSENSE, "node1 answered something else than asked", "Last login: today"),
        (_FAILING, "node1 could not look: no such thing", ""),
        (_ENDING, "node1 ended before it answered 'look'", "no module named shoal"),
    ],
)
def test_a_missing_or_malformed_reply_is_an_error_with_its_reason(program: str, seen: str, why: str) -> None:
    programs = {"node1": start_program(program)}
    with closing_all(programs), pytest.raises(ControlError) as caught:
        programs["node1"].ask(1.0, do="look")
    assert (caught.value.seen, caught.value.why) == (seen, why)


def test_all_programs_share_one_deadline_and_replies_in_time_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {name: start_program(program, name) for name, program in (("a", _SILENT), ("b", _SILENT), ("c", _ECHO))}
    allowed_s: dict[str, float] = {}
    receive_answer = RemoteProgram.receive_answer

    def record_deadline(program: RemoteProgram, deadline_s: float, about: str = "") -> Answer:
        allowed_s[program.node] = deadline_s
        return receive_answer(program, deadline_s, about)

    monkeypatch.setattr(RemoteProgram, "receive_answer", record_deadline)
    with closing_all(programs):
        replies, errors = ask_each(programs, {name: {"do": "look", "at": name} for name in programs}, 1.0)
    assert replies == {"c": {"request": {"do": "look", "at": "c"}}}
    assert errors.keys() == {"a", "b"}
    # The first silent program used up the time of all.
    assert 0 < allowed_s["a"] <= 1.0
    assert allowed_s["b"] == allowed_s["c"] == 0.0


def test_programs_that_do_not_end_are_ended_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_program, "_END_TIMEOUT_S", 0.2)
    processes = [LocalProgram([sys.executable, "-I", "-S", "-c", _SLEEPING]) for _ in range(2)]
    both_began = threading.Barrier(2, timeout=20)
    close = RemoteProgram.close

    def close_beside_the_other(program: RemoteProgram) -> None:
        both_began.wait()
        close(program)

    monkeypatch.setattr(RemoteProgram, "close", close_beside_the_other)
    with closing_all({f"node{number}": RemoteProgram(f"node{number}", end) for number, end in enumerate(processes)}):
        pass
    assert [process._process.returncode for process in processes] == [-signal.SIGKILL, -signal.SIGKILL]


def test_a_reply_in_pieces_is_read_whole() -> None:
    slow = "import sys, time\nfor line in sys.stdin:\n for part in ('{\"a\"', ': 1}\\n'):\n"
    slow += "  print(part, end='', flush=True); time.sleep(0.1)"
    programs = {"node1": start_program(slow)}
    with closing_all(programs):
        assert json.dumps(programs["node1"].ask(2.0, do="look")) == '{"a": 1}'
