"""`shoal sample`: let a trained model write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.runfolder import RunFolder

app = typer.Typer(add_completion=False)


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 5,
    prompt: Annotated[str, typer.Option(help="What they begin with.")] = "",
    temperature: Annotated[float, typer.Option(min=0, max=10, help="0 always takes the likeliest token.")] = 0.7,
    length: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens each, at most.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same.")] = 35_000,
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON on stdout.")] = False,
) -> None:
    """Let a trained model write a few sentences, from its newest checkpoint."""
    folder = RunFolder.open(run)
    # A process of its own, because this half never imports torch.
    argv = [sys.executable, "-P", "-m", "shoal.train.sample", str(folder.path), f"--prompt={prompt}"]
    argv += [f"--count={count}", f"--temperature={temperature}", f"--length={length}", f"--seed={seed}"]
    raise typer.Exit(subprocess.run(argv + (["--json"] if json else []), check=False).returncode)
