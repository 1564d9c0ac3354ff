"""Show what a run prints and how far it is: the lines of its ranks, and a bar or plain lines of its steps."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

from rich.cells import set_cell_size
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from shoal.cli.output import LONGEST_NOTE, make_console, print_note, print_paragraph
from shoal.config.defaults import DEFAULT_PRESET
from shoal.errors import split_command
from shoal.events import Event
from shoal.step_line import StepLine
from shoal.terminal import end_stage, printable, printable_line
from shoal.units import TOKENS, format_amount, format_count, format_value, pluralize, unit_of

if TYPE_CHECKING:
    from shoal.config.schema import EngineConfig
    from shoal.launch.logs import LogLine
    from shoal.runs.start import TrainDisplay


BUILTIN_TEXTS = {
    "grammar": "English sentences that shoal generates",
    "shakespeare": "two plays of Shakespeare, which come with shoal",
}
_PLAIN_EVERY_S = 10.0
# Of a progress line without its bar and the numbers of its steps.
_TEXT_WIDTH = 66
_LEAST_BAR, _MOST_BAR = 6, 40
_MOST_STATUS_BAR = 16
_REDRAW_S = 0.1
# Show the current lines of at most this many ranks.
_MOST_CURRENT = 8
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")
# Characters of a rank's first sample: its line fits a terminal of 80 columns.
_MOST_FIRST = 38
# Values of a program's own in one line.
_MOST_VALUES = 8
# Longer rounds than any training has steps.
_NEVER_STEPS = 10**8


def _label_of(node: str, rank: int | None) -> str:
    return f"[{node if rank is None else rank}] "


def make_line_printer(console: Console) -> Callable[[LogLine], None]:
    """Return a function that prints a rank's line with a coloured label."""

    @cache
    def label(node: str, rank: int | None) -> str:
        text = Text(_label_of(node, rank), style=_COLOURS[(rank or 0) % len(_COLOURS)])
        with console.capture() as drawn:
            console.print(text, end="")
        return drawn.get()

    def show(line: LogLine) -> None:
        # Not through rich, which would turn tabs into spaces and take ten times as long.
        for part in printable(line.text).splitlines() or [""]:
            console.file.write(f"{label(line.node, line.rank)}{part}\n")
        console.file.flush()

    return show


class LineDisplay:
    """Print the finished lines of ranks. On a terminal, redraw their unfinished lines (progress bars) below."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._show = make_line_printer(console)
        # With FORCE_COLOR rich treats a pipe as a terminal.
        self.is_live = console.is_terminal and not console.is_dumb_terminal and console.file.isatty()
        self.hidden: set[tuple[int | None, str]] = set()  # rank and line: errors that the launcher prints for all
        self.status = ""  # the last line of a live display: what the run is doing, or a bar
        self._drawn: list[str] = []  # the unfinished lines on the screen
        self._drawn_at = 0.0

    def lines(self, lines: Sequence[LogLine], current: Sequence[LogLine] = ()) -> None:
        lines = [line for line in lines if (line.rank, line.text) not in self.hidden]
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

    def beside(self, print_text: Callable[[], None]) -> None:
        """Call `print_text`, which prints to the same terminal, above the current lines."""
        below = self._drawn
        self._erase()
        # It may print to stderr, which is another stream.
        self._console.file.flush()
        print_text()
        self._draw(below)

    def close(self) -> None:
        self._erase()
        self._console.file.flush()

    def _below(self, current: Sequence[LogLine]) -> list[str]:
        """Return the current lines, cut to the width of the terminal: a wrapped line could not be redrawn."""
        most = max(1, min(_MOST_CURRENT, self._console.height // 3))
        shown = list(current) if len(current) <= most else list(current[: most - 1])
        below = [self._cut(_label_of(line.node, line.rank) + line.text) for line in shown]
        if len(shown) < len(current):
            below.append(f"… and the current lines of {len(current) - len(shown)} more ranks")
        return [*below, *([self._cut(self.status)] if self.status else [])]

    def _cut(self, text: str) -> str:
        text = printable_line(text, LONGEST_NOTE).expandtabs()
        return set_cell_size(text, self._console.width - 1).rstrip()

    def _draw(self, below: list[str]) -> None:
        if below:
            end_stage()
        self._console.file.write("".join(f"{line}\n" for line in below))
        self._console.file.flush()
        self._drawn, self._drawn_at = below, time.monotonic()

    def _erase(self) -> None:
        if self._drawn:
            self._console.file.write(f"\x1b[{len(self._drawn)}A\r\x1b[J")
            self._drawn = []


class PlainDisplay:
    """Progress for logs and pipes: a line every few seconds, none of them rewritten."""

    def __init__(self, console: Console, steps: int, title: str, rank: int | None = None) -> None:
        self._console = console
        self._line = StepLine(steps)
        self._printer = EventPrinter(title, rank)
        self._printed_at: float | None = None
        self._printed_step = 0

    def __call__(self, events: list[Event]) -> None:
        for event in events:
            for text in self._printer.announce(event):
                _print_announcement(text, self._console)
            if self._printer.leads(event, "step"):
                self._step(event)
            elif self._printer.leads(event, "doing") and self._printed_at is None:
                self._wait(event["text"])

    def _wait(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        pass

    def _step(self, event: Event) -> None:
        text = self._line.update(event)
        # A run that is attached to at its last step sends it twice: as the last one so far, and as it ends.
        last = event["step"] == self._line.steps and event["step"] != self._printed_step
        # The time of the step and not of now: `shoal logs` shows a run that may have ended long ago. Clocks of machines
        # differ, and the steps may be those of another one from here on.
        now = event["time"]
        # Always print the first event seen; in a resumed or attached run that is not step 1.
        if last or self._printed_at is None or abs(now - self._printed_at) > _PLAIN_EVERY_S:
            self._printed_at, self._printed_step = now, event["step"]
            self._console.print(f"step {event['step']}/{self._line.steps}  {text}", soft_wrap=True)


class StatusDisplay(PlainDisplay):
    """Progress on a terminal on which a script prints: the last line, which `lines` keeps below the script's own."""

    def __init__(self, lines: LineDisplay, config: EngineConfig) -> None:
        console, steps = make_console(stderr=True), config.train.steps
        super().__init__(console, steps, name_training(config))
        room = console.width - _TEXT_WIDTH - 2 * len(str(steps))
        self._bar = max(0, min(room, _MOST_STATUS_BAR))
        self._line = StepLine(steps, is_short=room < 0)
        self._lines = lines
        self._wait("the ranks have started; computing the first step")

    def _wait(self, text: str) -> None:
        self._lines.status = text

    def _step(self, event: Event) -> None:
        step, steps = event["step"], self._line.steps
        if step >= steps:
            self._lines.status = ""
            super()._step(event)
            return
        self._printed_at = event["time"]
        bar = "━" * (self._bar * step // steps)
        self._lines.status = f"step {step}/{steps} {bar.ljust(self._bar)} {self._line.update(event)}"


class BarDisplay:
    """Progress on a terminal: a spinner until the first step, then a bar."""

    def __init__(
        self, console: Console, steps: int, title: str, rank: int | None = None, transient: bool = False
    ) -> None:
        room = console.width - _TEXT_WIDTH - 2 * len(str(steps))
        self._line = StepLine(steps, is_short=room < 0)
        self._printer = EventPrinter(title, rank)
        columns: list[ProgressColumn] = [TextColumn("step {task.completed:.0f}/{task.total:.0f}")]
        if room >= _LEAST_BAR:
            columns.append(BarColumn(min(room, _MOST_BAR)))
        columns.append(TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis")))
        self._progress = Progress(*columns, console=console, transient=transient)
        self._task: TaskID | None = None
        self._waiting: Progress | None = None

    def wait(self, text: str) -> None:
        """Show what the run is doing, and for how long, until its first step."""
        self._end_wait()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._waiting = Progress(*columns, console=self._progress.console, transient=True)
        self._waiting.add_task(escape(text))
        self._waiting.start()

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None

    def __call__(self, events: list[Event]) -> None:
        for event in events:
            for text in self._printer.announce(event):
                _print_announcement(text, self._progress.console)
            if self._printer.leads(event, "step"):
                self._step(event)
            elif self._printer.leads(event, "start") and self._task is None:
                compiles = "compiling the model, for up to a minute, and " if event.get("compiled") else ""
                self.wait(f"the ranks have started; {compiles}computing the first step")
            elif self._printer.leads(event, "doing") and self._task is None:
                self.wait(event["text"])
            elif self._printer.leads(event, "lost") and self._task is not None:
                self._progress.update(self._task, description="between two generations: agreeing on the members")

    def close(self) -> None:
        self._end_wait()
        self._progress.stop()

    def _step(self, event: Event) -> None:
        if self._task is None:
            self._end_wait()
            self._progress.start()
            self._task = self._progress.add_task("", total=self._line.steps)
        self._progress.update(self._task, completed=event["step"], description=self._line.update(event))


def make_plain_display(config: EngineConfig) -> TrainDisplay:
    """Return plain lines even on a terminal, for a command that prints other lines between them."""
    return PlainDisplay(make_console(stderr=True), config.train.steps, name_training(config))


def make_display(config: EngineConfig, quiet: bool = False, rank: int | None = None, title: str = "") -> TrainDisplay:
    """Return the display for this terminal, and print what is trained; `title` is what distinguishes it from others.

    It shows the steps of `rank` or, without it, of the first member.
    """
    console = make_console(stderr=True, quiet=quiet)
    print_paragraph(f"[bold]{escape(title or name_training(config))}[/]: {escape(describe_training(config))}", console)
    return display_on(console, config, rank)


def display_on(
    console: Console, config: EngineConfig, rank: int | None = None, transient: bool = False
) -> TrainDisplay:
    """Return the display for this console; a transient bar disappears at the end."""
    if not console.is_terminal:
        return PlainDisplay(console, config.train.steps, name_training(config), rank)
    display = BarDisplay(console, config.train.steps, name_training(config), rank, transient)
    if not config.run.on.startswith("join:"):
        # A machine that joins may be confirmed by an answer at this terminal, which a spinner would disturb.
        display.wait("starting the ranks")
    return display


def name_training(config: EngineConfig) -> str:
    """Return the preset or the script; of the plain preset with the user's own text, the name of that text."""
    data = getattr(config, "data", None)
    if data is None or data.path is None or config.run.preset != DEFAULT_PRESET:
        return config.run.preset
    return str(data.path.stem)


def describe_training(config: EngineConfig) -> str:
    """Return the text that is trained on, how replicas agree, and where."""
    parts = [f"{pluralize(config.train.steps, 'step')} on {config.run.on}", f"sync {_sync_text(config)}"]
    data = getattr(config, "data", None)
    if data is not None:
        parts.insert(0, str(data.path) if data.path is not None else BUILTIN_TEXTS[data.builtin])
    return "; ".join(parts)


def _sync_text(config: EngineConfig) -> str:
    accumulated = f" with {config.sync.accumulate} times the batch" if config.sync.accumulate > 1 else ""
    mode, choice = config.sync.mode, config.sync.expected_choice
    if choice.is_outer and choice.every > _NEVER_STEPS:
        # The upper bound of `shoal bench levers`.
        return "none: no gradients are exchanged"
    return (mode if mode in ("auto", "stock") else str(choice)) + accumulated


class EventPrinter:
    """Turn events other than steps into lines, and decide which rank's steps are shown.

    That is `rank` or, without it, the first rank of the newest generation: rank 0 until it leaves.
    """

    def __init__(self, title: str, rank: int | None = None) -> None:
        from shoal.control.membership.types import NEVER

        self._title = title
        self._is_fixed = rank is not None
        self._lead = rank or 0
        self._newest = NEVER
        self._has_started = False
        self._ranks_with_shard: set[int] = set()

    def leads(self, event: Event, kind: str) -> bool:
        return bool(event["event"] == kind and event["rank"] == self._lead)

    def announce(self, event: Event) -> Iterator[str]:
        from shoal.records.rank_log import logged_values, read_entered

        match event["event"]:
            case "membership":
                entered = read_entered(event)
                if not self._is_fixed and entered is not None and entered.generation > self._newest:
                    self._newest, self._lead = entered.generation, entered.ids[0]
            case "start" if event["rank"] == self._lead and not self._has_started:
                self._has_started = True
                yield _start_line(event, self._title)
                if event["resumed_from"]:
                    yield f"continues after step {event['resumed_from']:,}"
            case "shard" if event["rank"] not in self._ranks_with_shard:
                # A restarted rank has the same shard.
                self._ranks_with_shard.add(event["rank"])
                yield (
                    f"rank {event['rank']}: {event['size']:,} of {event['total']:,} samples, "
                    f"first: {escape(textwrap.shorten(event['first'], _MOST_FIRST, placeholder=' …'))}"
                )
            case "choice" if event["rank"] == self._lead:
                yield f"step {event['step']}: from here on {escape(event['why'])}"
            case "trial" if event["rank"] == self._lead and event.get("changed"):
                yield f"step {event['step']}: {escape(event['why'])}"
            case "shares" | "aligned" if event["rank"] == self._lead and event.get("why"):
                yield f"step {event['step']}: {escape(event['why'])}"
            case "eval" if event["rank"] == self._lead:
                yield f"step {event['step']}: validation loss {event['val_loss']:.4f}"
            case "log" if event["rank"] == self._lead and (values := logged_values(event)):
                texts = (f"{name} {format_value(value)}" for name, value in list(values.items())[:_MOST_VALUES])
                yield f"step {event['step']}: {escape(', '.join(texts))}"
            case "note":
                yield f"[yellow]note[/]: {escape(event['text'])}"
            case "warning":
                yield f"[yellow]warning[/]: {escape(event['seen'])} ({escape(event['fix'])})"


def _print_announcement(text: str, console: Console) -> None:
    """Print a line about the run; the command at the end of a note stays whole where the line has to be wrapped."""
    prose, command = split_command(text)
    if not console.is_terminal or not command or console.render_str(text).cell_len <= console.width:
        print_paragraph(text, console)
        return
    print_paragraph(prose, console)
    console.print(f"  {command}", soft_wrap=True)


def _parameters(count: int) -> str:
    """Return `124M parameters (124,439,808)`; a number below a million is short enough to be written once."""
    return f"{format_count(count)} parameters ({count:,})" if count >= 1_000_000 else f"{count:,} parameters"


def _start_line(event: Event, title: str) -> str:
    unit = unit_of(event)
    amount = event["tokens_per_step"] if unit is TOKENS else event["global_batch"]
    a_step = "" if amount is None else f"{format_amount(amount, unit)} a step "
    shares = f"; {escape(why)}" if (why := event.get("shares_why")) else ""
    return (
        f"[bold]{escape(title)}[/]: {_parameters(event['params'])} on "
        f"{pluralize(event['world_size'], 'rank')} × {pluralize(event['threads'], 'thread')} "
        f"({event['device']}, {event['backend']}); "
        f"{a_step}in micro-batches of {event['micro_batch']}{shares}"
    )
