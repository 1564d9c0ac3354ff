"""A machine joins the run of a script with its own copy of it: no other program is started there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.errors import ShoalError, UsageError
from shoal.runs.join import check_script, describe_return, local_settings
from shoal.runs.supervisor import SharedScript, digest_script


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text("print(1)\n")
    return path


@pytest.fixture
def shared(script: Path) -> SharedScript:
    return SharedScript("net.py", ("--lr", "3"), digest_script(script), "{}")


def test_the_same_script_with_the_same_arguments_is_run_from_its_place_here(shared: SharedScript, script: Path) -> None:
    assert check_script(shared, [str(script), "--lr", "3"]) == (str(script), "--lr", "3")


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ([], "the run to join is that of a script, net.py"),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["{other}", "--lr", "3"], "is not the script of the run"),
        (["{script}", "--lr", "4"], "the script has other arguments at the host: --lr 3"),
    ],
)
def test_another_program_is_refused(shared: SharedScript, script: Path, words: list[str], seen: str) -> None:
    other = script.with_name("other.py")
    other.write_text("print(2)\n")
    with pytest.raises(UsageError, match=seen):
        check_script(shared, [word.format(script=script, other=other) for word in words])


def test_settings_about_the_hosts_own_machine_are_not_taken_over() -> None:
    given = {"run": {"on": "lab:3", "threads": 64, "weights": "2/1"}, "sync": {"wire": "int8"}}
    assert json.loads(local_settings(json.dumps(given))) == {
        "run": {"on": "local:1", "weights": "2/1"},
        "sync": {"wire": "int8"},
    }


@pytest.mark.parametrize("text", ["[]", '{"run": 1}', '{"nothing": {"a": 1}}', "{"])
def test_settings_that_are_none_are_refused(text: str) -> None:
    with pytest.raises((ShoalError, ValueError, TypeError, AttributeError)):
        local_settings(text)


@pytest.mark.parametrize(
    ("members", "step", "text"),
    [
        (["a", "b"], 1217, "a, b train on from step 1,217 with 2 ranks"),
        (["b"], 0, "b trains on from the newest checkpoint, if there is one, with 1 rank"),
    ],
)
def test_the_return_of_a_node_is_described(members: list[str], step: int, text: str) -> None:
    event = {"event": "generation", "members": members, "step": step, "ranks": len(members)}
    assert describe_return("b", event) == f"b takes part again: {text}"
