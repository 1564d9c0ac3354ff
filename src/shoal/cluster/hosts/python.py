"""Which Python a host must have, and whether one of those that are there will do. Pure but for `wanted_here`."""

from __future__ import annotations

import functools
import importlib.metadata
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

from shoal.errors import UsageError

# `numpy>=2.0`; what only an extra needs carries a marker.
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:>=\s*([0-9.]+))?")


class PythonFacts(BaseModel):
    """One interpreter on a host, and the versions of the packages it was asked about.

    `named` in the hosts file, shoal's `own` environment, or `found` there.
    """

    model_config = ConfigDict(frozen=True)

    origin: Literal["named", "own", "found"]
    executable: str
    version: str
    packages: dict[str, str]
    has_venv: bool


@dataclass(frozen=True)
class Wanted:
    """`packages` are shoal's own dependencies in the versions used here, `least` the versions it can do with."""

    minor: str
    packages: Mapping[str, str]
    least: Mapping[str, str] = field(default_factory=dict)

    @property
    def requirements(self) -> list[str]:
        return [f"{name}=={version}" for name, version in self.packages.items()]


@functools.cache
def wanted_here() -> Wanted:
    """What this very environment has. Without local tags: one torch may be built for CPU here and for CUDA there."""
    least = _least()
    try:
        packages = {name: public(importlib.metadata.version(name)) for name in least}
    except importlib.metadata.PackageNotFoundError as error:
        raise UsageError(
            f"{error.name} is not installed here", why="every host gets the versions used here", fix="make setup"
        ) from None
    return Wanted(f"{sys.version_info[0]}.{sys.version_info[1]}", packages, least)


def constraints_here() -> list[str]:
    """Every other version that is installed here, for pip to hold to where it needs one of them."""
    found = {_normal(dist.metadata["Name"]): public(dist.version) for dist in importlib.metadata.distributions()}
    asked = {"shoal", "pip", *wanted_here().packages}
    return sorted(f"{name}=={version}" for name, version in found.items() if name not in asked)


def public(version: str) -> str:
    """`2.13.0+cpu` is release 2.13.0."""
    return version.partition("+")[0]


def misfits(python: PythonFacts, wanted: Wanted, exactly: bool = False) -> list[str]:
    """What keeps a Python there from running what runs here, worst first; nothing when it will do.

    The same minor version and the same torch always. The other packages may be older or newer than here in an
    environment that somebody else keeps; `exactly` is for the one that shoal made.
    """
    if minor_of(python.version) != wanted.minor:
        return [f"it is Python {python.version}, and here is {wanted.minor}"]
    found = []
    for name, version in _torch_first(wanted.packages):
        there = python.packages.get(name)
        if there is None:
            found.append(f"{name} is not installed, and here is {version}")
        elif (exactly or name == "torch") and public(there) != version:
            found.append(f"it has {name} {there}, and here is {version}")
        elif _numbers(there) < _numbers(wanted.least.get(name, "0")):
            found.append(f"it has {name} {there}, and shoal needs {wanted.least[name]} or newer")
    return found


def minor_of(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _torch_first(packages: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(packages.items(), key=lambda item: item[0] != "torch")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", public(version)))


def _least() -> dict[str, str]:
    try:
        lines = importlib.metadata.requires("shoal") or []
    except importlib.metadata.PackageNotFoundError:
        raise UsageError(
            "shoal is not installed as a package here, so nobody can tell what it needs",
            why="it runs from a bare folder",
            fix="pip install -e . in the folder of shoal's pyproject.toml",
        ) from None
    found = (_REQUIREMENT.match(line) for line in lines if "extra ==" not in line)
    return {_normal(match[1]): match[2] or "0" for match in found if match}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
