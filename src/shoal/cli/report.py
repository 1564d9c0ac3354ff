"""`shoal report`, `trace`, `export`, `verify` and `sample`: look at a run, running, finished or dead."""

from __future__ import annotations

import codecs
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rich.markup import escape

from shoal.cli.command import command
from shoal.cli.options import Option, argument
from shoal.cli.output import as_command, make_console, open_browser, print_json, print_paragraph, shown, stdout_console
from shoal.config.defaults import SEED
from shoal.config.presets import did_you_mean
from shoal.control.processes import find_processes
from shoal.errors import DataError, ShoalError, UsageError
from shoal.run_folder import RunFolder
from shoal.terminal import begin_stage, end_stage, stderr_width
from shoal.units import format_count, format_spans, pluralize, rank_list, rank_names

if TYPE_CHECKING:
    from shoal.records.commit_log import LedgerReport
    from shoal.records.final_states import ReplicaReport
    from shoal.records.sharded_parts import PartsReport
    from shoal.records.verify import VerifyResult


_RUN = argument("A run folder.")
# The formats of `shoal export`; weights have the name of their file, or folder, in the run folder.
_METRICS = ("csv", "jsonl", "tensorboard", "wandb")
_STREAMED = ("csv", "jsonl")
_WEIGHTS = {"hf": "hf", "state-dict": "state-dict.safetensors"}


@command(
    runs=argument("Run folders; several are compared.", "RUN…"),
    out=Option(
        "A folder for the page, or a file that ends with .html; with .pdf it is printed too.",
        flags="--out -o",
        shown="the run's folder; beside the first run for several",
    ),
    open_=Option("Open the page in the browser."),
    pdf=Option("Also print it as a PDF; needs Chromium."),
    redact=Option("Replace hosts, addresses, users and paths by stand-ins, such as node-1."),
    json=Option("Print paths, and the compared figures, as JSON."),
)
def report(
    runs: list[Path],
    out: Path | None = None,
    open_: bool = False,
    pdf: bool = False,
    redact: bool = False,
    json: bool = False,
) -> None:
    """Write one self-contained HTML page about a run: loss, time per phase, scaling, manifest.

    Several runs are shown side by side: a table, loss, speed and the parts of a step of all runs in one picture each,
    and the settings in which they differ. A script that recorded no steps gets a page with its events and last output.

    With --redact the page can be shown to others: look through it first, since names inside other words stay.
    """
    from shoal.tools.report.pdf import find_chromium, print_pdf

    if out is not None and out.suffix.lower() == ".pdf":
        pdf, out = True, out.with_suffix(".html")
    # Before any work: without a browser there will be no PDF.
    browser = find_chromium() if pdf else ""
    # A run that is given twice is shown once.
    folders = list(dict.fromkeys(RunFolder.find(run) for run in runs))
    page, rows = _write_page(folders, out, redact)
    document: dict[str, object] = {"report": str(page)}
    if rows:
        document["runs"] = rows
    if pdf:
        document["pdf"] = str(print_pdf(page, browser))
    if json:
        print_json(document)
    else:
        for path in (document["report"], document.get("pdf")):
            if path:
                sys.stdout.write(shown(Path(str(path))) + "\n")
    if open_:
        open_browser(page.resolve().as_uri())


def _write_page(folders: list[RunFolder], out: Path | None, redact: bool) -> tuple[Path, list[dict[str, Any]]]:
    """Write the page of one or of several runs. Return its path, and the compared figures of several."""
    from shoal.tools.report.page import write_page, write_report
    from shoal.tools.report.redact import Redactor
    from shoal.tools.report.script_page import recorded_steps, render_script_page

    redactor = Redactor() if redact else None
    if len(folders) == 1:
        [run] = folders
        file = _page_file(out, run.path, run.report.name, redact)
        if recorded_steps(run):
            return write_report(run, file=file, redactor=redactor), []
        return write_page(render_script_page(run, redactor), file, folders), []
    from shoal.tools.report.compare import compare_runs, comparison_file, read_runs, render_comparison

    data = read_runs(folders, redactor)
    file = _page_file(out, folders[0].path.parent, comparison_file(folders), redact)
    return write_page(render_comparison(data), file, folders), compare_runs(data)


def _page_file(out: Path | None, folder: Path, name: str, is_redacted: bool) -> Path:
    if out is not None and out.suffix.lower() in (".html", ".htm"):
        return out
    # Never over the page that names everything: the wrong one of two would be shown.
    return (out or folder) / (name.replace(".html", "-redacted.html") if is_redacted else name)


@command(
    run=_RUN,
    out=Option("The file to write; compressed if it ends with .gz.", shown="RUN/trace.json"),
    json=Option("Print path, events and clock offsets as JSON."),
)
def trace(run: Path, out: Path | None = None, json: bool = False) -> None:
    """Write all ranks on one time axis, as a trace for https://ui.perfetto.dev or chrome://tracing.

    It shows computing, communication, waiting, checkpoints and recovery of every rank. The clocks of the machines are
    put on one axis by the ends of common all-reduces. With `shoal train --profile-steps 20-22` it has what
    torch.profiler saw in these steps too.
    """
    from shoal.tools.report.trace import write_trace

    summary = write_trace(RunFolder.find(run), out)
    if json:
        print_json({**asdict(summary), "path": str(summary.path)})
        return
    sys.stdout.write(shown(summary.path) + "\n")
    offsets = [
        f"{node} {1e3 * offset_s:+.1f} ms (± {1e3 * summary.spreads_s[node]:.1f})"
        for node, offset_s in summary.offsets_s.items()
    ]
    if len(offsets) > 1:
        print_paragraph(f"clock offsets that were corrected: {', '.join(offsets)}", make_console(stderr=True))
    if summary.unaligned:
        names = ", ".join(summary.unaligned)
        text = f"{names}: no step in common with the others, so its clock is taken as it is"
        print_paragraph(escape(text), make_console(stderr=True))


@command(
    run=_RUN,
    format=Option(f"One of {', '.join((*_METRICS, *_WEIGHTS))}.", flags="--format -f"),
    out=Option("The file or folder to write; - is stdout, for csv and jsonl.", flags="--out -o", shown="in RUN"),
    best=Option("Weights: those of the checkpoint that session.best keeps, not of the newest one."),
    json=Option("Print path, steps and skipped lines as JSON."),
)
def export(run: Path, format: str, out: Path | None = None, best: bool = False, json: bool = False) -> int:
    """Write the metrics or the weights of a run in a format that other programs read.

    csv, jsonl: what the ranks have recorded, with one row per step and rank: step, rank, node, time, loss, tokens,
    seconds of each part of the step, and your own values under their names. Steps that were done again are there once.

    tensorboard: a folder for tensorboard --logdir, with the scalars of the run, and of each rank beside them.

    wandb: sends the same scalars to Weights & Biases, as WANDB_PROJECT and WANDB_MODE say; needs shoal[wandb].

    state-dict: a safetensors file with the parameters and buffers of the newest checkpoint, by the names of your model.

    hf: a folder with config.json and model.safetensors in the layout of GPT-2, which transformers loads with the same
    logits; for models of shoal train. docs/formats.md has all columns.
    """
    from shoal.tools.report.export import ExportSummary, export_metrics

    folder, formats = RunFolder.find(run), (*_METRICS, *_WEIGHTS)
    if format not in formats:
        raise UsageError(
            f"there is no format {format!r}",
            why=did_you_mean(format, formats) or f"the formats are {', '.join(formats)}",
            fix=as_command("export", shown(folder.path), "--format", formats[0]),
        )
    if str(out) == "-" and format not in _STREAMED:
        raise UsageError(
            f"--format {format} cannot be written to stdout",
            why=f"only {' and '.join(_STREAMED)} are text",
            fix=as_command("export", shown(folder.path), "--format", format),
        )
    if best and format in _METRICS:
        raise UsageError(
            f"--best says nothing about --format {format}",
            why="it chooses a checkpoint, and the metrics of a run are those of all steps",
            fix=as_command("export", shown(folder.path), "--format", "state-dict", "--best"),
        )
    if format in _METRICS:
        summary = export_metrics(folder, format, out)
    else:
        path = out or folder.path / _WEIGHTS[format]
        written = _export_weights(folder, format, path, best)
        if written.returncode:
            return written.returncode
        summary = ExportSummary(str(path), int(written.stdout), 0)
    if json:
        print_json(asdict(summary))
    elif not summary.path:
        sys.stdout.write(f"{pluralize(summary.steps, 'step')} sent to wandb\n")
    elif summary.path != "-":
        sys.stdout.write(shown(Path(summary.path)) + "\n")
    if summary.unreadable:
        sys.stderr.write(f"{pluralize(summary.unreadable, 'line')} of its event files could not be read\n")
    return 0


def _export_weights(run: RunFolder, format: str, out: Path, best: bool) -> subprocess.CompletedProcess[str]:
    """Write weights in a separate process, because the command line never imports torch; it prints their step."""
    argv = [sys.executable, "-P", "-m", "shoal.train.export", str(run.path), format, str(out), *_width_option()]
    argv += ["--best"] if best else []
    begin_stage("shoal export: writing the weights")
    result = subprocess.run(argv, check=False, capture_output=True, text=True)
    end_stage()
    sys.stderr.write(result.stderr)
    return result


def _width_option() -> list[str]:
    """Return the option with which a process, whose output is read here, wraps its error for the terminal."""
    width = stderr_width()
    return [] if width is None else [f"--width={width}"]


@command(run=_RUN, json=Option("Print the verdict as JSON on stdout."))
def verify(run: Path, json: bool = False) -> int:
    """Check that all replicas are equal bit for bit, that every sample was used once, and that all files agree.

    Ledger, events, checkpoints, final states, settings and manifest are compared with each other. An unfinished run is
    verified up to its last step. Exit code 0: everything that could be checked agrees. Exit code 1: something does not.
    """
    from shoal.cli.runs import print_resume
    from shoal.records.manifest import write_derived_files
    from shoal.records.verify import verify_run

    folder = RunFolder.open(run)
    verdict = verify_run(folder)
    if not any(finding.file == folder.manifest.name for finding in verdict.findings):
        with contextlib.suppress(ShoalError):
            # In a read-only folder the verdict is only printed.
            write_derived_files(folder, verdict.replicas)
    if json:
        replicas = verdict.replicas.model_dump(mode="json") if verdict.replicas else {}
        print_json({**replicas, **verdict.model_dump(mode="json", exclude={"replicas"})})
    else:
        print_verdict(verdict, sharding_of(folder))
        if verdict.status != "finished" and not find_processes(folder.path):
            print_resume(folder)
    return 0 if verdict.ok else 1


def sharding_of(folder: RunFolder) -> str:
    from shoal.config.load import load_config

    try:
        return load_config(folder.config).data.sharding
    except ShoalError:
        return "cursor"


def print_verdict(verdict: VerifyResult, sharding: str) -> None:
    console = stdout_console()
    if verdict.replicas is not None:
        compared = "parameters" if verdict.is_measured else "weights" if verdict.parts else "weights and moments"
        for text in _replicas_verdict(verdict.replicas, compared):
            print_paragraph(text, console)
    elif verdict.status != "finished":
        print_paragraph(
            f"[yellow]{verdict.status}[/]: verified up to step {verdict.step:,}; final states are compared after the "
            "run has finished",
            console,
        )
    if verdict.parts is not None:
        print_paragraph(_parts_verdict(verdict.parts), console)
    if not verdict.is_measured:
        print_paragraph(_ledger_verdict(verdict.ledger, "drawn" if verdict.draws else sharding), console)
    for fork in verdict.ledger.forked:
        print_paragraph(
            f"[red]forked[/]: the lineages {' and '.join(fork.lineages)} both trained steps {fork.first:,} to "
            f"{fork.last:,} at the same time, and neither is marked abandoned; the checkpoints hold one of two models",
            console,
        )
    for finding in verdict.findings:
        how = "[red]wrong[/]" if finding.is_wrong else "[yellow]not checked[/]"
        print_paragraph(f"{how}: {escape(finding.file)}: {escape(finding.text)}", console)


def _replicas_verdict(replicas: ReplicaReport, what: str) -> Iterator[str]:
    tensors = " by their digests" if replicas.tensors is None else f", {replicas.tensors} tensors each"
    if replicas.ranks == 1:
        yield (
            f"[yellow]one replica[/]: there is no other one here to compare it with ({what}, SHA-256 "
            f"{next(iter(replicas.digests.values()))[:12]})"
        )
    elif replicas.byte_equivalent:
        yield (
            f"[green]identical[/]: {pluralize(replicas.ranks, 'replica')}{tensors}, equal to the bit "
            f"({what}, SHA-256 {next(iter(replicas.digests.values()))[:12]})"
        )
    elif replicas.tensors is None:
        yield (
            f"[red]different[/]: {rank_list(replicas.differing_ranks)} differs from rank "
            f"{min(replicas.digests)} by digest; the states are on the machines that wrote them"
        )
    else:
        nearness = "within 1e-5" if replicas.equal else "not even within 1e-5"
        yield (
            f"[red]different[/]: {rank_list(replicas.differing_ranks)} differs from rank "
            f"{min(replicas.digests)}, first in {escape(str(replicas.first_difference))}; largest difference "
            f"{replicas.max_abs_diff:.3g}, {nearness}"
        )
    if replicas.left_out:
        they = "it" if len(replicas.left_out) == 1 else "they"
        yield (
            f"[yellow]left out[/]: the state that {rank_names(replicas.left_out)} wrote earlier; "
            f"{they} took no part at the end"
        )
    if replicas.elsewhere:
        # A machine that joined later keeps its files: each side compares what it has.
        yield (
            f"[yellow]not here[/]: the state of {rank_names(replicas.elsewhere)}, on another machine; "
            "verify there too, and compare the digests"
        )


def _parts_verdict(parts: PartsReport) -> str:
    """Describe the parts of a divided model; what is wrong with them is a finding of its own."""
    is_sound = parts.owned_once is not False and parts.copies_equal is not False
    owned = {True: " owned once", False: ", not each owned once", None: ", not all of whose owners are here"}
    copies = {True: "; copies equal", False: "; copies differ", None: ""}
    return (
        f"[{'green' if is_sound else 'red'}]parts[/]: {parts.parts}, each on {pluralize(parts.ranks_each, 'rank')}, "
        f"{format_count(parts.elements)} elements{owned[parts.owned_once]}{copies[parts.copies_equal]}"
    )


def _ledger_verdict(ledger: LedgerReport, sharding: str) -> str:
    """Describe the ledger. With `cursor` a position is one sample; with `modulo` it is one within each rank's shard;
    with `drawn` it is one draw with replacement, which may be of a sample that was drawn before."""
    if not ledger.steps:
        return "[yellow]no ledger[/]: no step was committed"
    if ledger.ok:
        in_shards = "" if sharding == "cursor" else " within the shards"
        samples = f"{ledger.samples:,} samples, none skipped or used twice{in_shards}"
        if sharding == "drawn":
            samples = f"{ledger.samples:,} draws of samples with replacement, none skipped or done twice"
        return f"[green]complete[/]: {ledger.steps:,} steps, {samples}{_history(ledger)}"
    return (
        f"[red]incomplete[/]: {len(ledger.gaps)} gaps, {len(ledger.overlaps)} overlaps, {len(ledger.doubles)} steps "
        f"twice, {pluralize(len(ledger.forked), 'fork')}, {ledger.unreadable} unreadable lines in {ledger.steps:,} "
        f"steps{_lost_steps(ledger)}{_history(ledger)}"
    )


def _lost_steps(ledger: LedgerReport) -> str:
    """Name missing steps and misplaced samples."""
    parts = [
        f"the lines of step {format_spans(ledger.holes)} were lost before the run was resumed" if ledger.holes else "",
        f"step {format_spans(ledger.missing)} is missing" if ledger.missing else "",
        f"{len(ledger.misplaced)} steps do not start where the step before ended" if ledger.misplaced else "",
        f"the shares of {pluralize(len(ledger.misdivided), 'step')} do not add up" if ledger.misdivided else "",
    ]
    return "".join(f"; {part}" for part in parts if part)


def _history(ledger: LedgerReport) -> str:
    """Name repeated and abandoned steps and generations; empty for a run without interruption."""
    parts = [
        f"{pluralize(ledger.redone, 'step')} redone" if ledger.redone else "",
        f"{pluralize(ledger.abandoned, 'step')} abandoned" if ledger.abandoned else "",
        f"{pluralize(ledger.generations, 'generation')} in {pluralize(ledger.lineages, 'lineage')}"
        if ledger.generations > 1
        else "",
    ]
    return "".join(f", {part}" for part in parts if part)


@command(
    run=_RUN,
    count=Option("How many texts.", low=1, high=1000),
    prompt=Option("The beginning of each text."),
    temperature=Option("0 always takes the most likely token.", low=0, high=10),
    length=Option("Most tokens per text.", low=1, high=100_000),
    seed=Option("The same seed gives the same texts.", low=0),
    json=Option("Print the texts as JSON on stdout."),
)
def sample(
    run: Path,
    count: int = 5,
    prompt: str = "",
    temperature: float = 0.7,
    length: int = 100,
    seed: int = SEED,
    json: bool = False,
) -> int:
    """Generate text with a trained model, from its newest checkpoint.

    A model of the sentences that shoal generates writes one sentence a line. A model of another text writes --length
    tokens with their line ends; a line of dashes separates the texts.
    """
    folder = RunFolder.open(run)
    refuse_script(folder)
    refuse_without_checkpoint(folder)
    # A separate process, because the command line never imports torch.
    argv = [sys.executable, "-P", "-m", "shoal.train.sample", str(folder.path), f"--prompt={prompt}"]
    argv += [f"--count={count}", f"--temperature={temperature}", f"--length={length}", f"--seed={seed}"]
    argv += _width_option()
    begin_stage("shoal sample: loading the model")
    argv += ["--json"] if json else []
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as writer:
        for text in codecs.iterdecode(iter(cast(BufferedReader, writer.stdout).read1, b""), "utf-8"):
            end_stage()
            sys.stdout.write(text)
            sys.stdout.flush()
        end_stage()
        sys.stderr.write(writer.communicate()[1].decode(errors="replace"))
    return writer.returncode


def refuse_script(run: RunFolder) -> None:
    """Refuse a run whose model shoal does not know."""
    from shoal.config.load import load_settings
    from shoal.config.schema import Config

    config = load_settings(run.config)
    if isinstance(config, Config):
        return
    export = as_command("export", shown(run.path), "--format", "state-dict")
    raise UsageError(
        f"{shown(run.path)} has no GPT of shoal: the script {config.run.preset} trained its own model",
        why="shoal sample writes text with shoal's GPT and the run's tokenizer; it cannot build another model",
        fix=f"take its weights into your own program: {export}",
    )


def refuse_without_checkpoint(run: RunFolder) -> None:
    """Refuse a running training that has no checkpoint yet."""
    from shoal.config.load import load_config

    if run.has_checkpoint() or not find_processes(run.path):
        return
    train = load_config(run.config).train
    first = min(train.checkpoint_every, train.steps)
    raise DataError(
        f"{shown(run.path)} has no checkpoint yet",
        why=f"it is running and writes its first checkpoint after step {first} "
        + ("(its last)" if first == train.steps else "(train.checkpoint_every)"),
        fix=f"wait for it: {as_command('logs', '-f', shown(run.path))}",
    )
