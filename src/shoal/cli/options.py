"""The table of options: what each one sets, what it means, and when it has an effect.

A command is a function, or a function of a request; each of its parameters is an option or an argument of that name.
This table has those that several commands share and all that give a setting; the others stand at their command. Help,
completion, docs/settings.md, refusals and suggestions are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.config.presets import PRESET_NAMES
from shoal.config.sync_choice import OUTER_METHODS, ROUND_STEPS_TEXT, SHARDED_METHODS, SYNC_HELP, WIRE_HELP

# When an option has an effect: always, or only on a new run and not on one that is resumed.
Effect = Literal["", "new run"]


@dataclass(frozen=True)
class Option:
    help: str = ""
    setting: str = ""  # what it sets: `train.steps`
    effect: Effect = ""
    flags: str = ""  # what is typed, `--out -o`; by default the name of the parameter
    shown: str = ""  # the default in the help, where the value itself means nothing to a user
    low: float | None = None
    high: float | None = None
    metavar: str = ""
    is_argument: bool = False  # parameters without a default always are
    is_hidden: bool = False


def argument(
    help: str = "", metavar: str = "", shown: str = "", effect: Effect = "", is_hidden: bool = False
) -> Option:
    return Option(help, effect=effect, metavar=metavar, shown=shown, is_argument=True, is_hidden=is_hidden)


PROFILE = Path("profile.toml")
_BALANCE = (
    "How unequal machines share a batch: off (equally, or by run.weights), static (by their speed in the first steps) "
    "or live (shares follow their speed)"
)
_DROP = (
    "Leave a machine out that computes at less than this part of the speed of the fastest, such as 0.2; it stays a "
    "spare"
)

_COPIES = f"Copies of each part of {', '.join(SHARDED_METHODS)} on another rank: with 1, a lost machine loses no step."

# Options that give a setting, in the order of the settings.
SETTINGS = {
    "on": Option(
        "local:N, lab:N[,link=1gbit,…], lab[:NAME], slurm:N, a hosts file or join:N.", "run.on", shown="local:2"
    ),
    "threads": Option("Threads per rank.", "run.threads", shown="cores / ranks"),
    "balance": Option(f"{_BALANCE}.", "run.balance", shown="live where machines differ by more than 10%"),
    "launcher": Option("What starts the ranks: shoal, torchrun or spawn.", "run.launcher"),
    "data": Option("A text file, or a folder of text files.", "data.path"),
    "tokenizer": Option("char, byte or bpe.", "data.tokenizer"),
    "seq_len": Option("Tokens per sequence.", "model.seq_len"),
    "steps": Option("Number of steps.", "train.steps", low=1),
    "global_batch": Option("Sequences per step, over all ranks.", "train.global_batch"),
    "micro_batch": Option("Sequences that a rank computes at once.", "train.micro_batch"),
    "scaling": Option("strong: fixed global batch; weak: fixed batch per rank.", "train.scaling"),
    "lr": Option("The highest learning rate.", "train.lr", shown="the preset's"),
    "seed": Option("Of the first weights, the order of samples and dropout.", "train.seed"),
    "device": Option("auto, cpu or cuda.", "train.device"),
    "compile_": Option("torch.compile: on, off, or auto (if a trial shows a gain).", "train.compile"),
    "recompute": Option("Compute blocks again in backward instead of keeping what they made.", "train.recompute"),
    "precision": Option(
        "Precision of matrix products: fp32, bf16 or auto; by default bf16 on a GPU that has it.", "train.precision"
    ),
    "pin": Option("Pin each rank to its own cores: auto, on or off.", "train.pin"),
    "profile_steps": Option(
        "Steps that torch.profiler records, such as 20-22; see shoal trace.", "train.profile_steps"
    ),
    "sync": Option(f"How replicas agree. {SYNC_HELP}.", "sync.mode", shown="ddp"),
    "every": Option(
        f"Steps between exchanges of {', '.join(OUTER_METHODS)}.", "sync.every", shown=ROUND_STEPS_TEXT
    ),
    "accumulate": Option("Multiply the batch between two exchanges by this.", "sync.accumulate"),
    "wire": Option(f"Number format of sent gradients. {WIRE_HELP}.", "sync.wire"),
    "copies": Option(_COPIES, "sync.copies", shown="1 with three or more ranks", low=0, high=1),
    "inside": Option("Exchange between ranks of one machine: auto, gloo, copies or shared (memory).", "sync.inside"),
    "measure": Option("How the all-reduce is timed: hook, barrier or off.", "sync.measure"),
    "drop_slower_than": Option(f"{_DROP}.", "members.drop_slower_than", shown="none is left out"),
    "on_silent_tie": Option(
        "If half of the machines fall silent, the others continue on their own or pause.", "members.on_silent_tie"
    ),
}  # fmt: skip

# The same for `shoal run`, whose script may have a session or not.
SESSION_SETTINGS = {
    "on": Option("Where to run: local:N, lab:N[,link=1gbit,…], slurm:N or a hosts file.", "run.on", "new run"),
    "threads": Option("Threads per rank.", "run.threads", "new run", shown="cores / ranks", low=1),
    "steps": Option("Steps of the script's session.", "train.steps", low=1),
    "sync": Option(f"{SYNC_HELP} (session).", "sync.mode"),
    "wire": Option(f"{WIRE_HELP} (session).", "sync.wire"),
    "copies": Option(f"{_COPIES[:-1]} (session).", "sync.copies", shown="1 with three or more ranks", low=0, high=1),
    "accumulate": Option("Batches between two exchanges (session).", "sync.accumulate", low=1),
    "balance": Option(f"{_BALANCE} (session).", "run.balance", shown=SETTINGS["balance"].shown),
    "drop_slower_than": Option(f"{_DROP} (session).", "members.drop_slower_than", shown="none is left out"),
    "profile_steps": Option(
        "Steps that torch.profiler records (session, --measure), such as 20-22; see shoal trace.", "train.profile_steps"
    ),
    "set_": Option("A setting of the session, as section.key=value; may be repeated."),
}

TABLE = {
    **SETTINGS,
    "preset": argument(f"{PRESET_NAMES}.", shown="grammar", effect="new run"),
    "run": argument("The run folder."),
    "config": Option("A TOML file with settings.", effect="new run"),
    "set_": Option("One setting, as section.key=value; may be repeated."),
    "depth": Option("Model size as one number; 12 is GPT-2.", effect="new run"),
    "out": Option("The run folder to create.", effect="new run", shown="runs/NAME-TIME"),
    "profile": Option("The profile for --plan and --sync auto; see shoal probe.", effect="new run", shown=str(PROFILE)),
    "port": Option("The port to listen on.", shown="a free one", low=0, high=65_535),
    "clean": Option("End processes left over from earlier runs."),
    "detach": Option("Start the run in the background; see shoal ps, logs, attach."),
    "watch": Option("Serve a live page about the run while it runs; see shoal watch."),
    "json": Option("Print JSON on stdout."),
}
