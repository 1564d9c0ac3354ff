"""`shoal run`: anybody's torchrun-style script on the cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from shoal.cluster.cluster import open_cluster
from shoal.config.load import validate
from shoal.errors import UsageError
from shoal.launch.supervise import run_script
from shoal.runfolder import RunFolder
from shoal.trials.training import default_out

app = typer.Typer(add_completion=False)

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    script: Annotated[list[str], typer.Argument(help="A Python script, or -m MODULE, and its own arguments.")],
    on: Annotated[str, typer.Option(help="Where to run: local:N, or lab:N[,link=1gbit,…].")] = "local:2",
    out: Annotated[Path | None, typer.Option(help="The folder for logs.", show_default="runs/NAME-TIME")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads a rank.", show_default="cores / ranks")] = None,
) -> None:
    """Start anybody's torchrun-style script on every slot of the cluster.

    It finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and the rest as under torchrun. Ends with the script's exit code.
    """
    argv, name = script_command(script)
    config = validate({"run": {"on": on, "threads": threads}}, "the command line")
    colours = Console(highlight=False, soft_wrap=True)
    with open_cluster(on) as cluster:
        folder = RunFolder.create(out or default_out(name))
        run_script(config.run, argv, folder, cluster, lambda rank, line: _show(colours, rank, line))


def script_command(words: list[str]) -> tuple[list[str], str]:
    """What to start, and a name for its folder."""
    if words[0] == "-m":
        if len(words) < 2:
            raise UsageError("-m without a module", fix="write for example: shoal run -m my.training --epochs 3")
        return [sys.executable, *words], words[1].rpartition(".")[2]
    script = Path(words[0])
    if not script.is_file():
        raise UsageError(
            f"there is no script {script}",
            why="the first word that is no option of shoal run is the script to start",
            fix=f"check the path: ls {script.parent}",
        )
    return [sys.executable, str(script.absolute()), *words[1:]], script.stem


def _show(console: Console, rank: str, line: str) -> None:
    number = int(rank.rpartition("-")[2])
    console.print(Text(f"[{number}] ", style=_COLOURS[number % len(_COLOURS)]) + Text(line))
