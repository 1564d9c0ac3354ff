"""What a plan is made from: the catalogue, a measured profile, or measured machines over another link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cost.predict import Setting
from shoal.cost.sheet import Overrides, describe, find_link, find_machines, make_setting, ring, stack_of
from shoal.errors import UsageError
from shoal.units import format_si

if TYPE_CHECKING:
    from shoal.config.profile import Profile

LINK = "1gbe"
NODES = "1..8"
HOSTS = "hosts.toml"


@dataclass(frozen=True)
class Basis:
    """`nodes` are those of interest unless the user names others, `on` is where the command to paste would run.
    `known` is how many nodes are known one by one, `how` from where: measured or named. 0: all are alike."""

    setting: Setting
    note: str
    nodes: str
    on: str
    known: int = 0
    how: str = "measured"


def basis(given: dict[str, Any]) -> Basis:
    overrides = Overrides(*(given[name] for name in ("efficiency", "latency", "flops", "mfu", "memory_gb")))
    if given["profile"] is None:
        wired = find_link(given["link"] or LINK)
        machines = find_machines(given["machine"], wired)
        setting = make_setting(wired, machines, given["ranks_per_node"], overrides)
        note = f"{describe(wired, machines, setting)}; measure yours with shoal probe"
        named = len(machines) if len(machines) > 1 else 0
        return Basis(setting, note, f"1..{named}" if named else NODES, given["on"] or HOSTS, named, "named")
    _refuse_beside_profile(given)
    return _measured(given["profile"], given["link"], given["on"], overrides)


def _measured(path: Path, link: str | None, on: str | None, overrides: Overrides) -> Basis:
    # A plan without a profile must not pay for reading one: its schema takes a tenth of the whole answer.
    from shoal.config.profile_file import read_profile
    from shoal.cost.measured import setting_of

    profile = read_profile(path)
    setting = replace(setting_of(profile), ranks_per_node=_ranks_per_node(profile))
    note = f"as measured by {path} on {profile.on}, {profile.created}"
    if link is not None:
        wired = find_link(link)
        sheet = ring(wired, stack_of(()), overrides)
        setting = replace(setting, network=sheet)
        note += f"; but over {wired.name} by data sheet, {format_si(sheet.bytes_per_s, 'B/s')}"
    if profile.calibration is not None:
        note += f"; learned from {profile.calibration.runs} runs"
    last = len(profile.nodes)
    return Basis(setting, note, "1" if last == 1 else f"1..{last}", on or profile.on, last)


def _ranks_per_node(profile: Profile) -> int:
    counts = {node.ranks for node in profile.nodes}
    if len(counts) > 1:
        raise UsageError(
            "the profile's nodes have different numbers of ranks",
            why="rows of a plan are nodes of one kind",
            fix=f"predict the run itself: shoal train --on {profile.on} --plan --profile …",
        )
    return counts.pop()


def _refuse_beside_profile(given: dict[str, Any]) -> None:
    """A profile knows the machines; a flag that it would quietly overrule must not pass."""
    extra = [name for name in ("machine", "flops", "mfu", "memory_gb") if given[name] is not None]
    extra += ["ranks_per_node"] if given["ranks_per_node"] != 1 else []
    extra += [name for name in ("efficiency", "latency") if given[name] is not None and given["link"] is None]
    if extra:
        flag = "--" + extra[0].replace("_", "-")
        raise UsageError(
            f"{flag} does not go with --profile",
            why="the profile says how fast these machines and their links are",
            fix=f"leave {flag} out; to look at another link beside it: --link 10gbe",
        )
