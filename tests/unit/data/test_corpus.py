"""The built-in corpus is correct English, distinct, and the same everywhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.corpus import (
    ANIMALS,
    BLOCKS,
    PEOPLE,
    VERBS,
    Clause,
    Form,
    Question,
    Subject,
    Verb,
    distinct_sentences,
    forms_for,
    generate,
    ing_form,
    make_shard,
    past_form,
    render,
    tagged,
    third_person,
    training_sentences,
    write_corpus,
)
from shoal.errors import ConfigError, UsageError

BY_BASE = {verb.base: verb for verb in VERBS}
BY_TEXT = {subject.text: subject for subject in PEOPLE + ANIMALS}

# Written by hand, not by the rules: base, third person, past, participle, -ing form.
FORMS = """
arrive arrives arrived arrived arriving
be is was been being
begin begins began begun beginning
break breaks broke broken breaking
brush brushes brushed brushed brushing
buy buys bought bought buying
carry carries carried carried carrying
catch catches caught caught catching
choose chooses chose chosen choosing
clap claps clapped clapped clapping
come comes came come coming
cook cooks cooked cooked cooking
cry cries cried cried crying
cut cuts cut cut cutting
discover discovers discovered discovered discovering
do does did done doing
draw draws drew drawn drawing
drink drinks drank drunk drinking
drive drives drove driven driving
drop drops dropped dropped dropping
eat eats ate eaten eating
enjoy enjoys enjoyed enjoyed enjoying
fall falls fell fallen falling
fix fixes fixed fixed fixing
fly flies flew flown flying
forget forgets forgot forgotten forgetting
give gives gave given giving
go goes went gone going
have has had had having
help helps helped helped helping
hide hides hid hidden hiding
hurry hurries hurried hurried hurrying
know knows knew known knowing
lie lies lay lain lying
listen listens listened listened listening
mix mixes mixed mixed mixing
open opens opened opened opening
pay pays paid paid paying
plan plans planned planned planning
play plays played played playing
prefer prefers preferred preferred preferring
read reads read read reading
ride rides rode ridden riding
run runs ran run running
see sees saw seen seeing
sing sings sang sung singing
sit sits sat sat sitting
sleep sleeps slept slept sleeping
stir stirs stirred stirred stirring
stop stops stopped stopped stopping
study studies studied studied studying
swim swims swam swum swimming
take takes took taken taking
tie ties tied tied tying
try tries tried tried trying
use uses used used using
visit visits visited visited visiting
wash washes washed washed washing
write writes wrote written writing
"""


@pytest.mark.parametrize("line", FORMS.strip().splitlines())
def test_verb_forms_match_a_handwritten_table(line: str) -> None:
    base, third, past, participle, ing = line.split()
    verb = BY_BASE[base]
    assert (verb.third, verb.past, verb.participle, verb.ing) == (third, past, participle, ing)


@pytest.mark.parametrize(
    ("base", "third", "past", "ing"),
    [
        ("agree", "agrees", "agreed", "agreeing"),
        ("die", "dies", "died", "dying"),
        ("hop", "hops", "hopped", "hopping"),
        ("hope", "hopes", "hoped", "hoping"),
        ("kiss", "kisses", "kissed", "kissing"),
        ("permit", "permits", "permitted", "permitting"),
        ("show", "shows", "showed", "showing"),
        ("type", "types", "typed", "typing"),
        ("veto", "vetoes", "vetoed", "vetoing"),
    ],
)
def test_regular_verbs_outside_the_table_are_spelled_correctly(base: str, third: str, past: str, ing: str) -> None:
    assert (third_person(base), past_form(base), ing_form(base)) == (third, past, ing)


SHAPES: list[tuple[str, str, str, str, str, bool, Question | None]] = [
    ("She does not go to school.", "she", "go", "present", "simple", True, None),
    ("Have they been running in the park?", "they", "run", "present", "perfect continuous", False, "yes/no"),
    ("I am carrying heavy bags.", "I", "carry", "present", "continuous", False, None),
    ("Tom flies to the coast.", "Tom", "fly", "present", "simple", False, None),
    ("Did you not do the dishes?", "you", "do", "past", "simple", True, "yes/no"),
    ("Is he tired?", "he", "be", "present", "simple", False, "yes/no"),
    ("I am not tired.", "I", "be", "present", "simple", True, None),
    ("Why were we not tired?", "we", "be", "past", "simple", True, "why"),
    ("The girl has been tired.", "the girl", "be", "present", "perfect", False, None),
    ("My parents do not have a red car.", "my parents", "have", "present", "simple", True, None),
    ("Has Anna had a red car?", "Anna", "have", "present", "perfect", False, "yes/no"),
    ("Tom and Anna were not tying the ropes.", "Tom and Anna", "tie", "past", "continuous", True, None),
    ("It will have been lying on the grass.", "it", "lie", "future", "perfect continuous", False, None),
    ("The children will write letters.", "the children", "write", "future", "simple", False, None),
    ("Will the teacher not be writing letters?", "the teacher", "write", "future", "continuous", True, "yes/no"),
    ("How long had the old man been waiting at the door?", "the old man", "wait", "past", "perfect continuous", False,
     "how long"),
    ("Why does my sister worry about money?", "my sister", "worry", "present", "simple", False, "why"),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_sentences_match_handwritten_examples(shape: tuple[str, str, str, str, str, bool, Question | None]) -> None:
    text, subject, base, *form = shape
    verb = BY_BASE[base]
    # Taken from the forms the generator uses: this also shows that it can generate the sentence.
    wanted = next(f for f in forms_for(verb.kind) if [f.tense, f.aspect, f.negated, f.question, f.time] == [*form, ""])
    assert render(Clause(BY_TEXT[subject], verb, verb.complements[0]), wanted) == text


@st.composite
def clauses_with_forms(draw: st.DrawFn) -> tuple[Clause, Form]:
    verbs, subjects = draw(st.sampled_from(BLOCKS))
    verb = draw(st.sampled_from(verbs))
    complement = draw(st.sampled_from(verb.complements))
    return Clause(draw(st.sampled_from(subjects)), verb, complement), draw(st.sampled_from(forms_for(verb.kind)))


def verb_words(clause: Clause, form: Form) -> list[str]:
    """Return the verb group: the sentence without opening, subject, negation, complement and time."""
    text = render(clause, form)[:-1]
    text = text[0].lower() + text[1:] if not text.startswith(("I ", "Tom", "Anna")) else text
    for opening in ("why ", "how long "):
        text = text.removeprefix(opening)
    text = text.removesuffix(f" {form.time}").removesuffix(f" {clause.complement}")
    return [word for word in f" {text} ".replace(f" {clause.subject.text} ", " ").split() if word != "not"]


@given(clauses_with_forms())
def test_the_first_verb_agrees_with_the_subject(example: tuple[Clause, Form]) -> None:
    clause, form = example
    first = verb_words(clause, form)[0]
    singular = clause.subject.person == 3 and clause.subject.number == "singular"
    if clause.subject.text == "I":
        assert first not in {"is", "are", "were", "has", "does"}
    elif singular:
        assert first not in {"am", "are", "were", "have", "do"}
    else:
        assert first not in {"am", "is", "was", "has", "does"}
    if form.tense == "present":
        assert first.endswith("s") == (singular or first == "miss")


@given(clauses_with_forms())
def test_every_auxiliary_is_followed_by_the_right_form(example: tuple[Clause, Form]) -> None:
    clause, form = example
    *helpers, main = verb_words(clause, form)
    verb = clause.verb
    if form.tense == "future":
        assert helpers[0] == "will"
    if not helpers:
        assert main in {verb.third, verb.past, verb.base, "am", "are", "were"}
    elif helpers[-1] in {"will", "do", "does", "did"}:
        assert main == verb.base
    elif helpers[-1] in {"have", "has", "had"}:
        assert main == verb.participle
    else:
        assert helpers[-1] in {"am", "is", "are", "was", "were", "be", "been"}
        assert main == verb.ing


@given(clauses_with_forms())
def test_negations_and_questions_have_an_auxiliary_and_the_right_mark(example: tuple[Clause, Form]) -> None:
    clause, form = example
    text = render(clause, form)
    words = verb_words(clause, form)
    if form.negated or form.question:
        assert len(words) > 1 or clause.verb.base == "be"
    assert (" not " in text) == form.negated
    assert text.endswith("?" if form.question else ".")
    if form.question:
        assert f"{words[0]} {clause.subject.text}" in text[0].lower() + text[1:]


@pytest.mark.parametrize("kind", ["state", "event"])
def test_states_and_events_are_never_continuous(kind: str) -> None:
    sentences = [sentence for sentence in generate(20_000, 1) if BY_BASE[sentence.verb].kind == kind]
    assert len(sentences) > 500
    for sentence in sentences:
        assert "continuous" not in sentence.aspect
        assert BY_BASE[sentence.verb].ing not in sentence.text.split()


def test_the_table_covers_regular_and_irregular_verbs() -> None:
    irregular = [verb for verb in VERBS if verb.past != past_form(verb.base)]
    assert len(irregular) >= 30
    assert len(VERBS) - len(irregular) >= 30
    assert len(BY_BASE) == len(VERBS)


def test_no_complement_names_a_subject() -> None:
    nouns = [subject.text for subject in PEOPLE + ANIMALS if " " in subject.text]
    assert not [c for verb in VERBS for c in verb.complements if any(noun in c for noun in nouns)]


def test_sentences_are_distinct_short_and_ascii() -> None:
    sentences = [sentence.text for sentence in generate(40_000, 35_000)]
    assert len(set(sentences)) == 40_000
    assert all(sentence.isascii() and "  " not in sentence for sentence in sentences)
    assert 25 <= sum(map(len, sentences)) / len(sentences) <= 40


def test_a_seed_gives_the_same_sentences_on_every_machine() -> None:
    """When this changes on purpose, raise GRAMMAR_VERSION: caches of encoded text are named after it."""
    text = "\n".join(sentence.text for sentence in generate(5_000, 35_000))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "3fe84f7684df9c45c6b631f1973c1440753212e8343e5449b5a6d977a3defd20"
    )


def test_another_seed_gives_another_order() -> None:
    assert generate(100, 1) != generate(100, 2)


def test_a_longer_corpus_begins_with_the_shorter_one() -> None:
    assert generate(500, 7)[:200] == generate(200, 7)


def test_the_number_of_distinct_sentences_is_correct() -> None:
    """Generate all sentences of two subjects; no two subjects share a sentence."""
    sentences: list[str] = []
    for verbs, subjects in BLOCKS:
        for subject in (BY_TEXT["she"], BY_TEXT["they"]):
            assert subject in subjects
            sentences.extend(_all_sentences(verbs, subject))
    twins = sum(len(verb.complements) for verb in VERBS if verb.past == verb.base)
    assert twins > 0
    assert len(sentences) - len(set(sentences)) == twins


def _all_sentences(verbs: tuple[Verb, ...], subject: Subject) -> list[str]:
    clauses = [Clause(subject, verb, complement) for verb in verbs for complement in verb.complements]
    return [render(clause, form) for clause in clauses for form in forms_for(clause.verb.kind)]


def test_a_request_for_too_many_sentences_names_the_maximum() -> None:
    most = distinct_sentences()
    assert most > 100_000
    with pytest.raises(ConfigError, match=str(most)) as caught:
        generate(most + 1, 0)
    assert f"data.sentences={most}" in caught.value.fix


def test_tags_describe_the_grammar_of_a_sentence() -> None:
    form = Form("past", "continuous", negated=True, question="yes/no", time="yesterday")
    sentence = tagged(Clause(BY_TEXT["we"], BY_BASE["run"], "in the park"), form)
    assert vars(sentence) == {
        "text": "Were we not running in the park yesterday?",
        "verb": "run",
        "person": 1,
        "number": "plural",
        "tense": "past",
        "aspect": "continuous",
        "negated": True,
        "question": "yes/no",
    }


def test_the_written_corpus_is_split_without_overlap(tmp_path: Path) -> None:
    sentences = generate(1_000, 3)
    write_corpus(tmp_path, sentences, 0.1, 3)
    parts = [_read(tmp_path / name) for name in ("train.jsonl", "val.jsonl")]
    assert [len(part) for part in parts] == [900, 100]
    texts = [line["text"] for part in parts for line in part]
    assert sorted(map(str, texts)) == sorted(sentence.text for sentence in sentences)
    assert all(set(line) == set(vars(sentences[0])) for part in parts for line in part)


def test_another_seed_holds_out_other_sentences(tmp_path: Path) -> None:
    sentences = generate(200, 3)
    assert write_corpus(tmp_path, sentences, 0.1, 1)[1] != write_corpus(tmp_path, sentences, 0.1, 2)[1]


def test_training_sentences_are_those_of_the_default_configuration() -> None:
    sentences = training_sentences()
    assert len(sentences) == len(set(sentences)) == 36_000


def _read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="ascii").splitlines()]


@given(st.lists(st.integers(), max_size=100), st.integers(1, 12))
def test_make_shard_covers_everything_once(items: list[int], world: int) -> None:
    shards = [make_shard(rank, world, items) for rank in range(world)]
    assert sorted(item for shard in shards for item in shard) == sorted(items)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert all(shards[index % world][index // world] == item for index, item in enumerate(items))


def test_make_shard_without_items_uses_the_grammar_corpus() -> None:
    shards = [make_shard(rank, 3) for rank in range(3)]
    assert sum(map(len, shards)) == len(make_shard(0, 1))
    assert shards[0][0].endswith((".", "?"))
    assert not set(shards[0]) & set(shards[1])


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_make_shard_refuses_a_rank_that_does_not_exist(rank: int, world: int) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        make_shard(rank, world, [1, 2, 3])
