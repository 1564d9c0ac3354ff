"""`shoal train`: train a model data-parallel."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from shoal.cli.command import Request, command
from shoal.cli.options import PROFILE, SETTINGS, Option
from shoal.cli.output import (
    advising_flags,
    make_console,
    print_json,
    print_paragraph,
    print_result,
    process_lines,
)
from shoal.config.defaults import DEFAULT_PRESET
from shoal.config.presets import PRESETS, Overrides, depth_overrides, flag_of
from shoal.errors import ShoalError, UsageError
from shoal.run_folder import RunFolder, default_out

if TYPE_CHECKING:
    from shoal.cli.watch import WatchedRun
    from shoal.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class TrainRequest(Request):
    preset: str | None = None
    on: str | None = None
    config: Path | None = None
    set_: list[str] | None = None
    steps: int | None = None
    out: Path | None = None
    resume: Path | None = None
    lineage: str | None = None
    data: Path | None = None
    tokenizer: str | None = None
    depth: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    scaling: str | None = None
    lr: float | None = None
    seed: int | None = None
    sync: str | None = None
    every: int | None = None
    accumulate: int | None = None
    wire: str | None = None
    copies: int | None = None
    measure: str | None = None
    on_silent_tie: str | None = None
    inside: str | None = None
    balance: str | None = None
    drop_slower_than: float | None = None
    launcher: str | None = None
    threads: int | None = None
    device: str | None = None
    compile_: str | None = None
    recompute: bool = False
    precision: str | None = None
    pin: str | None = None
    profile_steps: str | None = None
    clean: bool = False
    detach: bool = False
    confirm: bool = False
    watch: bool = False
    plan: bool = False
    profile: Path | None = None
    dry_run: bool = False
    json: bool = False


@command(
    resume=Option("Continue this run from its last checkpoint."),
    lineage=Option("With --resume, after a network partition: the lineage to continue."),
    confirm=Option("With --on join:N, ask here before a joining machine receives anything."),
    plan=Option("Predict the step time first, and compare at the end.", effect="new run"),
    dry_run=Option("Print the commands without starting them.", effect="new run"),
    json=Option("Print the result as JSON on stdout."),
)
def train(request: TrainRequest) -> None:
    """Train the built-in GPT on your text. Gradients are exchanged in every step, or weights every few steps (--sync).

    A model of your own: shoal run, with shoal.Session or without.

    Every setting can be given as --set section.key=value; the sections are model, data, train, sync, run, members.
    With --resume only settings that no finished step depends on: steps, weights, balance, threads, intervals, measure,
    members.
    """
    if request.resume is not None:
        _resume(request, request.resume)
        return
    if request.lineage:
        raise UsageError(
            "--lineage goes with --resume",
            why="it names one of the lineages that a run's machines trained during a network partition",
            fix=f"shoal train --resume RUN --lineage {request.lineage}",
        )
    from shoal.cli.progress import make_display, name_training
    from shoal.cli.watch import watched
    from shoal.runs.start import refuse_confirm, start_training

    settings = new_run_config(request)
    folder = request.out or default_out(name_training(settings))
    if request.dry_run:
        refuse_with_dry_run(request)
        with advising_flags(request.flags()):
            print_plan(settings, folder, request.json)
        return
    if request.confirm:
        refuse_confirm(settings.run.on)
    clear_leftovers(request.clean)
    with advising_flags(request.flags()), watched(request.watch, request.detach) as page:
        before = before_start(settings, request.profile, request.plan, page)
        run, manifest = start_training(settings, folder, make_display, request.detach, before, request.confirm)
    print_result(run, manifest, request.json)


def _resume(request: TrainRequest, run: Path) -> None:
    """Continue a training of the GPT, or the session of a script."""
    from shoal.cli.progress import make_display
    from shoal.cli.runs import resume_session
    from shoal.cli.watch import watched
    from shoal.runs.start import resume_training
    from shoal.runs.supervisor import is_script

    refuse_with_resume(request)
    changes = resume_changes(request)
    is_of_script = is_script(RunFolder(run.resolve()))
    if is_of_script:
        for name in ("lineage", "confirm", *(() if request.detach else ("json",))):
            if getattr(request, name):
                raise UsageError(
                    f"--{name} does not go with the run of a script",
                    why="it is for a training of shoal's own GPT",
                    fix=f"leave it out: shoal run --resume {shlex.quote(str(run))}",
                )
    clear_leftovers(request.clean)
    with advising_flags(request.flags()), watched(request.watch, request.detach) as page:
        if page is not None:
            page.start(RunFolder.open(run))
        if is_of_script:
            resume_session(run, changes, request.detach, request.json)
            return
        lineage = request.lineage or ""
        resumed, manifest = resume_training(run, make_display, changes, request.detach, lineage, request.confirm)
    print_result(resumed, manifest, request.json)


def new_run_config(request: TrainRequest) -> Config:
    """Build the settings of a new run. Refuse a given setting that would have no effect."""
    from shoal.cluster.target import place_ranks
    from shoal.config.load import build_config, refuse_duplicate_settings, refuse_without_effect, typed_settings

    flags, sets = merge_depth(request), request.set_ or []
    refuse_duplicate_settings(request.flags(), sets)
    preset = request.preset or DEFAULT_PRESET
    refuse_path_as_preset(preset)
    # A setting that was typed with --set is corrected there.
    typed = typed_settings(None, sets)
    others = {option.setting: flag_of(name) for name, option in SETTINGS.items() if option.setting not in typed}
    with advising_flags(request.flags(), others):
        settings = build_config(preset, request.config, flags, sets)
        refuse_without_effect(settings, typed_settings(flags, sets))
        return place_ranks(settings)


def merge_depth(request: TrainRequest) -> Overrides:
    """Return the settings of the flags, with the shape of the model for `--depth`."""
    from shoal.config.load import merge

    return merge([depth_overrides(request.depth), request.overrides()])


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


def resume_changes(request: TrainRequest) -> Overrides:
    """Return the settings that change with a resume. Refuse those that cannot change."""
    from shoal.config.load import merge, parse_set, refuse_duplicate_settings, refuse_fixed, typed_settings

    sets, flags = request.set_ or [], request.flags()
    refuse_duplicate_settings(flags, sets)
    refuse_fixed({key: key for key in typed_settings(None, sets)} | flags)
    return merge([request.overrides(), *map(parse_set, sets)])


def before_start(
    settings: Config, profile: Path | None, plan: bool, page: WatchedRun | None = None
) -> Callable[[RunFolder], None]:
    """Return a function that prints the predicted sync method and speed, and starts the page, before the run starts.

    `--sync auto` and the first shares use ./profile.toml if it exists; a profile of another cluster is only refused if
    it was named.
    """
    from shoal.cluster.target import parse_on, rank_count
    from shoal.cost.memory import sharded_memory
    from shoal.records.explain_run import prediction_line
    from shoal.tools.plan.compare import store_first_speeds, store_prediction, store_sync_plan

    named = profile or PROFILE if plan or profile else None

    def before(run: RunFolder) -> None:
        console = make_console(stderr=True)
        if memory := sharded_memory(settings, rank_count(parse_on(settings.run.on))):
            print_paragraph(memory, console)
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


def refuse_with_resume(request: TrainRequest) -> None:
    """Refuse options of new runs. Flags of settings are checked as settings."""
    for name, option in request.given.items():
        if option.effect == "new run":
            raise UsageError(
                f"{request.preset if name == 'preset' else flag_of(name)} does not go with --resume",
                why="a resumed run continues in its folder with the model and the text it was started with",
                fix=f"leave it out, or start a new run without --resume {request.resume}",
            )


def refuse_with_dry_run(request: TrainRequest) -> None:
    for name in ("plan", "profile", "watch"):
        if name in request.given:
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
        sys.stdout.write(f"# {rank.name} on {rank.node.name}\n{variables} {shlex.join(rank.argv)}\n\n")


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
