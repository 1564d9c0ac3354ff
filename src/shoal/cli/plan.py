"""`shoal plan`: predict step time and speed without starting anything."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.cli.command import Request, command
from shoal.cli.options import SETTINGS, Option, argument
from shoal.cli.output import (
    advising_flags,
    as_command,
    check_picture,
    print_json,
    print_paragraph,
    print_table,
    shown,
    stdout_console,
)
from shoal.config.presets import PRESET_NAMES
from shoal.config.sync_choice import PLAN_USAGES, WIRE_USAGES, join_or
from shoal.cost.data_sheets import LINKS, MACHINES
from shoal.cost.network import payload_factor
from shoal.errors import ConfigError, UsageError
from shoal.tools.plan.request import (
    LINK,
    Basis,
    PlanRequest,
    make_basis,
    on_devices,
    parse_nodes,
    refuse_conflicts,
    train_words,
    what_to_plan,
)
from shoal.units import (
    format_amount,
    format_change,
    format_count,
    format_duration,
    format_percent,
    format_si,
    format_speed,
)

if TYPE_CHECKING:
    from shoal.config.profile import Profile
    from shoal.cost.predict import Prediction
    from shoal.cost.strategy import SyncStrategy
    from shoal.cost.workload import Workload
    from shoal.tools.plan.advise import Advice, Plan, PlanOption, PlanRow
    from shoal.tools.plan.compare import CalibrationResult

# By strategy and number of nodes.
Commands: TypeAlias = "Mapping[tuple[SyncStrategy, int], str | None]"

_TITLES = ("nodes", "payload", "comm", "compute", "exposed", "wait", "step", "tokens/s", "speed-up", "eff.", "memory")
_OPTION_TITLES = ("strategy", "tokens/s", "speed-up", "what it costs")
_LEGEND = {
    "payload": "times the gradients that a node sends",
    "comm": "time to exchange the gradients",
    "compute": "forward, backward and optimizer",
    "exposed": "the part of comm that nothing hides",
    "wait": "for the slowest node",
    "eff.": "speed-up for each node",
    "memory": "of a rank; ! is too much",
}
# Of --links: what a link changes.
_LINK_TITLES = ("comm", "compute", "exposed", "step", "tokens/s", "speed-up")
_LIMIT = "inf"
# Left out first where the terminal is narrow.
_LESS_IMPORTANT = ("payload", "wait", "memory", "eff.", "comm", "compute", "exposed")
_GAP = 2
_WHOLE_WIDTH = 100


@dataclass(frozen=True, kw_only=True)
class PlanCommand(PlanRequest, Request):
    nodes: str | None = None
    links: str | None = None
    out: Path | None = None
    calibrate: bool = False
    json: bool = False


@command(
    presets=argument(f"{PRESET_NAMES}; with --calibrate: runs.", "PRESET", shown="grammar"),
    nodes=Option(
        "Numbers of nodes: 4, 1..8 or 1,2,4; with inf, the limit of what a node sends.",
        shown="1..8, or the machines named or measured",
    ),
    link=Option(
        f"Link of the nodes: {', '.join(LINKS)}, or a rate such as 300mbit; of each: 1gbe,1gbe,wifi.", shown=LINK
    ),
    links=Option("Compare links: a row for each, with the most nodes; as 1gbe,10gbe,300mbit.", metavar="LINK,LINK"),
    profile=Option("Plan for the machines that shoal probe measured."),
    calibrate=Option("Fit the profile's constants to past runs, and save it."),
    latency=Option("Latency of a message, software included, such as 0.5ms."),
    efficiency=Option("Part of the link's rate that gradients reach."),
    machine=Option(f"{', '.join(MACHINES)}; several kinds: desktop,laptop.", shown="by link"),
    flops=Option("The machine's peak FLOP/s, such as 2e12."),
    mfu=Option("The part of --flops that training reaches."),
    memory_gb=Option("The machine's memory in GB."),
    ranks_per_node=Option("Ranks per node, such as its GPUs.", low=1, high=64),
    params=Option("A model with this many parameters instead of a preset, such as 760e6."),
    grad_dtype=Option("Gradients are computed in fp32 or bf16."),
    tokens=Option("Tokens per step, over all ranks.", "train.global_batch"),
    accumulate=replace(SETTINGS["accumulate"], shown="1"),
    wire=replace(SETTINGS["wire"], help=f"Number format of sent gradients: {join_or(WIRE_USAGES)}."),
    sync=replace(SETTINGS["sync"], help=f"{', '.join(PLAN_USAGES)}; zero… divide memory.", shown=""),
    on=replace(
        SETTINGS["on"],
        help="Where the printed command would run; shoal plan does not look there.",
        shown="hosts.toml",
    ),
    out=Option("Also write a figure (PNG).", flags="--out --output -o"),
    json=Option("Print the plan as JSON on stdout."),
)
def plan(request: PlanCommand) -> None:
    """Predict step time and speed on 1, 2, 3 … machines, and which sync strategy helps. Starts nothing.

    The effect of failures, stragglers and checkpoints over hours or months: shoal simulate.
    """
    if request.calibrate:
        _calibrate(request)
        return
    if request.out is not None:
        check_picture(request.out)
    if request.links is not None:
        _compare_links(request)
        return
    made, notes, basis = _plan_request(request)
    _show(made, notes, request, basis)


def _plan_request(request: PlanCommand) -> tuple[Plan, list[str], Basis]:
    flags = request.flags()
    refuse_conflicts(flags, request)
    basis = make_basis(request)
    counts = _numbers_of_nodes(request, basis)
    # --tokens sets the global batch in another unit.
    advised = {key: "--global-batch" if flag == "--tokens" else flag for key, flag in flags.items()}
    with advising_flags(advised):
        workload, strategy, notes = what_to_plan(request, max(counts) * basis.setting.ranks_per_node)
        basis = on_devices(basis, request)
        made = _make_plan(request, workload, strategy, basis, counts)
    return made, [basis.note, *notes, *_assumptions(made, basis)], basis


def _numbers_of_nodes(request: PlanCommand, basis: Basis) -> list[int]:
    """Return the rows of the plan, without the limit."""
    words = (request.nodes or basis.nodes).split(",")
    return parse_nodes(",".join(word for word in words if word != _LIMIT or len(words) == 1))


def _has_limit(request: PlanCommand) -> bool:
    """Return whether the table ends with what a node of endlessly many would send."""
    return _LIMIT in (request.nodes or "").split(",")


def _limit_of(made: Plan) -> float | None:
    """Return the factor of the gradients that a node of endlessly many sends; None where it has no limit of a ring."""
    last = made.rows[-1].prediction
    if last.world_size < 2 or not math.isclose(last.payload, payload_factor(last.world_size)):
        return None
    return 2.0


def _compare_links(request: PlanCommand) -> None:
    """Plan the most nodes over each link; print a row for each."""
    request.refuse(
        [name for name in ("link", "out") if name in request.given],
        "with --links",
        "it prints a row for each link, and no figure",
        "leave one out",
    )
    plans = {
        link.strip(): _plan_request(replace(request, link=link.strip())) for link in (request.links or "").split(",")
    }
    rows = {link: made.rows[-1] for link, (made, _, _) in plans.items()}
    if request.json:
        print_json({"links": [{"link": link, **row.as_dict()} for link, row in rows.items()]})
        return
    made = next(iter(plans.values()))[0]
    console = stdout_console()
    print_paragraph(escape(_describe(made.workload, made.strategy, made.rows[-1])), console)
    console.print(f"{made.rows[-1].nodes} nodes, a row for each link:\n")
    cells = [dict(zip(_TITLES, _row(row), strict=True)) for row in rows.values()]
    table: list[list[str | Text]] = [
        [link, *(Text.from_markup(cell[title]) for title in _LINK_TITLES)]
        for link, cell in zip(rows, cells, strict=True)
    ]
    print_table(("link", *_LINK_TITLES), table, range(1, 9), console)
    console.print()
    for _, _, basis in plans.values():
        print_paragraph(escape(basis.note), console)


def _make_plan(
    request: PlanRequest, workload: Workload, strategy: SyncStrategy, basis: Basis, counts: list[int]
) -> Plan:
    from shoal.tools.plan.advise import divided_plan, make_plan

    try:
        made = make_plan(workload, strategy, basis.setting, counts)
        return made if request.sync else divided_plan(made)
    except ConfigError as error:
        if request.params is not None:
            # The error suggests --set, but a model given by --params has flags only.
            error.fix = "use another --global-batch or --micro-batch, or fewer --nodes"
        raise


def _assumptions(made: Plan, basis: Basis) -> Iterator[str]:
    """Yield what a reader of the table must know about nodes that differ or were not measured."""
    if basis.known and max(row.nodes for row in made.rows) > basis.known:
        yield f"nodes beyond the {basis.known} {basis.how} ones are assumed to equal the last of them"
    if not made.rows[-1].base_fits:
        yield "speed-ups are against one machine that had the memory for it: none has"
    elif len(set(made.setting.node_names)) > 1:
        base = made.rows[-1]
        yield f"speed-ups are against {base.base} alone, which trains {format_speed(base.base_tokens_per_s)}"


def _calibrate(request: PlanCommand) -> None:
    fix = "write for example: shoal plan --calibrate runs/one runs/two --profile profile.toml"
    request.refuse(
        [name for name in request.given if name not in ("presets", "profile", "json", "calibrate")],
        "with --calibrate",
        "it fits a profile to past runs and plans nothing",
        fix,
    )
    runs, profile = request.presets, request.profile
    if not runs or profile is None:
        raise UsageError("--calibrate needs runs to learn from and a profile to write into", fix=fix)
    from shoal.config.load import write_profile
    from shoal.tools.plan.compare import calibrate_profile

    fitted, results = calibrate_profile(profile, [Path(run) for run in runs])
    write_profile(fitted, profile)
    if request.json:
        print_json(_calibration_document(fitted, results))
    else:
        _print_calibration(fitted, results, profile)


def _show(made: Plan, notes: list[str], request: PlanCommand, basis: Basis) -> None:
    from shoal.tools.plan.advise import advise

    advice = advise(made)
    choices = (*advice.options, *advice.fitting, advice.best, advice.other_training)
    commands = {
        (option.strategy, option.row.nodes): _command_to_train(request, basis, made, option)
        for option in choices
        if option is not None
    }
    if request.out is not None:
        from shoal.tools.plan.figures import plot_plan

        plot_plan(made, advice, request.out)
    if request.json:
        document = _plan_document(made, advice, notes, commands)
        print_json(document | ({"limit": {"payload_factor": _limit_of(made)}} if _has_limit(request) else {}))
        return
    _print_plan(made, advice, notes, commands, _has_limit(request))
    if request.out is not None:
        sys.stdout.write(f"\npicture: {shown(request.out)}\n")


def _command_to_train(request: PlanRequest, basis: Basis, made: Plan, option: PlanOption) -> str | None:
    """Return the command, or None for what shoal cannot do: a planned sync method, or a model that is not a preset."""
    if request.params is not None or not option.is_possible:
        return None
    return as_command(*train_words(request, basis, made, option))


def _print_plan(plan: Plan, advice: Advice, notes: Sequence[str], commands: Commands, has_limit: bool) -> None:
    from shoal.tools.plan.advise import describe_other_training, explain_plan

    console = stdout_console()
    if not console.is_terminal:
        # For a program or a file no column is left out.
        console.width = max(console.width, _WHOLE_WIDTH)
    verdict, *reasons = explain_plan(plan, advice)
    console.print(escape(verdict), style="bold")
    _print_command(console, "to do that", advice.best, commands)
    if other := describe_other_training(plan, advice):
        # Here and not below the tables: its command needs the sentence.
        reasons.remove(other)
        console.print(f"\n{escape(other)}")
        _print_command(console, "to do that at its price", advice.other_training, commands)
    console.print()
    for line in (_describe(plan.workload, plan.strategy, plan.rows[-1]), *notes):
        console.print(escape(line), style="dim")
    shown_columns = _fitting_columns(plan, console.width, "payload" if has_limit else "")
    console.print()
    table = _rows(plan, shown_columns)
    if has_limit:
        factor = _limit_of(plan)
        limit = {"nodes": "∞", "payload": "–" if factor is None else f"{factor:.2f}"}
        table.add_row(*(limit.get(title, "–") for title in shown_columns))
    console.print(table)
    console.print()
    meanings = "; ".join(f"{title}: {_LEGEND[title]}" for title in shown_columns if title in _LEGEND)
    console.print(f"{meanings}.", style="dim")
    if len(shown_columns) < len(_TITLES):
        left_out = ", ".join(title for title in _TITLES if title not in shown_columns)
        console.print(f"A wider terminal shows {left_out} too.", style="dim")
    if plan.rows[-1].nodes > 1:
        console.print()
        console.print(_options(advice))
        if any(not option.strategy.is_available for option in advice.options):
            console.print("* not in shoal yet", style="dim")
    for line in reasons:
        console.print()
        console.print(escape(line))


def _print_command(console: Console, label: str, option: PlanOption | None, commands: Commands) -> None:
    if option is not None and (text := commands.get((option.strategy, option.row.nodes))):
        where = f" on {option.row.nodes} machines (hosts.toml lists them)" if " hosts.toml" in text else ""
        console.print(f"\n{label}{where}:", style="dim")
        console.print(f"  {escape(text)}", soft_wrap=True)


def _plan_document(plan: Plan, advice: Advice, notes: Sequence[str], commands: Commands) -> dict[str, Any]:
    from shoal.tools.plan.advise import explain_plan, pipeline_of

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
        "strategy": str(plan.strategy),
        "notes": list(notes),
        "rows": [row.as_dict() for row in plan.rows],
        "advice": {
            "distribute": advice.best is not None,
            "recommended": None if advice.best is None else _option_document(advice.best, commands),
            "other_training": advice.other_training and _option_document(advice.other_training, commands),
            "sentences": explain_plan(plan, advice),
            "strategies": [_option_document(option, commands) for option in advice.options],
            "fitting": [_option_document(option, commands) for option in advice.fitting],
        },
        "pipeline": pipeline_of(plan).as_dict() if plan.distributed_rows else None,
    }


def _describe(workload: Workload, strategy: SyncStrategy, last: PlanRow) -> str:
    """Return for example `gpt2-124m: 124.44M parameters, 498 MB of gradients (ddp); 4,096 tokens a step, 4 × 1,024`."""
    from shoal.cost.strategy import bytes_per_parameter

    sent = bytes_per_parameter(strategy, workload) * workload.parameters
    sequences = last.prediction.batch_plan.global_batch
    strategy = strategy.in_world(last.prediction.world_size)
    size = "" if workload.model is None else f"{format_count(workload.parameters)} parameters, "
    return (
        f"{workload.name}: {size}{format_si(sent, 'B')} of gradients ({strategy}); "
        f"{format_amount(last.prediction.tokens)} a step, {sequences:,} × {workload.seq_len:,}"
    )


def _fitting_columns(plan: Plan, width: int, kept: str) -> list[str]:
    """Return the titles of the columns that fit, leaving out the least important ones."""
    rows = [dict(zip(_TITLES, _row(row), strict=True)) for row in plan.rows]
    widths = {
        title: max(cell_len(title), *(Text.from_markup(row[title]).cell_len for row in rows)) for title in _TITLES
    }
    left_out: set[str] = set()
    for title in ("", *(name for name in _LESS_IMPORTANT if name != kept)):
        left_out.add(title)
        if sum(widths[name] + _GAP for name in _TITLES if name not in left_out) <= width:
            break
    return [title for title in _TITLES if title not in left_out]


def _rows(plan: Plan, titles: Sequence[str]) -> Table:
    table = _table(titles, range(len(titles)))
    for row in plan.rows:
        is_best = row is plan.best and len(plan.rows) > 1
        cells = dict(zip(_TITLES, _row(row), strict=True))
        table.add_row(*(cells[title] for title in titles), style="bold" if is_best else None)
    return table


def _row(row: PlanRow) -> tuple[str, ...]:
    step, prediction = row.prediction.step, row.prediction
    return (
        str(row.nodes),
        f"{prediction.payload:.2f}",
        _time(step.comm_s),
        _time(step.compute_s),
        _time(step.exposed_s),
        _time(step.wait_s),
        _time(step.step_s),
        f"{prediction.tokens_per_s:,.0f}",
        f"[{'green' if row.speedup > 1 else 'red'}]{row.speedup:.2f}×[/]" if row.nodes > 1 else f"{row.speedup:.2f}×",
        format_percent(row.efficiency),
        _memory(prediction),
    )


def _options(advice: Advice) -> Table:
    """Return all strategies on the most nodes, and those that the sentences recommend for fewer nodes."""
    most = advice.options[0].row.nodes
    recommended = (advice.best, advice.larger_batch, advice.other_training)
    known = {(option.strategy, option.row.nodes) for option in advice.options}
    fewer = [option for option in recommended if option and (option.strategy, option.row.nodes) not in known]
    has_memory = any(option.strategy.shard_level for option in advice.options)
    titles = (
        f"strategy, on {most} nodes",
        *_OPTION_TITLES[1:3],
        *(["memory"] if has_memory else []),
        _OPTION_TITLES[3],
    )
    table = _table(titles, range(1, len(titles) - 1))
    for option in sorted((*advice.options, *fewer), key=lambda option: option.tokens_per_s, reverse=True):
        table.add_row(*_option_row(option, most, has_memory), style=None if option.is_possible else "dim")
    return table


def _option_row(option: PlanOption, most: int, has_memory: bool) -> tuple[str, ...]:
    name = str(option.strategy) + ("" if option.strategy.is_available else " *")
    name += f" ({option.row.nodes} nodes)" if option.row.nodes < most else ""
    memory = [_memory(option.row.prediction)] if has_memory else []
    return escape(name), f"{option.tokens_per_s:,.0f}", f"{option.row.speedup:.2f}×", *memory, escape(option.costs)


def _memory(prediction: Prediction) -> str:
    memory = format_si(prediction.memory.total, "B")
    return memory if prediction.fits else f"[red]{memory}![/]"


def _option_document(option: PlanOption, commands: Commands) -> dict[str, Any]:
    return {
        "strategy": str(option.strategy),
        "nodes": option.row.nodes,
        "tokens_per_s": option.tokens_per_s,
        "speedup": option.row.speedup,
        "step_s": option.row.prediction.step.step_s,
        "memory_bytes": option.row.prediction.memory.total,
        "fits": option.row.prediction.fits,
        "available": option.strategy.is_available,
        "costs": option.costs,
        "command": commands.get((option.strategy, option.row.nodes)),
    }


def _table(titles: Sequence[str], right: Sequence[int]) -> Table:
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for number, title in enumerate(titles):
        is_number = number in right
        table.add_column(title, justify="right" if is_number else "left", no_wrap=is_number)
    return table


def _time(seconds: float) -> str:
    """Format in one unit: minutes and seconds would make a column too wide."""
    if seconds >= 60:
        return f"{seconds:,.0f} s"
    return format_duration(seconds) if seconds else "–"


def _print_calibration(profile: Profile, results: Sequence[CalibrationResult], path: Path) -> None:
    fitted = profile.calibration
    assert fitted is not None  # noqa: S101 - it has just been fitted
    console = stdout_console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("run", "measured", "predicted", "error", "now", "error"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for result in results:
        predictions = (
            (format_duration(seconds), format_change(seconds / result.measured_s - 1))
            for seconds in (result.before_s, result.after_s)
        )
        cells = [cell for pair in predictions for cell in pair]
        table.add_row(escape(shown(result.run)), format_duration(result.measured_s), *cells)
    console.print(table)
    console.print(
        f"\ncomputing × {fitted.compute:.3f}, optimizer × {fitted.optimizer:.3f}, exchange × {fitted.comm:.3f}, "
        f"everything else {format_duration(fitted.other_s)} a step; medians over {fitted.runs} runs",
        soft_wrap=True,
    )
    console.print(f"saved: {escape(shown(path))}", soft_wrap=True)


def _calibration_document(profile: Profile, results: Sequence[CalibrationResult]) -> dict[str, Any]:
    fitted = profile.calibration
    return {
        "calibration": fitted.model_dump(mode="json") if fitted else None,
        "runs": [{**asdict(result), "run": str(result.run)} for result in results],
    }
