"""Untrusted text on the terminal: control sequences and markup in names, logs and errors have no effect.

Exercises terminal.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

import shoal as package
from shoal.cli.output import SafeConsole, make_console
from shoal.cli.progress import LineDisplay, make_line_printer
from shoal.launch.logs import LogLine
from shoal.terminal import PrintableStream, printable, printable_json, printable_line
from tests.support.programs import shoal
from tests.support.run_samples import make_run

CLI = Path(package.__file__).parent / "cli"

# Effect on a terminal: the raw text, the text after cleaning.
SEQUENCES = {
    "colour": ("a\x1b[31mb", "ab"),
    "clear screen": ("a\x1b[2J\x1b[Hb", "ab"),
    "window title": ("a\x1b]0;owned\x07b", "ab"),
    "clipboard": ("a\x1b]52;c;cm0gLXJmIH4=\x1b\\b", "ab"),
    "link": ("\x1b]8;;http://evil\x1b\\text\x1b]8;;\x1b\\", "text"),
    "device control": ("a\x1bPq#0\x1b\\b", "ab"),
    "8-bit CSI": ("a\x9b31mb", "ab"),
    "8-bit OSC": ("a\x9d0;owned\x9cb", "ab"),
    "character set": ("a\x1b(0b", "ab"),
    "reset": ("a\x1bcb", "ab"),
    "unfinished title": ("a\x1b]0;owned", "a0;owned"),
    "trailing escape": ("a\x1b", "a"),
    "backspace": ("good\x08\x08\x08\x08evil", "goodevil"),
    "bell and null": ("a\x07\x00b", "ab"),
    "delete": ("a\x7fb", "ab"),
    "overwritten line": ("evil\rgood", "evil\ngood"),
    "Windows line end": ("a\r\nb", "a\nb"),
    "right to left": ("a\u202etxt.exe\u202c", "atxt.exe"),
    "isolates": ("a\u2066b\u2069", "ab"),
    "undecodable byte": ("a\udcffb", "ab"),
    "nested": ("\x1b\x1b[31m[31mx", "[31mx"),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_control_sequences_are_removed(name: str) -> None:
    text, left = SEQUENCES[name]
    assert printable(text) == left
    assert printable(left) == left


@pytest.mark.parametrize("text", ["plain", "tab\tand\nnewline", "Umlaut ä, 漢字, 🐟, ×, –", "naïve עברית"])
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert printable(text) == text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("start", ["\x9d", "\x90a", "\x1b]", "\x9b1;", "\x1b[", "\x1b(", "\x9f\x98"])
def test_many_unfinished_sequences_take_linear_time(start: str) -> None:
    """Searching to the end of the text for each took 12 s for 16,000; 200,000 would take half an hour."""
    assert "\x1b" not in printable(start * 200_000)


def test_a_note_from_another_machine_stays_on_one_line() -> None:
    assert printable_line("x\nnote: type this\x1b[2J", 100) == "x note: type this"
    assert printable_line("abcdef", 3) == "abc …"


@pytest.mark.parametrize("name", SEQUENCES)
def test_json_writes_control_characters_as_escapes(name: str) -> None:
    text, _ = SEQUENCES[name]
    document = printable_json({"text": text})
    assert printable(document) == document
    assert json.loads(document) == {"text": text}


def test_a_printable_stream_cleans_print_and_writelines() -> None:
    raw = io.StringIO()
    stream = PrintableStream(raw)
    print("a\x1b[31mb", file=stream)
    stream.writelines(["c\x9b2J", "d\n"])
    assert raw.getvalue() == "ab\ncd\n"
    assert stream.getvalue() == raw.getvalue(), "other attributes come from the wrapped stream"


def make_coloured_console() -> tuple[SafeConsole, io.StringIO]:
    out = io.StringIO()
    return SafeConsole(file=out, force_terminal=True, color_system="standard", highlight=False, width=80), out


@pytest.mark.parametrize("name", SEQUENCES)
def test_a_console_emits_only_its_own_styles(name: str) -> None:
    console, out = make_coloured_console()
    text, left = SEQUENCES[name]
    table = Table(box=None)
    table.add_column("\x1b[2Jtitle")
    table.add_row(text)
    console.print(Text(text, style="red"))
    console.print(table)
    output = out.getvalue()
    style = re.compile(r"\x1b\[[0-9;]*m")
    assert style.search(output)
    assert "\x1b" not in style.sub("", output)
    assert "\x1b[2J" not in output
    assert f"\n {left.partition(chr(10))[0]}" in style.sub("", output)


def test_markup_in_untrusted_text_is_printed_literally() -> None:
    console, out = make_coloured_console()
    console.print("[green]styled[/] [link=http://evil]text[/link] [@click=x] [/nonsense] [blink]b")
    assert out.getvalue() == "\x1b[32mstyled\x1b[0m [link=http://evil]text[/link] [@click=x] [/nonsense] [blink]b\n"
    console.print("[/] [red]a[/]")
    assert out.getvalue().endswith("\n[/] [red]a[/]\n")


def test_consoles_are_created_in_one_module() -> None:
    makers = [path.name for path in CLI.glob("*.py") if re.search(r"(?<!class )\b(Safe)?Console\(", path.read_text())]
    assert makers == ["output.py"]
    assert isinstance(make_console(), SafeConsole)


def test_lines_of_ranks_are_cleaned_and_keep_their_label() -> None:
    out = io.StringIO()
    show = make_line_printer(SafeConsole(file=out, highlight=False, width=80))
    show(LogLine(node="a\x1b[2Jb", rank=None, text="x\x1b]0;t\x07y\tz", time=0.0))
    show(LogLine(node="n", rank=1, text="10%\r20%", time=0.0))
    show(LogLine(node="n", rank=1, text="", time=0.0))
    assert out.getvalue() == "[ab] xy\tz\n[1] 10%\n[1] 20%\n[1] \n"


class Screen:
    """The rows that a terminal shows after text, cursor-up movements and erasing below."""

    def __init__(self, text: str) -> None:
        self.rows, row = [""], 0
        for part in re.findall(r"\x1b\[\d*[A-Za-z]|\n|\r|[^\x1b\r\n]+", text):
            if part == "\n":
                row += 1
                self.rows += [""] * (row + 1 - len(self.rows))
            elif part.startswith("\x1b[") and part.endswith("A"):
                row -= int(part[2:-1])
                assert row >= 0
            elif part == "\x1b[J":
                self.rows = [*self.rows[:row], ""]
            elif part != "\r" and not part.startswith("\x1b"):
                self.rows[row] += part


def lines_of(*texts: str) -> list[LogLine]:
    return [LogLine(time=0.0, rank=rank, node="n", text=text) for rank, text in enumerate(texts)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_current_line_of_every_rank_is_drawn_below_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.progress._REDRAW_S", 0.0)
    out = Terminal()
    display = LineDisplay(SafeConsole(file=out, force_terminal=True, highlight=False, width=30, height=24))
    display.lines(lines_of("begun"), lines_of("\x1b[2J 10%|#   |", "loading\tdata"))
    display.lines([], lines_of(" 20%|##  |" + "x" * 40, "loading\tdata"))
    assert Screen(out.getvalue()).rows == ["[0] begun", "[0]  20%|##  |xxxxxxxxxxxxxxx", "[1] loading     data", ""]
    drawn = len(out.getvalue())
    display.lines([], lines_of(" 20%|##  |" + "x" * 40, "loading\tdata"))
    assert len(out.getvalue()) == drawn, "redrawn without a change"
    display.lines(lines_of(" 20%|##  |"), lines_of("", "loading")[1:])
    assert Screen(out.getvalue()).rows == ["[0] begun", "[0]  20%|##  |", "[1] loading", ""]
    display.close()
    assert Screen(out.getvalue()).rows == ["[0] begun", "[0]  20%|##  |", ""]


def test_a_large_world_does_not_fill_the_terminal() -> None:
    out = Terminal()
    display = LineDisplay(SafeConsole(file=out, force_terminal=True, highlight=False, width=60, height=12))
    display.lines([], lines_of(*("10%" for _ in range(16))))
    expected = ["[0] 10%", "[1] 10%", "[2] 10%", "… and the current lines of 13 more ranks", ""]
    assert Screen(out.getvalue()).rows == expected


def test_bars_are_drawn_at_most_ten_times_a_second() -> None:
    out = Terminal()
    display = LineDisplay(SafeConsole(file=out, force_terminal=True, highlight=False, width=60))
    for percent in range(100):
        display.lines([], lines_of(f"{percent}%"))
    assert out.getvalue().count("%") <= 3


@pytest.mark.parametrize("forced", [None, True])
def test_without_a_terminal_nothing_is_redrawn(forced: bool | None) -> None:
    """Also with FORCE_COLOR, which many CI systems set: rich then treats a pipe as a terminal."""
    out = io.StringIO()
    display = LineDisplay(SafeConsole(file=out, highlight=False, width=60, force_terminal=forced, color_system=None))
    assert not display.is_live
    display.lines(lines_of("begun"), lines_of("10%"))
    display.close()
    assert out.getvalue() == "[0] begun\n"


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil"


def test_commands_print_no_untrusted_control_sequence(tmp_path: Path) -> None:
    """Check logs, explanations of logs, and errors that quote the command line."""
    run = make_run(tmp_path / "run")
    log = run.log("local", 0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"{EVIL} from a rank\nRuntimeError: {EVIL} failed\n")
    for words in (
        ("logs", run.path),
        ("explain", log),
        ("logs", tmp_path / EVIL),
        (EVIL,),
        ("train", "--config", EVIL),
    ):
        done = shoal(*words)
        shown = done.stdout + done.stderr
        assert "evil" in shown
        assert printable(shown) == shown, words


def test_help_keeps_its_colours() -> None:
    done = shoal("ps", "--help", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[1" in done.stdout
    done = shoal("lab", "up", "--help", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[1" in done.stdout
