"""Lines that ranks printed, on the terminal: coloured by rank, whole, in order."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from rich.cells import set_cell_size
from rich.console import Console
from rich.text import Text

from shoal.cli.output import make_console
from shoal.launch.found import Found
from shoal.launch.logs import LogLine
from shoal.terminal import printable, printable_line
from shoal.units import format_duration

# A note may come from another machine's journal.
_LONGEST_NOTE = 4_000
_REDRAW_S = 0.1
# Of a large world, the current lines of so many ranks.
_MOST_CURRENT = 8
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


class LineDisplay:
    """Prints the lines of ranks as they are finished. On a terminal, the unfinished line of each rank (a progress bar)
    stands below them and is drawn anew."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._show = make_line_printer(console)
        # FORCE_COLOR makes rich take a pipe for a terminal.
        self.is_live = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        # The current lines as they stand on the screen, and when they were drawn.
        self._drawn: list[str] = []
        self._drawn_at = 0.0

    def lines(self, lines: Sequence[LogLine], current: Sequence[LogLine] = ()) -> None:
        below = self._below(current) if self.is_live else []
        is_due = time.monotonic() - self._drawn_at >= _REDRAW_S
        if not lines and (below == self._drawn or not is_due):
            return
        self._erase()
        for line in lines:
            self._show(line)
        self._draw(below)

    def note(self, text: str) -> None:
        self.beside(lambda: print_note(text))

    def beside(self, say: Callable[[], None]) -> None:
        """Lets `say` print to the same terminal, above the current lines."""
        below = self._drawn
        self._erase()
        # It may print to stderr, which is another stream.
        self._console.file.flush()
        say()
        self._draw(below)

    def close(self) -> None:
        self._erase()
        self._console.file.flush()

    def _below(self, current: Sequence[LogLine]) -> list[str]:
        """Cut to the width of the terminal: a line that wraps could not be drawn anew."""
        most = max(1, min(_MOST_CURRENT, self._console.height // 3))
        shown = list(current) if len(current) <= most else list(current[: most - 1])
        below = [self._cut(line) for line in shown]
        if len(shown) < len(current):
            below.append(f"… and the current lines of {len(current) - len(shown)} more ranks")
        return below

    def _cut(self, line: LogLine) -> str:
        label = f"[{line.node if line.rank is None else line.rank}] "
        text = printable_line(label + line.text, _LONGEST_NOTE).expandtabs()
        return set_cell_size(text, self._console.width - 1).rstrip()

    def _draw(self, below: list[str]) -> None:
        self._console.file.write("".join(f"{line}\n" for line in below))
        self._console.file.flush()
        self._drawn, self._drawn_at = below, time.monotonic()

    def _erase(self) -> None:
        if self._drawn:
            self._console.file.write(f"\x1b[{len(self._drawn)}A\r\x1b[J")
            self._drawn = []


def process_lines(processes: Iterable[Found]) -> Iterator[str]:
    for found in processes:
        age = format_duration(found.age_s)
        yield f"{found.pid:>8}  {found.part:<8}  {found.node:<8}  {age:>8}  {found.command}"


def print_note(text: str) -> None:
    make_console(stderr=True, soft_wrap=True).print(
        Text("note: ", style="yellow") + Text(printable_line(text, _LONGEST_NOTE))
    )
