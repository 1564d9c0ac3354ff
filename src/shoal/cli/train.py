"""`shoal train`: train a model data-parallel."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from shoal.cli.output import (
    Depth,
    advising_flags,
    flag_of,
    make_console,
    print_detached,
    print_json,
    print_paragraph,
    print_run,
    process_lines,
)
from shoal.config.defaults import DEFAULT_PRESET
from shoal.config.presets import PRESET_NAMES, PRESETS, Overrides, depth_overrides
from shoal.config.sync_choice import OUTER_METHODS, ROUND_STEPS_TEXT, SYNC_HELP, WIRE_HELP
from shoal.errors import ShoalError, UsageError
from shoal.run_folder import RunFolder, default_out

if TYPE_CHECKING:
    from shoal.cli.watch import WatchedRun
    from shoal.config.schema import Config


app = typer.Typer(add_completion=False)

PROFILE = Path("profile.toml")
BALANCE_HELP = (
    "How unequal machines share a batch: off (equally, or by run.weights), static (by their speed in the first steps) "
    "or live (shares follow their speed)."
)
BALANCE_DEFAULT = "live where machines differ by more than 10%"
DROP_HELP = (
    "Leave a machine out that computes at less than this part of the speed of the fastest, such as 0.2; it stays a "
    "spare."
)
# The setting of each flag; a flag has the name of its parameter below.
FLAGS = {
    "on": "run.on",
    "launcher": "run.launcher",
    "threads": "run.threads",
    "balance": "run.balance",
    "drop_slower_than": "members.drop_slower_than",
    "data": "data.path",
    "tokenizer": "data.tokenizer",
    "steps": "train.steps",
    "global_batch": "train.global_batch",
    "micro_batch": "train.micro_batch",
    "scaling": "train.scaling",
    "lr": "train.lr",
    "seed": "train.seed",
    "device": "train.device",
    "compile_": "train.compile",
    "precision": "train.precision",
    "pin": "train.pin",
    "profile_steps": "train.profile_steps",
    "seq_len": "model.seq_len",
    "sync": "sync.mode",
    "every": "sync.every",
    "accumulate": "sync.accumulate",
    "wire": "sync.wire",
    "measure": "sync.measure",
    "inside": "sync.inside",
    "on_silent_tie": "members.on_silent_tie",
}


@app.command()
def train(
    preset: Annotated[str | None, typer.Argument(help=f"{PRESET_NAMES}.", show_default="grammar")] = None,
    on: Annotated[
        str | None,
        typer.Option(help="local:N, lab:N[,link=1gbit,…], lab[:NAME], a hosts file or join:N.", show_default="local:2"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file with settings.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, as section.key=value; may be repeated.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps.")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder to create.", show_default="runs/NAME-TIME")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this run from its last checkpoint.", readable=False)
    ] = None,
    lineage: Annotated[
        str | None, typer.Option(help="With --resume, after a network partition: the lineage to continue.")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A text file, or a folder of text files.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="char, byte or bpe.")] = None,
    depth: Depth = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens per sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences per step, over all ranks.")] = None,
    micro_batch: Annotated[int | None, typer.Option(help="Sequences that a rank computes at once.")] = None,
    scaling: Annotated[str | None, typer.Option(help="strong: fixed global batch; weak: fixed batch per rank.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate.", show_default="the preset's")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the first weights, the order of samples and dropout.")] = None,
    sync: Annotated[str | None, typer.Option(help=f"How replicas agree. {SYNC_HELP}.", show_default="ddp")] = None,
    every: Annotated[
        int | None,
        typer.Option(help=f"Steps between exchanges of {', '.join(OUTER_METHODS)}.", show_default=ROUND_STEPS_TEXT),
    ] = None,
    accumulate: Annotated[int | None, typer.Option(help="Multiply the batch between two exchanges by this.")] = None,
    wire: Annotated[str | None, typer.Option(help=f"Number format of sent gradients. {WIRE_HELP}.")] = None,
    measure: Annotated[str | None, typer.Option(help="How the all-reduce is timed: hook, barrier or off.")] = None,
    on_silent_tie: Annotated[
        str | None,
        typer.Option(help="If half of the machines fall silent, the others continue on their own or pause."),
    ] = None,
    inside: Annotated[
        str | None, typer.Option(help="Exchange between ranks of one machine: auto, gloo, copies or shared (memory).")
    ] = None,
    balance: Annotated[str | None, typer.Option(help=BALANCE_HELP, show_default=BALANCE_DEFAULT)] = None,
    drop_slower_than: Annotated[float | None, typer.Option(help=DROP_HELP, show_default="none is left out")] = None,
    launcher: Annotated[str | None, typer.Option(help="What starts the ranks: shoal, torchrun or spawn.")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads per rank.", show_default="cores / ranks")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    compile_: Annotated[
        str | None, typer.Option("--compile", help="torch.compile: on, off, or auto (if a trial shows a gain).")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="Precision of matrix products: fp32, bf16 or auto; by default bf16 on a GPU that has it."),
    ] = None,
    pin: Annotated[str | None, typer.Option(help="Pin each rank to its own cores: auto, on or off.")] = None,
    profile_steps: Annotated[
        str | None, typer.Option(help="Steps that torch.profiler records, such as 20-22; see shoal trace.")
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="End processes left over from earlier runs.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the run in the background; see shoal ps, logs, attach.")
    ] = False,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="With --on join:N, ask here before a joining machine receives anything.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve a live page about the run while it goes on; see shoal watch.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Predict the step time first, and compare at the end.")] = False,
    profile: Annotated[
        Path | None,
        typer.Option(help="The profile for --plan and --sync auto; see shoal probe.", show_default=str(PROFILE)),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands without starting them.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Train the built-in GPT on your text. Gradients are exchanged in every step, or weights every few steps (--sync).

    A model of your own: shoal run, with shoal.Session or without.

    Every setting can be given as --set section.key=value; the sections are model, data, train, sync, run, members.
    With --resume only settings that no finished step depends on: steps, weights, balance, threads, intervals, measure,
    members.
    """
    given = dict(locals())
    from shoal.cli.progress import make_display, name_training
    from shoal.cli.runs import resume_session
    from shoal.cli.watch import watched
    from shoal.runs.start import refuse_confirm, resume_training, start_training
    from shoal.runs.supervisor import is_script

    if lineage and resume is None:
        raise UsageError(
            "--lineage goes with --resume",
            why="it names one of the lineages that a run's machines trained during a network partition",
            fix=f"shoal train --resume RUN --lineage {lineage}",
        )
    if resume is not None:
        refuse_with_resume(given)
        changes = resume_changes(given)
        is_of_script = is_script(RunFolder(resume.resolve()))
        if is_of_script:
            for name, value in (("--lineage", lineage), ("--confirm", confirm), ("--json", json and not detach)):
                if value:
                    raise UsageError(
                        f"{name} does not go with the run of a script",
                        why="it is for a training of shoal's own GPT",
                        fix=f"leave it out: shoal run --resume {shlex.quote(str(resume))}",
                    )
        clear_leftovers(clean)
        with advising_flags(named_flags(given)), watched(watch, detach) as page:
            if page is not None:
                page.start(RunFolder.open(resume))
            if is_of_script:
                resume_session(resume, changes, detach, json)
                return
            run, manifest = resume_training(resume, make_display, changes, detach, lineage or "", confirm)
    else:
        settings = new_run_config(given)
        folder = out or default_out(name_training(settings))
        if dry_run:
            refuse_with_dry_run(given)
            with advising_flags(named_flags(given)):
                print_plan(settings, folder, json)
            return
        if confirm:
            refuse_confirm(settings.run.on)
        clear_leftovers(clean)
        with advising_flags(named_flags(given)), watched(watch, detach) as page:
            before = before_start(settings, profile, plan, page)
            run, manifest = start_training(settings, folder, make_display, detach, before, confirm)
    if manifest is None:
        print_detached(run, json)
    elif json:
        print_json(manifest.model_dump(mode="json"))
    else:
        print_run(run, manifest)


def new_run_config(given: dict[str, Any]) -> Config:
    """Build the settings of a new run. Refuse a given setting that would have no effect."""
    from shoal.cluster.target import place_ranks
    from shoal.config.load import build_config, refuse_duplicate_settings, refuse_without_effect, typed_settings

    flags, sets = flags_to_overrides(given), given["set_"] or []
    refuse_duplicate_settings(named_flags(given), sets)
    refuse_path_as_preset(given["preset"] or DEFAULT_PRESET)
    # A setting that was typed with --set is corrected there.
    others = {key: flag_of(flag) for flag, key in FLAGS.items() if key not in typed_settings(None, sets)}
    with advising_flags(named_flags(given), others):
        settings = build_config(given["preset"] or DEFAULT_PRESET, given["config"], flags, sets)
        refuse_without_effect(settings, typed_settings(flags, sets))
        return place_ranks(settings)


def refuse_path_as_preset(name: str) -> None:
    """Refuse a file or folder in the place of the preset, with the option that takes it."""
    path = Path(name)
    if name in PRESETS or not path.exists():
        return
    what, flag = "a text", "--data"
    if path.suffix == ".toml":
        what, flag = "a file with settings", "--config"
    elif (path / "config.toml").is_file():
        what, flag = "a run", "--resume"
    raise UsageError(
        f"there is no preset {name!r}",
        why=f"a preset is a named starting configuration; {what} is given with {flag}",
        fix=f"shoal train {flag} {shlex.quote(name)}",
    )


def named_flags(given: dict[str, Any]) -> dict[str, str]:
    """Return the given flags by setting."""
    return {key: flag_of(flag) for flag, key in FLAGS.items() if given[flag] is not None}


def resume_changes(given: dict[str, Any]) -> Overrides:
    """Return the settings that change with a resume. Refuse those that cannot change."""
    from shoal.config.load import merge, parse_set, refuse_duplicate_settings, refuse_fixed, typed_settings

    sets, flags = given["set_"] or [], named_flags(given)
    refuse_duplicate_settings(flags, sets)
    refuse_fixed({key: key for key in typed_settings(None, sets)} | flags)
    return merge([flags_to_overrides(given), *map(parse_set, sets)])


def before_start(
    settings: Config, profile: Path | None, plan: bool, page: WatchedRun | None = None
) -> Callable[[RunFolder], None]:
    """Return a function that prints the predicted sync method and speed, and starts the page, before the run starts.

    `--sync auto` and the first shares use ./profile.toml if it exists; a profile of another cluster is only refused if
    it was named.
    """
    from shoal.records.explain_run import prediction_line
    from shoal.tools.plan.compare import store_first_speeds, store_prediction, store_sync_plan

    named = profile or PROFILE if plan or profile else None

    def before(run: RunFolder) -> None:
        console = make_console(stderr=True)
        if (path := named or PROFILE).exists():
            store_first_speeds(run, path)
        if settings.sync.mode == "auto":
            print_paragraph(escape(store_sync_plan(run, named) if named else _default_sync_plan(run)), console)
        if named is not None:
            print_paragraph(escape(prediction_line(store_prediction(run, named))), console)
        if page is not None:
            page.start(run)

    return before


def _default_sync_plan(run: RunFolder) -> str:
    from shoal.tools.plan.compare import NO_PLAN, store_sync_plan

    if not PROFILE.exists():
        return NO_PLAN
    try:
        return store_sync_plan(run, PROFILE, discard=False)
    except ShoalError as error:
        return f"plan: ./{PROFILE} is not used: {error.seen}; the first steps alone choose how to synchronise"


def flags_to_overrides(given: dict[str, Any]) -> Overrides:
    overrides: Overrides = depth_overrides(given.get("depth"))
    for flag, key in FLAGS.items():
        if (value := given.get(flag)) is not None:
            section, name = key.split(".")
            overrides.setdefault(section, {})[name] = value
    return overrides


def refuse_with_resume(given: dict[str, Any]) -> None:
    """Refuse options of new runs. Flags of settings are checked as settings."""
    allowed = {"set_", "resume", "lineage", "json", "detach", "clean", "confirm", "watch", *FLAGS}
    # A zero is a given value: `--threads 0` must not pass.
    left_out = [name for name, value in given.items() if value is None or value is False or value == []]
    extra = [name for name in given if name not in allowed and name not in left_out]
    if extra:
        flag = given["preset"] if extra[0] == "preset" else flag_of(extra[0])
        raise UsageError(
            f"{flag} does not go with --resume",
            why="a resumed run continues in its folder with the model and the text it was started with",
            fix=f"leave it out, or start a new run without --resume {given['resume']}",
        )


def refuse_with_dry_run(given: dict[str, Any]) -> None:
    for name in ("plan", "profile", "watch"):
        if given[name]:
            raise UsageError(
                f"--{name} does not go with --dry-run",
                why="--dry-run prints the commands that start the ranks, and starts and predicts nothing",
                fix="leave one of them out; to predict without training: shoal plan",
            )


def print_plan(config: Config, out: Path, json: bool) -> None:
    """Print the commands as they could be typed. The port is a placeholder: the real one is chosen at launch."""
    from shoal.cluster.cluster import planned_nodes
    from shoal.cluster.node import Rendezvous
    from shoal.cluster.target import parse_on, rank_count
    from shoal.data.prepare import check_shares
    from shoal.launch.plan import plan_ranks

    check_shares(config, rank_count(parse_on(config.run.on)))
    nodes = planned_nodes(config.run.on)
    rendezvous = Rendezvous(nodes[0].address, 0)
    commands = plan_ranks(config.run, lambda node: str(out), nodes, rendezvous, resume=False)
    if json:
        ranks = [
            {"name": rank.name, "node": rank.node.name, "env": dict(sorted(rank.env.items())), "argv": [*rank.argv]}
            for rank in commands
        ]
        print_json({"run": str(out), "config": config.model_dump(mode="json"), "commands": ranks})
        return
    for rank in commands:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(rank.env.items()))
        typer.echo(f"# {rank.name} on {rank.node.name}\n{variables} {shlex.join(rank.argv)}\n")


def clear_leftovers(clean: bool) -> None:
    """Show processes that earlier runs left behind, and end them if `clean`: they take cores and memory."""
    from shoal.runs.manage import end_processes, leftovers, running_runs

    processes = leftovers(running_runs())
    if not processes:
        return
    if clean:
        end_processes(processes)
    title = "ended" if clean else "left over from earlier runs (--clean ends them)"
    lines = "".join(f"  {line}\n" for line in process_lines(processes))
    sys.stderr.write(f"{title}:\n{lines}")
