"""What all commands share: safe consoles, tables and paragraphs, and results as text or JSON."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.control import Control
from rich.errors import MarkupError
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shoal.errors import ShoalError, UsageError, split_command
from shoal.run_folder import RunFolder
from shoal.terminal import end_stage, printable, printable_json, printable_line, raw_stream
from shoal.units import (
    SCRIPT_LOSS,
    Unit,
    format_duration,
    format_loss,
    format_speed,
    format_value,
    pluralize,
)

if TYPE_CHECKING:
    from shoal.config.manifest import Manifest
    from shoal.control.processes import RunProcess


# A note may come from another machine's journal.
LONGEST_NOTE = 4_000
_WIDE = 1000
# Between the columns of a table.
GAP = 2
# Of a user's own values, in the summary of a run.
_MOST_LOGGED = 12

# The only tags that are markup here. Any other, such as a link, is text.
_STYLES = {"bold", "dim", "red", "green", "yellow", "cyan"}
_PADDING = re.compile(r" +\n")
_TAG = re.compile(r"(?<!\\)\[([a-z#/@][^\[]*?)\]")


class SafeConsole(Console):
    """A console that removes control sequences from text before it adds shoal's own styles.

    Text from logs, files or other machines still goes through `rich.markup.escape`; if that is forgotten, the text
    can at most change a colour.
    """

    @property
    def file(self) -> IO[str]:
        """Return the unprotected stream: the protection of stdout and stderr would remove shoal's own styles too."""
        stream: IO[str] = raw_stream(Console.file.fget(self))  # type: ignore[attr-defined]
        return stream

    @file.setter
    def file(self, stream: IO[str]) -> None:
        Console.file.fset(self, stream)  # type: ignore[attr-defined]

    def print(self, *objects: Any, **options: Any) -> None:
        end_stage()
        super().print(*objects, **options)

    def control(self, *control: Control) -> None:
        end_stage()
        super().control(*control)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        text = super()._render_buffer(buffer)
        # Tables are padded to their width, which only a terminal needs.
        return text if self.is_terminal else _PADDING.sub("\n", text)

    def render_str(self, text: str, **options: Any) -> Text:
        # Before rich, which would remove single characters of a control sequence.
        text = printable(text)
        try:
            return super().render_str(_TAG.sub(_keep_own_tag, text), **options)
        except MarkupError:
            # The text contains a `[/]` that closes nothing.
            return super().render_str(text, **{**options, "markup": False})


def _keep_own_tag(tag: re.Match[str]) -> str:
    return tag[0] if tag[1].removeprefix("/") in {"", *_STYLES} else "\\" + tag[0]


def make_console(*, stderr: bool = False, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """Make a console. A test checks that all consoles are made here."""
    return SafeConsole(stderr=stderr, quiet=quiet, soft_wrap=soft_wrap, highlight=False, emoji=False)


def stdout_console() -> Console:
    return make_console()


def print_json(document: Any) -> None:
    sys.stdout.write(printable_json(document, indent=2) + "\n")


def check_picture(path: Path) -> None:
    if path.suffix != ".png":
        raise UsageError(
            f"{path} is not a PNG file", why="-o writes a figure as PNG", fix=f"write -o {path.with_suffix('.png')}"
        )


def open_browser(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        sys.stderr.write("no browser could be started here: open the address above\n")


def shown(path: Path) -> str:
    """Return the path relative to the current folder, where possible."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def as_command(*words: str) -> str:
    """Return a shoal command that can be pasted here, with its path where `shoal` is not on PATH."""
    started = Path(sys.argv[0])
    if shutil.which("shoal"):
        return shlex.join(["shoal", *words])
    if started.name == "__main__.py":
        return shlex.join([sys.executable, "-P", "-m", "shoal", *words])
    return shlex.join([shown(started.absolute()), *words])


def print_run(run: RunFolder, manifest: Manifest, *, stderr: bool = False) -> None:
    """Print the result, the folder and what to do next; the report has the rest.

    What chose the sync method, and a prediction, are printed where the user asked for them.
    """
    console = make_console(stderr=stderr)
    print_paragraph(escape("; ".join(f"{name} {value}" for name, value in run_rows(manifest))), console)
    for text in filter(None, (manifest.choice_notes, manifest.prediction_notes)):
        print_paragraph(escape(text), console)
    folder = shown(run.path)
    # Only shoal's own GPT writes text.
    nexts = "; ".join(
        as_command(name, folder) for name in ("report", "sample" if manifest.trains == "gpt" else "verify")
    )
    # Not through rich: a folder named `[x]` is not markup, and a command to paste is not wrapped.
    (sys.stderr if stderr else sys.stdout).write(f"run folder: {folder}\nnext: {nexts}\n")


def print_result(run: RunFolder, manifest: Manifest | None, json: bool) -> None:
    """Print the result of a training, or without one the commands for its run in the background."""
    if manifest is None:
        print_detached(run, json)
    elif json:
        print_json(manifest.model_dump(mode="json"))
    else:
        print_run(run, manifest)


def print_detached(run: RunFolder, json: bool) -> None:
    """Print the next commands for a run in the background."""
    if json:
        print_json({"run": str(run.path)})
        return
    folder = shown(run.path)
    verbs = (("attach", folder), ("watch", folder), ("logs", "-f", folder), ("stop", folder))
    nexts = "\n      ".join(as_command(*words) for words in verbs)
    sys.stdout.write(f"run folder: {folder}\nnext: {nexts}\n")


def run_rows(manifest: Manifest) -> list[tuple[str, str]]:
    is_early = manifest.status == "unfinished" and manifest.steps < manifest.steps_planned
    rows = [
        *([("steps", f"the loop ended at step {manifest.steps:,} of {manifest.steps_planned:,}")] if is_early else []),
        *([("loss", _loss(manifest))] if manifest.trains == "gpt" or manifest.final_loss is not None else []),
        *((name, format_value(value)) for name, value in list(manifest.logged.items())[:_MOST_LOGGED]),
        *([("speed", format_speed(manifest.speed, Unit(manifest.unit)))] if manifest.speed is not None else []),
    ]
    if manifest.world_size > 1:
        rows.append(("replicas", _replica_verdict(manifest)))
    if manifest.recoveries:
        rows.append(("members", _members_verdict(manifest)))
    return rows


def _loss(manifest: Manifest) -> str:
    if manifest.trains == "gpt":
        return f"{_number(manifest.final_loss, '.4f')} (validation {_number(manifest.val_loss, '.4f')})"
    return "–" if manifest.final_loss is None else f"{format_loss(manifest.final_loss)} ({SCRIPT_LOSS})"


def _replica_verdict(manifest: Manifest) -> str:
    if manifest.byte_equivalent is None:
        return "one, and no other to compare it with" if manifest.replicas == 1 else "not compared"
    if manifest.byte_equivalent:
        return f"all {manifest.replicas} identical to the bit"
    return f"they DIFFER, by up to {_number(manifest.max_abs_diff, '.3g')}"


def _members_verdict(manifest: Manifest) -> str:
    seconds = [recovery.seconds for recovery in manifest.recoveries if recovery.seconds is not None]
    parts = [
        f"changed {len(manifest.recoveries)}×, {len(manifest.members)} at the end",
        f"at most {max(seconds):.1f} s to the next commit" if seconds else "",
        f"{pluralize(manifest.redone_steps, 'step')} redone" if manifest.redone_steps else "",
        f"{pluralize(manifest.abandoned_steps, 'step')} abandoned" if manifest.abandoned_steps else "",
    ]
    return "; ".join(part for part in parts if part)


def print_table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    right: Container[int] = (),
    console: Console | None = None,
    gap: int = GAP,
) -> None:
    """Print a table on stdout or on `console`: on a terminal in its width, elsewhere with whole cells, for programs.

    Columns that do not fit beside the others follow below, with the first column again. `right` are the columns of
    numbers.
    """
    console = console or stdout_console()
    cells = [[cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row] for row in rows]
    widths = [max(map(cell_len, (title, *_lines(cells, number)))) for number, title in enumerate(titles)]
    if not console.is_terminal:
        console.width = _WIDE
    # A long path in the first column is folded: it stands in every part, and would leave room for one column in each.
    widths[0] = first_width = min(widths[0], console.width // 2) if len(titles) > 2 else widths[0]
    for count, columns in enumerate(_columns_that_fit(widths, console.width, gap)):
        if count:
            console.print()
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
        for number in columns:
            justify: JustifyMethod = "right" if number in right else "left"
            most = None if number else first_width
            table.add_column(titles[number], justify=justify, overflow="fold", no_wrap=number in right, max_width=most)
        for row in cells:
            table.add_row(*(row[number] for number in columns))
        console.print(table)


def _lines(rows: Sequence[Sequence[Text]], number: int) -> Iterator[str]:
    for row in rows:
        yield from row[number].plain.splitlines() or [""]


def _columns_that_fit(widths: Sequence[int], width: int, gap: int) -> list[list[int]]:
    """Return the columns of each part of a table. Each part has the first column; a wide column is alone with it."""
    parts, used = [[0]], widths[0]
    for number, column in enumerate(widths[1:], start=1):
        if len(parts[-1]) > 1 and used + gap + column > width:
            parts.append([0])
            used = widths[0]
        parts[-1].append(number)
        used += gap + column
    return parts


def print_paragraph(text: str, console: Console | None = None, label: str = "") -> None:
    """Print text on stdout, or on `console`: wrapped at words on a terminal, on one line for programs elsewhere.

    The lines begin behind `label`, which stands before the first one only.
    """
    console = console or stdout_console()
    if not console.is_terminal:
        console.print(label + text, soft_wrap=True)
    elif label:
        grid = Table.grid()
        grid.add_column(no_wrap=True)
        grid.add_row(label, text)
        console.print(grid)
    else:
        console.print(text)


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def process_lines(processes: Iterable[RunProcess]) -> Iterator[str]:
    """Yield one line for each process, in columns."""
    processes = list(processes)
    part_width = max((len(process.part) for process in processes), default=0)
    node_width = max((len(process.node) for process in processes), default=0)
    for process in processes:
        age, columns = format_duration(process.age_s), f"{process.part:<{part_width}}  {process.node:<{node_width}}"
        yield f"{process.pid:>8}  {columns}  {age:>8}  {process.command}"


def print_note(text: str) -> None:
    print_with_command(printable_line(text, LONGEST_NOTE), make_console(stderr=True), Text("note: ", style="yellow"))


def print_with_command(text: str, console: Console | None = None, label: Text | str = "") -> None:
    """Print plain text that may end with a command, which gets a line of its own where it would be broken."""
    console = console or stdout_console()
    line = Text.assemble(label, text)
    prose, command = split_command(text)
    if not console.is_terminal or not command or line.cell_len <= console.width:
        console.print(line, soft_wrap=not console.is_terminal)
        return
    console.print(Text.assemble(label, prose))
    console.print(Text(f"  {command}"), soft_wrap=True)


@contextlib.contextmanager
def advising_flags(flags: Mapping[str, str], others: Mapping[str, str] | None = None) -> Iterator[None]:
    """Make errors suggest a flag instead of `--set` where the command line has that flag.

    With both, the setting would be given twice and be refused. `flags` are the given flags, by setting; `others` are
    flags that could be given, too.
    """
    try:
        yield
    except ShoalError as error:
        for key, flag in {**(others or {}), **flags}.items():
            error.fix = error.fix.replace(f"--set {key}=", f"{flag} ")
        for key, flag in flags.items():
            # In the words of the command line: `--data`, not `data.path`. A quoted name is a setting's.
            texts = (text.replace(f"{key}=", f"{flag} ") for text in (error.seen, error.why))
            error.seen, error.why = (re.sub(rf"(?<!')\b{re.escape(key)}\b", flag, text) for text in texts)
        raise
