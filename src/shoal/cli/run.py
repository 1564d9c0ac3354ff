"""`shoal run`: anybody's torchrun-style script on the cluster."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import __version__
from shoal.cli.main import load_verb
from shoal.cli.output import LineDisplay, make_console, print_detached, print_json
from shoal.cli.train import clear_leftovers
from shoal.cluster.cluster import planned_nodes
from shoal.config.load import build_config, validate
from shoal.config.presets import PRESETS, Overrides, did_you_mean
from shoal.config.schema import Config
from shoal.errors import UsageError
from shoal.launch.emit import (
    DEFAULT_CLAIM,
    DEFAULT_MEMORY,
    MOUNT,
    Pods,
    k8s_name,
    k8s_text,
    make_job,
    slug,
    slurm_text,
    torchrun_commands,
    torchrun_text,
)
from shoal.launch.emit import EmitJob as EmitJob
from shoal.launch.launcher import GRACE_S
from shoal.run_folder import RunFolder
from shoal.runs.start import default_out, run_anything
from shoal.runs.supervisor import RunJob

app = typer.Typer(add_completion=False)

_LONGEST_GRACE_S = 86400.0


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[list[str], typer.Argument(help="A Python script, or -m MODULE, and its own arguments.")],
    on: Annotated[str, typer.Option(help="Where to run: local:N, lab:N[,link=1gbit,…] or a hosts file.")] = "local:2",
    out: Annotated[Path | None, typer.Option(help="The folder for logs.", show_default="runs/NAME-TIME")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads a rank.", show_default="cores / ranks")] = None,
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="MASTER_PORT, when a firewall lets only one through.", show_default="a free one"
        ),
    ] = 0,
    python: Annotated[
        str, typer.Option(help="The Python that runs it.", show_default="the activated environment's, or shoal's own")
    ] = "",
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that ranks have to end after Ctrl-C or shoal stop.")
    ] = GRACE_S,
    clean: Annotated[bool, typer.Option("--clean", help="End what earlier runs left running.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Start the run and leave; see shoal ps, logs, attach.")
    ] = False,
) -> None:
    """Start anybody's torchrun-style script on every slot of the cluster.

    It finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the rest as under torchrun. Ends with the script's exit code.
    On this machine, rank 0 reads the standard input.
    Modules come from the script's own folder first; with -m from the current folder, unless others can write to it.
    """
    argv, name = script_command(script)
    validate({"run": {"on": on, "threads": threads}}, "the command line")
    if not grace <= _LONGEST_GRACE_S:
        raise UsageError(
            f"--grace {grace:g} is no time that ranks can be given",
            why="after it they are ended, so it must come",
            fix=f"write seconds, up to a day: --grace {_LONGEST_GRACE_S:.0f}",
        )
    clear_leftovers(clean)
    out = out or default_out(name)
    job = RunJob(script=tuple(argv), on=on, threads=threads, port=port, grace_s=grace, python=python)
    folder = run_anything(job, out, detach, LineDisplay(make_console(soft_wrap=True)))
    if detach:
        print_detached(folder, json=False)


def script_command(words: list[str]) -> tuple[list[str], str]:
    """What to start, and a name for its folder."""
    if words[0] == "-m":
        if len(words) < 2:
            raise UsageError("-m without a module", fix="write for example: shoal run -m my.training --epochs 3")
        return words, words[1].rpartition(".")[2]
    if words[0].startswith("-"):
        name = words[0].partition("=")[0]
        known = [option for parameter in load_verb("run").params for option in parameter.opts]
        raise UsageError(
            f"shoal run has no option {name}", why=did_you_mean(name, known), fix="see its options: shoal run --help"
        )
    script = Path(words[0])
    if not script.is_file():
        raise UsageError(
            f"there is no script {script}",
            why="the first word that is no option of shoal run is the script to start",
            fix=f"check the path: ls {script.parent}",
        )
    return [str(script.resolve()), *words[1:]], script.stem


# SECTION cli/emit
# `shoal emit`: the same training as commands or files for other people's launchers.


emit_app = typer.Typer(add_completion=False, no_args_is_help=True)
app.add_typer(emit_app, name="emit")

DEFAULT_PRESET = "grammar"

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
Python = Annotated[str, typer.Option(help="The Python with shoal in it, on the machines that train.")]
Json = Annotated[bool, typer.Option("--json", help="Print it as JSON on stdout.")]


@emit_app.callback()
def emit() -> None:
    """The same training for launchers that are not shoal's: commands for torchrun, files for Slurm and Kubernetes."""


@emit_app.command()
def torchrun(
    runconfig: RunConfig = None,
    on: On = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/NAME-TIME")] = None,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Where the ranks meet on the first node.")] = 29500,
    python: Python = sys.executable,
    json: Json = False,
) -> None:
    """Print one torchrun command for each node, to be typed there."""
    config = _config(runconfig, on, set_)
    job = _job(config, out or default_out(slug(config.run.preset)), python)
    if json:
        print_json({"format": "torchrun", "commands": [asdict(each) for each in torchrun_commands(job, port)]})
    else:
        sys.stdout.write(torchrun_text(job, port))


@emit_app.command()
def slurm(
    runconfig: RunConfig = None,
    on: On = None,
    set_: Set = None,
    out: Annotated[Path | None, typer.Option(help="The run folder.", show_default="runs/NAME-JOBID")] = None,
    python: Python = sys.executable,
    json: Json = False,
) -> None:
    """Print an sbatch script: one task a node, each a torchrun."""
    config = _config(runconfig, on, set_)
    job = _job(config, out or Path("runs") / slug(config.run.preset), python)
    _print_file("slurm", f"shoal-{slug(config.run.preset)}.sbatch", slurm_text(job, new_folder=out is None), json)


@emit_app.command()
def k8s(
    runconfig: RunConfig = None,
    on: On = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder, on the volume; names the Job.", show_default="runs/NAME")
    ] = None,
    image: Annotated[str, typer.Option(help="A container image with shoal in it.")] = f"shoal:{__version__}",
    claim: Annotated[str, typer.Option(help=f"The volume claim that the pods share at {MOUNT}.")] = DEFAULT_CLAIM,
    memory: Annotated[str, typer.Option(help="Memory of a pod.")] = DEFAULT_MEMORY,
    python: Annotated[str, typer.Option(help="The Python with shoal in it, in the image.")] = "python3",
    json: Json = False,
) -> None:
    """Print a Kubernetes manifest: an indexed Job, one pod a node, and a headless Service."""
    config = _config(runconfig, on, set_)
    job = _job(config, out or Path("runs") / slug(config.run.preset), python)
    _print_file("k8s", f"{k8s_name(job)}.yaml", k8s_text(job, Pods(image, claim, memory)), json)


def _config(runconfig: str | None, on: str | None, sets: list[str] | None) -> Config:
    flags: Overrides = {} if on is None else {"run": {"on": on}}
    preset, file = find_config(runconfig or DEFAULT_PRESET)
    return build_config(preset, file, flags, sets or [])


def find_config(name: str) -> tuple[str, Path | None]:
    """A preset and the file with settings on top of it. A preset's name means the preset, `./NAME` the file."""
    if name in PRESETS:
        return name, None
    path = Path(name)
    if path.is_dir():
        return DEFAULT_PRESET, RunFolder.open(path).config
    if path.exists():
        return DEFAULT_PRESET, path
    raise UsageError(
        f"{name!r} is no preset, and there is no such file or run folder",
        why=did_you_mean(name, PRESETS) or "what to train is a preset, a TOML file with settings or a run folder",
        fix=f"use one of: {', '.join(PRESETS)}; or look for runs: ls runs/",
    )


def _job(config: Config, out: Path, python: str) -> EmitJob:
    return make_job(config, planned_nodes(config.run.on), out, python)


def _print_file(form: str, name: str, text: str, json: bool) -> None:
    document: dict[str, Any] = {"format": form, "files": {name: text}}
    if json:
        print_json(document)
    else:
        sys.stdout.write(text)
