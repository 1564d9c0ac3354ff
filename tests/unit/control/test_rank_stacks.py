"""The stacks that a rank has written: which line is the user's, and what is printed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.control.processes import PART_MARK, RUN_MARK
from shoal.control.rank_stacks import (
    STACKS_SIGNAL,
    parse_stacks,
    rank_of,
    register_stacks,
    stack_lines,
)
from shoal.host.proc import catches_signal

SHOAL = Path(register_stacks.__code__.co_filename).parents[1]


def dump(script: Path) -> str:
    return f"""Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "{SHOAL}/host/node_stats.py", line 405 in _work

Current thread 0x00007f02 (most recent call first):
  Garbage-collecting
  File "/opt/venv/lib/python3.11/site-packages/torch/nn/module.py", line 9 in forward
  File "{script}", line 2 in slow
  File "{SHOAL}/engine/session.py", line 220 in __iter__
  File "{script}", line 3 in <module>
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
"""


def test_the_innermost_line_of_the_users_code_is_marked(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def slow():\n    time.sleep(10000)\nslow()\n")
    stacks = parse_stacks(dump(script))
    assert stacks is not None
    assert str(stacks.place) == f"{script}:2, in slow: time.sleep(10000)"
    assert list(stack_lines(stacks)) == [
        f'  File "{script}", line 3, in <module>',
        "    slow()",
        f'  File "{SHOAL}/engine/session.py", line 220, in __iter__',
        f"    {stacks.threads[0][2].source}",
        f'> File "{script}", line 2, in slow',
        ">   time.sleep(10000)",
        '  File "/opt/venv/lib/python3.11/site-packages/torch/nn/module.py", line 9, in forward',
        "  and 1 more thread of shoal and its libraries: --json",
    ]


def test_without_code_of_the_user_the_innermost_line_is_named() -> None:
    text = dump(Path("/usr/lib/python3.11/site-packages/mine.py"))
    stacks = parse_stacks(text)
    assert stacks is not None
    assert stacks.place.function == "forward"


def test_half_an_answer_is_read_and_a_later_one_replaces_it(tmp_path: Path) -> None:
    text = dump(tmp_path / "gone.py")
    stacks = parse_stacks(text[: len(text) // 2] + "\n" + text)
    assert stacks is not None
    assert [len(frames) for frames in stacks.threads] == [5, 2]
    assert stacks.place.source == "", "the script cannot be read"
    assert parse_stacks(text[:50]) is None


def test_control_characters_do_not_reach_the_terminal() -> None:
    stacks = parse_stacks('Thread 0x1 (most recent call first):\n  File "/a\x1b[2Jb.py", line 1 in f\n')
    assert stacks is not None
    assert "\x1b" not in str(stacks.place)


@pytest.mark.parametrize(("part", "rank"), [("rank-0", 0), ("rank-12", 12), ("agent", None), ("torchrun", None)])
def test_only_ranks_are_asked(part: str, rank: int | None) -> None:
    assert rank_of(part) == rank


@pytest.mark.skipif(not STACKS_SIGNAL, reason="needs Linux")
def test_a_link_in_the_run_folder_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.txt"
    other.write_text("kept")
    (tmp_path / "run/stacks").mkdir(parents=True)
    (tmp_path / "run/stacks/rank-0.txt").symlink_to(other)
    monkeypatch.setenv(RUN_MARK, str(tmp_path / "run"))
    monkeypatch.setenv(PART_MARK, "rank-0")
    register_stacks()
    assert not catches_signal(os.getpid(), STACKS_SIGNAL)
    assert other.read_text() == "kept"
