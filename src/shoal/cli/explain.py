"""`shoal explain`: what an error log means."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import print_json
from shoal.errors import UsageError
from shoal.net.check_ids import CHECKS
from shoal.net.explain import Evidence, Explanation, Findings
from shoal.net.gather import explain_file, explain_run, explain_stream
from shoal.net.pattern import Weight
from shoal.runfolder import RunFolder

app = typer.Typer(add_completion=False)

_STDIN = Path("-")
_TITLES = {
    Weight.CAUSE: "cause",
    Weight.LIKELY: "likely cause",
    Weight.REPORT: "summary",
    Weight.CONSEQUENCE: "consequence",
    Weight.HARMLESS: "harmless",
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
        if number == 0 or each.weight <= Weight.LIKELY:
            yield from _in_full(each)
        else:
            yield f"{_TITLES[each.weight]}: {each.id}, {_place(each.evidence)}: {each.cause.partition('. ')[0]}"


def _unknown(found: Findings) -> Evidence | None:
    """Not where a line was found that names the cause: the rest follows from that."""
    return None if found.best and found.best.weight == Weight.CAUSE else found.unknown


def _in_full(each: Explanation) -> Iterator[str]:
    times = f" (and {each.count - 1} more)" if each.count > 1 else ""
    yield f"{_TITLES[each.weight]}: {each.id}"
    yield f"  means:  {each.cause}"
    yield f"  seen:   {_place(each.evidence)}{times}: {each.evidence.text}"
    yield f"  fix:    {each.fix}"
    if each.check:
        yield f"  before: shoal doctor checks this as {each.check}: {CHECKS[each.check]}"


def _place(evidence: Evidence) -> str:
    return f"{evidence.source} line {evidence.line}".strip()
