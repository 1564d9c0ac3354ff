"""`shoal run`: start a torchrun-style script on the cluster. `shoal emit`: write a training for other launchers."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal import __version__
from shoal.cli.output import Depth, advising_flags, given_settings, print_json, print_note, refuse_given
from shoal.cli.train import BALANCE_DEFAULT, BALANCE_HELP, DROP_HELP, PROFILE
from shoal.config.defaults import DEFAULT_CLAIM, DEFAULT_PRESET, GRACE_S, MOUNT
from shoal.config.presets import PRESETS, Overrides, depth_overrides, did_you_mean
from shoal.config.sync_choice import SYNC_HELP, WIRE_HELP
from shoal.errors import ShoalError, UsageError
from shoal.run_folder import RunFolder, default_out, write_atomically

if TYPE_CHECKING:
    from shoal.config.schema import Config
    from shoal.launch.emit import EmitJob


app = typer.Typer(add_completion=False)

_LONGEST_GRACE_S = 86400.0
_SETTINGS_OF_FLAGS = {
    "on": "run.on",
    "threads": "run.threads",
    "balance": "run.balance",
    "drop_slower_than": "members.drop_slower_than",
    "steps": "train.steps",
    "sync": "sync.mode",
    "wire": "sync.wire",
    "accumulate": "sync.accumulate",
    "profile_steps": "train.profile_steps",
}
# Options that scripts of others seldom have.
_OF_SHOAL = {"--on", "--detach", "--measure", "--wire", "--balance", "--restarts"}
# A resumed run has the values of its first start.
_OF_NEW_RUNS = ("on", "out", "threads", "port", "python", "grace", "measure", "restarts")


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    context: typer.Context,
    script: Annotated[
        list[str] | None, typer.Argument(help="A Python script, or -m MODULE, and its own arguments.")
    ] = None,
    on: Annotated[str, typer.Option(help="Where to run: local:N, lab:N[,link=1gbit,…] or a hosts file.")] = "local:2",
    out: Annotated[Path | None, typer.Option(help="The folder for logs.", show_default="runs/NAME-TIME")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads per rank.", show_default="cores / ranks")] = None,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="MASTER_PORT, if a firewall allows only one.", show_default="a free one"),
    ] = 0,
    python: Annotated[
        str, typer.Option(help="The Python that runs it.", show_default="the activated environment's, or shoal's own")
    ] = "",
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that ranks have to end after Ctrl-C or shoal stop.")
    ] = GRACE_S,
    measure: Annotated[
        bool, typer.Option("--measure", help="Record step and all-reduce times of an unmodified DDP script.")
    ] = False,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often to start all ranks again after a failure (no session).")
    ] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the script's session.", show_default=False)] = None,
    sync: Annotated[str | None, typer.Option(help=f"{SYNC_HELP} (session).", show_default=False)] = None,
    wire: Annotated[str | None, typer.Option(help=f"{WIRE_HELP} (session).", show_default=False)] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="Batches between two exchanges (session).", show_default=False)
    ] = None,
    balance: Annotated[
        str | None, typer.Option(help=f"{BALANCE_HELP.rstrip('.')} (session).", show_default=BALANCE_DEFAULT)
    ] = None,
    drop_slower_than: Annotated[
        float | None, typer.Option(help=f"{DROP_HELP.rstrip('.')} (session).", show_default="none is left out")
    ] = None,
    profile_steps: Annotated[
        str | None,
        typer.Option(help="Steps that torch.profiler records (session, --measure), such as 20-22; see shoal trace."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of the session, as section.key=value; may be repeated."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the session of this run from its newest checkpoint.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Predict the step time (session) from this earlier run on one rank, and compare at the end.",
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="The profile for --plan; see shoal probe.", show_default=str(PROFILE))
    ] = None,
    clean: Annotated[bool, typer.Option("--clean", help="End processes left over from earlier runs.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the run in the background; see shoal ps, logs, attach.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve a live page about the run while it goes on; see shoal watch.")
    ] = False,
) -> None:
    """Start your own script on every slot of the cluster: one that uses shoal.Session, or any torchrun-style script.

    Options marked (session), and --steps and --set, are for a script that uses shoal.Session; they win over its own
    values. Such a run also survives the loss of machines, and shoal report and verify work on it.
    Any other script runs as under torchrun: it gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the rest. The exit
    code is the script's. On this machine, rank 0 reads the standard input.
    With --measure, shoal report and verify work on it too. With --restarts, all ranks are started again when one fails,
    on the machines that are left; the script continues from its own checkpoint.
    Modules are imported from the script's folder first; with -m from the current folder, unless others can write to it.
    """
    from shoal.cli.runs import print_script_end, resume_session, watch_script
    from shoal.cli.train import clear_leftovers
    from shoal.cli.watch import watched
    from shoal.cluster.target import JoinSpec, parse_on
    from shoal.config.load import refuse_duplicate_settings, validate_session
    from shoal.records.explain_run import prediction_line
    from shoal.runs.start import start_script
    from shoal.runs.supervisor import RunJob
    from shoal.tools.plan.compare import first_speeds, predict_script

    flags: Overrides = {
        "run": {"threads": threads, "balance": balance},
        "members": {"drop_slower_than": drop_slower_than},
        "train": {"steps": steps, "profile_steps": profile_steps},
        "sync": {"mode": sync, "wire": wire, "accumulate": accumulate},
    }
    typed = given_settings(context, _SETTINGS_OF_FLAGS)
    refuse_duplicate_settings(typed, set_ or [])
    for option, is_given in (("--plan", plan is not None), ("--profile", profile is not None)):
        if is_given and (measure or resume is not None or plan is None):
            against = "--measure" if measure else "--resume" if resume is not None else "a run without --plan"
            raise UsageError(
                f"{option} does not go with {against}",
                why="a prediction needs a session's compute time, from an earlier run on one rank",
                fix="shoal run --on local:1 --out runs/alone SCRIPT\nthen: shoal run --plan runs/alone SCRIPT",
            )
    if resume is not None:
        if script:
            raise UsageError(
                f"--resume {resume} does not go with a script",
                why="the run folder knows its script",
                fix=f"shoal run --resume {resume}",
            )
        refuse_given(
            context,
            _OF_NEW_RUNS,
            "with --resume",
            why="the run goes on in its folder, on its cluster, as it was started",
            fix=f"leave it out: shoal run --resume {resume}",
        )
        clear_leftovers(clean)
        with watched(watch, detach) as page:
            if page is not None:
                page.start(RunFolder.open(resume))
            with advising_flags(typed):
                changes = session_settings(flags, set_ or [], None)
            resume_session(resume, changes, detach)
        return
    if not script:
        raise UsageError("no script to run", fix="write for example: shoal run --on local:2 train.py --epochs 3")
    argv, name = script_command(script)
    if note := misplaced_note(script):
        print_note(note)
    with advising_flags(typed):
        session = session_settings(flags, set_ or [], on)
    on = session["run"]["on"]
    if not grace <= _LONGEST_GRACE_S:
        raise UsageError(
            f"--grace {grace:g} is not a usable time",
            why="ranks are ended after it, so it must be finite",
            fix=f"write seconds, up to a day: --grace {_LONGEST_GRACE_S:.0f}",
        )
    if restarts and isinstance(parse_on(on), JoinSpec):
        raise UsageError(
            f"--restarts does not go with --on {on}",
            why="a machine that joined by a code takes part in one launch only",
            fix="leave --restarts out, or name the machines in a hosts file",
        )
    if argv[0] == "-m" and isinstance(parse_on(on), JoinSpec):
        raise UsageError(
            f"-m {argv[1]} does not go with --on {on}",
            why="the owner of a machine that joins names the script there, and both are compared",
            fix="start a script file instead",
        )
    prediction = None if plan is None else predict_script(session, plan, profile or PROFILE)
    clear_leftovers(clean)
    if (path := profile or PROFILE).exists():
        with contextlib.suppress(ShoalError):
            # A profile of other machines is of no use here.
            if speeds := first_speeds(validate_session(session), path):
                session["run"]["speeds"] = speeds
    out = out or default_out(name)
    job = RunJob(
        script=tuple(argv),
        on=on,
        port=port,
        grace_s=grace,
        python=python,
        session=dumps(session),
        measure=measure,
        restarts=restarts,
    )
    # A script that is only measured shows its own progress.
    display, show = watch_script(with_progress=not detach and not measure)
    if prediction is not None:
        display.note(prediction_line(prediction))

    with watched(watch, detach) as page:

        def before(folder: RunFolder) -> None:
            if prediction is not None:
                write_atomically(folder.prediction, prediction.model_dump_json(indent=2) + "\n")
            if page is not None:
                page.start(folder)

        print_script_end(start_script(job, out, detach, display, show, before), detach)


def session_settings(flags: Overrides, sets: list[str], on: str | None) -> dict[str, Any]:
    """Return the settings of the command line for the sessions of a script, and refuse wrong ones before it starts."""
    from shoal.cluster.target import place_ranks
    from shoal.config.load import merge, parse_set, refuse_without_effect, typed_settings, validate_session

    given = {
        section: chosen
        for section, values in flags.items()
        if (chosen := {key: value for key, value in values.items() if value is not None})
    }
    settings = merge([{"run": {"on": on}} if on else {}, given, *map(parse_set, sets)])
    config = validate_session(settings, typed=[*typed_settings(given, sets), *(["run.on"] if on else [])])
    if on and (devices := place_ranks(config).run.devices):
        settings["run"]["devices"] = devices
    if "mode" in settings.get("sync", {}):
        # Otherwise the script may choose the mode, and its session refuses a setting that the mode lacks.
        refuse_without_effect(config, typed_settings(given, sets))
    return settings


def misplaced_note(words: list[str]) -> str:
    """Return a note about options after the script that were probably meant for shoal; nothing if there are none."""
    start = 2 if words[0] == "-m" else 1
    late = [word for word in words[start:] if word.partition("=")[0] in _OF_SHOAL]
    if not late:
        return ""
    script = " ".join(words[:start])
    return (
        f"what stands after {script} goes to the script, also {' and '.join(late)}; options of shoal stand before it: "
        f"shoal run {late[0]} … {script}"
    )


def script_command(words: list[str]) -> tuple[list[str], str]:
    """Return the command to start and a name for its folder."""
    from shoal.cli.main import load_verb, suggest_option

    if words[0] == "-m":
        if len(words) < 2:
            raise UsageError("-m without a module", fix="write for example: shoal run -m my.training --epochs 3")
        return words, words[1].rpartition(".")[2]
    if words[0].startswith("-"):
        name = words[0].partition("=")[0]
        verb = load_verb("run")
        known = [option for parameter in verb.params for option in parameter.opts]
        why, fix = suggest_option(name, verb, ["run", *words]) or (
            did_you_mean(name, known),
            "see its options: shoal run --help",
        )
        raise UsageError(f"shoal run has no option {name}", why=why, fix=fix)
    script = Path(words[0])
    if not script.is_file():
        raise UsageError(
            f"there is no script {script}",
            why="the first word that is not an option of shoal run is the script to start",
            fix=f"check the path: ls {script.parent}",
        )
    return [str(script.resolve()), *words[1:]], script.stem


emit_app = typer.Typer(add_completion=False, no_args_is_help=True)
app.add_typer(emit_app, name="emit")

RunConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="RUNCONFIG", help="A preset, a TOML file with settings, or a run folder.", show_default="grammar"
    ),
]
On = Annotated[
    str | None,
    typer.Option(help="Nodes and ranks: local:N, lab:N, lab.", show_default="the configuration's"),
]
Set = Annotated[list[str] | None, typer.Option("--set", help="One setting, as section.key=value; may be repeated.")]
Python = Annotated[str, typer.Option(help="The Python that has shoal, on the training machines.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


@emit_app.callback()
def emit() -> None:
    """Write the training for other launchers: torchrun commands, a Slurm script, a Kubernetes manifest."""


@emit_app.command()
def torchrun(
    runconfig: RunConfig = None,
    on: On = None,
    depth: Depth = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/NAME-TIME")] = None,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Rendezvous port on the first node.")] = 29500,
    python: Python = sys.executable,
    json: Json = False,
) -> None:
    """Print one torchrun command for each node; type it there."""
    from shoal.launch.emit import slug, torchrun_commands, torchrun_text

    config = _config(runconfig, on, depth, set_)
    job = _job(config, out or default_out(slug(config.run.preset)), python, with_addresses=True)
    if json:
        print_json({"format": "torchrun", "commands": [asdict(command) for command in torchrun_commands(job, port)]})
    else:
        sys.stdout.write(torchrun_text(job, port))


@emit_app.command()
def slurm(
    runconfig: RunConfig = None,
    on: On = None,
    depth: Depth = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/NAME-JOBID")] = None,
    python: Python = sys.executable,
    json: Json = False,
) -> None:
    """Print an sbatch script: one task per node, each a torchrun."""
    from shoal.launch.emit import slug, slurm_text

    config = _config(runconfig, on, depth, set_)
    job = _job(config, out or Path("runs") / slug(config.run.preset), python)
    _print_file("slurm", f"shoal-{slug(config.run.preset)}.sbatch", slurm_text(job, new_folder=out is None), json)


@emit_app.command()
def k8s(
    runconfig: RunConfig = None,
    on: On = None,
    depth: Depth = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder, on the volume; names the Job.", show_default="runs/NAME")
    ] = None,
    image: Annotated[str, typer.Option(help="A container image that has shoal.")] = f"shoal:{__version__}",
    claim: Annotated[str, typer.Option(help=f"The volume claim that the pods share at {MOUNT}.")] = DEFAULT_CLAIM,
    memory: Annotated[
        str | None, typer.Option(help="Memory per pod.", show_default="what its ranks need, as shoal plan estimates it")
    ] = None,
    python: Annotated[str, typer.Option(help="The Python that has shoal, in the image.")] = "python3",
    json: Json = False,
) -> None:
    """Print a Kubernetes manifest: an indexed Job with one pod per node, and a headless Service."""
    from shoal.launch.emit import Pods, k8s_name, k8s_text, slug

    config = _config(runconfig, on, depth, set_)
    job = _job(config, out or Path("runs") / slug(config.run.preset), python)
    _print_file("k8s", f"{k8s_name(job)}.yaml", k8s_text(job, Pods(image, claim, memory)), json)


def _config(runconfig: str | None, on: str | None, depth: int | None, sets: list[str] | None) -> Config:
    from shoal.cluster.target import place_ranks
    from shoal.config.load import build_config

    flags: Overrides = depth_overrides(depth) | ({} if on is None else {"run": {"on": on}})
    preset, file = find_config(runconfig or DEFAULT_PRESET)
    return place_ranks(build_config(preset, file, flags, sets or []))


def find_config(name: str) -> tuple[str, Path | None]:
    """Return a preset and a file with settings for it. A preset's name means the preset, `./NAME` the file."""

    if name in PRESETS:
        return name, None
    path = Path(name)
    if path.is_dir():
        return DEFAULT_PRESET, RunFolder.open(path).config
    if path.exists():
        return DEFAULT_PRESET, path
    raise UsageError(
        f"{name!r} is not a preset, and there is no such file or run folder",
        why=did_you_mean(name, PRESETS) or "RUNCONFIG is a preset, a TOML file with settings or a run folder",
        fix=f"use one of: {', '.join(PRESETS)}; or look for runs: shoal runs",
    )


def _job(config: Config, out: Path, python: str, with_addresses: bool = False) -> EmitJob:
    """Return the job on the nodes that are planned; `with_addresses`, each by an address that the others reach.

    A hosts file has `localhost` and `me@laptop-b`, which mean something to ssh here, and nothing to the other nodes.
    """
    from shoal.cluster.cluster import planned_nodes
    from shoal.cluster.hosts.spec import HostsSpec
    from shoal.cluster.target import parse_on
    from shoal.launch.emit import make_job

    spec = parse_on(config.run.on)
    if with_addresses and isinstance(spec, HostsSpec):
        from shoal.cluster.hosts.cluster import hosts_as_nodes

        return make_job(config, hosts_as_nodes(spec), out, python)
    return make_job(config, planned_nodes(config.run.on), out, python)


def _print_file(form: str, name: str, text: str, json: bool) -> None:
    if json:
        print_json({"format": form, "files": {name: text}})
    else:
        sys.stdout.write(text)
