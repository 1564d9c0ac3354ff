"""The language of the code base: the field's vocabulary, one name per class, one name per core module."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
import shoal_lab
from tests.support.paths import ROOT

SOURCE = Path(shoal.__file__).parent
MODULES = sorted([*SOURCE.rglob("*.py"), *Path(shoal_lab.__file__).parent.rglob("*.py")])
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"])
CORE = {"control", "agent", "launch", "records", "runs", "sync", "engine", "train"}

# Name the process instead: the agent, every rank, the joining node.
VAGUE = "nobody|somebody|whoever|whomever|everybody|anybody|someone|everyone|anyone"
# Private names for things that have a name in the field.
METAPHORS = (
    "council|crew|kin|turnstile|outpost|farewell|scout|scouts|keeper|doorkeeper|doorstep|homecoming|freight|errand"
    "|elector|electorate|tenure|laggard|laggards|sponsor"
)
BANNED_TEXT = re.compile(rf"\b({VAGUE}|{METAPHORS})\b", re.IGNORECASE)
# In comments and docstrings: name the process, and use the common word.
PLAIN_COMMENT = re.compile(r"\b(we|us|our|ourselves|for ever|goes on|so many|in vain)\b", re.IGNORECASE)
# Names for how a value was obtained, or for speech where bytes are sent. Name what the value is instead.
BANNED_NAMES = {
    *("said", "told", "heard", "mine", "ours", "theirs", "each", "found", "nobody", "somebody", "everybody", "whoever"),
    *("say", "tell", "hear", "speak", "council", "chair", "desk", "crew", "kin", "elector", "electorate", "keeper"),
    *("scout", "sponsor", "let_go", "begin_anew", "see_through", "bear_with"),
}


def banned_words(source: str) -> list[str]:
    """List banned words in comments and strings, with their lines."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [token for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]
    return [f"{token.start[0]}: {match[0]}" for token in texts for match in BANNED_TEXT.finditer(token.string)]


def odd_comments(source: str) -> list[str]:
    """List words that comments and docstrings should not have."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts = [token.string for token in tokens if token.type == tokenize.COMMENT]
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts += [ast.get_docstring(node) or "" for node in ast.walk(ast.parse(source)) if isinstance(node, owners)]
    return [match[0] for text in texts for match in PLAIN_COMMENT.finditer(text)]


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name


def banned_names(source: str) -> list[str]:
    names = defined_names(ast.parse(source))
    return [f"{line}: {name}" for line, name in names if name.lstrip("_") in BANNED_NAMES]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE.parent)))
def test_a_module_uses_the_vocabulary_of_the_field(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert banned_words(source) == []
    assert banned_names(source) == []
    assert odd_comments(source) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_uses_the_vocabulary_of_the_field(path: Path) -> None:
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    assert [f"{number}: {match[0]}" for number, line in lines for match in BANNED_TEXT.finditer(line)] == []


def test_a_banned_word_is_detected() -> None:
    assert banned_words('# The keeper waits.\nx = "nobody here"\n') == ["1: keeper", "2: nobody"]
    assert odd_comments('x = "our"  # for ever\ndef f():\n    """Stop us."""\n') == ["for ever", "us"]
    assert banned_names("def f(told):\n    _said = told\n") == ["1: told", "2: _said"]


@pytest.mark.parametrize("package", ["shoal", "shoal_lab"])
def test_no_two_classes_share_a_name(package: str) -> None:
    """The lab is a package of its own, with a public API of its own: its Node is not that of a cluster."""
    paths = [path for path in MODULES if path.relative_to(SOURCE.parent).parts[0] == package]
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in paths)
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert len(names) > 10
    assert [name for name, count in names.items() if count > 1] == []


def test_no_two_core_modules_share_a_name() -> None:
    core = [path for path in MODULES if path.relative_to(SOURCE.parent).parts[1] in CORE and path.stem != "__init__"]
    assert len(core) > 50
    assert [name for name, count in Counter(path.stem for path in core).items() if count > 1] == []
