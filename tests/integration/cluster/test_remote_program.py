"""Conversations with real programs: good ones, silent ones, and those that talk nonsense."""

from __future__ import annotations

import json
import sys
import time

import pytest

from shoal.cluster.node import LocalProgram, RemoteProgram, ask_each, closing_all
from shoal.errors import ControlError

_ECHO = "import sys, json\nfor line in sys.stdin: print(json.dumps({'heard': json.loads(line)}), flush=True)"
_MUTE = "import sys\nfor line in sys.stdin: pass"
_DEAF = "import time\ntime.sleep(60)"
_NONSENSE = "import sys\nfor line in sys.stdin: print('Last login: today', flush=True)"
_FAILING = 'import sys\nfor line in sys.stdin: print(\'{"error": "no such thing"}\', flush=True)'
_ENDING = "import sys\nsys.stdin.readline()\nsys.exit('no module named shoal')"


def talk(program: str, name: str = "node1") -> RemoteProgram:
    return RemoteProgram(name, LocalProgram([sys.executable, "-I", "-S", "-c", program]))


@pytest.mark.parametrize(
    ("program", "seen", "why"),
    [
        (_MUTE, "node1 gave no answer to 'look' in time", ""),
        (_NONSENSE, "node1 answered something else than asked", "Last login: today"),
        (_FAILING, "node1 could not look: no such thing", ""),
        (_ENDING, "node1 ended before it answered 'look'", "no module named shoal"),
    ],
)
def test_no_answer_is_an_error_with_its_reason(program: str, seen: str, why: str) -> None:
    programs = {"node1": talk(program)}
    with closing_all(programs), pytest.raises(ControlError) as caught:
        programs["node1"].ask(1.0, do="look")
    assert (caught.value.seen, caught.value.why) == (seen, why)


def test_one_deadline_for_all_and_what_came_meanwhile_counts() -> None:
    programs = {name: talk(program, name) for name, program in (("a", _MUTE), ("b", _MUTE), ("c", _ECHO))}
    with closing_all(programs):
        began = time.monotonic()
        said, errors = ask_each(programs, {name: {"do": "look", "at": name} for name in programs}, 1.0)
        assert time.monotonic() - began < 1.9, "not one after the other"
    assert said == {"c": {"heard": {"do": "look", "at": "c"}}}
    assert errors.keys() == {"a", "b"}


def test_a_program_that_does_not_end_is_ended() -> None:
    programs = {"node1": talk(_DEAF), "node2": talk(_DEAF)}
    began = time.monotonic()
    with closing_all(programs):
        pass
    assert time.monotonic() - began < 3.9, "both at once"


def test_an_answer_in_pieces() -> None:
    slow = "import sys, time\nfor line in sys.stdin:\n for part in ('{\"a\"', ': 1}\\n'):\n"
    slow += "  print(part, end='', flush=True); time.sleep(0.1)"
    programs = {"node1": talk(slow)}
    with closing_all(programs):
        assert json.dumps(programs["node1"].ask(2.0, do="look")) == '{"a": 1}'
