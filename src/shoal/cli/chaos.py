"""`shoal chaos`: inject scripted or random faults into a small real training and check the outcome."""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from shoal.cli.command import Group
from shoal.cli.options import Option, argument
from shoal.cli.output import make_console, print_json, print_paragraph, print_table, shown, stdout_console
from shoal.config.sync_choice import TRAINED_METHODS
from shoal.errors import UsageError
from shoal.run_folder import default_out
from shoal.units import format_duration, pluralize

if TYPE_CHECKING:
    from shoal.tools.chaos.run import Percentiles, ScenarioResult
    from shoal.tools.chaos.scenario import ChaosScenario, FaultRow
    from shoal.tools.chaos.soak import FaultOutcome, ModeResult, SoakResult, SoakStatus

_TIMES = ("detect_s", "regroup_s", "next_step_s", "next_commit_s")
_TITLES = ("scenario", "row", "seen", "group", "step", "commit", "lost", "redone", "gens", "equal", "verdict")
_LEGEND = (
    "seen, group, step, commit: seconds from the fault until it was detected, the next process group existed, a step "
    "was done, a step was committed. lost, redone: steps. gens: generations since the fault. equal: replicas are equal "
    "bit for bit."
)

Done = Callable[["ScenarioResult"], None]
_SOAK_TITLES = (
    "sync", "faults", "survived", "steps", "gens", "pause", "loss", "without", "to step", "ledger", "equal", "MB/min",
    "sockets", "verdict",
)  # fmt: skip
_SOAK_LEGEND = (
    "pause: the longest time without a step. loss, without: mean loss with and without faults over the 50 steps where "
    "they differ most (with local, diloco and streaming: where the loss is highest above the other), up to `to step`. "
    "MB/min, sockets: the largest growth per minute of a process that lived long enough to measure it."
)
# Columns of a terminal from which the texts of `chaos list` have room beside the other columns.
_LIST_WIDTH = 100

CHAOS = Group(
    "chaos",
    "Inject scripted or random faults into a small real training and check the outcome.",
    on=Option("Where: lab:3 (emulated nodes, made for the run), or local:3 (processes only)."),
    script=Option(
        "Train your own script with shoal.Session, as for shoal run: 'my_train.py --width 64'.",
        metavar="COMMAND",
        shown="a small GPT",
    ),
    seed=Option("Seed of the random times, files and faults.", low=0),
)


@CHAOS.command()
def list_(json: bool = False) -> None:
    """List every scenario with its fault, where it can run and its target time, and the faults without a scenario.

    --json adds the steps of each scenario and what must hold.
    """
    from shoal.tools.chaos.scenario import all_scenarios

    scenarios = all_scenarios()
    if json:
        print_json(list_document(scenarios))
    else:
        _print_list(scenarios)


@CHAOS.command(
    scenarios=argument("Names from the list, your own files (my.toml), or all.", "SCENARIO…"),
    sync=Option("Train with this sync method, such as zero1 or ddp+int8.", metavar="MODE", shown="the scenario's"),
    times=Option("Repetitions of each scenario, with other random times.", low=1),
    out=Option("The folder to create.", shown="runs/chaos-TIME"),
)
def run(
    scenarios: list[str],
    on: str = "lab:3",
    script: str | None = None,
    sync: str | None = None,
    times: int = 1,
    seed: int = 1,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Train in the background, inject the faults, and check the outcome.

    Exit code 0: all assertions held. Exit code 1: at least one did not.
    """
    from shoal.tools.chaos.run import FIGURES, choose_scenarios, figures_document, play_all, scenarios_left_out

    _clean_up_on_sigterm()
    folder = (out or default_out("chaos")).absolute()
    words = read_script(script)
    wanted = choose_scenarios(scenarios, on, words, sync)
    for name, reason in scenarios_left_out(scenarios, on, words).items():
        sys.stderr.write(f"left out: {name} ({reason})\n")
    with _scenario_progress() as (show, done):
        results = play_all(wanted, on, times, seed, folder, show, done, words)
    if json:
        print_json(figures_document(results, on, seed, words))
    else:
        _print_results(results)
        sys.stdout.write(f"\nfigures: {shown(folder / FIGURES)}\n")
    return 0 if all(result.ok for result in results) else 1


@CHAOS.command(
    minutes=Option("How long faults are injected, over all sync methods together.", low=0.1),
    every=Option("Time from one fault to the next."),
    sync=Option(
        "A sync method, such as ddp, diloco or ddp+int8; repeat it to test several. "
        f"all: {', '.join(TRAINED_METHODS)}.",
        metavar="MODE",
        shown="ddp",
    ),
    fault=Option("Inject only this kind of fault; may be repeated.", metavar="KIND", shown="all kinds"),
    on=Option("At least three emulated nodes, made for the run."),
    out=Option("The folder to create.", shown="runs/soak-TIME"),
)
def soak(
    minutes: float = 5.0,
    every: str = "15s",
    sync: list[str] | None = None,
    fault: list[str] | None = None,
    seed: int = 1,
    on: str = "lab:3",
    script: str | None = None,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Inject a random fault every few seconds and check each: one training per sync method, and one without faults.

    Ranks and nodes are killed and return, freeze, lose the network once or repeatedly, get slow links, and the disk
    fills up. The faults are divided among the sync methods, which are tested one after another. At the end of each, the
    loss is compared with the run without faults, ledger and replicas are checked, and the agents' and ranks' memory,
    files, sockets and threads must not have grown, where a process lived for 4 minutes. soak.json in the folder has the
    figures after every fault.
    Exit code 0: all assertions held. Exit code 1: at least one did not.
    """
    from shoal.tools.chaos.run import new_folder
    from shoal.tools.chaos.soak import FIGURES as SOAK_FIGURES
    from shoal.tools.chaos.soak import SoakOrder, growth_warning, read_kinds, read_modes, soak_document
    from shoal.tools.chaos.soak import soak as soak_run

    _clean_up_on_sigterm()
    nodes, words = _soak_nodes(on), read_script(script)
    modes, kinds = read_modes(sync or ["ddp"]), read_kinds(fault or [], words)
    order = SoakOrder(on, nodes, minutes, parse_every(every), seed, modes, kinds, words)
    folder = (out or default_out("soak")).absolute()
    new_folder(folder)
    if warning := growth_warning(order):
        print_paragraph(escape(warning), make_console(stderr=True))
    with _soak_progress() as display:
        result = soak_run(order, folder, display)
    if json:
        print_json(soak_document(order, result))
    else:
        _print_soak(result)
        sys.stdout.write(f"\nfigures: {shown(folder / SOAK_FIGURES)}\n")
    return 0 if result.ok else 1


def _clean_up_on_sigterm() -> None:
    """Clean up lab, training and frozen nodes on SIGTERM as on Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _soak_nodes(on: str) -> int:
    """Return the number of emulated nodes; refuse what a soak cannot run on."""
    from shoal.cluster.lab import LabSpec
    from shoal.cluster.target import parse_on

    spec = parse_on(on)
    if not isinstance(spec, LabSpec) or len(spec.nodes) < 3 or any(node.slots > 1 for node in spec.nodes):
        raise UsageError(
            f"--on {on}: a soak needs three emulated nodes or more, with one rank each",
            why="with fewer, no majority is left to continue when one node is cut off",
            fix="--on lab:3",
        )
    return len(spec.nodes)


def read_script(text: str | None) -> tuple[str, ...]:
    """Return the script of `--script` and its arguments, with its absolute path."""
    from shoal.cli.run import script_command

    if text is None:
        return ()
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"--script {text!r} cannot be read: {error}", fix="write for example: --script 'my_train.py --width 64'"
        ) from None
    if not words:
        raise UsageError("--script is empty", fix="write for example: --script my_train.py")
    return tuple(script_command(words)[0])


def parse_every(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?s?", text.strip())
    if match is None or float(match[1]) < 4:
        raise UsageError(
            f"--every {text!r} is no time between faults",
            why="a fault and what follows take at least 4 s",
            fix="write for example: --every 15s",
        )
    return float(match[1])


@contextlib.contextmanager
def _scenario_progress() -> Iterator[tuple[Callable[[str], None], Done]]:
    """Show on stderr the current activity (one changing line, on a terminal only) and a line for every finished run."""
    console = make_console(stderr=True)
    with console.status("") as status:
        yield lambda text: status.update(escape(text)), lambda result: _print_done(console, result)


def _print_done(console: Console, result: ScenarioResult) -> None:
    verdict = "[green]passed[/]" if result.ok else "[red]FAILED[/]"
    console.print(f"{verdict} {result.scenario} {result.number}, {result.seconds:.0f} s", soft_wrap=True)


def _print_list(scenarios: Sequence[ChaosScenario]) -> None:
    console = stdout_console()
    if console.is_terminal and console.width < _LIST_WIDTH:
        _print_narrow_list(scenarios, console)
    else:
        _print_list_table(scenarios, console)
    console.print("\n[bold]not covered by a scenario[/]")
    for row in rows_without_scenario(scenarios):
        text = "; ".join(filter(None, (row.why, ", ".join(f"tests/{test}.py" for test in row.tests))))
        print_paragraph(escape(f"{row.fault}: {text}"), console, f"{row.number:>3}  ")


def _print_narrow_list(scenarios: Sequence[ChaosScenario], console: Console) -> None:
    """Print each text below its scenario's name: beside the other columns it would have one or two words a line."""
    for scenario in scenarios:
        target = "" if scenario.target_s is None else f", target {scenario.target_s:g} s"
        label = f"{scenario.row:>3}  "
        print_paragraph(f"[bold]{scenario.name}[/]  {_where(scenario)}{target}", console, label)
        print_paragraph(escape(scenario.text), console, " " * len(label))


def _print_list_table(scenarios: Sequence[ChaosScenario], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("row", "scenario", "what happens", "where", "target"):
        # A scenario's name is typed: it is never cut.
        justify: JustifyMethod = "right" if title in ("row", "target") else "left"
        table.add_column(title, justify=justify, overflow="fold", no_wrap=title == "scenario")
    for scenario in scenarios:
        target = "–" if scenario.target_s is None else f"{scenario.target_s:g} s"
        table.add_row(str(scenario.row), scenario.name, escape(scenario.text), _where(scenario), target)
    console.print(table)


def _where(scenario: ChaosScenario) -> str:
    if scenario.cuts_power:
        return f"local:{scenario.nodes}"
    return f"lab:{scenario.nodes}" if scenario.needs_lab else f"lab:{scenario.nodes}, local:{scenario.nodes}"


def rows_without_scenario(scenarios: Sequence[ChaosScenario]) -> list[FaultRow]:
    from shoal.tools.chaos.scenario import FAULT_ROWS

    covered = {scenario.row for scenario in scenarios}
    return [row for row in FAULT_ROWS if row.number not in covered]


def list_document(scenarios: Sequence[ChaosScenario]) -> dict[str, Any]:
    from shoal.tools.chaos.scenario import FAULT_ROWS

    return {
        "scenarios": [
            {
                "name": scenario.name,
                "row": scenario.row,
                "text": scenario.text,
                "does": scenario.does,
                "on": _where(scenario).split(", "),
                "target_s": scenario.target_s,
                "expect": scenario.expect.model_dump(exclude_none=True),
            }
            for scenario in scenarios
        ],
        "rows": [asdict(row) for row in FAULT_ROWS],
        "by_tests_alone": [row.number for row in rows_without_scenario(scenarios)],
    }


def _print_results(results: Sequence[ScenarioResult]) -> None:
    console = stdout_console()
    by_scenario: dict[str, list[ScenarioResult]] = {}
    for result in results:
        by_scenario.setdefault(result.scenario, []).append(result)
    rows = [[Text.from_markup(cell) for cell in row] for runs in by_scenario.values() for row in _scenario_rows(runs)]
    print_table(_TITLES, rows, right=range(1, len(_TITLES)), console=console, gap=1)
    print_paragraph(f"\n{_LEGEND}", console)
    for name, runs in by_scenario.items():
        # The message to the user in the first run that has one, and every failed assertion.
        texts = next((run.measured.sentences for run in runs if run.measured.sentences), ())
        if texts:
            print_paragraph(f"\n{name}: “{escape(texts[0])}”", console)
        for run in runs:
            for failed in (assertion for assertion in run.assertions if not assertion.ok):
                label = escape(f"{name} {run.number}")
                expected, seen = escape(failed.name), escape(failed.seen)
                print_paragraph(f"[red]{label}[/]: expected: {expected}; seen: {seen}", console)


def _scenario_rows(runs: Sequence[ScenarioResult]) -> Iterator[tuple[str, ...]]:
    """Yield one line for a single run, and p50, p95 and worst for several. Counts are always the worst."""
    from shoal.tools.chaos.run import percentiles_by_time

    stats = percentiles_by_time(runs)
    first = runs[0]
    passed = sum(run.ok for run in runs)
    replicas = [check.ok for run in runs for check in run.assertions if check.name.startswith("replicas")]
    counts = (
        str(max(run.measured.lost_steps for run in runs)),
        str(max(run.measured.redone_steps for run in runs)),
        str(max(run.measured.reconfigurations for run in runs)),
        "–" if not replicas else "yes" if all(replicas) else "[red]no[/]",
        f"[{'green' if passed == len(runs) else 'red'}]{passed}/{len(runs)}[/]",
    )
    if len(runs) == 1:
        yield (first.scenario, str(first.row), *(_seconds(stats.get(name), "p50") for name in _TIMES), *counts)
        return
    for which in ("p50", "p95", "worst"):
        label = (first.scenario, str(first.row)) if which == "p50" else (f"  {which}", "")
        times = (_seconds(stats.get(name), which) for name in _TIMES)
        yield (*label, *times, *(counts if which == "p50" else ("",) * len(counts)))


def _seconds(stats: Percentiles | None, which: str) -> str:
    return "–" if stats is None else f"{getattr(stats, which):.2f}"


class SoakProgress:
    """Show the progress of a soak on stderr: a bar on a terminal, plain lines elsewhere."""

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
        skipped = f" ({escape(outcome.skipped)})" if outcome.skipped else ""
        self._console.print(f"{verdict} {escape(text)}{skipped}", soft_wrap=True)

    def mode(self, result: ModeResult) -> None:
        verdict = "[green]held[/]" if result.ok else "[red]NOT HELD[/]"
        text = f"{result.sync}: survived {result.survived} of {pluralize(result.planned, 'fault')}"
        self._console.print(f"{verdict} {escape(text)}, {format_duration(result.seconds)}", soft_wrap=True)


@contextlib.contextmanager
def _soak_progress() -> Iterator[SoakProgress]:
    console = make_console(stderr=True)
    columns = (TextColumn("faults: {task.completed:.0f}"), BarColumn(20), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield SoakProgress(console, bar)


def _print_soak(result: SoakResult) -> None:
    console = stdout_console()
    rows = [[Text.from_markup(cell) for cell in _mode_row(mode)] for mode in result.modes]
    print_table(_SOAK_TITLES, rows, right=range(1, len(_SOAK_TITLES)), console=console)
    print_paragraph(f"\n{_SOAK_LEGEND}\n", console)
    console.print(_kinds_table([fault for mode in result.modes for fault in mode.faults]))
    console.print()
    for label, assertion in [
        *(("", assertion) for assertion in result.assertions),
        *((f"{mode.sync}: ", assertion) for mode in result.modes for assertion in mode.assertions),
    ]:
        # With several modes, print only failed assertions: the table has the rest.
        if not label or not assertion.ok or len(result.modes) == 1:
            verdict = "[green]held[/]" if assertion.ok else "[red]NOT HELD[/]"
            print_paragraph(f"{verdict}  {escape(f'{label}{assertion.name}: {assertion.seen}')}", console)
    if result.not_judged:
        print_paragraph(f"[yellow]not judged[/]  {escape(result.not_judged)}", console)


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
    return f"{max(getattr(growth, name) for growth in mode.growth):.2f}" if mode.growth else "–"


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
