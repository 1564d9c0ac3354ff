"""The names of wire formats: in which form gradients travel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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
