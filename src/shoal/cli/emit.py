"""`shoal emit`: the same training as commands or files for other people's launchers."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import __version__
from shoal.cli.output import print_json
from shoal.cluster.cluster import planned_nodes
from shoal.config.load import build_config
from shoal.config.presets import PRESETS, Overrides, did_you_mean
from shoal.config.schema import Config
from shoal.errors import UsageError
from shoal.launch.emit.job import Job, make_job, slug
from shoal.launch.emit.k8s import DEFAULT_CLAIM, DEFAULT_MEMORY, MOUNT, Pods, k8s_name, k8s_text
from shoal.launch.emit.slurm import slurm_text
from shoal.launch.emit.torchrun import torchrun_commands, torchrun_text
from shoal.runfolder import RunFolder
from shoal.trials.training import default_out

app = typer.Typer(add_completion=False, no_args_is_help=True)

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


@app.callback()
def emit() -> None:
    """The same training for launchers that are not shoal's: commands for torchrun, files for Slurm and Kubernetes."""


@app.command()
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


@app.command()
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


@app.command()
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


def _job(config: Config, out: Path, python: str) -> Job:
    return make_job(config, planned_nodes(config.run.on), out, python)


def _print_file(form: str, name: str, text: str, json: bool) -> None:
    document: dict[str, Any] = {"format": form, "files": {name: text}}
    if json:
        print_json(document)
    else:
        sys.stdout.write(text)
