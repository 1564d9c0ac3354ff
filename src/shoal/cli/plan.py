"""`shoal plan`: predict step time and speed without starting anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.cli import plan_options
from shoal.cli import simulate as options
from shoal.cli.output import (
    Depth,
    advising_flags,
    command,
    given_settings,
    print_json,
    refuse_given,
    shown,
    stdout_console,
)
from shoal.cli.plan_options import LINK, Basis, basis
from shoal.cli.simulate import run_simulation
from shoal.config.presets import PRESET_NAMES
from shoal.config.sync_choice import PLAN_USAGES, WIRE_USAGES, join_or
from shoal.cost.data_sheets import LINKS, MACHINES
from shoal.errors import ConfigError, UsageError
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
    from shoal.cost.predict import ClusterModel, Prediction
    from shoal.cost.strategy import SyncStrategy
    from shoal.cost.workload import Workload
    from shoal.tools.plan.advise import Advice, Plan, PlanOption, PlanRow
    from shoal.tools.plan.compare import CalibrationResult

app = typer.Typer(add_completion=False)

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
# Left out first where the terminal is narrow.
_LESS_IMPORTANT = ("payload", "wait", "memory", "eff.", "comm", "compute", "exposed")
_GAP = 2
_WHOLE_WIDTH = 100

DEFAULTS = options.SimulateOptions
# Options that plans and simulations share.
_SHARED = ("nodes", "scaling", "ranks_per_node")


@app.command()
def plan(
    context: typer.Context,
    preset: Annotated[
        list[str] | None,
        typer.Argument(help=f"{PRESET_NAMES}; with --calibrate: runs.", show_default="grammar"),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            help="Numbers of nodes: 4, 1..8 or 1,2,4.", show_default="1..8, or the machines named or measured"
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            help=f"Link of the nodes: {', '.join(LINKS)}, or a rate such as 300mbit; of each: 1gbe,1gbe,wifi.",
            show_default=LINK,
        ),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Plan for the machines that shoal probe measured.")] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the profile's constants to past runs, and save it.")
    ] = False,
    latency: Annotated[str | None, typer.Option(help="Latency of a message, software included, such as 0.5ms.")] = None,
    efficiency: Annotated[float | None, typer.Option(help="Part of the link's rate that gradients reach.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(MACHINES)}; several kinds: desktop,laptop.", show_default="by link"),
    ] = None,
    flops: Annotated[float | None, typer.Option(help="The machine's peak FLOP/s, such as 2e12.")] = None,
    mfu: Annotated[float | None, typer.Option(help="The part of --flops that training reaches.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="The machine's memory in GB.")] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, max=64, help="Ranks per node, such as its GPUs.")] = 1,
    params: Annotated[
        float | None, typer.Option(help="A model with this many parameters instead of a preset, such as 760e6.")
    ] = None,
    grad_dtype: Annotated[str, typer.Option(help="Gradients are computed in fp32 or bf16.")] = "fp32",
    tokens: Annotated[float | None, typer.Option(help="Tokens per step, over all ranks.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, as section.key=value; may be repeated.")
    ] = None,
    depth: Depth = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences per step, over all ranks.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences that a rank computes at once.")] = None,
    scaling: Annotated[str | None, typer.Option(help="strong: fixed global batch; weak: fixed batch per rank.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="Multiply the batch between two exchanges by this.", show_default="1")
    ] = None,
    wire: Annotated[str | None, typer.Option(help=f"Number format of sent gradients: {join_or(WIRE_USAGES)}.")] = None,
    sync: Annotated[str | None, typer.Option(help=f"{', '.join(PLAN_USAGES)}.")] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Where the printed command would run; shoal plan does not look there.", show_default="hosts.toml"
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--out", "--output", "-o", help="Also write a figure (PNG).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON on stdout.")] = False,
    simulate: options.Simulate = False,
    hours: options.Hours = DEFAULTS.hours,
    step_s: options.StepS = None,
    tokens_per_step: options.TokensPerStep = None,
    mtbf_hours: options.MtbfHours = DEFAULTS.mtbf_hours,
    all_share: options.AllShare = DEFAULTS.all_share,
    recovery: options.RecoveryKind = DEFAULTS.recovery,
    checkpoint_every: options.CheckpointEvery = DEFAULTS.checkpoint_every,
    checkpoint_s: options.CheckpointS = DEFAULTS.checkpoint_s,
    hidden_checkpoints: options.HiddenCheckpoints = DEFAULTS.hidden_checkpoints,
    detect_s: options.DetectS = DEFAULTS.detect_s,
    restart_s: options.RestartS = DEFAULTS.restart_s,
    regroup_s: options.RegroupS = DEFAULTS.regroup_s,
    rejoin_s: options.RejoinS = DEFAULTS.rejoin_s,
    repair_minutes: options.RepairMinutes = DEFAULTS.repair_minutes,
    straggler: options.Straggler = DEFAULTS.straggler,
    min_nodes: options.MinNodes = DEFAULTS.min_nodes,
    spares: options.Spares = DEFAULTS.spares,
    seeds: options.Seeds = DEFAULTS.seeds,
    seed: options.Seed = DEFAULTS.seed,
) -> None:
    """Predict step time and speed on 1, 2, 3 … machines, and which sync strategy helps. Starts nothing.

    With --simulate: the effect of failures, stragglers and checkpoints over hours or months.
    """
    given = dict(locals())
    from shoal.tools.plan.advise import make_plan

    _refuse_without_effect(context, calibrate, simulate)
    if calibrate:
        _calibrate(preset or [], profile, json)
        return
    given["preset"] = plan_options.one_preset(preset)
    if output is not None:
        plan_options.check_picture(output)
    flags = given_settings(context, plan_options.SETTINGS)
    plan_options.refuse_conflicts(flags, given)
    made_from = basis(given)
    counts = plan_options.parse_nodes(nodes or made_from.nodes)
    # --tokens sets the global batch in another unit.
    advised = {key: "--global-batch" if flag == "--tokens" else flag for key, flag in flags.items()}
    with advising_flags(advised):
        workload, strategy, notes = plan_options.what_to_plan(given, max(counts) * made_from.setting.ranks_per_node)
        made_from = plan_options.on_devices(made_from, given)
    if simulate:
        run_simulation(_simulate_options(given, workload, strategy, made_from.setting, max(counts)), json, output)
        return
    try:
        with advising_flags(advised):
            made = make_plan(workload, strategy, made_from.setting, counts)
    except ConfigError as error:
        # The error suggests --set, but a model given by --params has flags only.
        fix = "use another --global-batch or --micro-batch, or fewer --nodes" if params is not None else error.fix
        raise ConfigError(error.seen, why=error.why, fix=fix) from None
    _show(made, [made_from.note, *notes, *_assumptions(made, made_from)], given, made_from)


def _assumptions(made: Plan, made_from: Basis) -> Iterator[str]:
    """Yield what a reader of the table must know about nodes that differ or were not measured."""
    if made_from.known and max(row.nodes for row in made.rows) > made_from.known:
        yield f"nodes beyond the {made_from.known} {made_from.how} ones are assumed to equal the last of them"
    if len(set(made.setting.node_names)) > 1:
        base = made.rows[-1]
        yield f"speed-ups are against {base.base} alone, which trains {format_speed(base.base_tokens_per_s)}"


def _refuse_without_effect(context: typer.Context, calibrate: bool, simulate: bool) -> None:
    """Refuse an option that has no effect together with the others."""
    names = [name for name in context.params if name not in ("preset", "profile", "json", "calibrate")]
    if calibrate:
        fix = "write for example: shoal plan --calibrate runs/one runs/two --profile profile.toml"
        refuse_given(context, names, "with --calibrate", "it fits a profile to past runs and plans nothing", fix)
    own = ({field.name for field in fields(options.SimulateOptions)} & set(names)) - {*_SHARED}
    if not simulate:
        refuse_given(
            context,
            [name for name in names if name in own],
            "without --simulate",
            "it is an option of the simulation of failures, stragglers and checkpoints",
            "add --simulate, or leave it out",
        )
        return
    refuse_given(context, ["on"], "with --simulate", "a simulation prints no command to paste", "leave it out")
    chosen = context.params
    if chosen["checkpoint_every"] == "never":
        why = "checkpoints are never written"
        refuse_given(
            context, ["checkpoint_s", "hidden_checkpoints"], "with --checkpoint-every never", why, "leave it out"
        )
    if chosen["recovery"] == "restart":
        why = "all ranks are restarted from a checkpoint"
        refuse_given(context, ["regroup_s", "rejoin_s"], "with --recovery restart", why, "use --recovery both")


def _simulate_options(
    given: dict[str, Any], workload: Workload, strategy: SyncStrategy, setting: ClusterModel, nodes: int
) -> options.SimulateOptions:
    """Return the simulator's options, with the plan's prediction for every number of remaining nodes."""
    from shoal.cost.predict import predict

    own = {field.name for field in fields(options.SimulateOptions)} - {"nodes", "step_s", "tokens_per_step", "scaling"}
    values = {name: given[name] for name in own} | {"ranks_per_node": setting.ranks_per_node}

    @cache
    def planned(count: int) -> Prediction:
        return predict(workload, strategy, setting, count * setting.ranks_per_node)

    step_s = (lambda count: planned(count).step.step_s) if given["step_s"] is None else given["step_s"]
    tokens = planned(nodes).tokens if given["tokens_per_step"] is None else given["tokens_per_step"]
    scaling = workload.train.scaling
    return options.SimulateOptions(nodes=nodes, step_s=step_s, tokens_per_step=tokens, scaling=scaling, **values)


def _calibrate(runs: list[str], profile: Path | None, json: bool) -> None:
    if not runs or profile is None:
        raise UsageError(
            "--calibrate needs runs to learn from and a profile to write into",
            fix="write for example: shoal plan --calibrate runs/one runs/two --profile profile.toml",
        )
    from shoal.config.load import write_profile
    from shoal.tools.plan.compare import calibrate_profile

    fitted, results = calibrate_profile(profile, [Path(run) for run in runs])
    write_profile(fitted, profile)
    if json:
        print_json(_calibration_document(fitted, results))
    else:
        _print_calibration(fitted, results, profile)


def _show(made: Plan, notes: list[str], given: dict[str, Any], made_from: Basis) -> None:
    from shoal.tools.plan.advise import advise

    advice = advise(made)
    choices = (*advice.options, advice.best, advice.other_training)
    commands = {
        (option.strategy, option.row.nodes): _command(given, made_from, made, option)
        for option in choices
        if option is not None
    }
    if given["output"] is not None:
        from shoal.tools.plan.figures import plot_plan

        plot_plan(made, advice, given["output"])
    if given["json"]:
        print_json(_plan_document(made, advice, notes, commands))
        return
    _print_plan(made, advice, notes, commands)
    if given["output"] is not None:
        typer.echo(f"\npicture: {shown(given['output'])}")


def _command(given: dict[str, Any], made_from: Basis, made: Plan, option: PlanOption) -> str | None:
    """Return the command, or None for what shoal cannot do: a planned sync method, or a model that is no preset."""
    if given["params"] is not None or not option.is_possible:
        return None
    return command(*plan_options.train_words(given, made_from, made, option))


def _print_plan(plan: Plan, advice: Advice, notes: Sequence[str], commands: Commands) -> None:
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
    shown_columns = _fitting_columns(plan, console.width)
    console.print()
    console.print(_rows(plan, shown_columns))
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
    from shoal.tools.plan.advise import explain_plan

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
        },
    }


def _describe(workload: Workload, strategy: SyncStrategy, last: PlanRow) -> str:
    """Return for example `gpt2-124m: 124.44M parameters, 498 MB of gradients (ddp); 4,096 tokens a step, 4 × 1,024`."""
    from shoal.cost.strategy import bytes_per_parameter

    sent = bytes_per_parameter(strategy, workload) * workload.parameters
    sequences = last.prediction.batch_plan.global_batch
    size = "" if workload.model is None else f"{format_count(workload.parameters)} parameters, "
    return (
        f"{workload.name}: {size}{format_si(sent, 'B')} of gradients ({strategy}); "
        f"{format_amount(last.prediction.tokens)} a step, {sequences:,} × {workload.seq_len:,}"
    )


def _fitting_columns(plan: Plan, width: int) -> list[str]:
    """Return the titles of the columns that fit, leaving out the least important ones."""
    rows = [dict(zip(_TITLES, _row(row), strict=True)) for row in plan.rows]
    widths = {
        title: max(cell_len(title), *(Text.from_markup(row[title]).cell_len for row in rows)) for title in _TITLES
    }
    left_out: set[str] = set()
    for title in ("", *_LESS_IMPORTANT):
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
        format_percent(row.efficiency),
        memory if prediction.fits else f"[red]{memory}![/]",
    )


def _options(advice: Advice) -> Table:
    """Return all strategies on the most nodes, and those that the sentences recommend for fewer nodes."""
    most = advice.options[0].row.nodes
    recommended = (advice.best, advice.larger_batch, advice.other_training)
    fewer = [option for option in recommended if option is not None and option.row.nodes < most]
    table = _table((f"strategy, on {most} nodes", *_OPTION_TITLES[1:]), (1, 2))
    for option in sorted((*advice.options, *fewer), key=lambda option: option.tokens_per_s, reverse=True):
        table.add_row(*_option_row(option, most), style=None if option.is_possible else "dim")
    return table


def _option_row(option: PlanOption, most: int) -> tuple[str, ...]:
    name = str(option.strategy) + ("" if option.strategy.is_available else " *")
    name += f" ({option.row.nodes} nodes)" if option.row.nodes < most else ""
    return escape(name), f"{option.tokens_per_s:,.0f}", f"{option.row.speedup:.2f}×", escape(option.costs)


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
