"""Cut the nodes of a run from each other, heal the cut, and read from the ledger which side trained meanwhile."""

from __future__ import annotations

import json
from dataclasses import dataclass

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result

SCENARIO = """\
name = "{name}"
row = 7
text = "node{nodes} is cut off from the others, then the cut heals"
nodes = {nodes}
watch_s = {watch_s}
training.members = {{ on_silent_tie = "{on_silent_tie}" }}
steps = [
  {{ at_step = 20, do = "cut", between = ["node{nodes}"] }},
  {{ after_s = 8.0, do = "heal" }},
]
expect = {{ members = {nodes}{rejoin} }}
"""
# After this part of the cut each side has decided; before it, commits are those of the last common steps.
DECIDED = 0.75


@dataclass(frozen=True)
class Split:
    """What is left of a run that was cut."""

    sides: set[bool]  # that committed steps during the cut; True is the side of the node that was cut off
    pause_s: float  # the longest time without a step on any node
    begun: set[str]  # lineages that committed during the cut
    abandoned: set[str]  # lineages
    failed: list[str]  # of what the scenario checks, such as a clean ledger and equal replicas


def run(experiment: Experiment) -> Result:
    majority = cut(experiment, "two-and-one", 3, "continue")
    tie = cut(experiment, "one-and-one", 2, "continue")
    pause = cut(experiment, "one-and-one-pause", 2, "pause")
    verified = experiment.shoal("verify", "one-and-one/one-and-one-1", "--json", codes=(0, 1)).json()
    ledger = verified["ledger"]
    splits = {"2|1": majority, "1|1": tie, "1|1, pause": pause}
    failed = [f"{name}: {text}" for name, split in splits.items() for text in split.failed]
    return Result(
        theory={"majority": "the two", "tie": "both sides", "pause": "none", "lineages": "1"},
        measured={
            "majority": side_names(majority, "the two", "the one"),
            "tie": side_names(tie, "one of them", "one of them"),
            "pause": side_names(pause, "one of them", "one of them"),
            "lineages": str(len(tie.begun - tie.abandoned)),
        },
        checks=[
            Check(
                "all nodes were together again, with equal weights and a clean ledger", not failed, "; ".join(failed)
            ),
            Check(
                "verify finds no step twice and none missing, after 1|1, too",
                bool(verified["ok"]) and not ledger["forked"] and not ledger["gaps"],
                f"{ledger['steps']} steps stand, {ledger['abandoned']} are abandoned",
            ),
            Check("with a majority, or with pause, nothing was given up", not majority.abandoned | pause.abandoned),
        ],
        figures={
            "majority_pause": majority.pause_s,
            "pause_pause": pause.pause_s,
            "tie_abandoned": ledger["abandoned"],
        },
        picture=Bars(
            "The longest time without a step",
            "s",
            list(splits),
            {"seconds": [split.pause_s for split in splits.values()]},
        ),
    )


def cut(experiment: Experiment, name: str, nodes: int, on_silent_tie: str) -> Split:
    # A node that trained apart rejoins after the cut; nodes that paused regroup, and get some seconds for it.
    watch_s, rejoin = (6.0, "") if on_silent_tie == "pause" else (2.0, ", rejoin_within_s = 60.0")
    text = SCENARIO.format(name=name, nodes=nodes, on_silent_tie=on_silent_tie, watch_s=watch_s, rejoin=rejoin)
    (experiment.folder / f"{name}.toml").write_text(text)
    words = ("chaos", "run", f"{name}.toml", "--on", f"lab:{nodes}", "--out", name, "--json")
    [played] = experiment.shoal(*words, codes=(0, 1)).json()["runs"]
    folder = experiment.folder / name / f"{name}-1"
    began, ended = (json.loads(line)["time"] for line in (folder / "chaos.jsonl").read_text().splitlines())
    ledger = [json.loads(line) for line in (folder / "commits.jsonl").read_text().splitlines()]
    decided = began + DECIDED * (ended - began)
    during = [one for one in ledger if "step" in one and decided < one["time"] < ended]
    return Split(
        sides={nodes - 1 in one["members"] for one in during},
        pause_s=played["measured"]["longest_pause_s"],
        begun={one["lineage"] for one in during},
        abandoned={one["abandoned"] for one in ledger if "abandoned" in one},
        failed=[one["name"] for one in played["assertions"] if not one["ok"]],
    )


def side_names(split: Split, others: str, last: str) -> str:
    if len(split.sides) == 2:
        return "both sides"
    return last if True in split.sides else others if split.sides else "none"
