"""`shoal doctor`: check machines and network before a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from shoal.cli.output import make_console, print_json, stdout_console
from shoal.errors import UsageError
from shoal.run_folder import RunFolder
from shoal.tools.doctor.checks import CHECK_IDS_CHECKS
from shoal.tools.doctor.facts import Finding, Severity
from shoal.tools.doctor.run import Diagnosis, examine
from shoal.tools.explain.explain import Evidence, Explanation, Findings, explain_file, explain_run, explain_stream
from shoal.tools.explain.pattern import CauseOrder

app = typer.Typer(add_completion=False)

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.INFO: "cyan"}


@app.command()
def doctor(
    on: Annotated[str, typer.Option(help="Where a run would be: local:N, lab[:N], or a hosts file.")] = "local:2",
    port: Annotated[int, typer.Option(min=0, max=65535, help="A port that the run will use, if you fixed one.")] = 0,
    fix_commands: Annotated[bool, typer.Option("--fix-commands", help="Print only the commands that fix.")] = False,
    no_proof: Annotated[bool, typer.Option("--no-proof", help="Leave out the real gloo exchange at the end.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on stdout.")] = False,
) -> None:
    """Check machines and network before a run; every finding comes with what it means and the command that fixes it.

    Exit code 1 when something would stop a run or slow it badly.
    """
    if json and fix_commands:
        raise UsageError(
            "--fix-commands does not go with --json", why="--json has every finding with its fix", fix="leave one out"
        )
    status = make_console(stderr=True)
    with status.status("") as spinner:
        found = examine(on, lambda text: spinner.update(escape(text)), port, prove=not no_proof)
    if json:
        print_json(as_json(found))
    elif fix_commands:
        fixes = dict.fromkeys((place_of(finding), finding.fix) for finding in found.findings if finding.fix)
        sys.stdout.write("".join(f"# {place}\n{fix}\n" for place, fix in fixes))
    else:
        print_findings(found)
    raise typer.Exit(0 if found.healthy else 1)


def place_of(finding: Finding) -> str:
    """Where the command is typed. A machine that cannot be reached, or has no shoal, is helped from here."""
    from_here = finding.id == "reach.host" or finding.fix.startswith("shoal setup ")
    return "on this machine" if from_here else f"on {finding.node}"


def as_json(found: Diagnosis) -> dict[str, object]:
    return {
        "healthy": found.healthy,
        "proved": found.proved,
        "took_s": round(found.took_s, 2),
        "nodes": [node.name for node in found.scene.nodes],
        "findings": [finding.as_dict() for finding in found.findings],
    }


def print_findings(found: Diagnosis) -> None:
    console = stdout_console()
    for finding in found.findings:
        _print_one(console, finding)
    names = escape(", ".join(node.name for node in found.scene.nodes))
    failed = any(finding.id.startswith("proof.") for finding in found.findings)
    went = "gloo failed" if failed else "gloo exchanged between every pair"
    proof = went if found.proved else "gloo was not tried"
    verdict = "[green]ready[/]" if found.healthy else "[red]not ready[/]"
    console.print(f"{verdict}: {names}; {proof} ({found.took_s:.1f} s)", soft_wrap=True)


def _print_one(console: Console, finding: Finding) -> None:
    colour = _COLOURS[finding.severity]
    where = f" on {escape(finding.node)}" if finding.node else ""
    console.print(f"[{colour}]{finding.severity}[/] {finding.id}{where}: {escape(finding.evidence)}", soft_wrap=True)
    console.print(f"  means: {escape(finding.meaning)}", soft_wrap=True)
    for label, text in (("fix", finding.fix), ("again", finding.retest)):
        if text:
            console.print(f"  {label + ':':6} {escape(text)}", soft_wrap=True)


# SECTION cli/explain
# `shoal explain`: what an error log means.


_STDIN = Path("-")
_TITLES = {
    CauseOrder.CAUSE: "cause",
    CauseOrder.LIKELY: "likely cause",
    CauseOrder.REPORT: "summary",
    CauseOrder.CONSEQUENCE: "consequence",
    CauseOrder.HARMLESS: "harmless",
}


@app.command()
def explain(
    log: Annotated[
        Path, typer.Argument(help="A log, a run folder, or - for what is piped in.", readable=False)
    ] = _STDIN,
    json: Annotated[bool, typer.Option("--json", help="Print the explanations as JSON on stdout.")] = False,
) -> None:
    """Turn an error log of torch, gloo, torchrun, ssh or shoal into cause and fix.

    Exit code 0 when something was recognised, 1 when nothing was.
    """
    found = _read(log)
    if json:
        print_json(as_document(found))
    else:
        typer.echo("\n".join(as_lines(found)))
    if not found.explanations:
        raise typer.Exit(1)


def _read(log: Path) -> Findings:
    if log == _STDIN:
        if sys.stdin.isatty():
            raise UsageError(
                "no log was given",
                why="nothing is piped in either",
                fix="shoal explain FILE, or: … 2>&1 | shoal explain",
            )
        return explain_stream(sys.stdin.buffer)
    return explain_run(RunFolder.find(log)) if log.is_dir() else explain_file(log)


def as_document(found: Findings) -> dict[str, object]:
    error = _unknown(found)
    return {
        "explanations": [each.as_dict() for each in found.explanations],
        "first_error": error and {"text": error.text, "line": error.line, "source": error.source},
    }


def as_lines(found: Findings) -> Iterator[str]:
    """The answer in full, and what only follows from it in a line each."""
    if error := _unknown(found):
        yield f"first error that shoal does not know: {_place(error)}"
        yield f"  {error.text}"
    elif not found.explanations:
        yield "nothing here looks like an error that shoal knows, or like any other"
    for number, each in enumerate(found.explanations):
        if number == 0 or each.weight <= CauseOrder.LIKELY:
            yield from _in_full(each)
        else:
            yield f"{_TITLES[each.weight]}: {each.id}, {_place(each.evidence)}: {each.cause.partition('. ')[0]}"


def _unknown(found: Findings) -> Evidence | None:
    """Not where a line was found that names the cause: the rest follows from that."""
    return None if found.best and found.best.weight == CauseOrder.CAUSE else found.unknown


def _in_full(each: Explanation) -> Iterator[str]:
    times = f" (and {each.count - 1} more)" if each.count > 1 else ""
    yield f"{_TITLES[each.weight]}: {each.id}"
    yield f"  means:  {each.cause}"
    yield f"  seen:   {_place(each.evidence)}{times}: {each.evidence.text}"
    yield f"  fix:    {each.fix}"
    if each.check:
        yield f"  before: shoal doctor checks this as {each.check}: {CHECK_IDS_CHECKS[each.check]}"


def _place(evidence: Evidence) -> str:
    return f"{evidence.source} line {evidence.line}".strip()
