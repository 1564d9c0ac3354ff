"""`shoal plan`: predict before anything is started."""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli import planargs
from shoal.cli import simulateoptions as options
from shoal.cli.given import advising_flags, given_settings, refuse_given
from shoal.cli.output import command, print_json, shown
from shoal.cli.planbasis import LINK, basis
from shoal.cli.plantext import plan_document, print_plan
from shoal.cli.simulate import run_simulation
from shoal.cost.advice import Advice, Option, advise
from shoal.cost.catalogue import LINKS, MACHINES
from shoal.cost.lever import Lever
from shoal.cost.plan import Plan, make_plan
from shoal.cost.predict import Prediction, Setting, predict
from shoal.cost.workload import Workload
from shoal.errors import ConfigError, UsageError

app = typer.Typer(add_completion=False)

DEFAULTS = options.SimulateOptions
# Options of a plan that a simulation has too.
_SHARED = ("nodes", "scaling", "ranks_per_node")


@app.command()
def plan(
    context: typer.Context,
    preset: Annotated[
        list[str] | None,
        typer.Argument(help="grammar, shakespeare-char or gpt2-124m; with --calibrate: runs.", show_default="grammar"),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(
            help="Numbers of nodes: 4, 1..8 or 1,2,4.", show_default="1..8, or the machines named or measured"
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help=f"Between nodes: {', '.join(LINKS)}, or a rate as 300mbit.", show_default=LINK),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="Plan for machines as measured by shoal probe.")] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Fit the profile's constants to past runs, and save it.")
    ] = False,
    latency: Annotated[str | None, typer.Option(help="What a message waits, software included, as 0.5ms.")] = None,
    efficiency: Annotated[float | None, typer.Option(help="Part of the link's rate that gradients get.")] = None,
    machine: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(MACHINES)}; unequal ones as desktop,laptop.", show_default="by link"),
    ] = None,
    flops: Annotated[float | None, typer.Option(help="The machine's matrix peak, as 2e12.")] = None,
    mfu: Annotated[float | None, typer.Option(help="The part of that which training reaches.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="The machine's memory.")] = None,
    ranks_per_node: Annotated[int, typer.Option(min=1, max=64, help="Ranks on each node, as GPUs in it.")] = 1,
    params: Annotated[float | None, typer.Option(help="A model of this size instead of a preset, as 760e6.")] = None,
    grad_dtype: Annotated[str, typer.Option(help="Gradients are computed in fp32 or bf16.")] = "fp32",
    tokens: Annotated[float | None, typer.Option(help="Tokens in a step of the whole world.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, as section.key=value; may be repeated.")
    ] = None,
    depth: Annotated[int | None, typer.Option(help="One dial for the model's size; 12 is GPT-2.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences in a step of the whole world.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences a rank computes at once.")] = None,
    scaling: Annotated[str | None, typer.Option(help="strong: the global batch is fixed; weak: each rank's.")] = None,
    accumulate: Annotated[
        int | None, typer.Option(help="So many times the batch between two exchanges.", show_default="1")
    ] = None,
    wire: Annotated[str | None, typer.Option(help="fp32, fp16, bf16, int8 or powersgd:RANK.")] = None,
    sync: Annotated[str | None, typer.Option(help="ddp, local:STEPS, diloco:STEPS, streaming:STEPS, sharded.")] = None,
    on: Annotated[
        str | None,
        typer.Option(help="Where the command to paste would run; nothing is looked at.", show_default="hosts.toml"),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A picture to write (PNG).")] = None,
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
    """Predict step time and speed on 1, 2, 3 … machines, and say which lever helps. Starts nothing.

    With --simulate: what failures, stragglers and checkpoints make of it over hours or months.
    """
    given = locals()
    refuse_idle(context, calibrate, simulate)
    if calibrate:
        learn(preset or [], profile, json)
        return
    given["preset"] = planargs.one_preset(preset)
    if output is not None:
        planargs.check_picture(output)
    flags = given_settings(context, planargs.SETTINGS)
    planargs.refuse_conflicts(flags, given)
    made_from = basis(given)
    given["on"] = made_from.on
    counts = planargs.parse_nodes(nodes or made_from.nodes)
    # The same setting in another unit.
    advised = {key: "--global-batch" if flag == "--tokens" else flag for key, flag in flags.items()}
    with advising_flags(advised):
        workload, lever, notes = planargs.what_to_plan(given, max(counts) * made_from.setting.ranks_per_node)
    if simulate:
        run_simulation(foretell(given, workload, lever, made_from.setting, max(counts)), json, output)
        return
    try:
        with advising_flags(advised):
            made = make_plan(workload, lever, made_from.setting, counts)
    except ConfigError as error:
        # What `--set` would change; a bare model takes flags only.
        fix = "use another --global-batch or --micro-batch, or fewer --nodes" if params is not None else error.fix
        raise ConfigError(error.seen, why=error.why, fix=fix) from None
    if made_from.known and max(counts) > made_from.known:
        notes.append(f"nodes beyond the {made_from.known} {made_from.how} ones are taken to be like the last of them")
    if len(set(made.setting.node_names)) > 1:
        base = made.rows[-1]
        notes.append(f"speed-ups are against {base.base} alone, which trains {base.base_tokens_per_s:,.0f} tokens/s")
    show(made, [made_from.note, *notes], given)


def refuse_idle(context: typer.Context, calibrate: bool, simulate: bool) -> None:
    """Refuse an option that has no effect beside the others."""
    names = [name for name in context.params if name not in ("preset", "profile", "json", "calibrate")]
    if calibrate:
        fix = "write for example: shoal plan --calibrate runs/one runs/two --profile profile.toml"
        refuse_given(context, names, "with --calibrate", "it fits a profile to past runs, and plans nothing", fix)
    own = ({field.name for field in fields(options.SimulateOptions)} & set(names)) - {*_SHARED}
    if not simulate:
        refuse_given(
            context,
            [name for name in names if name in own],
            "without --simulate",
            "it is one of the simulation's: failures, stragglers and checkpoints over hours or months",
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


def foretell(
    given: dict[str, Any], workload: Workload, lever: Lever, setting: Setting, nodes: int
) -> options.SimulateOptions:
    """The simulator's knobs, with the plan's own prediction for every number of nodes that are left."""
    own = {field.name for field in fields(options.SimulateOptions)} - {"nodes", "step_s", "tokens_per_step", "scaling"}
    knobs = {name: given[name] for name in own} | {"ranks_per_node": setting.ranks_per_node}

    @cache
    def planned(count: int) -> Prediction:
        return predict(workload, lever, setting, count * setting.ranks_per_node)

    step_s = (lambda count: planned(count).step.step_s) if given["step_s"] is None else given["step_s"]
    tokens = planned(nodes).tokens if given["tokens_per_step"] is None else given["tokens_per_step"]
    scaling = workload.train.scaling
    return options.SimulateOptions(nodes=nodes, step_s=step_s, tokens_per_step=tokens, scaling=scaling, **knobs)


def learn(runs: list[str], profile: Path | None, json: bool) -> None:
    if not runs or profile is None:
        raise UsageError(
            "--calibrate needs runs to learn from and a profile to write into",
            fix="write for example: shoal plan --calibrate runs/one runs/two --profile profile.toml",
        )
    # Reading runs takes numpy, which takes as long to import as a whole plan.
    from shoal.cli.lessonstext import lessons_document, print_lessons
    from shoal.config.profile_file import write_profile
    from shoal.trials.predicting import calibrated

    learned, lessons = calibrated(profile, [Path(run) for run in runs])
    write_profile(learned, profile)
    if json:
        print_json(lessons_document(learned, lessons))
    else:
        print_lessons(learned, lessons, profile)


def show(made: Plan, notes: list[str], given: dict[str, Any]) -> None:
    """`notes` say what the plan was made from."""
    advice = advise(made)
    commands = {option.lever: _command(given, made, option) for option in _named(advice)}
    if given["output"] is not None:
        from shoal.report.plan_picture import plot_plan

        plot_plan(made, given["output"])
    if given["json"]:
        print_json(plan_document(made, advice, notes, commands))
        return
    print_plan(made, advice, notes, commands)
    if given["output"] is not None:
        typer.echo(f"\npicture: {shown(given['output'])}")


def _named(advice: Advice) -> list[Option]:
    return [option for option in (*advice.options, advice.best, advice.other_training) if option is not None]


def _command(given: dict[str, Any], made: Plan, option: Option) -> str | None:
    """None for what shoal cannot do: a lever of tomorrow, or a model that is no preset."""
    if given["params"] is not None or not option.is_possible:
        return None
    return command(*planargs.train_words(given, made, option))
