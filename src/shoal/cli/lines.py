"""Lines that ranks printed, on the terminal: coloured by rank, whole, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache

from rich.console import Console
from rich.text import Text

from shoal.cli.output import make_console
from shoal.launch.found import Found
from shoal.launch.logs import LogLine
from shoal.terminal import printable, printable_line
from shoal.units import format_duration

# A note may come from another machine's journal.
_LONGEST_NOTE = 4_000
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def make_line_printer(console: Console) -> Callable[[LogLine], None]:
    @cache
    def label(node: str, rank: int | None) -> str:
        words = Text(f"[{node if rank is None else rank}] ", style=_COLOURS[(rank or 0) % len(_COLOURS)])
        with console.capture() as drawn:
            console.print(words, end="")
        return drawn.get()

    def show(line: LogLine) -> None:
        # Past rich, which would turn tabs into spaces and take ten times as long.
        for part in printable(line.text).splitlines() or [""]:
            console.file.write(f"{label(line.node, line.rank)}{part}\n")
        console.file.flush()

    return show


def process_lines(processes: Iterable[Found]) -> Iterator[str]:
    for found in processes:
        age = format_duration(found.age_s)
        yield f"{found.pid:>8}  {found.part:<8}  {found.node:<8}  {age:>8}  {found.command}"


def print_note(text: str) -> None:
    make_console(stderr=True, soft_wrap=True).print(
        Text("note: ", style="yellow") + Text(printable_line(text, _LONGEST_NOTE))
    )
