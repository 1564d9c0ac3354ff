"""The words of the grammar corpus: verbs with complements that fit them, subjects, and expressions of time.

A line of a table is `base [past participle] | complement; complement; …`; a regular verb gives its base only.
Complements name no time and none of the subjects, so that any combination is a sentence somebody could say.
"""

from __future__ import annotations

from shoal.data.conjugation import Aspect, Kind, Subject, Tense, Verb, past_form

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
