"""`shoal probe`: measure a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shoal.cli.output import print_json, shown
from shoal.cli.probetext import print_profile
from shoal.config.profile_file import check_writable, write_profile
from shoal.report.probe_picture import plot_probe
from shoal.trials.probing import probe as measure

app = typer.Typer(add_completion=False)

PICTURE = "probe.png"


@app.command()
def probe(
    on: Annotated[str, typer.Option(help="What to measure: local:N, lab[:N], or a hosts file.")] = "local:2",
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile to write.")] = Path("profile.toml"),
    budget: Annotated[float, typer.Option(min=5, help="Seconds it may take; slow links get smaller sizes.")] = 60.0,
    json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON on stdout.")] = False,
) -> None:
    """Measure links, gloo and machines; writes a profile, and probe.png beside it."""
    check_writable(output)
    console = Console(stderr=True, highlight=False)
    with console.status("") as spinner:
        profile = measure(on, budget, lambda text: spinner.update(escape(text)))
    write_profile(profile, output)
    picture = output.parent / PICTURE
    plot_probe(profile, picture)
    if json:
        print_json(profile.model_dump(mode="json"))
        return
    print_profile(profile)
    typer.echo(f"\nprofile: {shown(output)}\npicture: {shown(picture)}")
