"""`shoal report`: one self-contained HTML page about a run, alive, finished or dead."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from shoal.cli.output import command, print_json, shown, stdout_console
from shoal.config.load import load_config
from shoal.control.processes import find
from shoal.errors import DataError, ShoalError
from shoal.run_folder import RunFolder
from shoal.tools.report.commit_log import ForkedSteps, LedgerReport
from shoal.tools.report.manifest import finish
from shoal.tools.report.page import write_report
from shoal.tools.report.replicas import ReplicaReport
from shoal.tools.report.verify import VerifyResult, verify_run
from shoal.units import count, format_spans, join

app = typer.Typer(add_completion=False)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run folder.", readable=False)],
    out: Annotated[Path | None, typer.Option(help="The folder to write it into.", show_default="the run's")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the page's path as JSON on stdout.")] = False,
) -> None:
    """One self-contained HTML page about a run: loss, where each step's time went, scaling, manifest."""
    page = write_report(RunFolder.open(run), out=out)
    if json:
        print_json({"report": str(page)})
    else:
        typer.echo(shown(page))


# SECTION cli/verify
# `shoal verify`: do all replicas agree, and was every sample used exactly once?


@app.command()
def verify(
    run: Annotated[Path, typer.Argument(help="A run folder.", readable=False)],
    json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON on stdout.")] = False,
) -> None:
    """Do all replicas agree, bit for bit? Was every sample used exactly once? Do all files of the run tell the same?

    Ledger, events, checkpoints, final states, settings and manifest are compared with each other. A run that is not
    finished is verified so far. Exit code 0 when all that could be checked agrees, 1 when something does not.
    """
    folder = RunFolder.open(run)
    verdict = verify_run(folder)
    if not any(finding.file == folder.manifest.name for finding in verdict.findings):
        with contextlib.suppress(ShoalError):
            # A read-only folder can be verified too; the verdict is then only printed.
            finish(folder, verdict.replicas)
    if json:
        replicas = verdict.replicas.model_dump(mode="json") if verdict.replicas else {}
        print_json({**replicas, **verdict.model_dump(mode="json", exclude={"replicas"})})
    else:
        _print(verdict, _sharding(folder))
    if not verdict.ok:
        raise typer.Exit(1)


def _sharding(folder: RunFolder) -> str:
    try:
        return load_config(folder.config).data.sharding
    except ShoalError:
        return "cursor"


def _print(verdict: VerifyResult, sharding: str) -> None:
    console = stdout_console()
    if verdict.replicas is not None:
        for text in replicas_verdict(verdict.replicas):
            console.print(text, soft_wrap=True)
    elif verdict.status != "finished":
        console.print(
            f"[yellow]{verdict.status}[/]: verified so far, up to step {verdict.step}; final states are compared when "
            "the run has finished",
            soft_wrap=True,
        )
    console.print(ledger_verdict(verdict.ledger, sharding), soft_wrap=True)
    for fork in verdict.ledger.forked:
        console.print(fork_verdict(fork), soft_wrap=True)
    for finding in verdict.findings:
        how = "[red]wrong[/]" if finding.is_wrong else "[yellow]not checked[/]"
        console.print(f"{how}: {escape(finding.file)}: {escape(finding.text)}", soft_wrap=True)


def replicas_verdict(replicas: ReplicaReport) -> Iterator[str]:
    if replicas.byte_equivalent:
        yield (
            f"[green]identical[/]: {count(replicas.ranks, 'replica')}{_tensors(replicas)}, equal to the bit "
            f"(weights and moments, SHA-256 {next(iter(replicas.digests.values()))[:12]})"
        )
    elif replicas.tensors is None:
        yield (
            f"[red]different[/]: rank {', '.join(map(str, replicas.differing_ranks))} differs from rank "
            f"{min(replicas.digests)} by digest; the states are on the machines that wrote them"
        )
    else:
        nearness = "within 1e-5" if replicas.equal else "not even within 1e-5"
        yield (
            f"[red]different[/]: rank {', '.join(map(str, replicas.differing_ranks))} differs from rank "
            f"{min(replicas.digests)}, first in {escape(str(replicas.first_difference))}; largest difference "
            f"{replicas.max_abs_diff:.3g}, {nearness}"
        )
    if replicas.left_out:
        yield left_out_remark(replicas.left_out)
    if replicas.elsewhere:
        yield elsewhere_remark(replicas.elsewhere)


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
        f"{_lost_steps(ledger)}{history_of(ledger)}"
    )


def _lost_steps(ledger: LedgerReport) -> str:
    """Which steps nothing can be said of, and which samples are out of place."""
    parts = [
        f"the lines of step {format_spans(ledger.holes)} were lost before the run was resumed" if ledger.holes else "",
        f"step {format_spans(ledger.missing)} is missing" if ledger.missing else "",
        f"{len(ledger.misplaced)} steps do not begin where the one before ended" if ledger.misplaced else "",
    ]
    return "".join(f"; {part}" for part in parts if part)


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


def fork_verdict(fork: ForkedSteps) -> str:
    one, other = fork.lineages
    return (
        f"[red]forked[/]: the lineages {one} and {other} both trained steps {fork.first} to {fork.last} at the "
        "same time, and neither is marked abandoned; what the checkpoints hold is one of two models"
    )


# SECTION cli/sample
# `shoal sample`: let a trained model write.


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
