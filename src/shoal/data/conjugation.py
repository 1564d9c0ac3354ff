"""English verb forms: the spelling of regular verbs, and the verb group of a clause as a list of words.

A verb group is a chain, `will` → `have` → `be` → main verb, in which every verb decides the form of the next one:
`will` and `do` want the base, `have` the participle, `be` the -ing form. Only the first one agrees with the subject.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

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
    """A main verb with the complements that fit it.

    An `action` takes every aspect. An `event` is over at once (`find`, `win`) and a `state` goes on by itself (`know`,
    `own`): neither takes a continuous aspect.
    """

    base: str
    past: str
    participle: str
    kind: Kind = "action"
    complements: tuple[str, ...] = ()

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


def verb_group(verb: Verb, tense: Tense, aspect: Aspect, subject: Subject, helped: bool) -> list[str]:
    """The words from finite to main verb; `helped` (negated or asked) adds `do` where nothing else helps."""
    chain = _chain(verb, tense, aspect)
    if helped and len(chain) == 1 and verb.base != "be":
        chain.insert(0, DO)
    words = [finite(chain[0], tense, subject)]
    words.extend(_after(before, word) for before, word in pairwise(chain))
    return words


def _chain(verb: Verb, tense: Tense, aspect: Aspect) -> list[Verb]:
    helpers = [
        (WILL, tense == "future"),
        (HAVE, aspect.startswith("perfect")),
        (BE, aspect.endswith("continuous")),
    ]
    return [helper for helper, wanted in helpers if wanted] + [verb]


def _after(before: Verb, word: Verb) -> str:
    if before is HAVE:
        return word.participle
    return word.ing if before is BE else word.base


def finite(verb: Verb, tense: Tense, subject: Subject) -> str:
    """The one form that agrees with its subject; `will` is written as a present."""
    if verb.base == "be":
        return _finite_be(tense, subject)
    if tense == "past":
        return verb.past
    return verb.third if subject.takes_s else verb.base


def _finite_be(tense: Tense, subject: Subject) -> str:
    first = subject.person == 1 and subject.number == "singular"
    if tense == "past":
        return "was" if first or subject.takes_s else "were"
    if first:
        return "am"
    return "is" if subject.takes_s else "are"


def third_person(base: str) -> str:
    if _ends_in_consonant_y(base):
        return base[:-1] + "ies"
    return base + ("es" if base.endswith(("s", "x", "z", "ch", "sh", "o")) else "s")


def past_form(base: str) -> str:
    """Past and participle of a regular verb."""
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
    """`stop` → `stopp`, but `help`, `cook`, `show`, `fix` and `visit` stay."""
    stressed = base in _STRESSED_AT_THE_END or _vowel_groups(base) == 1
    if stressed and _ends_in_consonant_vowel_consonant(base):
        return base + base[-1]
    return base


def _ends_in_consonant_vowel_consonant(base: str) -> bool:
    if len(base) < 3 or base[-1] in _VOWELS + "wxy":
        return False
    return base[-2] in _VOWELS and base[-3] not in _VOWELS


def _vowel_groups(base: str) -> int:
    marks = [False, *(letter in _VOWELS for letter in base)]
    return sum(here and not before for before, here in pairwise(marks))
