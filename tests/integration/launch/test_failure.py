"""Which rank of a failed script is named first, and its exception, from the logs alone.

Exercises launch.failure.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import OutOfMemory
from shoal.explain.explain import is_consequence
from shoal.launch.failure import (
    ProcessEnd,
    RaisedException,
    diagnose,
    explain_early_exit,
    first_to_fail,
    last_exception,
    script_faults,
)
from shoal.launch.launcher import read_log_tail
from tests.support.programs import shoal

RAISED = """\
epoch 1
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/oops.py", line 12, in <module>
[rank1]:     train()
[rank1]:   File "/home/me/oops.py", line 9, in train
[rank1]:     raise ValueError("negative learning rate")
[rank1]: ValueError: negative learning rate
"""
# As printed by torch 2.13 where the peer closed its connections in a `finally:`.
VICTIM = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/oops.py", line 12, in <module>
[rank0]:     train()
[rank0]:   File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
[rank0]:     work.wait()
[rank0]: RuntimeError: [/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:41610
"""
WHILE_HANDLED = (
    RAISED
    + """
During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/oops.py", line 15, in <module>
    dist.barrier()
RuntimeError: [/third_party/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:41610
"""
)
RAISED_FROM = (
    RAISED
    + """
The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/me/oops.py", line 20, in <module>
    raise RuntimeError("the configuration is wrong") from error
RuntimeError: the configuration is wrong
"""
)
MISMATCHES = (
    RAISED.rstrip("\n")
    + " in load_state_dict:\n"
    + "".join(f"\tsize mismatch for layers.{number}.weight\n" for number in range(50))
)
# Printed by faulthandler where a process is ended by a signal.
FAULT = """\
Fatal Python error: Segmentation fault

Current thread 0x0000ffff (most recent call first):
  File "/home/me/oops.py", line 6 in <module>

Extension modules: numpy._core._multiarray_umath (total: 1)
"""
SYNTAX = '  File "/home/me/oops.py", line 3\n    def f(:\n          ^\nSyntaxError: invalid syntax\n'


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (RAISED, RaisedException("ValueError: negative learning rate", "oops.py line 9")),
        # The program's own line, not that of the library that raised.
        (VICTIM, RaisedException(VICTIM.splitlines()[-1].removeprefix("[rank0]: "), "oops.py line 12")),
        (WHILE_HANDLED, RaisedException("ValueError: negative learning rate", "oops.py line 9")),
        (
            RAISED + WHILE_HANDLED.replace("ValueError", "KeyError"),
            RaisedException("KeyError: negative learning rate", "oops.py line 9"),
        ),
        (RAISED_FROM, RaisedException("RuntimeError: the configuration is wrong", "oops.py line 20")),
        (MISMATCHES, RaisedException("ValueError: negative learning rate in load_state_dict:", "oops.py line 9")),
        (FAULT, None),
        # A progress bar or a prompt without a line end stands before the traceback.
        (
            "4/10 it" + RAISED.partition("\n")[2],
            RaisedException("ValueError: negative learning rate", "oops.py line 9"),
        ),
        (
            "\r3/10 it\r4/10 it" + RAISED.partition("\n")[2],
            RaisedException("ValueError: negative learning rate", "oops.py line 9"),
        ),
        (SYNTAX, RaisedException("SyntaxError: invalid syntax", "oops.py line 3")),
        (
            RAISED + "[W1] a warning of torch at its end\n",
            RaisedException("ValueError: negative learning rate", "oops.py line 9"),
        ),
        (RAISED + "training goes on\n" * 30, None),
        ("KeyError: printed, not raised\n", None),
        ("", None),
        ("Traceback (most recent call last):\n", None),
    ],
)
def test_the_exception_that_ended_a_rank_is_read_from_its_log(log: str, expected: RaisedException | None) -> None:
    assert last_exception(log, is_consequence) == expected


def ending(rank: int, order: int, code: int = 1) -> ProcessEnd:
    return ProcessEnd(f"rank-{rank}", "here", (rank,), code, order, log=f"/logs/rank-{rank}.log")


def faults_of(endings: list[ProcessEnd], *logs: str) -> dict[int, dict[str, object]]:
    return script_faults(endings, lambda ending: logs[ending.ranks[0]], is_consequence)


def test_the_rank_that_raised_is_named_and_not_its_victim() -> None:
    endings = [ending(0, order=0), ending(1, order=1, code=4)]
    faults = faults_of(endings, VICTIM, RAISED)
    error, first = diagnose(endings, faults, {"rank-1": "last line"}), first_to_fail(endings, faults)
    assert error is not None
    assert first is endings[1]
    assert error.seen == "rank 1 on here ended with exit code 4: ValueError: negative learning rate (oops.py line 9)"
    assert error.why == "rank 0 then ended because a peer was gone\nthe end of its log:\nlast line"
    assert error.fix == "read its log: less /logs/rank-1.log"


def test_ranks_that_fail_in_the_same_way_are_reported_together() -> None:
    endings = [ending(0, order=0), ending(1, order=1), ending(2, order=2)]
    other = RAISED.replace("ValueError: negative learning rate", "KeyError: 'x'")
    error = diagnose(endings, faults_of(endings, RAISED, RAISED, other), {})
    assert error is not None
    assert error.why == "rank 1 failed in the same way; rank 2 failed too: KeyError: 'x' (oops.py line 9)"


def test_ranks_with_the_same_error_of_a_session_are_counted() -> None:
    """What was seen may differ from rank to rank: the shape of a tensor, or a path."""
    endings = [ending(rank, order=rank, code=2) for rank in range(3)]
    advice = {"error": "UsageError", "why": "", "fix": "pass the sum"}
    faults = {rank: {**advice, "rank": rank, "seen": f"a tensor of shape ({rank}, 1)"} for rank in range(3)}
    error = diagnose(endings, faults, {"rank-0": "error: a tensor of shape (0, 1)"})
    assert error is not None
    assert error.render() == (
        "error: a tensor of shape (0, 1)\n  why:  all 3 ranks failed in the same way\n  next: pass the sum\n"
    )
    other = {"rank": 2, "error": "DataError", "seen": "no such file", "why": "", "fix": "ls"}
    error = diagnose(endings, {**faults, 2: other}, {})
    assert error is not None
    assert error.why == "rank 1 failed in the same way; rank 2 failed too: no such file"


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_a_rank_that_was_killed_is_not_blamed_for_an_exception_that_it_handled(out_of_memory: bool) -> None:
    killed = ProcessEnd("rank-1", "local", (1,), -9, 0, out_of_memory=out_of_memory)
    faults = script_faults([killed], lambda ending: RAISED, is_consequence)
    assert faults == {}
    error = diagnose([killed], faults, {"rank-1": RAISED})
    assert isinstance(error, OutOfMemory) == out_of_memory
    assert error is not None
    assert "ValueError" not in error.seen


def test_the_end_of_a_log_is_the_only_reason_where_nothing_else_is_known() -> None:
    error = diagnose([ProcessEnd("rank-1", "local", (1,), 3, 0)], {}, {"rank-1": "last line"})
    assert error is not None
    assert error.why == "the end of its log:\nlast line"


def test_the_end_of_a_log_has_only_the_last_state_of_a_progress_bar(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_bytes(b"begun\n" + b"".join(b"\r%d/14 it" % number for number in range(14)) + b"Traceback\r\nend\r")
    assert read_log_tail(log) == "begun\n13/14 itTraceback\nend"


def test_a_rank_without_an_exception_is_still_named() -> None:
    endings = [ending(0, order=0, code=7), ending(1, order=1)]
    error = diagnose(endings, faults_of(endings, "no traceback\n", VICTIM), {})
    assert error is not None
    assert error.seen == "rank 0 on here ended with exit code 7"
    assert "rank 1 then ended because a peer was gone" in error.why


def test_a_peer_that_ended_early_with_exit_code_0_is_named() -> None:
    endings = [ending(1, order=0, code=0), ending(0, order=1)]
    text = explain_early_exit(endings, faults_of(endings, VICTIM, ""))
    assert text.startswith("rank 1 had ended before with exit code 0")
    assert explain_early_exit(endings, faults_of(endings, RAISED, "")) == ""
    assert explain_early_exit([], {}) == ""


def test_the_error_of_a_script_names_the_exception_and_its_line(tmp_path: Path) -> None:
    script = tmp_path / "oops.py"
    script.write_text("import os\nrank = os.environ['RANK']\nraise ValueError(f'no data for rank {rank}')\n")
    done = shoal("run", "--on", "local:1", "--out", tmp_path / "run", script)
    assert done.returncode == 1
    assert (
        "error: rank 0 on local ended with exit code 1: ValueError: no data for rank 0 (oops.py line 3)\n"
        in done.stderr
    )
    assert "the end of its log:\n" in done.stderr


FINALLY = """
import os, sys
import torch
import torch.distributed as dist
def train():
    dist.init_process_group("gloo")
    for step in range(100):
        if os.environ["RANK"] == "1" and step == 20:
            raise ValueError("negative learning rate")
        dist.all_reduce(torch.ones(4))
try:
    train()
finally:
    dist.destroy_process_group()
"""


@pytest.mark.long
def test_the_victim_of_a_finally_is_not_named_first(tmp_path: Path) -> None:
    script = tmp_path / "oops.py"
    script.write_text(FINALLY)
    done = shoal("run", "--on", "local:2", "--out", tmp_path / "run", script)
    assert done.returncode == 1
    assert (
        "error: rank 1 on local ended with exit code 1: ValueError: negative learning rate (oops.py line 9)"
        in done.stderr
    )
    assert "rank 0 then ended because a peer was gone" in done.stderr
