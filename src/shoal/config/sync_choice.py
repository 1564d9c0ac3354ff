"""One way to synchronise: what `--sync auto` chooses, what a plan recommends, and what events and settings keep."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

# SECTION config/wire
# The names of wire formats: in which form gradients travel.


WireName = Literal["fp32", "fp16", "bf16", "int8", "powersgd"]

DEFAULT_RANK = 4


@dataclass(frozen=True)
class WireChoice:
    """`rank` is how many columns PowerSGD keeps of a matrix; the others have none."""

    name: WireName
    rank: int = DEFAULT_RANK


def parse_wire(text: str) -> WireChoice:
    """`int8`, `powersgd`, `powersgd:8`."""
    name, colon, number = text.partition(":")
    is_whole = number.isascii() and number.isdecimal() and int(number) > 0
    for known in get_args(WireName):
        if name == known and (not colon or (known == "powersgd" and is_whole)):
            return WireChoice(known, int(number) if colon else DEFAULT_RANK)
    raise ValueError(f"there is no wire format {text!r}: use fp32, fp16, bf16, int8, powersgd or powersgd:RANK")


ChosenMode = Literal["ddp", "local", "diloco", "streaming"]

_TEXT = re.compile(r"([a-z]+):([1-9]\d{0,8}),(.+)")


@dataclass(frozen=True)
class SyncChoice:
    """`every` is 1 where gradients are exchanged in every step."""

    mode: ChosenMode = "ddp"
    wire: str = "fp32"
    every: int = 1

    @property
    def is_outer(self) -> bool:
        return self.mode != "ddp"

    @property
    def text(self) -> str:
        """As a setting has it; `parse_choice` reads it."""
        return f"{self.mode}:{self.every},{self.wire}"

    def __str__(self) -> str:
        often = f" every {self.every} steps" if self.is_outer else ""
        return f"{self.mode}{often} in {self.wire}"


def parse_choice(text: str) -> SyncChoice:
    """`diloco:50,fp16`, `ddp:1,int8`."""
    match = _TEXT.fullmatch(text)
    for mode in get_args(ChosenMode):
        if match is not None and match[1] == mode:
            parse_wire(match[3])
            return SyncChoice(mode, match[3], int(match[2]))
    raise ValueError(f"{text!r} is no way to synchronise: write for example diloco:50,fp16 or ddp:1,fp32")


def choice_in(record: Mapping[str, Any]) -> SyncChoice | None:
    """What an event says of how replicas agree; None where it says nothing of it, or nothing that can be read."""
    try:
        return parse_choice(f"{record.get('sync')}:{record.get('round_steps')},{record.get('wire')}")
    except ValueError:
        return None
