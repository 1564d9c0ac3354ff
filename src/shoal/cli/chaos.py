"""`shoal chaos`: scripted faults with asserted outcomes."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import print_json, shown
from shoal.errors import UsageError
from shoal.trials.training import default_out

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="rich")

On = Annotated[str, typer.Option(help="Where: lab:3 (emulated nodes made for it), or local:3 (processes only).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Seed = Annotated[int, typer.Option(min=0, help="Which random moments, files and faults.")]


@app.callback()
def chaos() -> None:
    """Scripted faults with asserted outcomes, done to a real small training."""
    # A lab, a training and frozen nodes are to be cleared away, however politely we are asked to leave.
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@app.command("list")
def list_(json: Json = False) -> None:
    """Every scenario: what happens, where it can be played and its target; and the faults that none plays.

    --json adds what is done, step by step, and what must hold.
    """
    from shoal.cli.chaostext import list_document, print_list
    from shoal.trials.chaos.spec import all_scenarios

    scenarios = all_scenarios()
    if json:
        print_json(list_document(scenarios))
    else:
        print_list(scenarios)


@app.command()
def run(
    scenarios: Annotated[
        list[str], typer.Argument(metavar="SCENARIO…", help="Names from the list, files of yours (my.toml), or all.")
    ],
    on: On = "lab:3",
    times: Annotated[int, typer.Option(min=1, help="How often each: random moments differ, figures get spreads.")] = 1,
    seed: Seed = 1,
    out: Annotated[Path | None, typer.Option(help="The folder to create.", show_default="runs/chaos-TIME")] = None,
    json: Json = False,
) -> None:
    """Train in the background, do it harm, and judge what became of it.

    Exit code 0 when everything that must hold did, 1 when something did not.
    """
    from shoal.cli.chaostext import print_played, progress
    from shoal.trials.chaos.gather import FIGURES, chosen, document, left_out, play_all

    folder = (out or default_out("chaos")).absolute()
    wanted = chosen(scenarios, on)
    for name, reason in left_out(scenarios, on).items():
        typer.echo(f"left out: {name} ({reason})", err=True)
    with progress() as (show, done):
        played = play_all(wanted, on, times, seed, folder, show, done)
    if json:
        print_json(document(played, on, seed))
    else:
        print_played(played)
        typer.echo(f"\nfigures: {shown(folder / FIGURES)}")
    if not all(each.ok for each in played):
        raise typer.Exit(1)


@app.command()
def soak(
    minutes: Annotated[
        float, typer.Option(min=0.1, help="How long faults are injected, over all sync modes together.")
    ] = 5.0,
    every: Annotated[str, typer.Option(help="Time from one fault to the next.")] = "15s",
    sync: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODE",
            help="A way to synchronise, such as ddp, diloco or ddp+int8; repeat it, and they take turns. "
            "all: ddp, stock, accumulate, local, diloco, streaming.",
            show_default="ddp",
        ),
    ] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Draw only this kind of fault; can be repeated.", show_default="all kinds"),
    ] = None,
    seed: Seed = 1,
    on: Annotated[str, typer.Option(help="Three emulated nodes or more, made for it.")] = "lab:3",
    out: Annotated[Path | None, typer.Option(help="The folder to create.", show_default="runs/soak-TIME")] = None,
    json: Json = False,
) -> None:
    """A random fault every few seconds, each checked; one training per sync mode, beside a short one without faults.

    Ranks and nodes are killed and come back, freeze, are cut off, flap, get slow links, and the disk fills up. The
    faults are divided among the sync modes: each gets its part as one block, one mode after another. At the end of each
    the loss is held against the run without faults, ledger and replicas are checked, and memory, files, sockets and
    threads of agents and ranks must not have grown. soak.json in the folder has the figures after every fault. Exit
    code 0 when all of it held, 1 when something did not.
    """
    from shoal.cli.chaostext import print_soak, soak_progress
    from shoal.cluster.lab.spec import LabSpec
    from shoal.cluster.spec import parse_on
    from shoal.trials.chaos.gather import new_folder
    from shoal.trials.chaos.soak import FIGURES, SoakOrder, read_kinds, read_modes, soak_document
    from shoal.trials.chaos.soak import soak as soak_run

    spec = parse_on(on)
    if not isinstance(spec, LabSpec) or len(spec.nodes) < 3:
        raise UsageError(
            f"--on {on}: a soak needs three emulated nodes or more",
            why="with fewer, no majority is left to go on when one is cut off",
            fix="--on lab:3",
        )
    modes, kinds = read_modes(sync or ["ddp"]), read_kinds(fault or [])
    order = SoakOrder(on, len(spec.nodes), minutes, parse_every(every), seed, modes, kinds)
    folder = (out or default_out("soak")).absolute()
    new_folder(folder)
    with soak_progress() as display:
        result = soak_run(order, folder, display)
    if json:
        print_json(soak_document(order, result))
    else:
        print_soak(result)
        typer.echo(f"\nfigures: {shown(folder / FIGURES)}")
    if not result.ok:
        raise typer.Exit(1)


def parse_every(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?s?", text.strip())
    if match is None or float(match[1]) < 4:
        raise UsageError(
            f"--every {text!r} is no time between faults",
            why="a fault and what follows take at least 4 s",
            fix="write for example: --every 15s",
        )
    return float(match[1])
