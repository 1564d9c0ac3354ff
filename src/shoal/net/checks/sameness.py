"""What must be equal on all machines of a world, and which machine is the odd one out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any

from shoal.net.checks.commands import again, same_versions, sudo
from shoal.net.finding import Finding, Severity
from shoal.net.scene import Scene
from shoal.units import format_duration

_CLOCK_S = 1.0


@dataclass(frozen=True)
class Trait:
    """`of` takes it from what a scout saw of its machine; None where there is nothing to compare."""

    id: str
    words: str
    of: Callable[[dict[str, Any]], object]
    meaning: str
    severity: Severity = Severity.ERROR


_APART = "train on machines of one kind"
_KINDS = (
    Trait("sameness.os", "system", lambda seen: seen["system"], f"gloo cannot connect different systems: {_APART}"),
    Trait("sameness.arch", "architecture", lambda seen: seen["arch"], f"replicas would drift apart: {_APART}"),
    Trait(
        "sameness.cpu",
        "AVX2",
        lambda seen: None if seen["avx2"] is None else ("yes" if seen["avx2"] else "no"),
        "without AVX2 sums are rounded in another way, so replicas drift apart: leave out the machines without it",
    ),
    Trait(
        "sameness.cpu",
        "processor",
        lambda seen: seen["cpu"],
        "they compute at different speeds, and every step waits for the slowest",
        Severity.INFO,
    ),
)
_SET_UP = "shoal sets it up from here"
_DRIFT = f"a world of different versions fails in the middle, or trains replicas that drift apart; {_SET_UP}"
_VERSIONS = (
    Trait("sameness.python", "Python", lambda seen: ".".join(seen["python"].split(".")[:2]), _DRIFT),
    Trait("sameness.torch", "torch", lambda seen: release(seen["torch"]), _DRIFT),
    Trait("sameness.shoal", "shoal", lambda seen: seen["shoal"], _DRIFT),
)


def release(version: str | None) -> str | None:
    """`2.13.0+cpu` is release 2.13.0: the same torch may be built for CPU here and for CUDA there."""
    return None if version is None else version.partition("+")[0]


def kinds(scene: Scene) -> Iterator[Finding]:
    for trait in _KINDS:
        yield from _odd_ones(scene, trait)


def versions(scene: Scene) -> Iterator[Finding]:
    for trait in _VERSIONS:
        yield from _odd_ones(scene, trait)


def _odd_ones(scene: Scene, trait: Trait) -> Iterator[Finding]:
    values = {name: value for name, seen in _machines(scene).items() if (value := trait.of(seen)) is not None}
    common = majority(list(values.values()))
    for name, value in values.items():
        if value != common:
            with_common = [other for other in values if values[other] == common]
            yield Finding(
                trait.id,
                trait.severity,
                name,
                f"{trait.words} {value} on {name}, {common} on {', '.join(with_common)}",
                trait.meaning,
                same_versions(scene, "") if trait in _VERSIONS else "",
                again(scene),
            )


def majority(values: list[object]) -> object:
    """Of equally many, what the first node has."""
    counts = Counter(values)
    return max(values, key=lambda value: counts[value], default=None)


def no_torch(scene: Scene) -> Iterator[Finding]:
    for name, seen in _machines(scene).items():
        if seen["torch"] is None:
            yield Finding(
                "sameness.torch",
                Severity.ERROR,
                name,
                f"{seen['executable']} has no torch",
                f"no rank can start there; {_SET_UP}",
                same_versions(scene, f"{seen['executable']} -m pip install torch"),
                again(scene),
            )


def clocks(scene: Scene) -> Iterator[Finding]:
    """Against each other. The machine that asked has a say in who is wrong, and no more than that."""
    offsets = {name: facts["clock"] for name, facts in scene.facts.items() if "clock" in facts}
    if not any(_apart(one, other) for one, other in combinations(offsets.values(), 2)):
        return
    middle = {"offset_s": median([0.0, *(said["offset_s"] for said in offsets.values())]), "uncertainty_s": 0.0}
    wrong = [name for name, said in offsets.items() if _apart(said, middle)]
    farthest = max(offsets, key=lambda name: abs(offsets[name]["offset_s"] - middle["offset_s"]))
    for name in wrong or [farthest]:
        offset_s = offsets[name]["offset_s"] - middle["offset_s"]
        yield Finding(
            "clock.offset",
            Severity.WARNING,
            name,
            f"its clock is {format_duration(abs(offset_s))} {'ahead of' if offset_s > 0 else 'behind'} the others, "
            f"give or take {format_duration(offsets[name]['uncertainty_s'])}",
            "shoal compares no clocks, but make does, and torchrun: 40 s made it train alone and report success",
            f"{sudo(scene.facts[name])}timedatectl set-ntp true",
            f"timedatectl; {again(scene)}",
        )


def _apart(one: dict[str, float], other: dict[str, float]) -> bool:
    doubt_s = one["uncertainty_s"] + other["uncertainty_s"]
    return abs(one["offset_s"] - other["offset_s"]) > _CLOCK_S + doubt_s


def _machines(scene: Scene) -> dict[str, dict[str, Any]]:
    return {name: facts["machine"] for name, facts in scene.facts.items() if facts.get("machine")}
