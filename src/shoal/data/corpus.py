"""The user's text: one file, or every text file under a folder, checked before anything is made of it.

`.txt`, `.md` and `.jsonl` count as text in a folder; a single file may have any name. A `.jsonl` file gives the `text`
field of each line. Links to folders are not followed, so a loop cannot trap us, and hidden names are passed over.
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
from typing import Literal, NoReturn

from shoal.config.schema import DataConfig
from shoal.errors import ConfigError, DataError

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")
_JSON_LINES = ".jsonl"
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_texts(path: Path) -> Iterator[str]:
    """One text a file, in a fixed order; nothing but whitespace in all of them is an error."""
    blank = True
    for file in find_texts(path):
        text = read_text_file(file)
        blank = blank and not text.strip()
        yield text
    if blank:
        raise DataError(
            f"{path} holds no text: it is empty or only whitespace",
            why="there is nothing to train on",
            fix="name another file or folder: --set data.path=my.txt",
        )


def find_texts(path: Path) -> tuple[Path, ...]:
    """The regular files to read, sorted; only the names are looked at, no content."""
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
            why="a pipe or a device can be read once only, and waits for somebody to write",
            fix=f"save it first: cat {path} > my.txt, then --set data.path=my.txt",
        )
    return (path,)


def _texts_below(folder: Path) -> tuple[Path, ...]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=lambda error: _refuse(folder, error)):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found.extend(Path(parent, name) for name in names if _looks_like_text(name))
    texts = tuple(sorted(filter(_is_regular, found)))
    if not texts:
        raise DataError(
            f"the folder {folder} holds no text files",
            why=f"only {', '.join(TEXT_SUFFIXES)} files count as text, and hidden ones do not",
            fix="name the file itself, whatever its ending: --set data.path=FOLDER/FILE",
        )
    return texts


def _is_regular(path: Path) -> bool:
    """A pipe, a socket or a dangling link among the texts is passed over; one we may not look at is not."""
    try:
        return path.is_file()
    except OSError as error:
        _refuse(path, error)


def _looks_like_text(name: str) -> bool:
    return not name.startswith(".") and Path(name).suffix.lower() in TEXT_SUFFIXES


def digest_files(files: Sequence[Path]) -> str:
    """Identifies the content, whatever the files are called; read in blocks, so memory does not limit it."""
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


def stamps(files: Sequence[Path]) -> list[tuple[int, int]]:
    """Size and time of the last change of each file: equal before and after means nobody wrote in between."""
    try:
        return [(status.st_size, status.st_mtime_ns) for status in map(Path.stat, files)]
    except OSError as error:
        _refuse(Path(str(error.filename)), error)


def read_text_file(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        _refuse(path, error)
    text = _decode(raw, path)
    return "\n".join(_json_texts(text, path)) if _is_json_lines(path) else text


def _decode(raw: bytes, path: Path) -> str:
    """UTF-8 without its byte-order mark, lines ending in `\\n` as Python's own text files do."""
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
        if line.strip():
            yield _json_text(line, f"{path} line {number}")


def _json_text(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
        # JSON can spell half of a surrogate pair, which is no character and cannot be encoded again.
        text.encode("utf-8")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DataError(
            f'{where} is not a JSON object with a "text" field that holds text',
            why='every line of a .jsonl file must be like {"text": "She runs."}',
            fix="correct that line, or give the file the ending .txt to read it as plain text",
        ) from None
    return str(text)


def _refuse(path: Path, error: Exception) -> NoReturn:
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


# SECTION data/conjugation
# English verb forms: the spelling of regular verbs, and the verb group of a clause as a list of words.
#
# A verb group is a chain, `will` → `have` → `be` → main verb, in which every verb decides the form of the next one:
# `will` and `do` want the base, `have` the participle, `be` the -ing form. Only the first one agrees with the subject.


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


# SECTION data/verbs
# The words of the grammar corpus: verbs with complements that fit them, subjects, and expressions of time.
#
# A line of a table is `base [past participle] | complement; complement; …`; a regular verb gives its base only.
# Complements name no time and none of the subjects, so that any combination is a sentence somebody could say.


ACTIONS_OF_ALL = """
climb | up the hill; over the wall
come came come | to the door; back home
dig dug dug | in the sand; behind the house
drink drank drunk | cold water; fresh milk; from the stream
eat ate eaten | in the kitchen; fresh fish; very slowly
hide hid hidden | under the table; behind the house
jump | over the wall; very high; into the lake
lie lay lain | on the grass; in the sun
play | in the garden; near the river; with a ball
run ran run | in the park; very fast; along the river
sit sat sat | in the sun; near the fire; on the floor
sleep slept slept | on the sofa; near the fire; very well
stand stood stood | at the gate; in the rain
swim swam swum | in the lake; across the river
wait | at the door; near the gate; outside
walk | to the beach; in the snow; along the road
watch | the birds; the rain
"""

ACTIONS_OF_PEOPLE = """
answer | the phone; the letters; hard questions
ask | for help; a lot of questions
bake | bread; an apple cake
bring brought brought | warm clothes; good news
brush | the horse; the carpet
build built built | a wall; a wooden boat; sand castles
buy bought bought | old books; fresh bread; flowers
call | the office; for help
carry | heavy bags; the boxes; water
catch caught caught | fish; the ball
chat | in the hall; about music
clap | very loudly; to the music
clean | the kitchen; the windows; the car
collect | stamps; old coins
cook | dinner; rice; on an open fire
copy | the list; the notes
count | the money; the stars
cry | at the airport; very quietly
cut cut cut | the grass; the bread; wood
dance | on the stage; to the music
do did done | the dishes; the shopping
draw drew drawn | a map; horses; small pictures
drive drove driven | to work; a red car; very carefully
enjoy | the music; the view
explain | the rules; the problem
feed fed fed | the ducks; the horses
fight fought fought | for the truth; against the fire
fix | the roof; an old bike
fly flew flown | to the coast; a kite
go went gone | to school; to the market; by train
grow grew grown | roses; tomatoes
help | at the market; in the kitchen
hold held held | the rope; the map
hurry | to the station; through the rain
jog | in the park; around the lake
laugh | at the joke; very loudly
lead led led | the way; the meeting
learn | French; new words; about history
listen | to the radio; very carefully
make made made | tea; a lot of noise; plans
mix | the colors; the salad
move | the chairs; very quietly
open | the windows; the letters
pack | the bags; the books
paint | the fence; the walls; portraits
pay paid paid | the bills; for lunch
plan | a trip; the garden; a party
pull | the rope; the cart
push | the cart; the car
read read read | the newspaper; long stories; in bed
ride rode ridden | a bike; to town; on the bus
sail | around the island; a small boat
sell sold sold | old books; fruit; tickets
send sent sent | letters; a lot of photos
share | the food; the work
shop | for shoes; at the market
sing sang sung | in a choir; old songs; very softly
speak spoke spoken | French; on the radio; very clearly
stir | the soup; the paint
study | history; at the library; for the test
sweep swept swept | the floor; the yard
take took taken | photos; the bus; notes
talk | about the weather; on the phone
teach taught taught | music; at the college
tell told told | jokes; the truth; long stories
think thought thought | about the future; very hard
throw threw thrown | stones; the ball
tidy | the room; the desk
tie | the ropes; the boxes
try | new recipes; very hard
use | the computer; a sharp knife
visit | the museum; old castles
wash | the car; the dishes
wear wore worn | a blue coat; heavy boots
work | in an office; on a farm; very hard
worry | about money; about the exam
write wrote written | letters; a long story; in English
"""

EVENTS = """
admit | the mistake; the truth
arrive | at the station; on time; by taxi
begin began begun | the lesson; a new job
break broke broken | the rules; the record
choose chose chosen | the red one; the best seat
discover | the secret; a new path
drop | the keys; the plates
fall fell fallen | off the ladder; asleep
find found found | the keys; the right road; a seat
finish | the race; the report
forget forgot forgotten | the tickets; the password
get got gotten | a letter; a good seat
give gave given | good advice; a short speech
hear heard heard | the bell; strange sounds
leave left left | the house; the party
lose lost lost | the keys; the game; the map
meet met met | the mayor; a famous singer
miss | the bus; the first act
notice | the change; the error
reach | the top; the coast
see saw seen | the sea; a rainbow; the sign
spill | the milk; some paint
stop | at the corner; the car
win won won | the race; the game; a prize
"""

STATES = """
agree | with the plan; with the judge
be was been | tired; at home; very happy; ready; late
believe | the story; the news
belong | to the club; to the team
deserve | a rest; the prize
hate | cold weather; noise
have had had | a red car; a lot of time; good ideas
know knew known | the answer; the way; the town
like | green tea; the song; long walks
love | summer; the sea; jazz
mean meant meant | well; a lot to the team
need | more time; a new phone; help
own | a small boat; the house
prefer | coffee; the quiet room
remember | the story; the old house
seem | tired; very calm; happy
trust | the doctor; the map
understand understood understood | the rules; French; the problem
want | a new bike; more sleep; some soup
"""

PRONOUNS = (
    Subject("I", 1, "singular"),
    Subject("you", 2, "either"),
    Subject("he", 3, "singular"),
    Subject("she", 3, "singular"),
    Subject("we", 1, "plural"),
    Subject("they", 3, "plural"),
)

_SINGULAR_PEOPLE = ("Anna", "Tom", "the teacher", "my sister", "her uncle", "the old man", "the girl")
_PLURAL_PEOPLE = ("the children", "my parents", "the students", "Tom and Anna", "his friends", "the two boys")

PEOPLE = (
    *PRONOUNS,
    *(Subject(text, 3, "singular") for text in _SINGULAR_PEOPLE),
    *(Subject(text, 3, "plural") for text in _PLURAL_PEOPLE),
)
ANIMALS = (
    Subject("it", 3, "singular"),
    Subject("the dog", 3, "singular"),
    Subject("our cat", 3, "singular"),
    Subject("the bears", 3, "plural"),
)

TIMES: dict[tuple[Tense, Aspect], tuple[str, ...]] = {
    ("present", "simple"): ("every day", "on Mondays"),
    ("present", "continuous"): ("now", "today"),
    ("past", "simple"): ("yesterday", "last week"),
    ("past", "continuous"): ("yesterday", "last night"),
    ("future", "simple"): ("tomorrow", "next week"),
    ("future", "continuous"): ("tomorrow", "tonight"),
}


def parse_table(table: str, kind: Kind) -> tuple[Verb, ...]:
    return tuple(_parse_line(line, kind) for line in table.strip().splitlines())


def _parse_line(line: str, kind: Kind) -> Verb:
    forms, _, complements = line.partition(" | ")
    base, *irregular = forms.split()
    past, participle = irregular or (past_form(base), past_form(base))
    return Verb(base, past, participle, kind, tuple(complements.split("; ")))


# Who can do what: each block combines every one of its verbs with every one of its subjects.
BLOCKS: tuple[tuple[tuple[Verb, ...], tuple[Subject, ...]], ...] = (
    (parse_table(ACTIONS_OF_ALL, "action"), PEOPLE + ANIMALS),
    (parse_table(ACTIONS_OF_PEOPLE, "action"), PEOPLE),
    (parse_table(EVENTS, "event"), PEOPLE),
    (parse_table(STATES, "state"), PEOPLE),
)
VERBS: tuple[Verb, ...] = tuple(verb for verbs, _ in BLOCKS for verb in verbs)


# SECTION data/grammar
# The built-in corpus: every English sentence that a table of verbs, subjects and forms can make, in a seeded order.
#
# The whole space is numbered; a number becomes a sentence without looking at any other, so drawing forty thousand
# out of several hundred thousand costs only what is drawn.


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
