"""`shoal verify`: do all replicas agree, and was every sample used exactly once?"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from shoal.cli.output import print_json, stdout_console
from shoal.config.load import load_config
from shoal.errors import ShoalError
from shoal.report.finish import finish, read_commits
from shoal.report.ledger import Fork, LedgerReport, check_ledger
from shoal.report.replicas import ReplicaReport, judge_replicas
from shoal.report.wording import count, join
from shoal.runfolder import RunFolder

app = typer.Typer(add_completion=False)


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON on stdout.")] = False,
) -> None:
    """Do all replicas agree, bit for bit? Was every sample used exactly once?

    Exit code 0 when they do, 1 when they don't.
    """
    folder = RunFolder.open(run)
    replicas = judge_replicas(folder)
    ledger = check_ledger(read_commits(folder))
    with contextlib.suppress(ShoalError):
        # A read-only folder can be verified too; the verdict is then only printed.
        finish(folder, replicas)
    if json:
        print_json({**replicas.model_dump(mode="json"), "ledger": ledger.model_dump(mode="json")})
    else:
        _print(replicas, ledger, load_config(folder.config).data.sharding)
    if not (replicas.byte_equivalent and ledger.ok):
        raise typer.Exit(1)


def _print(replicas: ReplicaReport, ledger: LedgerReport, sharding: str) -> None:
    console = stdout_console()
    if replicas.byte_equivalent:
        console.print(
            f"[green]identical[/]: {count(replicas.ranks, 'replica')}{_tensors(replicas)}, equal to the bit "
            f"(weights and moments, SHA-256 {next(iter(replicas.digests.values()))[:12]})",
            soft_wrap=True,
        )
    elif replicas.tensors is None:
        console.print(
            f"[red]different[/]: rank {', '.join(map(str, replicas.differing_ranks))} differs from rank "
            f"{min(replicas.digests)} by digest; the states are on the machines that wrote them",
            soft_wrap=True,
        )
    else:
        nearness = "within 1e-5" if replicas.equal else "not even within 1e-5"
        console.print(
            f"[red]different[/]: rank {', '.join(map(str, replicas.differing_ranks))} differs from rank "
            f"{min(replicas.digests)}, first in {escape(str(replicas.first_difference))}; largest difference "
            f"{replicas.max_abs_diff:.3g}, {nearness}",
            soft_wrap=True,
        )
    if replicas.left_out:
        console.print(left_out_remark(replicas.left_out), soft_wrap=True)
    if replicas.elsewhere:
        console.print(elsewhere_remark(replicas.elsewhere), soft_wrap=True)
    console.print(ledger_verdict(ledger, sharding), soft_wrap=True)
    for fork in ledger.forked:
        console.print(fork_verdict(fork), soft_wrap=True)


def elsewhere_remark(ranks: list[int]) -> str:
    """A machine that came while others trained keeps its files: each side compares what it has."""
    return (
        f"[yellow]not here[/]: the state of {_ranks(ranks)}, on another machine; "
        "verify there too, and compare the digests"
    )


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {join([str(rank) for rank in ranks])}"


def left_out_remark(ranks: list[int]) -> str:
    """Their states are of the step at which they left."""
    one, who = len(ranks) == 1, _ranks(ranks)
    return f"[yellow]left out[/]: the state that {who} wrote earlier; {'it' if one else 'they'} took no part in the end"


def _tensors(replicas: ReplicaReport) -> str:
    return " by their digests" if replicas.tensors is None else f", {replicas.tensors} tensors each"


def ledger_verdict(ledger: LedgerReport, sharding: str) -> str:
    """With `cursor` a position of the ledger is one sample; with `modulo` each rank walks its own shard."""
    if not ledger.steps:
        return "[yellow]no ledger[/]: no step was committed"
    if ledger.ok:
        in_shards = "" if sharding == "cursor" else " within the shards"
        samples = f"{ledger.samples:,} samples, none skipped or used twice{in_shards}"
        return f"[green]complete[/]: {ledger.steps} steps, {samples}{history_of(ledger)}"
    return (
        f"[red]incomplete[/]: {len(ledger.gaps)} gaps, {len(ledger.overlaps)} overlaps, {len(ledger.doubles)} steps "
        f"twice, {count(len(ledger.forked), 'fork')}, {ledger.unreadable} unreadable lines in {ledger.steps} steps"
        f"{history_of(ledger)}"
    )


def history_of(ledger: LedgerReport) -> str:
    """What was done and does not stand, and by how many worlds; nothing for a run that went straight through."""
    parts = [
        f"{count(ledger.redone, 'step')} redone" if ledger.redone else "",
        f"{count(ledger.abandoned, 'step')} abandoned" if ledger.abandoned else "",
        f"{count(ledger.generations, 'generation')} in {count(ledger.lineages, 'lineage')}"
        if ledger.generations > 1
        else "",
    ]
    return "".join(f", {part}" for part in parts if part)


def fork_verdict(fork: Fork) -> str:
    one, other = fork.lineages
    return (
        f"[red]forked[/]: the lineages {one} and {other} both trained steps {fork.first} to {fork.last} at the "
        "same time, and neither is marked abandoned; what the checkpoints hold is one of two models"
    )
