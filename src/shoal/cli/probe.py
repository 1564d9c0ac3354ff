"""`shoal probe`: measure a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from shoal.cli.output import make_console, print_json, shown
from shoal.cli.probetext import print_profile
from shoal.config.load import build_config
from shoal.config.presets import depth_overrides
from shoal.config.profile_file import check_writable, write_profile
from shoal.config.schema import ModelConfig
from shoal.cost.workload import workload_of
from shoal.errors import DataError, UsageError
from shoal.report.probe_picture import plot_probe
from shoal.trials.probing import probe as measure

app = typer.Typer(add_completion=False)


@app.command()
def probe(
    on: Annotated[str, typer.Option(help="What to measure: local:N, lab[:N], or a hosts file.")] = "local:2",
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")] = Path("profile.toml"),
    budget: Annotated[float, typer.Option(min=5, help="Seconds it may take; slow links get smaller sizes.")] = 60.0,
    model: Annotated[
        list[str] | None, typer.Option(help="Time this model too: a preset, or depth:N; may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON on stdout.")] = False,
) -> None:
    """Measure links, gloo and machines; writes a profile, and a picture of the same name beside it."""
    check_writable(output)
    picture = picture_of(output)
    models = {name: model_called(name) for name in model or []}
    console = make_console(stderr=True)
    with console.status("") as spinner:
        profile = measure(on, budget, lambda text: spinner.update(escape(text)), models)
    write_profile(profile, output)
    plot_probe(profile, picture)
    if json:
        print_json(profile.model_dump(mode="json"))
        return
    print_profile(profile)
    typer.echo(f"\nprofile: {shown(output)}\npicture: {shown(picture)}")


def picture_of(profile: Path) -> Path:
    """Of the same name, so that a second profile does not take the picture of the first."""
    if profile.suffix == ".png":
        raise UsageError(
            f"{profile} is the name of a picture",
            why="-o names the profile, a TOML file; its picture gets the same name with .png",
            fix=f"write -o {profile.with_suffix('.toml')}",
        )
    picture = profile.with_suffix(".png")
    if picture.exists() and not profile.exists():
        raise DataError(
            f"{picture} is there already, and there is no profile {profile} that it would belong to",
            why="only the picture of an older profile is replaced",
            fix="choose another file: -o FILE",
        )
    return picture


def model_called(name: str) -> ModelConfig:
    """A preset's, or for `depth:6` the demo's with another depth; the vocabulary is what its text will come to."""
    preset, _, depth = name.partition(":")
    if depth and (preset != "depth" or not depth.isdigit()):
        raise UsageError(f"--model {name}: no such model", fix="write a preset, such as gpt2-124m, or depth:6")
    deep = depth_overrides(int(depth)) if depth else {}
    config = build_config("grammar" if depth else preset, None, deep, [])
    return workload_of(config).shape
