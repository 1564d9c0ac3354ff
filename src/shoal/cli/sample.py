"""`shoal sample`: let a trained model write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import command, shown
from shoal.config.load import load_config
from shoal.errors import DataError
from shoal.launch.found import find
from shoal.runfolder import RunFolder

app = typer.Typer(add_completion=False)


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="A run folder.", readable=False)],
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many.")] = 5,
    prompt: Annotated[str, typer.Option(help="What they begin with.")] = "",
    temperature: Annotated[float, typer.Option(min=0, max=10, help="0 always takes the likeliest token.")] = 0.7,
    length: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens each, at most.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="The same seed writes the same.")] = 35_000,
    json: Annotated[bool, typer.Option("--json", help="Print them as JSON on stdout.")] = False,
) -> None:
    """Let a trained model write a few sentences, from its newest checkpoint."""
    folder = RunFolder.open(run)
    refuse_without_checkpoint(folder)
    # A process of its own, because this half never imports torch.
    argv = [sys.executable, "-P", "-m", "shoal.train.sample", str(folder.path), f"--prompt={prompt}"]
    argv += [f"--count={count}", f"--temperature={temperature}", f"--length={length}", f"--seed={seed}"]
    raise typer.Exit(subprocess.run(argv + (["--json"] if json else []), check=False).returncode)


def refuse_without_checkpoint(run: RunFolder) -> None:
    """Refuse a run that goes on and has nothing to sample from yet."""
    if any(run.checkpoints.glob("step-*")) or not find(run.path):
        return
    train = load_config(run.config).train
    first = min(train.checkpoint_every, train.steps)
    raise DataError(
        f"{shown(run.path)} has no checkpoint yet",
        why=f"it is running, and writes its first checkpoint after step {first}, "
        + ("its last" if first == train.steps else "by train.checkpoint_every"),
        fix=f"wait for it: {command('logs', '-f', shown(run.path))}",
    )
