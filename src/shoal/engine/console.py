"""What a training does for itself where no launcher of shoal watches it: progress lines, a summary, and the manifest.

Rank 0 does it, under torchrun or alone.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from shoal.config.manifest import Manifest
from shoal.events import Event
from shoal.run_folder import RunFolder
from shoal.step_line import StepLine
from shoal.terminal import printable
from shoal.units import Unit, format_duration, format_ms, format_share, format_speed, pluralize

_EVERY_S = 2.0


class Console:
    """Prints on stderr: a program may use its stdout for results."""

    def __init__(self, run: RunFolder, steps: int, resume: str) -> None:
        self._run = run
        self._line = StepLine(steps)
        self._resume = resume  # how an interrupted training is continued
        self._printed_at: float | None = None

    def show(self, event: Event) -> None:
        """Print an event of this rank, if it is one that its user wants to see now."""
        match event["event"]:
            case "step":
                self._show_step(event)
            case "eval":
                self._print(f"step {event['step']}: validation loss {event['val_loss']:.4f}")
            case "choice":
                self._print(f"step {event['step']}: from here on {event['why']}")
            case "shares" | "aligned" if event.get("why"):
                self._print(f"step {event['step']}: {event['why']}")
            case "note":
                self._print(f"note: {event['text']}")
            case "warning":
                self._print(f"warning: {event['seen']} ({self._run.name_in(event['fix'])})")

    def _show_step(self, event: Event) -> None:
        text, now = self._line.update(event), time.monotonic()
        is_last = event["step"] == self._line.steps
        if is_last or self._printed_at is None or now - self._printed_at >= _EVERY_S:
            self._printed_at = now
            self._print(f"step {event['step']}/{self._line.steps}  {text}")

    def finish(self) -> None:
        """Write the manifest and print a summary, after all ranks have written their last event."""
        manifest = write_manifest(self._run)
        if manifest is not None:
            for line in summary_lines(manifest, self._run.path, self._resume):
                self._print(line)

    def _print(self, text: str) -> None:
        # A training does not end because its terminal is gone.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(printable(text) + "\n")
            sys.stderr.flush()


def write_manifest(run: RunFolder) -> Manifest | None:
    """Write the manifest in another process, as a rank does not import the tools; return None if that fails.

    That process prints the reason. The training itself is done and saved.
    """
    argv = [sys.executable, "-P", "-m", "shoal.records.manifest", str(run.path)]
    if subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode:
        return None
    return Manifest.model_validate_json(run.manifest.read_bytes())


def summary_lines(manifest: Manifest, path: Path, resume: str) -> list[str]:
    """Return how the training ended, its speed, whether the replicas agree, its folder and the next command."""
    folder = _shown(path)
    is_finished = manifest.status == "finished"
    done = f"{manifest.steps:,} steps" if is_finished else f"step {manifest.steps:,} of {manifest.steps_planned:,}"
    took = "" if manifest.duration_s is None else f" in {format_duration(manifest.duration_s)}"
    how = "finished" if is_finished else "stopped after"
    lines = [f"{manifest.preset}: {how} {done} on {pluralize(manifest.world_size, 'rank')}{took}"]
    if manifest.speed is not None and manifest.step_s_measured:
        waiting_s = manifest.phases.get("exposed", 0.0) + manifest.phases.get("wait", 0.0)
        share = format_share(waiting_s, manifest.step_s_measured)
        waiting = f", {share} waiting" if manifest.world_size > 1 and manifest.phases else ""
        speed = format_speed(manifest.speed, Unit(manifest.unit))
        lines.append(f"speed:      {speed} ({format_ms(manifest.step_s_measured)} a step{waiting})")
    if manifest.world_size > 1 and is_finished:
        verdicts = {None: "not compared", True: "identical to the bit", False: "they DIFFER"}
        lines.append(f"replicas:   {verdicts[manifest.byte_equivalent]}")
    lines.append(f"run folder: {folder}")
    lines.append(f"next:       {_command('report', folder) if is_finished else resume}")
    return lines


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _command(*words: str) -> str:
    """Return a shoal command that can be pasted here, with its path where `shoal` is not on PATH."""
    beside = Path(sys.executable).with_name("shoal")
    if shutil.which("shoal"):
        return shlex.join(["shoal", *words])
    start = [_shown(beside)] if beside.exists() else [sys.executable, "-P", "-m", "shoal"]
    return shlex.join([*start, *words])
