"""Results on stdout: a JSON document for scripts, a small table for people."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.errors import MarkupError
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from shoal.runfolder import RunFolder
from shoal.terminal import printable, printable_json, raw_stream
from shoal.units import format_si

if TYPE_CHECKING:
    from shoal.config.manifest import Manifest
    from shoal.report.scaling import ScalingPoint


# The only tags that are markup here. Any other, such as a link, is text.
_STYLES = {"bold", "dim", "red", "green", "yellow", "cyan"}
_TAG = re.compile(r"(?<!\\)\[([a-z#/@][^\[]*?)\]")


class SafeConsole(Console):
    """A console on which foreign text stays text: its control sequences are removed before our own styles are added.

    Text that is known to be foreign goes through `rich.markup.escape` all the same: a forgotten one costs a colour.
    """

    @property
    def file(self) -> IO[str]:
        """Behind the protection of stdout and stderr, which would remove our own styles too."""
        stream: IO[str] = raw_stream(Console.file.fget(self))  # type: ignore[attr-defined]
        return stream

    @file.setter
    def file(self, stream: IO[str]) -> None:
        Console.file.fset(self, stream)  # type: ignore[attr-defined]

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def render_str(self, text: str, **options: Any) -> Text:
        # Before rich takes single characters out of a sequence.
        text = printable(text)
        try:
            return super().render_str(_TAG.sub(_keep_own_tag, text), **options)
        except MarkupError:
            # A foreign `[/]` that closes nothing.
            return super().render_str(text, **{**options, "markup": False})


def _keep_own_tag(tag: re.Match[str]) -> str:
    return tag[0] if tag[1].removeprefix("/") in {"", *_STYLES} else "\\" + tag[0]


def make_console(*, stderr: bool = False, quiet: bool = False, soft_wrap: bool = False) -> Console:
    """The only way to make a console, which a test checks."""
    return SafeConsole(stderr=stderr, quiet=quiet, soft_wrap=soft_wrap, highlight=False, emoji=False)


def stdout_console() -> Console:
    return make_console()


def print_json(document: Any) -> None:
    sys.stdout.write(printable_json(document, indent=2) + "\n")


def shown(path: Path) -> str:
    """As short as it can be typed from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def command(*words: str) -> str:
    """A shoal command as it can be pasted here: by its path where `shoal` alone would not be found."""
    started = Path(sys.argv[0])
    if shutil.which("shoal"):
        return shlex.join(["shoal", *words])
    if started.name == "__main__.py":
        return shlex.join([sys.executable, "-P", "-m", "shoal", *words])
    return shlex.join([shown(started.absolute()), *words])


def print_run(run: RunFolder, manifest: Manifest) -> None:
    console = stdout_console()
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in run_rows(manifest):
        table.add_row(name, escape(value))
    console.print(table)
    folder = shown(run.path)
    nexts = "   ".join(command(verb, folder) for verb in ("report", "sample"))
    # Not through rich: a folder named `[x]` is not markup.
    said = (manifest.choice_notes, manifest.lesson_notes, manifest.prediction_notes)
    notes = "\n\n".join(text for text in said if text)
    sys.stdout.write(f"\n{notes}\n\nrun folder: {folder}\nnext: {nexts}\n")


def print_detached(run: RunFolder, json: bool) -> None:
    """What to type next for a run that goes on without us."""
    if json:
        print_json({"run": str(run.path)})
        return
    folder = shown(run.path)
    nexts = "\n      ".join(command(*words) for words in (("attach", folder), ("logs", "-f", folder), ("stop", folder)))
    sys.stdout.write(f"run folder: {folder}\nnext: {nexts}\n")


def run_rows(manifest: Manifest) -> list[tuple[str, str]]:
    rows = [
        ("loss", f"{_number(manifest.final_loss, '.4f')} (validation {_number(manifest.val_loss, '.4f')})"),
        ("speed", f"{_number(manifest.tokens_per_sec.get(manifest.world_size), ',.0f')} tokens/s"),
    ]
    if manifest.world_size > 1:
        rows += [
            ("all-reduce", _allreduce(manifest)),
            ("on the wire", f"{_wire(manifest)} a rank and step"),
            ("replicas", replica_verdict(manifest)),
        ]
    if manifest.recoveries:
        rows.append(("members", members_verdict(manifest)))
    return rows


def replica_verdict(manifest: Manifest) -> str:
    if manifest.byte_equivalent is None:
        return "not compared"
    if manifest.byte_equivalent:
        return f"all {len(manifest.members) or manifest.world_size} identical to the bit"
    return f"they DIFFER, by up to {_number(manifest.max_abs_diff, '.3g')}"


def members_verdict(manifest: Manifest) -> str:
    """How often it changed who took part, and what that cost."""
    changes, known = (
        len(manifest.recoveries),
        [each.seconds for each in manifest.recoveries if each.seconds is not None],
    )
    parts = [
        f"changed {changes}×, {len(manifest.members)} at the end",
        f"at most {max(known):.1f} s to the next commit" if known else "",
        f"{manifest.redone_steps} steps redone" if manifest.redone_steps else "",
        f"{manifest.abandoned_steps} steps abandoned" if manifest.abandoned_steps else "",
    ]
    return "; ".join(part for part in parts if part)


def print_scaling(points: list[ScalingPoint]) -> None:
    # Imported here because it brings numpy, which most verbs do without.
    from shoal.report.explain_scaling import explain

    console = stdout_console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for title in ("ranks", "threads", "tokens/s", "speed-up", "efficiency", "step", "all-reduce", "exposed"):
        table.add_column(title, justify="right", no_wrap=True)
    base = points[0]
    for point in points:
        table.add_row(*_scaling_row(point, base))
    console.print(table)
    sys.stdout.write(f"\n{explain(points)}\n")


def _scaling_row(point: ScalingPoint, base: ScalingPoint) -> tuple[str, ...]:
    from shoal.report.scaling import efficiency

    waiting = point.phases.get("exposed", 0.0) + point.phases.get("wait", 0.0)
    return (
        str(point.ranks),
        str(point.threads or "–"),
        f"{point.tokens_per_s:,.0f}",
        f"{point.tokens_per_s / base.tokens_per_s:.2f}×",
        f"{100 * efficiency(point, base):.0f}%",
        f"{1e3 * point.step_s:.0f} ms",
        f"{1e3 * point.allreduce_s:.1f} ms" if point.ranks > 1 and point.allreduce_s is not None else "–",
        f"{1e3 * waiting:.1f} ms" if point.ranks > 1 else "–",
    )


def _allreduce(manifest: Manifest) -> str:
    if manifest.allreduce_p50_ms is None:
        return "not measured"
    return f"{manifest.allreduce_p50_ms:.1f} ms a step, p95 {_number(manifest.allreduce_p95_ms, '.1f')} ms"


def _wire(manifest: Manifest) -> str:
    if manifest.wire_bytes_per_step is None or manifest.theoretical_bytes_per_step is None:
        return "not counted"
    sent, theory = (
        format_si(each, "B") for each in (manifest.wire_bytes_per_step, manifest.theoretical_bytes_per_step)
    )
    if manifest.inside == "gloo":
        return f"{sent} (2(N-1)/N of the gradients is {theory})"
    return f"{sent} (of the gradients, which a machine's ranks share in memory: {theory})"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
