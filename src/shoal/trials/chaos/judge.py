"""Does what was measured hold what was promised? Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from shoal.trials.chaos.measure import Measured
from shoal.trials.chaos.record import Ending
from shoal.trials.chaos.spec import Expect, Scenario

_STOPPED = 130


class Assertion(BaseModel):
    """One thing that had to hold, and what was seen instead, or of it."""

    model_config = ConfigDict(frozen=True)

    name: str
    ok: bool
    seen: str


def judge(scenario: Scenario, measured: Measured, ending: Ending) -> list[Assertion]:
    if ending.trouble:
        return [Assertion(name="the scenario could be played", ok=False, seen=ending.trouble)]
    found = [*_times(scenario.expect, measured, ending), *_counts(scenario.expect, measured)]
    found += [*_words(scenario.expect, measured), *_commands(scenario.expect, ending)]
    return [*found, *(_invariants(scenario, measured, ending) if scenario.trains else ())]


def _times(expect: Expect, measured: Measured, ending: Ending) -> Iterator[Assertion]:
    for name, within_s, took_s in (
        ("detected", expect.detect_within_s, measured.detect_s),
        ("regrouped", expect.regroup_within_s, measured.regroup_s),
        ("next step", expect.next_step_within_s, measured.next_step_s),
        ("next commit", expect.next_commit_within_s, measured.next_commit_s),
        ("rejoined", expect.rejoin_within_s, measured.rejoin_s),
        ("pause at the return", expect.return_pause_within_s, measured.return_pause_s),
        ("paused", expect.pause_within_s, measured.pause_s),
        ("stopped", expect.stop_within_s, ending.stop_s),
    ):
        if within_s is not None:
            seen = "never" if took_s is None else f"{took_s:.2f} s"
            yield Assertion(
                name=f"{name} within {within_s:g} s", ok=took_s is not None and took_s <= within_s, seen=seen
            )


def _counts(expect: Expect, measured: Measured) -> Iterator[Assertion]:
    for name, asked, count in (
        ("reconfigurations", expect.reconfigurations, measured.reconfigurations),
        ("members at the end", expect.members, measured.members),
        ("lineages given up", expect.abandoned, measured.abandoned),
    ):
        if asked is not None:
            yield Assertion(name=f"{name}: {asked}", ok=count == asked, seen=str(count))
    for name, most, value in (
        ("reconfigurations", expect.most_reconfigurations, measured.reconfigurations),
        ("times slower", expect.slower_at_most, measured.slower),
        ("steps behind when it was resumed", expect.resumed_behind_at_most, measured.resumed_behind),
    ):
        if most is not None:
            seen = "unknown" if value is None else f"{value:.3g}"
            yield Assertion(name=f"{name}: at most {most:g}", ok=value is not None and value <= most, seen=seen)


def _words(expect: Expect, measured: Measured) -> Iterator[Assertion]:
    if expect.sentence is not None:
        hit = next((text for text in measured.sentences if re.search(expect.sentence, text)), None)
        seen = hit or "; ".join(measured.sentences) or "nothing was said"
        yield Assertion(name=f"the user read /{expect.sentence}/", ok=hit is not None, seen=seen)
    if expect.sentence_within_steps is not None:
        after = [steps for text, steps in measured.warned if re.search(expect.sentence or "", text)]
        ok = bool(after) and after[0] <= expect.sentence_within_steps
        name = f"within {expect.sentence_within_steps} steps"
        yield Assertion(name=name, ok=ok, seen=f"after {after[0]}" if after else "never")


def _commands(expect: Expect, ending: Ending) -> Iterator[Assertion]:
    if not ending.answers:
        return
    last = ending.answers[-1]
    if expect.command_code is not None:
        yield Assertion(
            name=f"the command ended with {expect.command_code}",
            ok=last.code == expect.command_code,
            seen=str(last.code),
        )
    if expect.command_says is not None:
        hit = next((line for line in last.text.splitlines() if re.search(expect.command_says, line)), None)
        yield Assertion(
            name=f"it said /{expect.command_says}/", ok=hit is not None, seen=(hit or last.text[-300:]).strip()
        )
    if expect.command_within_s is not None:
        yield Assertion(
            name=f"it answered within {expect.command_within_s:g} s",
            ok=last.seconds <= expect.command_within_s,
            seen=f"{last.seconds:.2f} s",
        )


def _invariants(scenario: Scenario, measured: Measured, ending: Ending) -> Iterator[Assertion]:
    expect = scenario.expect
    code = expect.exit_code if expect.exit_code is not None else (0 if scenario.ends_by_itself else _STOPPED)
    if expect.kept:
        yield Assertion(name=f"exit code {code}", ok=ending.exit_code == code, seen=str(ending.exit_code))
    for name, most, count in (
        ("steps lost", 0, measured.lost_steps),
        ("samples lost", 0, measured.lost_samples),
        ("stale commits", expect.stale_commits, measured.stale_commits),
    ):
        yield Assertion(name=f"{name}: {most}", ok=count <= most, seen=str(count))
    # A ledger that ends too early has no gap.
    least = scenario.training["train"]["steps"] if scenario.ends_by_itself and code == 0 else 1
    name = f"the ledger has {least} steps" + ("" if scenario.ends_by_itself and code == 0 else " or more")
    yield Assertion(name=name, ok=measured.committed >= least, seen=str(measured.committed))
    yield Assertion(name="every sample used once", ok=measured.ledger_ok, seen="yes" if measured.ledger_ok else "no")
    if expect.verified:
        wrong = ending.verified
        seen = "not asked" if wrong is None else "; ".join(wrong) or "yes"
        yield Assertion(name="shoal verify passes", ok=wrong == (), seen=seen)
    if code in (0, _STOPPED):
        said = {True: f"{ending.replicas} equal", False: f"{ending.replicas} differ", None: "nothing to compare"}
        equal = ending.replicas_equal
        yield Assertion(name="replicas equal to the bit", ok=equal is True, seen=said[equal])
        if expect.whole_checkpoints:
            yield Assertion(name="no torn checkpoint left", ok=not ending.torn, seen=", ".join(ending.torn) or "none")
    yield Assertion(name="nothing left after 5 s", ok=not ending.left, seen=", ".join(ending.left) or "nothing")
