"""`shoal doctor`: check machines and network before a run. `shoal explain`: explain an error log."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape

from shoal.cli.command import command
from shoal.cli.options import Option, argument
from shoal.cli.output import make_console, print_json, print_paragraph, stdout_console
from shoal.config.defaults import DEFAULT_PRESET
from shoal.config.presets import Overrides
from shoal.errors import UsageError
from shoal.run_folder import RunFolder
from shoal.units import pluralize

if TYPE_CHECKING:
    from shoal.config.schema import Config
    from shoal.explain.explain import Evidence, Findings
    from shoal.tools.doctor.facts import Finding
    from shoal.tools.doctor.run import Diagnosis


_COLOURS = {"error": "red", "warning": "yellow", "info": "cyan"}


@command(
    on=Option("Where the run will be: local:N, lab[:N], or a hosts file.", shown="local:2"),
    preset=Option("Also compare the memory with what this preset needs.", shown="none"),
    config=Option("Also compare the memory with what a training with these settings needs."),
    sync=Option("With --preset or --config: how replicas agree, such as zero1."),
    set_=Option("With --preset or --config: one setting, as section.key=value; may be repeated."),
    port=Option("The port that the run will use, if you chose one.", low=0, high=65_535),
    fix_commands=Option("Print only the commands that fix the problems."),
    no_proof=Option("Skip the real gloo exchange at the end."),
)
def doctor(
    on: str | None = None,
    preset: str | None = None,
    config: Path | None = None,
    sync: str | None = None,
    set_: list[str] | None = None,
    port: int = 0,
    fix_commands: bool = False,
    no_proof: bool = False,
    json: bool = False,
) -> int:
    """Check machines, GPUs and network before a run. Every finding has its meaning and the command that fixes it.

    Exit code 1: something would stop a run or make it much slower.
    """
    from shoal.cluster.slurm.job import enter_allocation
    from shoal.tools.doctor.run import examine

    if json and fix_commands:
        raise UsageError(
            "--fix-commands does not go with --json", why="--json has every finding with its fix", fix="leave one out"
        )
    training = _training_config(on, preset, config, sync, set_ or [])
    on = on or (training.run.on if training else "local:2")
    enter_allocation(on)
    status = make_console(stderr=True)
    with status.status("") as spinner:
        diagnosis = examine(on, lambda text: spinner.update(escape(text)), port, not no_proof, training)
    if json:
        print_json(_doctor_document(diagnosis))
    elif fix_commands:
        fixes = dict.fromkeys((place_of(finding), finding.fix) for finding in diagnosis.findings if finding.fix)
        sys.stdout.write("".join(f"# {place}\n{fix}\n" for place, fix in fixes))
    else:
        _print_diagnosis(diagnosis)
    return 0 if diagnosis.healthy else 1


def _training_config(
    on: str | None, preset: str | None, file: Path | None, sync: str | None, sets: list[str]
) -> Config | None:
    """Return the settings of the training that shall be compared with the memory; None if none was named."""
    from shoal.cluster.target import place_ranks
    from shoal.config.load import build_config

    if preset is None and file is None:
        if sync or sets:
            raise UsageError(
                f"{'--sync' if sync else '--set'} goes with --preset or --config",
                why="it is a setting of a training, and none was named",
                fix=f"name one: shoal doctor --preset {DEFAULT_PRESET}",
            )
        return None
    flags: Overrides = {**({"sync": {"mode": sync}} if sync else {}), **({"run": {"on": on}} if on else {})}
    return place_ranks(build_config(preset or DEFAULT_PRESET, file, flags, sets))


def place_of(finding: Finding) -> str:
    """Return where to type the fix. A machine that is unreachable or has no shoal is fixed from here."""
    from_here = finding.id == "reach.host" or finding.fix.startswith("shoal setup ")
    return "on this machine" if from_here else f"on {finding.node}"


def _doctor_document(diagnosis: Diagnosis) -> dict[str, object]:
    from shoal.tools.doctor.checks import applicable_checks

    return {
        "healthy": diagnosis.healthy,
        "proved": diagnosis.proved,
        "took_s": round(diagnosis.took_s, 2),
        "nodes": [node.name for node in diagnosis.cluster.nodes],
        "applicable": sorted(applicable_checks(diagnosis.cluster)),
        "findings": [finding.as_dict() for finding in diagnosis.findings],
    }


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    console = stdout_console()
    for finding in diagnosis.findings:
        _print_finding(console, finding)
    names = escape(", ".join(node.name for node in diagnosis.cluster.nodes))
    failed = any(finding.id.startswith("proof.") for finding in diagnosis.findings)
    result = "gloo failed" if failed else "gloo exchanged between every pair"
    proof = result if diagnosis.proved else "gloo was not tried"
    verdict = "[green]ready[/]" if diagnosis.healthy else "[red]not ready[/]"
    print_paragraph(f"{verdict}: {names}; {proof} ({diagnosis.took_s:.1f} s)", console)
    print_paragraph(count_checks(diagnosis), console)


def count_checks(diagnosis: Diagnosis) -> str:
    """Return how many kinds of checks passed, and how many could not be made or had nothing to look at.

    A note is not a problem. Errors and warnings are counted as they are printed: one check may find several.
    """
    from shoal.tools.doctor.checks import CHECK_MEANINGS, applicable_checks, checks_not_made

    cluster = diagnosis.cluster
    by_severity = {
        severity: [finding.id for finding in diagnosis.findings if finding.severity == severity]
        for severity in ("error", "warning")
    }
    failed = {check_id for ids in by_severity.values() for check_id in ids}
    applied = applicable_checks(cluster) | failed
    not_made = checks_not_made(cluster) - failed
    problems = [pluralize(len(ids), severity) for severity, ids in by_severity.items() if ids]
    where = f" on {len(cluster.facts)} of {len(cluster.nodes)} machines" if cluster.unreached and cluster.facts else ""
    parts = [f"{len(applied - failed - not_made)} of {len(applied)} checks passed{where}", *problems]
    if not_made:
        parts.append(f"{len(not_made)} not made")
    if left_out := len(CHECK_MEANINGS) - len(applied):
        parts.append(f"{left_out} do not apply here")
    return ", ".join(parts)


def _print_finding(console: Console, finding: Finding) -> None:
    colour = _COLOURS[finding.severity]
    where = f" on {escape(finding.node)}" if finding.node else ""
    print_paragraph(f"[{colour}]{finding.severity}[/] {finding.id}{where}: {escape(finding.evidence)}", console)
    print_paragraph(escape(finding.meaning), console, label="  means: ")
    for label, text in (("fix", finding.fix), ("again", finding.retest)):
        if text:
            # A command to paste stays on one line.
            console.print(f"  {label + ':':6} {escape(text)}", soft_wrap=True)


_STDIN = Path("-")
# The indent of a line of an explanation, and its label: "  means:  ".
_LABEL = re.compile(r"\A((?:  (?:(?:means|seen|fix|before|next): +)?)?)")
# Between two clauses of a fix; not within the quotes of a command.
_CLAUSE_END = re.compile(r"; (?=(?:[^']*'[^']*')*[^']*$)")
_TITLES = {
    "CAUSE": "cause",
    "LIKELY": "likely cause",
    "REPORT": "summary",
    "CONSEQUENCE": "consequence",
    "HARMLESS": "harmless",
}


@command(log=argument("A log file, a run folder, or - for standard input."))
def explain(log: Path = _STDIN, json: bool = False) -> int:
    """Explain an error log of torch, gloo, torchrun, ssh or shoal: cause and fix.

    Exit code 0: an error was recognised. Exit code 1: none was.
    """
    findings = _read(log)
    if json:
        print_json(_explain_document(findings))
    else:
        for line in as_lines(findings):
            _, label, text = _LABEL.split(line, maxsplit=1)
            if label.strip() in ("fix:", "next:"):
                print_fix(text, label)
            else:
                print_paragraph(escape(text), label=label)
    return 0 if findings.explanations else 1


def print_fix(text: str, label: str) -> None:
    """Print a fix. Where it does not fit on a line, each clause has its own, and a command is never broken."""
    console = stdout_console()
    if not console.is_terminal or cell_len(label + text) <= console.width:
        print_paragraph(escape(text), console, label)
        return
    for clause in _CLAUSE_END.split(text):
        prose, colon, command = clause.partition(": ")
        if not colon or cell_len(label + clause) <= console.width:
            print_paragraph(escape(clause), console, label)
        else:
            print_paragraph(escape(f"{prose}:"), console, label)
            console.print(f"{' ' * len(label)}{escape(command)}", soft_wrap=True)
        label = " " * len(label)


def _read(log: Path) -> Findings:
    from shoal.explain.explain import explain_file, explain_run, explain_stream

    if log == _STDIN:
        if sys.stdin.isatty():
            raise UsageError(
                "no log was given",
                why="nothing is piped in either",
                fix="shoal explain FILE, or: … 2>&1 | shoal explain",
            )
        return explain_stream(sys.stdin.buffer)
    return explain_run(RunFolder.find(log)) if log.is_dir() else explain_file(log)


def _explain_document(findings: Findings) -> dict[str, object]:
    error = _unknown_error(findings)
    return {
        "explanations": [explanation.as_dict() for explanation in findings.explanations],
        "first_error": error and {"text": error.text, "line": error.line, "source": error.source},
    }


def as_lines(findings: Findings) -> Iterator[str]:
    """Yield causes in full and consequences in one line each."""
    from shoal.explain.pattern import CauseOrder
    from shoal.tools.doctor.checks import CHECK_MEANINGS

    if error := _unknown_error(findings):
        yield f"first error that shoal does not know: {_place(error)}"
        yield f"  {error.text}"
        if not findings.explanations:
            yield "  next:   look at the lines before it and at the other ranks' logs; check the machines: shoal doctor"
    elif not findings.explanations:
        yield "no line here looks like an error, known to shoal or not"
        yield "  next:   explain the log of another rank or the whole run: shoal explain RUN; list the runs: shoal runs"
    for number, explanation in enumerate(findings.explanations):
        title, place = _TITLES[explanation.weight.name], _place(explanation.evidence)
        if number > 0 and explanation.weight > CauseOrder.LIKELY:
            yield f"{title}: {explanation.id}, {place}: {explanation.cause.partition('. ')[0]}"
            continue
        times = f" (and {explanation.count - 1} more)" if explanation.count > 1 else ""
        yield f"{title}: {explanation.id}"
        yield f"  means:  {explanation.cause}"
        yield f"  seen:   {place}{times}: {explanation.evidence.text}"
        yield f"  fix:    {explanation.fix}"
        if explanation.check:
            yield f"  before: shoal doctor checks this as {explanation.check}: {CHECK_MEANINGS[explanation.check]}"


def _unknown_error(findings: Findings) -> Evidence | None:
    """Return the first unknown error, unless a line names the cause: then the unknown one follows from it."""
    from shoal.explain.pattern import CauseOrder

    return None if findings.best and findings.best.weight == CauseOrder.CAUSE else findings.unknown


def _place(evidence: Evidence) -> str:
    return f"{evidence.source} line {evidence.line}".strip()
