"""Text that is safe to print on a terminal: no control sequences.

Machine names, log lines, process lists and error texts of other programs come from outside. An escape sequence in them
could rewrite the reader's screen, window title or clipboard.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from typing import Any, TextIO

# Whole sequences first, so that no half of one remains as text: OSC, DCS, SOS, PM and APC up to their terminator,
# then CSI, then the short ones. An unfinished string loses only its introducer.
_SEQUENCES = re.compile(
    # No introducer in the body: otherwise each of many unfinished ones would scan to the end of the text.
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c\n\x90\x98\x9d-\x9f]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]+[0-~]"
    r"|\x1b[@-~]?"
)
# C0 controls except tab and newline, DEL, C1 controls, characters that reorder text on the screen, and halves of
# surrogate pairs, which stand for undecodable bytes and cannot be written.
_FORBIDDEN = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROLS = re.compile(f"[{_FORBIDDEN}]")


def printable(text: str) -> str:
    """Remove escape sequences, control characters and characters that change the writing direction.

    A carriage return becomes a newline: the part before it was meant to be overwritten and must not hide what follows.
    """
    if _CONTROLS.search(text) is None:
        return text
    text = _SEQUENCES.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROLS.sub("", text)


def printable_line(text: str, most: int) -> str:
    """Return printable text on one line, cut to `most` characters: a newline in a name could forge an output line."""
    shown = " ".join(printable(text[:most]).split("\n"))
    return f"{shown} …" if len(text) > most else shown


def printable_json(document: Any, indent: int | None = None) -> str:
    """Return a JSON document in which the forbidden characters are `\\u` escapes, so that nothing is lost."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


class PrintableStream:
    """A text stream that writes through `printable`; every other attribute is the wrapped stream's."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        end_stage()
        self.raw.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def protect_terminal() -> None:
    """Replace stdout and stderr by printable streams for the rest of the process.

    Consoles that style text clean it before they add their own sequences, and write to `raw_stream`.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, PrintableStream):
            setattr(sys, name, PrintableStream(stream))


def raw_stream(stream: Any) -> Any:
    """Return the stream behind a protected one, for text that is known to be clean."""
    return stream.raw if isinstance(stream, PrintableStream) else stream


_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_SPIN_S = 0.1


class StageLine:
    """One line on a terminal that says what a command is doing, until the command itself prints something."""

    def __init__(self, stream: TextIO, text: str) -> None:
        self._stream = stream
        self._text = text
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._draw(0)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._stream.write("\r\x1b[K")
        self._stream.flush()

    def _spin(self) -> None:
        count = 0
        while not self._ended.wait(_SPIN_S):
            count += 1
            self._draw(count)

    def _draw(self, count: int) -> None:
        seconds = int(time.monotonic() - self._began)
        self._stream.write(
            f"\r{_SPINNER[count % len(_SPINNER)]} {self._text}{f' ({seconds} s)' if seconds else ''}\x1b[K"
        )
        self._stream.flush()


_stage: StageLine | None = None


def begin_stage(text: str) -> None:
    """Show on a terminal what the command is doing; whatever is printed next replaces it."""
    global _stage
    end_stage()
    stream = raw_stream(sys.stderr)
    if stream is not None and stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        _stage = StageLine(stream, text)


def end_stage() -> None:
    global _stage
    if _stage is not None:
        stage, _stage = _stage, None
        stage.end()


def stderr_width() -> int | None:
    """Return the columns of the terminal that errors go to; None if they go elsewhere."""
    if not sys.stderr.isatty():
        return None
    # A terminal that was never given a size says 0.
    return max(20, os.get_terminal_size(sys.stderr.fileno()).columns or 80)
