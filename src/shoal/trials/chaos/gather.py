"""Several scenarios, each several times; and the file that has all of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.runfolder import write_atomically
from shoal.trials.chaos.figures import spreads
from shoal.trials.chaos.ground import why_not
from shoal.trials.chaos.session import Played, Show, play
from shoal.trials.chaos.spec import Scenario, all_scenarios, find_scenario

ALL = "all"
FIGURES = "chaos.json"


def left_out(words: Sequence[str], on: str) -> dict[str, str]:
    """What `all` is not: scenarios of ours that cannot be played there, and why."""
    found = {each.name: why_not(each, on) for each in all_scenarios()} if ALL in words else {}
    return {name: reason for name, reason in found.items() if reason}


def chosen(words: Sequence[str], on: str) -> list[Scenario]:
    """Checked before the first one is played. `all` is every one of ours that can be played there."""
    found: list[Scenario] = []
    for word in words:
        found += [each for each in all_scenarios() if not why_not(each, on)] if word == ALL else [find_scenario(word)]
    for scenario in found:
        if reason := why_not(scenario, on):
            raise UsageError(f"{scenario.name} cannot be played on {on}", why=reason, fix="shoal chaos list")
    return list({scenario.name: scenario for scenario in found}.values())


def play_all(
    scenarios: Sequence[Scenario],
    on: str,
    times: int,
    seed: int,
    out: Path,
    show: Show,
    done: Callable[[Played], None],
) -> list[Played]:
    """The figures so far are in the file after every run: somebody may not wait for the last."""
    new_folder(out)
    found: list[Played] = []
    for scenario in scenarios:
        for number in range(1, times + 1):
            label = scenario.name + (f" {number} of {times}" if times > 1 else "")

            def tell(text: str, label: str = label) -> None:
                show(f"{label}: {text}")

            found.append(play(scenario, on, out, number, seed, tell))
            write_atomically(out / FIGURES, json.dumps(document(found, on, seed), indent=2) + "\n")
            done(found[-1])
    return found


def document(played: Sequence[Played], on: str, seed: int) -> dict[str, Any]:
    by_name: dict[str, list[Played]] = {}
    for each in played:
        by_name.setdefault(each.scenario, []).append(each)
    return {
        "on": on,
        "seed": seed,
        "ok": all(each.ok for each in played),
        "scenarios": {
            name: {
                "row": runs[0].row,
                "runs": len(runs),
                "passed": sum(each.ok for each in runs),
                "seconds": {key: value.model_dump() for key, value in spreads(runs).items()},
            }
            for name, runs in by_name.items()
        },
        "runs": [{**each.model_dump(mode="json"), "ok": each.ok} for each in played],
    }


def new_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise UsageError(
                f"the folder {out} is not empty", why="it would mix two trials", fix="choose another --out"
            )
    except OSError as error:
        raise UsageError(f"cannot make {out}: {error.strerror}", fix="choose another --out") from None
