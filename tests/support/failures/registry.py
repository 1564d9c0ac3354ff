"""The failures, by the name of the log they leave: an explanation's id, `+` and a word when there are several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal_lab.lab import Lab
from tests.support.failures.bench import Bench

Provoke = Callable[[Bench], None]
ProvokeOnLab = Callable[[Bench, Lab], None]


@dataclass(frozen=True)
class Failure:
    """`provoke` needs only this machine, `on_lab` a lab's nodes. With neither, the log was quoted in public by users:
    it needs something unavailable here, such as Slurm. `torch` is an older version with a different message."""

    name: str
    provoke: Provoke | None = None
    on_lab: ProvokeOnLab | None = None
    needs_gpu: bool = False
    torch: str = ""


FAILURES: dict[str, Failure] = {}


def here(name: str, needs_gpu: bool = False, torch: str = "") -> Callable[[Provoke], Provoke]:
    def register(provoke: Provoke) -> Provoke:
        FAILURES[name] = Failure(name, provoke=provoke, needs_gpu=needs_gpu, torch=torch)
        return provoke

    return register


def on_lab(name: str, torch: str = "") -> Callable[[ProvokeOnLab], ProvokeOnLab]:
    def register(provoke: ProvokeOnLab) -> ProvokeOnLab:
        FAILURES[name] = Failure(name, on_lab=provoke, torch=torch)
        return provoke

    return register


def quoted(name: str) -> None:
    FAILURES[name] = Failure(name)
