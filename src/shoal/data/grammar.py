"""The built-in corpus: every English sentence that a table of verbs, subjects and forms can make, in a seeded order.

The whole space is numbered; a number becomes a sentence without looking at any other, so drawing forty thousand out of
several hundred thousand costs only what is drawn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

from shoal.config.schema import DataConfig
from shoal.data.conjugation import ASPECTS, TENSES, Aspect, Kind, Number, Subject, Tense, Verb, verb_group
from shoal.data.verbs import BLOCKS, TIMES
from shoal.errors import ConfigError

# Part of the cache key of an encoded corpus: raise it whenever a seed gives other sentences than before.
GRAMMAR_VERSION = 1

Question = Literal["yes/no", "why", "how long"]
_QUESTIONS: tuple[Question | None, ...] = (None, "yes/no", "why", "how long")


@dataclass(frozen=True)
class Clause:
    """Who does what."""

    subject: Subject
    verb: Verb
    complement: str


@dataclass(frozen=True)
class Form:
    """How it is said. `time` is an adverbial such as `yesterday`, or empty."""

    tense: Tense
    aspect: Aspect
    negated: bool
    question: Question | None
    time: str


@dataclass(frozen=True)
class Sentence:
    """A line of `train.jsonl`: the text and what it is an example of."""

    text: str
    verb: str
    person: int
    number: Number
    tense: Tense
    aspect: Aspect
    negated: bool
    question: Question | None


def generate_sentences(count: int, seed: int) -> list[str]:
    return [sentence.text for sentence in generate(count, seed)]


def generate(count: int, seed: int) -> list[Sentence]:
    """`count` distinct sentences, the same for a seed on every machine."""
    _check_count(count)
    blocks = _blocks()
    chosen: dict[str, Sentence] = {}
    for number in _shuffled(_size(blocks), seed):
        if len(chosen) >= count:
            break
        sentence = tagged(*_unpack(number, blocks))
        chosen.setdefault(sentence.text, sentence)
    return list(chosen.values())


def _check_count(count: int) -> None:
    most = distinct_sentences()
    if count > most:
        raise ConfigError(
            f"data.sentences={count} is more than the {most} distinct sentences of the built-in corpus",
            why="sentences are never repeated, so that validation holds none that were trained on",
            fix=f"--set data.sentences={most}, or name a text of your own: --set data.path=my.txt",
        )


def distinct_sentences() -> int:
    """How many there are. `They cut the grass.` is both a present and a past, so it counts, and is drawn, once."""
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
    asked = form.question is not None
    group = verb_group(clause.verb, form.tense, form.aspect, clause.subject, helped=asked or form.negated)
    order = [group[0], clause.subject.text] if asked else [clause.subject.text, group[0]]
    opening = form.question if form.question in ("why", "how long") else ""
    negation = "not" if form.negated else ""
    words = [opening, *order, negation, *group[1:], clause.complement, form.time]
    text = " ".join(word for word in words if word)
    return text[0].upper() + text[1:] + ("?" if asked else ".")


@cache
def forms_for(kind: Kind) -> tuple[Form, ...]:
    """Every form that makes good English with verbs of a kind."""
    spoken = [
        Form(tense, aspect, negated, question, time)
        for tense, aspect, negated, question in product(TENSES, ASPECTS, (False, True), _QUESTIONS)
        for time in ("", *TIMES.get((tense, aspect), ()))
    ]
    return tuple(form for form in spoken if _fits(kind, form))


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
    return tuple((_clauses(verbs, subjects), forms_for(verbs[0].kind)) for verbs, subjects in BLOCKS)


def _clauses(verbs: Sequence[Verb], subjects: Sequence[Subject]) -> tuple[Clause, ...]:
    return tuple(
        Clause(subject, verb, complement) for verb in verbs for complement in verb.complements for subject in subjects
    )


def _unpack(number: int, blocks: Sequence[Block]) -> tuple[Clause, Form]:
    for clauses, forms in blocks:
        if number < len(clauses) * len(forms):
            return clauses[number // len(forms)], forms[number % len(forms)]
        number -= len(clauses) * len(forms)
    raise IndexError(number)


def _shuffled(size: int, seed: int) -> Iterator[int]:
    """The numbers below `size` in a seeded order, drawn lazily (Fisher-Yates that stores only what it has moved).

    Python promises that `random()` gives the same sequence for a seed in every version; it promises nothing of the kind
    for `shuffle`, `sample` or `randrange`, and numpy nothing for its generators.
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
    """Training and validation; both keep the order of `sentences`, and both get at least one where there are two."""
    held_out = min(max(round(len(sentences) * val_fraction), 1), len(sentences) - 1)
    order = _shuffled(len(sentences), seed)
    val = {next(order) for _ in range(held_out)}
    return (
        [sentence for index, sentence in enumerate(sentences) if index not in val],
        [sentence for index, sentence in enumerate(sentences) if index in val],
    )


def training_sentences() -> list[str]:
    """What `train.jsonl` holds under the default configuration."""
    config = DataConfig()
    train, _ = split_sentences(generate(config.sentences, config.seed), config.val_fraction, config.seed)
    return [sentence.text for sentence in train]


def write_corpus(
    folder: Path, sentences: Sequence[Sentence], val_fraction: float, seed: int
) -> tuple[list[Sentence], list[Sentence]]:
    """Writes `train.jsonl` and `val.jsonl`, one tagged sentence a line, and returns what went into each."""
    train, val = split_sentences(sentences, val_fraction, seed)
    for name, part in (("train.jsonl", train), ("val.jsonl", val)):
        lines = (json.dumps(vars(sentence)) + "\n" for sentence in part)
        (folder / name).write_text("".join(lines), encoding="ascii", newline="\n")
    return train, val
