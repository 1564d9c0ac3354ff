"""`shoal run`: start a torchrun-style script on the cluster. `shoal emit`: write a training for other launchers."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict, dataclass, replace
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import __version__
from shoal.cli.command import COMMANDS, Group, Request, any_word, command
from shoal.cli.options import PROFILE, SESSION_SETTINGS, SETTINGS, Option, argument
from shoal.cli.output import advising_flags, print_json, print_note
from shoal.config.defaults import DEFAULT_CLAIM, DEFAULT_PRESET, GRACE_S, MOUNT
from shoal.config.presets import PRESETS, Overrides, depth_overrides, did_you_mean
from shoal.errors import ShoalError, UsageError
from shoal.run_folder import RunFolder, default_out, write_atomically

if TYPE_CHECKING:
    from shoal.config.schema import Config
    from shoal.launch.emit import EmitJob
    from shoal.runs.supervisor import RunJob


_LONGEST_GRACE_S = 86400.0
# Options that scripts of others seldom have.
_OF_SHOAL = {"--on", "--detach", "--measure", "--wire", "--balance", "--restarts"}


@dataclass(frozen=True, kw_only=True)
class RunRequest(Request):
    script: list[str] | None = None
    on: str = "local:2"
    out: Path | None = None
    threads: int | None = None
    port: int = 0
    python: str = ""
    grace: float = GRACE_S
    measure: bool = False
    restarts: int = 0
    steps: int | None = None
    sync: str | None = None
    wire: str | None = None
    copies: int | None = None
    accumulate: int | None = None
    balance: str | None = None
    drop_slower_than: float | None = None
    profile_steps: str | None = None
    set_: list[str] | None = None
    resume: Path | None = None
    plan: Path | None = None
    profile: Path | None = None
    clean: bool = False
    detach: bool = False
    watch: bool = False


@command(
    takes_words=any_word,
    **SESSION_SETTINGS,
    script=argument("A Python script, or -m MODULE, and its own arguments."),
    out=Option("The folder for logs.", effect="new run", shown="runs/NAME-TIME"),
    port=Option(
        "MASTER_PORT, if a firewall allows only one.", effect="new run", shown="a free one", low=0, high=65_535
    ),
    python=Option("The Python that runs it.", effect="new run", shown="the activated environment's, or shoal's own"),
    grace=Option("Seconds that ranks have to end after Ctrl-C or shoal stop.", effect="new run", low=0),
    measure=Option("Record step and all-reduce times of an unmodified DDP script.", effect="new run"),
    restarts=Option("How often to start all ranks again after a failure (no session).", effect="new run", low=0),
    resume=Option("Continue the session of this run from its newest checkpoint."),
    plan=Option(
        "Predict the step time (session) from this earlier run on one rank, and compare at the end.", metavar="RUN"
    ),
    profile=Option("The profile for --plan; see shoal probe.", shown=str(PROFILE)),
)
def run(request: RunRequest) -> None:
    """Start your own script on every slot of the cluster: one that uses shoal.Session, or any torchrun-style script.

    Options marked (session), and --steps and --set, are for a script that uses shoal.Session; they win over its own
    values. Such a run also survives the loss of machines, and shoal report and verify work on it.
    Any other script runs as under torchrun: it gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the rest. The exit
    code is the script's. On this machine, rank 0 reads the standard input.
    With --measure, shoal report and verify work on it too. With --restarts, all ranks are started again when one fails,
    on the machines that are left; the script continues from its own checkpoint.
    Modules are imported from the script's folder first; with -m from the current folder, unless others can write to it.
    """
    from shoal.config.load import refuse_duplicate_settings

    refuse_duplicate_settings(request.flags(), request.set_ or [])
    _refuse_plan_without_effect(request)
    if request.resume is not None:
        _resume(request, request.resume)
        return
    if not request.script:
        raise UsageError("no script to run", fix="write for example: shoal run --on local:2 train.py --epochs 3")
    from shoal.cli.runs import print_script_end, watch_script
    from shoal.cli.train import clear_leftovers
    from shoal.cli.watch import watched
    from shoal.records.explain_run import prediction_line
    from shoal.runs.start import start_script
    from shoal.tools.plan.compare import predict_script

    argv, name = script_command(request.script)
    if note := misplaced_note(request.script):
        print_note(note)
    with advising_flags(request.flags()):
        session = session_settings(request)
    _refuse_unfit(request, argv)
    prediction = None if request.plan is None else predict_script(session, request.plan, request.profile or PROFILE)
    clear_leftovers(request.clean)
    job = _job_of_script(request, argv, session)
    # A script that is only measured shows its own progress.
    display, show = watch_script(with_progress=not request.detach and not request.measure)
    if prediction is not None:
        display.note(prediction_line(prediction))
    with watched(request.watch, request.detach) as page:

        def before(folder: RunFolder) -> None:
            if prediction is not None:
                write_atomically(folder.prediction, prediction.model_dump_json(indent=2) + "\n")
            if page is not None:
                page.start(folder)

        out = request.out or default_out(name)
        print_script_end(start_script(job, out, request.detach, display, show, before), request.detach)


def _refuse_plan_without_effect(request: RunRequest) -> None:
    for name in ("plan", "profile"):
        if name in request.given and (request.measure or request.resume is not None or request.plan is None):
            beside = "--resume" if request.resume is not None else "a run without --plan"
            raise UsageError(
                f"--{name} does not go with {'--measure' if request.measure else beside}",
                why="a prediction needs a session's compute time, from an earlier run on one rank",
                fix="shoal run --on local:1 --out runs/alone SCRIPT\nthen: shoal run --plan runs/alone SCRIPT",
            )


def _resume(request: RunRequest, run: Path) -> None:
    """Continue the session of a script."""
    from shoal.cli.runs import resume_session
    from shoal.cli.train import clear_leftovers
    from shoal.cli.watch import watched

    if request.script:
        raise UsageError(
            f"--resume {run} does not go with a script",
            why="the run folder knows its script",
            fix=f"shoal run --resume {run}",
        )
    request.refuse(
        [name for name, option in request.given.items() if option.effect == "new run"],
        "with --resume",
        why="the run continues in its folder, on its cluster, as it was started",
        fix=f"leave it out: shoal run --resume {run}",
    )
    clear_leftovers(request.clean)
    with watched(request.watch, request.detach) as page:
        if page is not None:
            page.start(RunFolder.open(run))
        with advising_flags(request.flags()):
            changes = session_settings(request)
        resume_session(run, changes, request.detach)


def _refuse_unfit(request: RunRequest, argv: list[str]) -> None:
    """Refuse what cannot be done on this cluster, or not in any time."""
    from shoal.cluster.target import JoinSpec, parse_on

    if not request.grace <= _LONGEST_GRACE_S:
        raise UsageError(
            f"--grace {request.grace:g} is not a usable time",
            why="ranks are ended after it, so it must be finite",
            fix=f"write seconds, up to a day: --grace {_LONGEST_GRACE_S:.0f}",
        )
    if not isinstance(parse_on(request.on), JoinSpec):
        return
    if request.restarts:
        raise UsageError(
            f"--restarts does not go with --on {request.on}",
            why="a machine that joined by a code takes part in one launch only",
            fix="leave --restarts out, or name the machines in a hosts file",
        )
    if argv[0] == "-m":
        raise UsageError(
            f"-m {argv[1]} does not go with --on {request.on}",
            why="the owner of a machine that joins names the script there, and both are compared",
            fix="start a script file instead",
        )


def _job_of_script(request: RunRequest, argv: list[str], session: dict[str, Any]) -> RunJob:
    from shoal.config.load import validate_session
    from shoal.runs.supervisor import RunJob
    from shoal.tools.plan.compare import first_speeds

    if (path := request.profile or PROFILE).exists():
        with contextlib.suppress(ShoalError):
            # A profile of other machines is of no use here.
            if speeds := first_speeds(validate_session(session), path):
                session["run"]["speeds"] = speeds
    return RunJob(
        script=tuple(argv),
        on=session["run"]["on"],
        port=request.port,
        grace_s=request.grace,
        python=request.python,
        session=dumps(session),
        measure=request.measure,
        restarts=request.restarts,
    )


def session_settings(request: RunRequest) -> dict[str, Any]:
    """Return the settings of the command line for the sessions of a script, and refuse wrong ones before it starts."""
    from shoal.cluster.target import place_ranks
    from shoal.config.load import (
        merge,
        parse_set,
        refuse_without_effect,
        typed_settings,
        validate_session,
    )

    given, sets = request.overrides(), request.set_ or []
    # A resumed run is where it was.
    on = {} if request.resume is not None else {"run": {"on": request.on}}
    settings = merge([on, given, *map(parse_set, sets)])
    config = validate_session(settings, typed=[*typed_settings(given, sets), *typed_settings(on, ())])
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
    if words[0] == "-m":
        if len(words) < 2:
            raise UsageError("-m without a module", fix="write for example: shoal run -m my.training --epochs 3")
        return words, words[1].rpartition(".")[2]
    if words[0].startswith("-"):
        error = COMMANDS["run"].unknown_option(words[0].partition("=")[0], "run", words)
        error.fix = error.fix or "see its options: shoal run --help"
        raise error
    script = Path(words[0])
    if not script.is_file():
        raise UsageError(
            f"there is no script {script}",
            why="the first word that is not an option of shoal run is the script to start",
            fix=f"check the path: ls {script.parent}",
        )
    return [str(script.resolve()), *words[1:]], script.stem


def names_script(word: str) -> bool:
    """Tell whether the first word of `shoal emit` names a script, and not a preset or a run folder."""
    return word == "-m" or word.endswith(".py")


EMIT = Group(
    "emit",
    "Write the training for other launchers: torchrun commands, a Slurm script, a Kubernetes manifest.",
    runconfig=argument("A preset, a TOML file with settings, or a run folder.", shown="grammar"),
    on=replace(SETTINGS["on"], help="Nodes and ranks: local:N, lab:N, lab.", shown="the configuration's"),
    python=Option("The Python that has shoal, on the training machines.", shown="the path of this one"),
    json=Option("Print the result as JSON on stdout."),
)


_OR_SCRIPT = argument(
    "A preset, a TOML file with settings, a run folder, or a script and its own arguments.", shown="grammar"
)


@dataclass(frozen=True, kw_only=True)
class EmitRequest(Request):
    runconfig: list[str] | None = None
    on: str | None = None
    depth: int | None = None
    set_: list[str] | None = None
    out: Path | None = None
    python: str = sys.executable
    json: bool = False

    @property
    def is_script(self) -> bool:
        return names_script(next(iter(self.runconfig or ()), ""))

    def config(self) -> Config:
        """Return the settings of a training."""
        words = self.runconfig or [DEFAULT_PRESET]
        if len(words) > 1:
            raise UsageError(
                f"{words[1]!r} after {words[0]} means nothing",
                why="only a script, FILE.py or -m MODULE, has arguments",
                fix="shoal emit --help",
            )
        preset, file = find_config(words[0])
        return _placed(preset, file, depth_overrides(self.depth) | self.overrides(), self.set_)

    def script(self) -> tuple[list[str], str, list[str]]:
        """Return the words of a script, where it runs, and the settings of its session."""
        if self.depth is not None:
            raise UsageError("--depth does not go with a script", why="it is of shoal's own GPT", fix="leave it out")
        sets = [word for setting in self.set_ or [] for word in ("--set", setting)]
        return self.runconfig or [], self.on or "local:2", sets


@dataclass(frozen=True, kw_only=True)
class TorchrunRequest(EmitRequest):
    port: int = 29500


@dataclass(frozen=True, kw_only=True)
class K8sRequest(EmitRequest):
    image: str = f"shoal:{__version__}"
    claim: str = DEFAULT_CLAIM
    memory: str | None = None
    gpus: str | None = None
    python: str = "python3"


@EMIT.command(
    out=Option("The run folder.", shown="runs/NAME-TIME"),
    port=Option("Rendezvous port on the first node.", low=1, high=65_535),
)
def torchrun(request: TorchrunRequest) -> None:
    """Print one torchrun command for each node; type it there."""
    from shoal.launch.emit import slug, torchrun_commands, torchrun_text

    config = request.config()
    job = _job(config, request.out or default_out(slug(config.run.preset)), request.python, with_addresses=True)
    if request.json:
        commands = [asdict(one) for one in torchrun_commands(job, request.port)]
        print_json({"format": "torchrun", "commands": commands})
    else:
        sys.stdout.write(torchrun_text(job, request.port))


@EMIT.command(
    takes_words=names_script,
    runconfig=_OR_SCRIPT,
    on=replace(SETTINGS["on"], help="Nodes and ranks: slurm:N,partition=P, local:N, lab:N.", shown="local:2"),
    out=Option("The run folder.", shown="runs/NAME-JOBID"),
)
def slurm(request: EmitRequest) -> None:
    """Print a job script that checks the nodes, probes the network, and trains on them; for sbatch.

    shoal train --on slurm:N and shoal run --on slurm:N submit a job themselves, and show its run.
    """
    from shoal.cluster.cluster import planned_nodes
    from shoal.launch.emit import slug
    from shoal.launch.emit_slurm import script_job, slurm_text, training_job

    if request.is_script:
        words, on, sets = request.script()
        argv, _ = script_command(words)
        job = script_job(argv, on, planned_nodes(on), sets, request.out, request.python)
    else:
        config = request.config()
        training = _job(config, request.out or Path("runs") / slug(config.run.preset), request.python)
        job = training_job(training, new_folder=request.out is None)
    _print_file("slurm", f"{job.name}.sbatch", slurm_text(job), request.json)


@EMIT.command(
    takes_words=names_script,
    runconfig=_OR_SCRIPT,
    out=Option("The run folder, on the volume; names the Job.", shown="runs/NAME"),
    image=Option("A container image that has shoal."),
    claim=Option(f"The volume claim that the pods share at {MOUNT}."),
    memory=Option("Memory per pod.", shown="what its ranks need, as shoal plan estimates it"),
    gpus=Option("One GPU for each rank: nvidia or amd.", shown="nvidia, where the settings need GPUs"),
    python=Option("The Python that has shoal, in the image."),
)
def k8s(request: K8sRequest) -> None:
    """Print a Kubernetes manifest: an indexed Job whose pods are the nodes of a run with live recovery."""
    from shoal.cluster.cluster import planned_nodes
    from shoal.launch.emit import slug
    from shoal.launch.emit_k8s import GPUS, Pods, k8s_name, k8s_text, script_name, script_pods, training_pods

    if request.gpus not in (None, *GPUS):
        raise UsageError(
            f"--gpus {request.gpus} names no kind of GPU",
            why=did_you_mean(str(request.gpus), GPUS) or f"it is {' or '.join(GPUS)}; each rank gets one",
            fix="write for example: --gpus amd",
        )
    gpus = request.gpus
    if request.is_script:
        words, on, sets = request.script()
        if words[0] == "-m":
            script_command(words)  # refuses -m alone; a script need not be here
        out = request.out or Path("runs") / slug(script_name(words))
        run = script_pods(words, planned_nodes(on), sets, out, request.python)
    else:
        config = request.config()
        job = _job(config, request.out or Path("runs") / slug(config.run.preset), request.python)
        gpus = gpus or ("nvidia" if job.needs_gpus else None)
        run = training_pods(job)
    text = k8s_text(run, Pods(request.image, request.claim, request.memory, gpus))
    _print_file("k8s", f"{k8s_name(run.out)}.yaml", text, request.json)


def _placed(preset: str, file: Path | None, flags: Overrides, sets: list[str] | None) -> Config:
    from shoal.cluster.target import place_ranks
    from shoal.config.load import build_config

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
