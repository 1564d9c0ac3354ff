"""`shoal run`: anybody's torchrun-style script on the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.leftovers import clear_leftovers
from shoal.cli.lines import LineDisplay
from shoal.cli.output import make_console, print_detached
from shoal.config.load import validate
from shoal.config.presets import did_you_mean
from shoal.errors import UsageError
from shoal.launch.supervise import GRACE_S
from shoal.trials.keeper import Job
from shoal.trials.scripts import run_anything
from shoal.trials.training import default_out

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
    job = Job(script=tuple(argv), on=on, threads=threads, port=port, grace_s=grace, python=python)
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
        known = [option for parameter in typer.main.get_command(app).params for option in parameter.opts]
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
