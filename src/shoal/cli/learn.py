"""`shoal learn`: lessons that ask for a prediction, run the experiment, and check both."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from shoal.cli.command import command
from shoal.cli.options import Option, argument
from shoal.cli.output import as_command, make_console, print_json, print_paragraph, print_table, shown, stdout_console
from shoal.errors import DataError, Interrupted, UsageError
from shoal.units import format_duration, pluralize

# Imported inside functions: the list of lessons must not wait for numpy.
if TYPE_CHECKING:
    from shoal.tools.learn.experiment import Display, Value
    from shoal.tools.learn.judge import JudgedRecord, LessonResult
    from shoal.tools.learn.lesson import Lesson, LessonFolder, Question

_STYLES = {"right": "green", "passed": "green", "wrong": "red", "not passed": "red"}
_NOISY = "too noisy, repeat"
_ROWS = ("prediction", "theory", "measurement")


@command(
    lesson=argument("The number of a lesson, or report; without it: the list.", "LESSON"),
    answer=Option(
        "A prediction, instead of typing it at the terminal; repeat it for each, in their order, or write NAME=WORD.",
        metavar="WORD",
    ),
    yes=Option("Take the theory's predictions, and in lessons with files their own solution."),
    quick=Option("A short form: fewer steps, and times are not judged."),
    out=Option("The folder of results and runs.", shown="learn"),
    from_=Option(
        "Also lessons in this folder; their check.py is a program and is run. May be repeated.",
        flags="--from",
        metavar="FOLDER",
    ),
)
def learn(
    lesson: str | None = None,
    answer: list[str] | None = None,
    yes: bool = False,
    quick: bool = False,
    out: Path = Path("learn"),
    from_: list[Path] | None = None,
    json: bool = False,
) -> int:
    """Lessons that check themselves: each asks for a prediction, runs real shoal commands, and compares.

    Without a number: the list, with your progress. With `report`: one HTML page of everything that you did.
    A lesson shows its commands while they run, then prediction, theory and measurement, a verdict and why. While other
    programs keep the machine busy, times are not judged.
    Exit code 0: passed. Exit code 1: not passed, or to be repeated. Results are in learn/NN.json.
    """
    from shoal.tools.learn.lesson import find_lesson, find_lessons

    if out.exists() and not out.is_dir():
        raise UsageError(
            f"--out {out} is not a folder", why="results are kept in a folder", fix="name another: --out learn"
        )
    options = [word for folder in from_ or () for word in ("--from", str(folder))]
    options += ["--out", str(out)] if out != Path("learn") else []
    if lesson in (None, "report"):
        _refuse_options(lesson, {"--answer": answer, "--yes": yes, "--quick": quick})
    out = out.absolute()
    if lesson == "report":
        return _write_report(out, json)
    lessons = find_lessons(from_ or [])
    if lesson is None:
        _list_lessons(lessons, out, json, options)
        return 0
    return _play(find_lesson(lesson, lessons), lessons, out, answer or [], yes, quick, json, options)


def _refuse_options(lesson: str | None, given: dict[str, Any]) -> None:
    for flag, value in given.items():
        if value:
            raise UsageError(
                f"{flag} belongs to a lesson",
                why="without a number, shoal learn lists the lessons" if lesson is None else "report plays none",
                fix=f"write the number first: shoal learn 1 {flag}",
            )


# The list


def _list_lessons(lessons: dict[int, LessonFolder], out: Path, json: bool, options: list[str]) -> None:
    from shoal.tools.learn.judge import read_results

    results = read_results(out)
    if json:
        print_json({"lessons": [_list_document(one.lesson, results.get(number)) for number, one in lessons.items()]})
        return
    console = stdout_console()
    rows = [
        (
            str(number),
            one.lesson.title,
            format_duration(one.lesson.seconds),
            ", ".join(need.removesuffix(" limits") for need in one.lesson.needs),
            _progress(results.get(number)),
        )
        for number, one in lessons.items()
    ]
    print_table(("", "lesson", "takes", "needs", "progress"), rows, right=(0, 2), console=console)
    to_do = [number for number in lessons if not _was_passed(results.get(number))]
    console.print()
    for error in results.values():
        if isinstance(error, DataError):
            print_paragraph(escape(f"damaged: {error.seen}; {error.fix}"), console)
    counts = f"{len(lessons) - len(to_do)} of {pluralize(len(lessons), 'lesson')} passed"
    print_paragraph(f"{counts}; results are in {shown(out)}", console)
    following = str(to_do[0]) if to_do else "report"
    console.print(f"next: {as_command('learn', following, *options)}", soft_wrap=True, markup=False)


def _was_passed(result: LessonResult | DataError | None) -> bool:
    return result is not None and not isinstance(result, DataError) and result.was_passed


def _progress(result: LessonResult | DataError | None) -> Text:
    if result is None:
        return Text("–")
    if isinstance(result, DataError):
        return Text("damaged", "red")
    if result.was_passed:
        return Text("passed", "green")
    return Text(result.verdict, "yellow" if result.verdict == "too noisy" else "red")


def _list_document(lesson: Lesson, result: LessonResult | DataError | None) -> dict[str, Any]:
    tried = None if isinstance(result, DataError) else result
    return {
        "number": lesson.number,
        "title": lesson.title,
        "seconds": lesson.seconds,
        "needs": list(lesson.needs),
        "predictions": [question.model_dump(mode="json", exclude_defaults=True) for question in lesson.predict],
        "tries": 0 if tried is None else len(tried.tries),
        "verdict": "damaged" if isinstance(result, DataError) else tried and tried.verdict,
        "passed": _was_passed(result),
    }


# One lesson


def _play(
    folder: LessonFolder,
    lessons: dict[int, LessonFolder],
    out: Path,
    words: list[str],
    yes: bool,
    quick: bool,
    json: bool,
    options: list[str],
) -> int:
    from shoal.tools.learn.experiment import END_SIGNALS
    from shoal.tools.learn.judge import read_answers
    from shoal.tools.learn.run import check_needs, play

    lesson = folder.lesson
    if yes and words:
        raise UsageError("--yes does not go with --answer", why="both are the prediction", fix="leave one out")
    console = make_console(stderr=json)
    answers: dict[str, Value] = {}
    if words:
        answers = read_answers(lesson, words)
    elif lesson.predict and not yes and not sys.stdin.isatty():
        _print_question(lesson, console)
        read_answers(lesson, words)
    check_needs(lesson, out)
    _print_question(lesson, console)
    if not yes and not words:
        try:
            answers = {question.name: _ask(question, console) for question in lesson.predict}
        except EOFError:
            console.print()
            read_answers(lesson, words)
        except KeyboardInterrupt:
            console.print()
            raise
    warn = lambda sentence: print_paragraph(f"[yellow]{sentence}[/]", console)  # noqa: E731
    again = as_command("learn", str(lesson.number), *options)
    for signum in END_SIGNALS:
        # nohup ignores SIGHUP.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, signal.default_int_handler)
    try:
        result = play(folder, out, answers, _make_display(console), warn, is_quick=quick, takes_theory=yes)
    except KeyboardInterrupt:
        seen = f"lesson {lesson.number} was interrupted; what it had started has ended, and the try does not count"
        raise Interrupted(seen, fix=again) from None
    if json:
        print_json(result.model_dump(mode="json"))
    else:
        following = next((str(number) for number in lessons if number > lesson.number), "report")
        print_result(result, out, console, again, as_command("learn", following, *options))
    return 0 if result.is_passed else 1


def _print_question(lesson: Lesson, console: Console) -> None:
    console.print(f"[bold]Lesson {lesson.number}: {escape(lesson.title)}[/]")
    console.print()
    print_paragraph(escape(lesson.question), console)
    if lesson.predict:
        console.print("\nYour prediction:")
    for question in lesson.predict:
        right = " / ".join(question.choices) or (question.distance and f"right: {question.distance}")
        print_paragraph(escape(f"{question.ask} ({right})" if right else question.ask), console, "  · ")
    console.print()


def _ask(question: Question, console: Console) -> Value:
    """Ask at the terminal until the answer is one."""
    unit = f" [{question.unit}]" if question.unit else ""
    while True:
        typed = console.input(Text(f"{question.label}{unit}: ", "bold"), markup=False)
        if not typed.strip():
            continue
        try:
            return question.read(typed)
        except UsageError as error:
            print_paragraph(escape(f"{error.seen}: {error.fix}"), console)


def _make_display(console: Console) -> Display:
    @contextlib.contextmanager
    def display(text: str) -> Iterator[Any]:
        console.print(Text(f"$ {wrap_command(text, console.width - 6)}", "bold"), soft_wrap=True)
        with console.status("") as status:
            # Of one line: a status that wraps would move up and down.
            yield lambda line: status.update(escape(set_cell_size(line, console.width - 4).rstrip()))

    return display


def wrap_command(text: str, width: int) -> str:
    """Break a long command before options, as a shell takes it."""
    parts: list[str] = []  # an option and its values
    for word in map(shlex.quote, shlex.split(text)):
        parts[-1:] = [word] if not parts else [parts[-1], word] if word.startswith("-") else [f"{parts[-1]} {word}"]
    lines = parts[:1]
    for part in parts[1:]:
        fits = len(lines[-1]) + len(part) <= width
        lines[-1:] = [f"{lines[-1]} {part}"] if fits else [lines[-1], part]
    return " \\\n    ".join(lines)


def print_result(result: LessonResult, out: Path, console: Console, again: str, onward: str) -> None:
    """Print prediction, theory and measurement in a line each, the verdict, why, and what to do next."""
    console.print()
    if result.predictions:
        rows = [
            (what, *(one.shown[what] for one in result.predictions))
            for what in _ROWS
            if what != "measurement" or any(one.measured is not None for one in result.predictions)
        ]
        judged = [_judgement(one.judgement, one.within) for one in result.predictions]
        print_table(("", *(one.label for one in result.predictions)), [*rows, ("", *judged)], range(1, 99), console)
        console.print()
    print_paragraph(f"theory: {escape(result.theory)}", console)
    for check in result.checks:
        mark = {"right": "[green]✓[/] ", "wrong": "[red]✗[/] "}.get(check.judgement, "– ")
        note = f" ({_NOISY if check.judgement == 'too noisy' else check.judgement})" if mark == "– " else ""
        seen = f": {check.seen}" if check.seen else ""
        print_paragraph(escape(f"{check.text}{seen}{note}"), console, mark)
    console.print(f"\n[bold]{_verdict(result)}[/]")
    console.print()
    print_paragraph(escape(result.explanation), console)
    console.print()
    print_paragraph(f"On a large cluster: {escape(result.cluster)}", console)
    console.print()
    folder, picture = out / result.folder, out / result.picture
    lines = [f"runs:    {shown(folder)}", f"result:  {shown(out / f'{result.number:02}.json')}"]
    lines[1:1] = [f"picture: {shown(picture)}"] if picture.is_file() else []
    if result.is_passed:
        lines.append(f"next:    {onward}")
    else:
        # Who has read the explanation knows the answer.
        lines += [f"again:   {again}"] + ([f"next:    {onward}"] if result.verdict == "not passed" else [])
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _judgement(judgement: str, within: str) -> Text:
    text = _NOISY if judgement == "too noisy" else judgement
    if within and judgement in ("right", "wrong"):
        text = within if judgement == "right" else f"not {within}"
    return Text(text, _STYLES.get(judgement, "yellow"))


def _verdict(result: LessonResult) -> str:
    if result.verdict == "too noisy":
        cores = f"other programs kept {result.other_programs_cores:.1f} cores busy"
        return f"[yellow]{_NOISY}[/]: {cores}, so times were not judged; all else is right"
    unjudged = " (times were not judged)" if result.quick and result.is_passed else ""
    judged: list[JudgedRecord] = [*result.predictions, *result.checks]
    has_times = any(one.judgement == "too noisy" for one in judged)
    loud = has_times and not result.is_passed
    note = f" (other programs kept {result.other_programs_cores:.1f} cores busy)" if loud else ""
    wrong = [one.label for one in result.predictions if one.judgement == "wrong"]
    failed = sum(check.judgement == "wrong" for check in result.checks)
    reasons = [f"wrong: {escape(', '.join(wrong))}"] if wrong else []
    reasons += [f"{pluralize(failed, 'check')} failed (✗)"] if failed else []
    why = f": {'; '.join(reasons)}" if reasons else ""
    return f"[{_STYLES[result.verdict]}]{result.verdict}[/]{why}{unjudged}{note}"


def _write_report(out: Path, json: bool) -> int:
    from shoal.tools.learn.page import write_page

    path = write_page(out)
    if json:
        print_json({"report": str(path)})
    else:
        sys.stdout.write(f"report: {shown(path)}\n")
    return 0
