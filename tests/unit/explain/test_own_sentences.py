"""`shoal explain` knows every sentence that shoal itself prints about a failure.

That is: every error in the source, as it is rendered, and every sentence about a change of members. Left out are errors
of the class `Interrupted` (nothing went wrong), and those without a cause and a next command: `explain` can add nothing
to them and shows them unchanged. Their number per package does not grow.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
from shoal import errors
from shoal.agent.hung_ranks import hangs_again
from shoal.control.membership import sentences
from shoal.control.membership.sentences import GenerationChange
from shoal.control.membership.types import MemberRanks, State, first_generation
from shoal.errors import RunFailed, ShoalError
from shoal.explain.explain import explain_text

SOURCE = Path(shoal.__file__).parent
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(SOURCE.rglob("*.py"))}
BARE = {"agent": 1, "engine": 13, "cli": 7, "sync": 2, "tools": 1, "runs": 8, "cluster": 3}


def error_classes() -> set[str]:
    """Return the names of all classes that derive from `ShoalError`, in whichever module they are."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    names, more = {"ShoalError"}, {"ShoalError"}
    while more:
        more = {name for name, parents in bases.items() if parents & names} - names
        names |= more
    return names - {"Interrupted"}


def text_of(node: ast.expr | None) -> str:
    """Return a text as it could be printed: 7 takes the place of each value."""
    match node:
        case None:
            return ""
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(text_of(part) for part in node.values)
        case ast.BinOp():
            return text_of(node.left) + text_of(node.right)
        case ast.IfExp():
            return text_of(node.body)
        case ast.BoolOp():
            return text_of(node.values[-1])
    return "7"


def raised_errors() -> Iterator[tuple[Path, ShoalError]]:
    names = error_classes()
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names and node.args:
                advice = {word.arg: text_of(word.value) for word in node.keywords}
                kind = getattr(errors, node.func.id, RunFailed)
                yield path, kind(text_of(node.args[0]), why=advice.get("why", ""), fix=advice.get("fix", ""))


def test_every_error_is_explained_by_its_own_cause_and_fix() -> None:
    count, bare, wrong = 0, Counter[str](), []
    for path, error in raised_errors():
        count += 1
        if not error.why and not error.fix:
            bare[path.relative_to(SOURCE).parts[0]] += 1
            continue
        best = explain_text(error.render()).best
        own = (error.why.split("\n")[0], error.fix.split("\n")[0])
        if best is None or own[0] not in best.cause or own[1] not in best.fix:
            wrong.append((str(path), error.seen, best))
    assert wrong == []
    assert count > 500
    assert {name: number for name, number in bare.items() if number > BARE.get(name, 0)} == {}


BEFORE = first_generation(tuple(MemberRanks(member=member, ranks=(0, 1)) for member in range(3)))
AFTER = BEFORE.model_copy(update={"member_ranks": BEFORE.member_ranks[:2], "state": State(step=9, committed=8)})
CHANGE = GenerationChange(BEFORE, AFTER, {2: "closed"}, since_s=0.2)


def name(member: int) -> str:
    return f"node{member + 1}"


SENTENCES = {
    "regrouped": sentences.regrouped(CHANGE, name),
    "begun_without": sentences.begun_without(CHANGE, name),
    "admitted": sentences.admitted(AFTER, 0, name),
    "recovering": sentences.recovering(AFTER, 0, name),
    "paused": sentences.paused("min_nodes", [0], BEFORE, name, 2),
    "fenced": sentences.fenced(0, 8, name),
    "cannot_recover": sentences.cannot_recover(0, "disk full", name),
    "abandoned": sentences.abandoned(0, AFTER, 8, 4, name),
    "redone": sentences.redone(0, AFTER, 8, 4, name),
    "cannot_promise": sentences.cannot_promise(0, OSError(28, "No space"), name),
}


@pytest.mark.parametrize("kind", SENTENCES)
def test_every_sentence_about_members_is_explained(kind: str) -> None:
    best = explain_text(f"note: {SENTENCES[kind]}\n").best
    assert best is not None
    assert best.id == "shoal.members"


@pytest.mark.parametrize("why", ["min_nodes", "no state", "silent"])
def test_every_reason_of_a_pause_is_explained(why: str) -> None:
    best = explain_text(sentences.paused(why, [], BEFORE, name, 2, 45.0)).best
    assert best is not None
    assert best.id == "shoal.members"


def test_the_sentences_are_all_of_them() -> None:
    tree = ast.parse(Path(sentences.__file__).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"}
    assert functions == SENTENCES.keys()


@pytest.mark.parametrize(
    "text",
    [
        "rank 1 keeps the others waiting: it has done nothing for 1 min 02 s, since step 2. It is at train.py:12, in f",
        "rank-1 did not stop when it was told to, and was killed: it was at train.py:12, in f",
    ],
)
def test_the_notes_about_a_rank_that_hangs_are_explained(text: str) -> None:
    best = explain_text(f"note: node2: {text}\n").best
    assert best is not None
    assert best.id == "shoal.hung"
    assert "shoal stacks RUN" in best.fix


def test_a_rank_that_hangs_again_is_explained_by_its_line() -> None:
    best = explain_text(hangs_again("rank 1 on node2", 2, "/home/me/train.py:12, in slow").render()).best
    assert best is not None
    assert best.id == "shoal.hung"
    assert "train.py:12" in best.evidence.text
    assert "shoal adds: it kept the others waiting" in best.cause
    assert best.fix.startswith("look at what that line waits for")
