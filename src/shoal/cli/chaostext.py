"""What `shoal chaos` prints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from shoal.cli.output import make_console, stdout_console
from shoal.trials.chaos.figures import Spread, spreads
from shoal.trials.chaos.rows import ROWS, Row
from shoal.trials.chaos.spec import Scenario
from shoal.units import format_duration

if TYPE_CHECKING:
    from shoal.trials.chaos.judge import Assertion
    from shoal.trials.chaos.session import Played
    from shoal.trials.chaos.soak import SoakStatus
    from shoal.trials.chaos.soakjudge import FaultOutcome, ModeResult, SoakResult

_TIMES = ("detect_s", "regroup_s", "next_step_s", "next_commit_s")
_TITLES = ("scenario", "row", "seen", "group", "step", "commit", "lost", "redone", "gens", "equal", "verdict")
_LEGEND = (
    "seen, group, step, commit: seconds from the fault until it was noticed, the next group stood, a step was done, "
    "one was committed. lost, redone: steps. gens: generations since the fault. equal: replicas, to the bit."
)

Done = Callable[["Played"], None]


@contextlib.contextmanager
def progress() -> Iterator[tuple[Callable[[str], None], Done]]:
    """On stderr: what is going on, on a terminal in one line that changes; a line for every run that is done."""
    console = make_console(stderr=True)
    with console.status("") as status:
        yield lambda text: status.update(escape(text)), lambda played: _print_done(console, played)


def _print_done(console: Console, played: Played) -> None:
    verdict = "[green]passed[/]" if played.ok else "[red]FAILED[/]"
    console.print(f"{verdict} {played.scenario} {played.number}, {played.seconds:.0f} s", soft_wrap=True)


def print_list(scenarios: Sequence[Scenario]) -> None:
    console = stdout_console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("row", "scenario", "what happens", "where", "target"):
        table.add_column(title, justify="right" if title in ("row", "target") else "left")
    for scenario in scenarios:
        target = "–" if scenario.target_s is None else f"{scenario.target_s:g} s"
        table.add_row(str(scenario.row), scenario.name, escape(scenario.text), where(scenario), target)
    console.print(table)
    console.print("\n[bold]played by no scenario[/]")
    for row in by_tests_alone(scenarios):
        tests = ", ".join(row.tests)
        text = "; ".join(filter(None, (row.why, tests)))
        console.print(f"{row.number:>3}  {row.fault}: {text}", soft_wrap=True)


def where(scenario: Scenario) -> str:
    if scenario.cuts_power:
        return f"local:{scenario.nodes}"
    return f"lab:{scenario.nodes}" if scenario.needs_lab else f"lab:{scenario.nodes}, local:{scenario.nodes}"


def by_tests_alone(scenarios: Sequence[Scenario]) -> list[Row]:
    played = {scenario.row for scenario in scenarios}
    return [row for row in ROWS if row.number not in played]


def list_document(scenarios: Sequence[Scenario]) -> dict[str, Any]:
    return {
        "scenarios": [
            {
                "name": scenario.name,
                "row": scenario.row,
                "text": scenario.text,
                "does": scenario.does,
                "on": where(scenario).split(", "),
                "target_s": scenario.target_s,
                "expect": scenario.expect.model_dump(exclude_none=True),
            }
            for scenario in scenarios
        ],
        "rows": [asdict(row) for row in ROWS],
        "by_tests_alone": [row.number for row in by_tests_alone(scenarios)],
    }


def print_played(played: Sequence[Played]) -> None:
    console = stdout_console()
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for number, title in enumerate(_TITLES):
        table.add_column(title, justify="right" if number else "left", no_wrap=True)
    for name in dict.fromkeys(each.scenario for each in played):
        for row in _rows([each for each in played if each.scenario == name]):
            table.add_row(*row)
    console.print(table)
    console.print(f"\n{_LEGEND}", soft_wrap=True)
    for name in dict.fromkeys(each.scenario for each in played):
        _print_words(console, [each for each in played if each.scenario == name])


def _rows(runs: Sequence[Played]) -> Iterator[tuple[str, ...]]:
    """One line a scenario; of several runs p50, p95 and the worst, of counts always the worst."""
    found = spreads(runs)
    first = runs[0]
    passed = sum(each.ok for each in runs)
    verdict = f"[green]{passed}/{len(runs)}[/]" if passed == len(runs) else f"[red]{passed}/{len(runs)}[/]"
    counts = (
        _most(runs, lambda each: each.measured.lost_steps),
        _most(runs, lambda each: each.measured.redone_steps),
        _most(runs, lambda each: each.measured.reconfigurations),
        _replicas(runs),
        verdict,
    )
    if len(runs) == 1:
        yield (first.scenario, str(first.row), *(_seconds(found.get(name), "p50") for name in _TIMES), *counts)
        return
    for which in ("p50", "p95", "worst"):
        label = (first.scenario, str(first.row)) if which == "p50" else (f"  {which}", "")
        times = (_seconds(found.get(name), which) for name in _TIMES)
        yield (*label, *times, *(counts if which == "p50" else ("",) * len(counts)))


def _most(runs: Sequence[Played], count: Callable[[Played], int]) -> str:
    return str(max(map(count, runs)))


def _replicas(runs: Sequence[Played]) -> str:
    said = [assertion for each in runs for assertion in each.assertions if assertion.name.startswith("replicas")]
    if not said:
        return "–"
    return "yes" if all(assertion.ok for assertion in said) else "[red]no[/]"


def _seconds(found: Spread | None, which: str) -> str:
    return "–" if found is None else f"{getattr(found, which):.2f}"


def _print_words(console: Console, runs: Sequence[Played]) -> None:
    """What the user was told in the first run, and of every run each assertion that did not hold."""
    told = next((each.measured.sentences for each in runs if each.measured.sentences), ())
    if told:
        console.print(f"\n{runs[0].scenario}: “{escape(told[0])}”", soft_wrap=True)
    for each in runs:
        _print_failed(console, f"{each.scenario} {each.number}", each.assertions)


def _print_failed(console: Console, label: str, assertions: Sequence[Assertion]) -> None:
    for assertion in assertions:
        if not assertion.ok:
            console.print(
                f"[red]{escape(label)}[/]: {escape(assertion.name)}: {escape(assertion.seen)}", soft_wrap=True
            )


class SoakLines:
    """The progress of a soak on stderr: a bar on a terminal, a plain line for every fault and mode elsewhere."""

    def __init__(self, console: Console, bar: Progress) -> None:
        self._console = console
        self._bar = bar
        self._task = bar.add_task("", total=None)

    def status(self, status: SoakStatus) -> None:
        text = (
            f"{status.sync} ({status.mode} of {status.modes}): {status.doing}, step {status.step:,}; "
            f"{format_duration(status.elapsed_s)}, about {format_duration(max(1.0, status.remaining_s))} left"
        )
        self._bar.update(self._task, completed=status.faults, total=status.planned, description=escape(text))

    def fault(self, sync: str, number: int, planned: int, outcome: FaultOutcome) -> None:
        verdict = "[green]survived[/]" if outcome.ok else "[red]NOT SURVIVED[/]"
        pause = "no step before or after it" if outcome.pause_s is None else f"pause {outcome.pause_s:.2f} s"
        text = f"{sync} {number} of {planned}: {outcome.does}; step {outcome.step:,}, {pause}"
        words = f" ({escape(outcome.skipped)})" if outcome.skipped else ""
        self._console.print(f"{verdict} {escape(text)}{words}", soft_wrap=True)

    def mode(self, result: ModeResult) -> None:
        verdict = "[green]held[/]" if result.ok else "[red]NOT HELD[/]"
        text = f"{result.sync}: {result.survived} of {result.planned} faults survived"
        self._console.print(f"{verdict} {escape(text)}, {format_duration(result.seconds)}", soft_wrap=True)


@contextlib.contextmanager
def soak_progress() -> Iterator[SoakLines]:
    console = make_console(stderr=True)
    columns = (TextColumn("{task.completed:.0f} faults"), BarColumn(20), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield SoakLines(console, bar)


_SOAK_TITLES = (
    "sync", "faults", "survived", "steps", "gens", "pause", "loss", "without", "to step", "ledger", "equal", "MB/min",
    "sockets", "verdict",
)  # fmt: skip
_SOAK_LEGEND = (
    "pause: the longest time without a step. loss, without: means over the 50 steps where it is furthest from that of "
    "the run without faults (with local, diloco and streaming: furthest above it), among those up to `to step`. "
    "MB/min, sockets: the most that a process grew a minute that lived long enough to tell."
)
# In a pipe or a file there is no width to keep to.
_WIDE = 160


def print_soak(result: SoakResult) -> None:
    console = stdout_console()
    if not console.is_terminal:
        console.width = _WIDE
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, title in enumerate(_SOAK_TITLES):
        table.add_column(title, justify="right" if number else "left", overflow="fold")
    for mode in result.modes:
        table.add_row(*_mode_row(mode))
    console.print(table)
    console.print(f"\n{_SOAK_LEGEND}\n", soft_wrap=True)
    console.print(_kinds_table([fault for mode in result.modes for fault in mode.faults]))
    console.print()
    for label, assertion in [
        *(("", assertion) for assertion in result.assertions),
        *((f"{mode.sync}: ", assertion) for mode in result.modes for assertion in mode.assertions),
    ]:
        # Of several modes only what did not hold: the table has the rest.
        if not label or not assertion.ok or len(result.modes) == 1:
            verdict = "[green]held[/]" if assertion.ok else "[red]NOT HELD[/]"
            words = f"{label}{assertion.name}: {assertion.seen}"
            console.print(f"{verdict}  {escape(words)}", soft_wrap=True)


def _mode_row(mode: ModeResult) -> tuple[str, ...]:
    held = {assertion.name: "yes" if assertion.ok else "[red]no[/]" for assertion in mode.assertions}
    pauses = [fault.pause_s for fault in mode.faults if fault.pause_s is not None]
    return (
        escape(mode.sync),
        str(mode.planned),
        str(mode.survived),
        f"{mode.steps:,}",
        str(mode.reconfigurations),
        f"{max(pauses):.2f} s" if pauses else "–",
        "–" if mode.loss is None else f"{mode.loss:.3f}",
        "–" if mode.reference_loss is None else f"{mode.reference_loss:.3f}",
        f"{mode.compared_steps:,}",
        held.get("every sample used once", "–"),
        held.get("replicas equal to the bit", "–"),
        _most_growth(mode, "rss_mb_a_minute"),
        _most_growth(mode, "sockets_a_minute"),
        "[green]held[/]" if mode.ok else "[red]NOT HELD[/]",
    )


def _most_growth(mode: ModeResult, name: str) -> str:
    return f"{max(getattr(each, name) for each in mode.growth):.2f}" if mode.growth else "–"


def _kinds_table(faults: Sequence[FaultOutcome]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("fault", "times", "skipped", "survived", "longest pause"):
        table.add_column(title, justify="left" if title == "fault" else "right")
    for kind in dict.fromkeys(fault.kind for fault in faults):
        same = [fault for fault in faults if fault.kind == kind]
        pause = max((fault.pause_s or 0.0 for fault in same), default=0.0)
        skipped, survived = sum(bool(fault.skipped) for fault in same), sum(fault.ok for fault in same)
        table.add_row(kind, str(len(same)), str(skipped), str(survived), f"{pause:.2f} s")
    return table
