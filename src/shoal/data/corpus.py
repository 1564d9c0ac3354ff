"""Training text: the user's files, and the built-in corpus of English sentences.

The user's text is one file, or every text file under a folder, checked before it is used. `.txt`, `.md` and `.jsonl`
count as text in a folder; a single file may have any name. A `.jsonl` file gives the `text` field of each line. Links
to folders are not followed, so a loop cannot trap the walk, and hidden names are skipped.

The built-in corpus is every English sentence that the tables of `grammar.json` can make, in a seeded order. All
sentences are numbered, and a number becomes a sentence without the others, so drawing forty thousand of several hundred
thousand costs only what is drawn.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import random
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Literal, NoReturn, TypeVar, overload

from shoal.config.schema import DataConfig
from shoal.errors import ConfigError, DataError, UsageError

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
_JSON_LINES = ".jsonl"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_texts(path: Path) -> Iterator[str]:
    """Yield the text of every file in a fixed order; raise where all of them are blank."""
    is_blank = True
    for file in find_texts(path):
        text = _read_text_file(file)
        is_blank = is_blank and not text.strip()
        yield text
    if is_blank:
        raise DataError(
            f"{path} holds no text: it is empty or only whitespace",
            why="there is nothing to train on",
            fix="name another file or folder: --set data.path=my.txt",
        )


def find_texts(path: Path) -> tuple[Path, ...]:
    """Return the regular files to read, sorted. Reads names only, no content."""
    try:
        path = path.expanduser()
        mode = path.stat().st_mode
    except (OSError, ValueError, RuntimeError) as error:
        _refuse(path, error)
    if stat.S_ISDIR(mode):
        return _texts_below(path)
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{path} is neither a file nor a folder",
            why="a pipe or a device can be read once only, and may wait for a writer without end",
            fix=f"save it first: cat {path} > my.txt, then --set data.path=my.txt",
        )
    return (path,)


def _texts_below(folder: Path) -> tuple[Path, ...]:
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=lambda error: _refuse(folder, error)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths.extend(Path(parent, name) for name in names if _looks_like_text(name))
    texts = tuple(sorted(filter(_is_regular, paths)))
    if not texts:
        raise DataError(
            f"the folder {folder} holds no text files",
            why=f"only {', '.join(TEXT_SUFFIXES)} files count as text, and hidden ones do not",
            fix="name the file itself, whatever its ending: --set data.path=FOLDER/FILE",
        )
    return texts


def _is_regular(path: Path) -> bool:
    """Skip a pipe, a socket or a dangling link among the texts; raise for a file that may not be looked at."""
    try:
        return path.is_file()
    except OSError as error:
        _refuse(path, error)


def _looks_like_text(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in TEXT_SUFFIXES


def digest_files(files: Sequence[Path]) -> str:
    """Return a digest of the content, independent of file names. Reads in blocks: files may exceed the memory."""
    whole = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                part = hashlib.file_digest(file, "sha256")
        except OSError as error:
            _refuse(path, error)
        whole.update(b"jsonl" if _is_json_lines(path) else b"plain")
        whole.update(part.digest())
    return whole.hexdigest()


def file_stamps(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Return size and modification time of each file; equal stamps before and after mean that no file was written."""
    try:
        return [(status.st_size, status.st_mtime_ns) for status in map(Path.stat, files)]
    except OSError as error:
        _refuse(Path(str(error.filename)), error)


def _read_text_file(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        _refuse(path, error)
    text = _decode(raw, path)
    return "\n".join(_json_texts(text, path)) if _is_json_lines(path) else text


def _decode(raw: bytes, path: Path) -> str:
    """Decode UTF-8 without its byte-order mark; end lines in `\\n`, as Python's own text files do."""
    try:
        return raw.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if raw.startswith(_UTF16_MARKS) else "ISO-8859-1"
        raise DataError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}",
            why=f"it is binary, or in another encoding (perhaps {encoding})",
            fix=f"iconv -f {encoding} -t UTF-8 {path} > my.txt, then --set data.path=my.txt",
        ) from None


def _is_json_lines(path: Path) -> bool:
    return path.suffix.lower() == _JSON_LINES


def _json_texts(content: str, path: Path) -> Iterator[str]:
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            # JSON can spell half of a surrogate pair, which is not a character and cannot be encoded again.
            text.encode("utf-8")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise DataError(
                f'{path} line {number} is not a JSON object with a "text" field that holds text',
                why='every line of a .jsonl file must be like {"text": "She runs."}',
                fix="correct that line, or give the file the ending .txt to read it as plain text",
            ) from None
        yield str(text)


def _refuse(path: Path, error: Exception) -> NoReturn:
    """Raise the `DataError` that explains why `path` cannot be read."""
    if isinstance(error, FileNotFoundError):
        raise DataError(
            f"there is no text at {path}",
            why="data.path names a text file or a folder of text files",
            fix=f"check the path: ls {path.parent}",
        ) from None
    if isinstance(error, PermissionError):
        denied = error.filename or path
        raise DataError(
            f"cannot read {denied}: permission denied",
            why="the file, or a folder on the way to it, is not readable for you",
            fix=f"look at it: ls -ld {denied}, then chmod u+r, or name another text",
        ) from None
    reason = error.strerror if isinstance(error, OSError) else str(error)
    raise DataError(f"cannot read {path}: {reason}", fix=f"look at it: ls -ld {path}") from None


Tense = Literal["present", "past", "future"]
Aspect = Literal["simple", "continuous", "perfect", "perfect continuous"]
Number = Literal["singular", "plural", "either"]
Kind = Literal["action", "event", "state"]

TENSES: tuple[Tense, ...] = ("present", "past", "future")
ASPECTS: tuple[Aspect, ...] = ("simple", "continuous", "perfect", "perfect continuous")

_VOWELS = "aeiou"
# Verbs of two syllables with the stress on the second double their last letter; spelling alone does not show stress.
_STRESSED_AT_THE_END = frozenset({"admit", "begin", "forget", "permit", "prefer", "refer", "regret"})


@dataclass(frozen=True)
class Verb:
    base: str
    past: str
    participle: str
    # An action takes every aspect. An event is over at once (find, win), a state lasts (know, own): neither takes a
    # continuous aspect.
    kind: Kind = "action"
    complements: tuple[str, ...] = ()  # Phrases that can follow the verb.

    @property
    def third(self) -> str:
        return _IRREGULAR_THIRD.get(self.base) or third_person(self.base)

    @property
    def ing(self) -> str:
        return ing_form(self.base)


@dataclass(frozen=True)
class Subject:
    text: str
    person: Literal[1, 2, 3]
    number: Number

    @property
    def takes_s(self) -> bool:
        return self.person == 3 and self.number == "singular"


BE = Verb("be", "was", "been", "state")
HAVE = Verb("have", "had", "had", "state")
DO = Verb("do", "did", "done")
WILL = Verb("will", "would", "would")

_IRREGULAR_THIRD = {"be": "is", "have": "has", "will": "will"}


def _verb_group(verb: Verb, tense: Tense, aspect: Aspect, subject: Subject, needs_auxiliary: bool) -> list[str]:
    """Return the words from the finite to the main verb; add `do` to a negation or question without an auxiliary.

    A verb group is a chain, `will` → `have` → `be` → main verb, in which every verb decides the form of the next one:
    `will` and `do` want the base, `have` the participle, `be` the -ing form. Only the first agrees with the subject.
    """
    auxiliaries = ((WILL, tense == "future"), (HAVE, aspect.startswith("perfect")), (BE, aspect.endswith("continuous")))
    chain = [*(auxiliary for auxiliary, is_used in auxiliaries if is_used), verb]
    if needs_auxiliary and len(chain) == 1 and verb.base != "be":
        chain.insert(0, DO)
    return [_finite_form(chain[0], tense, subject), *(_form_after(*pair) for pair in pairwise(chain))]


def _form_after(before: Verb, word: Verb) -> str:
    if before is HAVE:
        return word.participle
    return word.ing if before is BE else word.base


def _finite_form(verb: Verb, tense: Tense, subject: Subject) -> str:
    """Return the form that agrees with the subject; `will` is written as a present."""
    if verb.base == "be":
        is_first = subject.person == 1 and subject.number == "singular"
        if tense == "past":
            return "was" if is_first or subject.takes_s else "were"
        return "am" if is_first else "is" if subject.takes_s else "are"
    if tense == "past":
        return verb.past
    return verb.third if subject.takes_s else verb.base


def third_person(base: str) -> str:
    if _ends_in_consonant_y(base):
        return base[:-1] + "ies"
    return base + ("es" if base.endswith(("s", "x", "z", "ch", "sh", "o")) else "s")


def past_form(base: str) -> str:
    """Return the past, which is also the participle, of a regular verb."""
    if base.endswith("e"):
        return base + "d"
    if _ends_in_consonant_y(base):
        return base[:-1] + "ied"
    return _doubled(base) + "ed"


def ing_form(base: str) -> str:
    if base.endswith("ie"):
        return base[:-2] + "ying"
    has_another_vowel = any(letter in _VOWELS + "y" for letter in base[:-1])
    if base.endswith("e") and not base.endswith(("ee", "oe", "ye")) and has_another_vowel:
        return base[:-1] + "ing"
    return _doubled(base) + "ing"


def _ends_in_consonant_y(base: str) -> bool:
    return base.endswith("y") and base[-2] not in _VOWELS


def _doubled(base: str) -> str:
    """Double the last letter of a short stressed syllable: `stop` → `stopp`; `help`, `cook`, `fix`, `visit` stay."""
    are_vowels = [False, *(letter in _VOWELS for letter in base)]
    vowel_groups = sum(is_vowel and not before for before, is_vowel in pairwise(are_vowels))
    if base not in _STRESSED_AT_THE_END and vowel_groups != 1:
        return base
    ends_in_consonant = len(base) >= 3 and base[-1] not in _VOWELS + "wxy"
    if ends_in_consonant and base[-2] in _VOWELS and base[-3] not in _VOWELS:
        return base + base[-1]
    return base


# The words of the corpus. Every line of a verb table is `base [past participle] | complement; complement; …`; a regular
# verb gives its base only. Complements name no time and none of the subjects, so that every combination is a sentence.
_WORDS = json.loads(Path(__file__).with_name("grammar.json").read_text(encoding="utf-8"))
# Expressions of time by `tense aspect`.
_TIMES: dict[str, list[str]] = _WORDS["times"]

_PRONOUNS = (
    Subject("I", 1, "singular"),
    Subject("you", 2, "either"),
    Subject("he", 3, "singular"),
    Subject("she", 3, "singular"),
    Subject("we", 1, "plural"),
    Subject("they", 3, "plural"),
)


def _third_person_subjects(group: str) -> tuple[Subject, ...]:
    numbers: tuple[Number, ...] = ("singular", "plural")
    return tuple(Subject(text, 3, number) for number in numbers for text in _WORDS[group][number])


def _parse_verbs(table: str, kind: Kind) -> tuple[Verb, ...]:
    return tuple(_parse_verb(line, kind) for line in _WORDS["verbs"][table])


def _parse_verb(line: str, kind: Kind) -> Verb:
    forms, _, complements = line.partition(" | ")
    base, *irregular = forms.split()
    past, participle = irregular or (past_form(base), past_form(base))
    return Verb(base, past, participle, kind, tuple(complements.split("; ")))


PEOPLE = (*_PRONOUNS, *_third_person_subjects("people"))
ANIMALS = _third_person_subjects("animals")
# Each block combines every one of its verbs with every one of its subjects.
BLOCKS: tuple[tuple[tuple[Verb, ...], tuple[Subject, ...]], ...] = (
    (_parse_verbs("actions_of_all", "action"), PEOPLE + ANIMALS),
    (_parse_verbs("actions_of_people", "action"), PEOPLE),
    (_parse_verbs("events", "event"), PEOPLE),
    (_parse_verbs("states", "state"), PEOPLE),
)
VERBS: tuple[Verb, ...] = tuple(verb for verbs, _ in BLOCKS for verb in verbs)

# Part of the cache key of an encoded corpus: raise it whenever a seed gives other sentences than before.
GRAMMAR_VERSION = 1

Question = Literal["yes/no", "why", "how long"]
_QUESTIONS: tuple[Question | None, ...] = (None, "yes/no", "why", "how long")


@dataclass(frozen=True)
class Clause:
    subject: Subject
    verb: Verb
    complement: str


@dataclass(frozen=True)
class Form:
    tense: Tense
    aspect: Aspect
    negated: bool
    question: Question | None
    time: str  # An adverbial such as `yesterday`, or empty.


@dataclass(frozen=True)
class Sentence:
    """A line of `train.jsonl`: the text and its grammatical labels."""

    text: str
    verb: str
    person: int
    number: Number
    tense: Tense
    aspect: Aspect
    negated: bool
    question: Question | None


def generate(count: int, seed: int) -> list[Sentence]:
    """Return `count` distinct sentences, the same for a seed on every machine."""
    most = distinct_sentences()
    if count > most:
        raise ConfigError(
            f"data.sentences={count} is more than the {most} distinct sentences of the built-in corpus",
            why="sentences are never repeated, so that validation holds none that were trained on",
            fix=f"--set data.sentences={most}, or name a text of your own: --set data.path=my.txt",
        )
    blocks = _blocks()
    chosen: dict[str, Sentence] = {}
    for number in _shuffled(_size(blocks), seed):
        if len(chosen) >= count:
            break
        sentence = tagged(*_unpack(number, blocks))
        chosen.setdefault(sentence.text, sentence)
    return list(chosen.values())


def distinct_sentences() -> int:
    """Count the sentences. `They cut the grass.` is both present and past: it counts, and is drawn, once."""
    clauses = (clause for clauses, _ in _blocks() for clause in clauses)
    twins = sum(clause.verb.past == clause.verb.base and not clause.subject.takes_s for clause in clauses)
    return _size(_blocks()) - twins


def tagged(clause: Clause, form: Form) -> Sentence:
    subject = clause.subject
    return Sentence(
        text=render(clause, form),
        verb=clause.verb.base,
        person=subject.person,
        number=subject.number,
        tense=form.tense,
        aspect=form.aspect,
        negated=form.negated,
        question=form.question,
    )


def render(clause: Clause, form: Form) -> str:
    is_question = form.question is not None
    group = _verb_group(clause.verb, form.tense, form.aspect, clause.subject, is_question or form.negated)
    order = [group[0], clause.subject.text] if is_question else [clause.subject.text, group[0]]
    opening = form.question if form.question in ("why", "how long") else ""
    negation = "not" if form.negated else ""
    words = [opening, *order, negation, *group[1:], clause.complement, form.time]
    text = " ".join(word for word in words if word)
    return text[0].upper() + text[1:] + ("?" if is_question else ".")


@cache
def forms_for(kind: Kind) -> tuple[Form, ...]:
    """Return every form that makes good English with verbs of a kind."""
    forms = [
        Form(tense, aspect, negated, question, time)
        for tense, aspect, negated, question in product(TENSES, ASPECTS, (False, True), _QUESTIONS)
        for time in ("", *_TIMES.get(f"{tense} {aspect}", ()))
    ]
    return tuple(form for form in forms if _fits(kind, form))


def _fits(kind: Kind, form: Form) -> bool:
    if form.question == "how long" and (form.negated or form.aspect != "perfect continuous"):
        return False
    # Correct everywhere, but a third of the corpus would be `Why`, and its longest third.
    if form.question == "why" and (form.time or form.aspect.startswith("perfect")):
        return False
    if kind == "action":
        return True
    if form.aspect.endswith("continuous"):
        return False
    return not form.time or (kind == "event" and form.tense != "present")


Block = tuple[tuple[Clause, ...], tuple[Form, ...]]


def _size(blocks: Sequence[Block]) -> int:
    return sum(len(clauses) * len(forms) for clauses, forms in blocks)


@cache
def _blocks() -> tuple[Block, ...]:
    blocks: list[Block] = []
    for verbs, subjects in BLOCKS:
        complements = [(verb, complement) for verb in verbs for complement in verb.complements]
        clauses = tuple(Clause(subject, verb, text) for verb, text in complements for subject in subjects)
        blocks.append((clauses, forms_for(verbs[0].kind)))
    return tuple(blocks)


def _unpack(number: int, blocks: Sequence[Block]) -> tuple[Clause, Form]:
    for clauses, forms in blocks:
        if number < len(clauses) * len(forms):
            return clauses[number // len(forms)], forms[number % len(forms)]
        number -= len(clauses) * len(forms)
    raise IndexError(number)


def _shuffled(size: int, seed: int) -> Iterator[int]:
    """Yield the numbers below `size` in a seeded order, lazily: Fisher-Yates that stores only the moved numbers.

    Python guarantees the same `random()` sequence for a seed in every version. It does not guarantee that for
    `shuffle`, `sample` or `randrange`, and numpy does not for its generators.
    """
    draw = random.Random(seed).random
    moved: dict[int, int] = {}
    for last in range(size - 1, -1, -1):
        place = int(draw() * (last + 1))
        number = moved.get(place, place)
        moved[place] = moved.pop(last, last)
        yield number


def split_sentences(
    sentences: Sequence[Sentence], val_fraction: float, seed: int
) -> tuple[list[Sentence], list[Sentence]]:
    """Split into training and validation. Both keep the order, and both get at least one of two or more."""
    held_out = min(max(round(len(sentences) * val_fraction), 1), len(sentences) - 1)
    order = _shuffled(len(sentences), seed)
    val = {next(order) for _ in range(held_out)}
    return (
        [sentence for index, sentence in enumerate(sentences) if index not in val],
        [sentence for index, sentence in enumerate(sentences) if index in val],
    )


def training_sentences() -> list[str]:
    """Return the sentences of `train.jsonl` under the default configuration."""
    config = DataConfig()
    train, _ = split_sentences(generate(config.sentences, config.seed), config.val_fraction, config.seed)
    return [sentence.text for sentence in train]


def write_corpus(
    folder: Path, sentences: Sequence[Sentence], val_fraction: float, seed: int
) -> tuple[list[Sentence], list[Sentence]]:
    """Write `train.jsonl` and `val.jsonl`, one labelled sentence per line; return the sentences of each."""
    train, val = split_sentences(sentences, val_fraction, seed)
    for name, part in (("train.jsonl", train), ("val.jsonl", val)):
        lines = (json.dumps(vars(sentence)) + "\n" for sentence in part)
        (folder / name).write_text("".join(lines), encoding="ascii", newline="\n")
    return train, val


T = TypeVar("T")


@overload
def make_shard(rank: int, world_size: int) -> list[str]: ...
@overload
def make_shard(rank: int, world_size: int, items: Sequence[T]) -> list[T]: ...
def make_shard(rank: int, world_size: int, items: Sequence[T] | None = None) -> list[T] | list[str]:
    """Return the items with `index % world_size == rank`: disjoint, complete, and equal in size to within one.

    Without `items`, use the training sentences of the built-in English-verb corpus.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise UsageError(
            f"rank {rank} of {world_size} does not exist",
            why="ranks count from 0 to world_size - 1",
            fix="pass the two values that init_distributed() returns",
        )
    if items is None:
        return training_sentences()[rank::world_size]
    return list(items[rank::world_size])
