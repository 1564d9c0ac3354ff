"""`shoal chaos`: scripted faults with asserted outcomes."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from shoal.cli.output import make_console, print_json, shown, stdout_console
from shoal.config.sync_choice import TRAINED_METHODS
from shoal.errors import UsageError
from shoal.runs.start import default_out
from shoal.tools.chaos.run import Percentiles, spreads
from shoal.tools.chaos.scenario import ROWS, ChaosScenario, FaultRow
from shoal.units import format_duration

if TYPE_CHECKING:
    from shoal.tools.chaos.judge import Assertion
    from shoal.tools.chaos.run import ScenarioResult
    from shoal.tools.chaos.soak import FaultOutcome, ModeResult, SoakResult, SoakStatus


# SECTION cli/chaostext
# What `shoal chaos` prints.


_TIMES = ("detect_s", "regroup_s", "next_step_s", "next_commit_s")
_TITLES = ("scenario", "row", "seen", "group", "step", "commit", "lost", "redone", "gens", "equal", "verdict")
_LEGEND = (
    "seen, group, step, commit: seconds from the fault until it was noticed, the next group stood, a step was done, "
    "one was committed. lost, redone: steps. gens: generations since the fault. equal: replicas, to the bit."
)

Done = Callable[["ScenarioResult"], None]


@contextlib.contextmanager
def progress() -> Iterator[tuple[Callable[[str], None], Done]]:
    """On stderr: what is going on, on a terminal in one line that changes; a line for every run that is done."""
    console = make_console(stderr=True)
    with console.status("") as status:
        yield lambda text: status.update(escape(text)), lambda played: _print_done(console, played)


def _print_done(console: Console, played: ScenarioResult) -> None:
    verdict = "[green]passed[/]" if played.ok else "[red]FAILED[/]"
    console.print(f"{verdict} {played.scenario} {played.number}, {played.seconds:.0f} s", soft_wrap=True)


def print_list(scenarios: Sequence[ChaosScenario]) -> None:
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


def where(scenario: ChaosScenario) -> str:
    if scenario.cuts_power:
        return f"local:{scenario.nodes}"
    return f"lab:{scenario.nodes}" if scenario.needs_lab else f"lab:{scenario.nodes}, local:{scenario.nodes}"


def by_tests_alone(scenarios: Sequence[ChaosScenario]) -> list[FaultRow]:
    played = {scenario.row for scenario in scenarios}
    return [row for row in ROWS if row.number not in played]


def list_document(scenarios: Sequence[ChaosScenario]) -> dict[str, Any]:
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


def print_played(played: Sequence[ScenarioResult]) -> None:
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


def _rows(runs: Sequence[ScenarioResult]) -> Iterator[tuple[str, ...]]:
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


def _most(runs: Sequence[ScenarioResult], count: Callable[[ScenarioResult], int]) -> str:
    return str(max(map(count, runs)))


def _replicas(runs: Sequence[ScenarioResult]) -> str:
    said = [assertion for each in runs for assertion in each.assertions if assertion.name.startswith("replicas")]
    if not said:
        return "–"
    return "yes" if all(assertion.ok for assertion in said) else "[red]no[/]"


def _seconds(found: Percentiles | None, which: str) -> str:
    return "–" if found is None else f"{getattr(found, which):.2f}"


def _print_words(console: Console, runs: Sequence[ScenarioResult]) -> None:
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


app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="rich")

On = Annotated[str, typer.Option(help="Where: lab:3 (emulated nodes made for it), or local:3 (processes only).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Seed = Annotated[int, typer.Option(min=0, help="Which random moments, files and faults.")]


@app.callback()
def chaos() -> None:
    """Scripted faults with asserted outcomes, done to a real small training."""
    # A lab, a training and frozen nodes are to be cleared away, however politely we are asked to leave.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@app.command("list")
def list_(json: Json = False) -> None:
    """Every scenario: what happens, where it can be played and its target; and the faults that none plays.

    --json adds what is done, step by step, and what must hold.
    """
    from shoal.tools.chaos.scenario import all_scenarios

    scenarios = all_scenarios()
    if json:
        print_json(list_document(scenarios))
    else:
        print_list(scenarios)


@app.command()
def run(
    scenarios: Annotated[
        list[str], typer.Argument(metavar="SCENARIO…", help="Names from the list, files of yours (my.toml), or all.")
    ],
    on: On = "lab:3",
    times: Annotated[int, typer.Option(min=1, help="How often each: random moments differ, figures get spreads.")] = 1,
    seed: Seed = 1,
    out: Annotated[Path | None, typer.Option(help="The folder to create.", show_default="runs/chaos-TIME")] = None,
    json: Json = False,
) -> None:
    """Train in the background, do it harm, and judge what became of it.

    Exit code 0 when everything that must hold did, 1 when something did not.
    """
    from shoal.tools.chaos.run import FIGURES, chosen, document, left_out, play_all

    folder = (out or default_out("chaos")).absolute()
    wanted = chosen(scenarios, on)
    for name, reason in left_out(scenarios, on).items():
        typer.echo(f"left out: {name} ({reason})", err=True)
    with progress() as (show, done):
        played = play_all(wanted, on, times, seed, folder, show, done)
    if json:
        print_json(document(played, on, seed))
    else:
        print_played(played)
        typer.echo(f"\nfigures: {shown(folder / FIGURES)}")
    if not all(each.ok for each in played):
        raise typer.Exit(1)


@app.command()
def soak(
    minutes: Annotated[
        float, typer.Option(min=0.1, help="How long faults are injected, over all sync modes together.")
    ] = 5.0,
    every: Annotated[str, typer.Option(help="Time from one fault to the next.")] = "15s",
    sync: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODE",
            help="A way to synchronise, such as ddp, diloco or ddp+int8; repeat it, and they take turns. "
            f"all: {', '.join(TRAINED_METHODS)}.",
            show_default="ddp",
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Draw only this kind of fault; can be repeated.", show_default="all kinds"),
    ] = None,
    seed: Seed = 1,
    on: Annotated[str, typer.Option(help="Three emulated nodes or more, made for it.")] = "lab:3",
    out: Annotated[Path | None, typer.Option(help="The folder to create.", show_default="runs/soak-TIME")] = None,
    json: Json = False,
) -> None:
    """A random fault every few seconds, each checked; one training per sync mode, beside a short one without faults.

    Ranks and nodes are killed and come back, freeze, are cut off, flap, get slow links, and the disk fills up. The
    faults are divided among the sync modes: each gets its part as one block, one mode after another. At the end of each
    the loss is held against the run without faults, ledger and replicas are checked, and memory, files, sockets and
    threads of agents and ranks must not have grown. soak.json in the folder has the figures after every fault. Exit
    code 0 when all of it held, 1 when something did not.
    """
    from shoal.cluster.lab.spec import LabSpec
    from shoal.cluster.target import parse_on
    from shoal.tools.chaos.run import new_folder
    from shoal.tools.chaos.soak import FIGURES as SOAK_FIGURES
    from shoal.tools.chaos.soak import SoakOrder, read_kinds, read_modes, soak_document
    from shoal.tools.chaos.soak import soak as soak_run

    spec = parse_on(on)
    if not isinstance(spec, LabSpec) or len(spec.nodes) < 3:
        raise UsageError(
            f"--on {on}: a soak needs three emulated nodes or more",
            why="with fewer, no majority is left to go on when one is cut off",
            fix="--on lab:3",
        )
    modes, kinds = read_modes(sync or ["ddp"]), read_kinds(fault or [])
    order = SoakOrder(on, len(spec.nodes), minutes, parse_every(every), seed, modes, kinds)
    folder = (out or default_out("soak")).absolute()
    new_folder(folder)
    with soak_progress() as display:
        result = soak_run(order, folder, display)
    if json:
        print_json(soak_document(order, result))
    else:
        print_soak(result)
        typer.echo(f"\nfigures: {shown(folder / SOAK_FIGURES)}")
    if not result.ok:
        raise typer.Exit(1)


def parse_every(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?s?", text.strip())
    if match is None or float(match[1]) < 4:
        raise UsageError(
            f"--every {text!r} is no time between faults",
            why="a fault and what follows take at least 4 s",
            fix="write for example: --every 15s",
        )
    return float(match[1])
