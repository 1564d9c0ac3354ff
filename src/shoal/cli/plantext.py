"""A plan as a table and sentences for people, and as a document for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from shoal.cli.output import stdout_console
from shoal.cost.advice import Advice, Option
from shoal.cost.lever import Lever
from shoal.cost.plan import Plan, Row
from shoal.cost.wire import bytes_per_parameter
from shoal.cost.workload import Workload
from shoal.report.explain_plan import explain
from shoal.units import format_count, format_duration, format_si

Commands = Mapping[Lever, str | None]

_TITLES = ("nodes", "payload", "comm", "compute", "exposed", "wait", "step", "tokens/s", "speed-up", "eff.", "memory")
_OPTION_TITLES = ("lever", "tokens/s", "speed-up", "what it costs")
_LEAST_WIDTH = 100
_A_MINUTE_S = 60


def print_plan(plan: Plan, advice: Advice, notes: Sequence[str], commands: Commands) -> None:
    console = stdout_console()
    console.width = max(console.width, _LEAST_WIDTH)
    for line in (describe(plan.workload, plan.lever, plan.rows[-1]), *notes):
        console.print(escape(line), style="dim")
    console.print()
    console.print(_rows(plan))
    console.print()
    has_options = plan.rows[-1].nodes > 1
    if has_options:
        console.print(_options(advice))
        console.print()
    for number, line in enumerate(explain(plan, advice)):
        console.print(escape(line), style="bold" if number == 0 else None)
    if has_options and any(not option.lever.is_available for option in advice.options):
        console.print("* not in shoal yet", style="dim")
    _print_commands(console.print, advice, commands)


def plan_document(plan: Plan, advice: Advice, notes: Sequence[str], commands: Commands) -> dict[str, Any]:
    workload = plan.workload
    return {
        "workload": {
            "name": workload.name,
            "parameters": workload.parameters,
            "flops_per_token": workload.flops_per_token,
            "gradient_bytes": workload.gradient_bytes * workload.parameters,
            "seq_len": workload.seq_len,
            "scaling": workload.train.scaling,
        },
        "lever": str(plan.lever),
        "notes": list(notes),
        "rows": [row.as_dict() for row in plan.rows],
        "advice": {
            "distribute": advice.best is not None,
            "recommended": None if advice.best is None else _option_document(advice.best, commands),
            "other_training": advice.other_training and _option_document(advice.other_training, commands),
            "sentences": explain(plan, advice),
            "levers": [_option_document(option, commands) for option in advice.options],
        },
    }


def describe(workload: Workload, lever: Lever, last: Row) -> str:
    """`gpt2-124m: 124.44M parameters, 498 MB of gradients (ddp); 4,096 tokens a step, 4 × 1,024`."""
    sent = bytes_per_parameter(lever, workload) * workload.parameters
    sequences = last.prediction.deal.global_batch
    size = "" if workload.model is None else f"{format_count(workload.parameters)} parameters, "
    return (
        f"{workload.name}: {size}{format_si(sent, 'B')} of gradients ({lever}); "
        f"{last.prediction.tokens:,} tokens a step, {sequences:,} × {workload.seq_len:,}"
    )


def _rows(plan: Plan) -> Table:
    table = _table(_TITLES, range(len(_TITLES)))
    for row in plan.rows:
        is_best = row is plan.best and len(plan.rows) > 1
        table.add_row(*_row(row), style="bold" if is_best else None)
    return table


def _row(row: Row) -> tuple[str, ...]:
    step, prediction = row.prediction.step, row.prediction
    memory = format_si(prediction.memory.total, "B")
    return (
        str(row.nodes),
        f"{row.payload_factor:.2f}",
        _time(step.comm_s),
        _time(step.compute_s),
        _time(step.exposed_s),
        _time(step.wait_s),
        _time(step.step_s),
        f"{prediction.tokens_per_s:,.0f}",
        f"[{'green' if row.speedup > 1 else 'red'}]{row.speedup:.2f}×[/]" if row.nodes > 1 else f"{row.speedup:.2f}×",
        f"{row.efficiency:.0%}",
        memory if prediction.fits else f"[red]{memory}![/]",
    )


def _options(advice: Advice) -> Table:
    nodes = advice.options[0].row.nodes
    table = _table((f"lever, on {nodes} nodes", *_OPTION_TITLES[1:]), (1, 2))
    for option in advice.options:
        table.add_row(*_option_row(option), style=None if option.is_possible else "dim")
    return table


def _option_row(option: Option) -> tuple[str, ...]:
    """What cannot be done today is told from what is merely slow."""
    name = str(option.lever) + ("" if option.lever.is_available else " *")
    return escape(name), f"{option.tokens_per_s:,.0f}", f"{option.row.speedup:.2f}×", escape(option.costs)


def _option_document(option: Option, commands: Commands) -> dict[str, Any]:
    return {
        "lever": str(option.lever),
        "nodes": option.row.nodes,
        "tokens_per_s": option.tokens_per_s,
        "speedup": option.row.speedup,
        "step_s": option.row.prediction.step.step_s,
        "memory_bytes": option.row.prediction.memory.total,
        "fits": option.row.prediction.fits,
        "available": option.lever.is_available,
        "costs": option.costs,
        "command": commands.get(option.lever),
    }


def _print_commands(say: Any, advice: Advice, commands: Commands) -> None:
    for words, option in (("to do that", advice.best), ("to do the other at its price", advice.other_training)):
        if option is not None and (line := commands.get(option.lever)):
            say(f"\n{words}{' (hosts.toml lists your machines)' if 'hosts.toml' in line else ''}:", style="dim")
            say(f"  {escape(line)}", soft_wrap=True)


def _table(titles: Sequence[str], right: Sequence[int]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, title in enumerate(titles):
        is_number = number in right
        table.add_column(title, justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _time(seconds: float) -> str:
    """In one unit: minutes and seconds would make a column too wide."""
    if seconds >= _A_MINUTE_S:
        return f"{seconds:,.0f} s"
    return format_duration(seconds) if seconds else "–"
