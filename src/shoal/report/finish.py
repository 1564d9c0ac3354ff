"""The last thing a run does: `timings.jsonl` and `manifest.json` from its events.

Everything here is derived, so it can be done again at any time, on a run that is alive, finished or dead:
`python -m shoal.report.finish RUN`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from shoal.config.load import load_config
from shoal.config.manifest import Manifest, PredictionRecord
from shoal.data.run_setup import DataFacts, read_facts
from shoal.errors import DataError, ShoalError, UsageError
from shoal.events import Event, read_events
from shoal.report.changes import describe_changes
from shoal.report.compose import carry_over, compose_manifest
from shoal.report.replicas import ReplicaReport
from shoal.report.scaling import SCALING_FILE, ScalingPoint, read_scaling, to_json
from shoal.report.summary import Summary, summarize, timing_rows
from shoal.runfolder import RunFolder, write_atomically


def finish(
    run: RunFolder, replicas: ReplicaReport | None = None, scaling: list[ScalingPoint] | None = None
) -> Manifest:
    """Writes what the run folder says into its derived files; `replicas` and `scaling` are added where given."""
    with writing(run.path):
        if scaling:
            write_atomically(run.path / SCALING_FILE, to_json(scaling))
        rows = (json.dumps(row, separators=(",", ":")) + "\n" for row in timing_rows(run.read_all_events()))
        write_atomically(run.timings, "".join(rows))
        manifest = current_manifest(run, replicas)
        write_atomically(run.manifest, manifest.model_dump_json(indent=2) + "\n")
    return manifest


def current_manifest(run: RunFolder, replicas: ReplicaReport | None = None) -> Manifest:
    """The manifest as the folder stands now, written nowhere."""
    summary = summarize(run.read_all_events())
    return manifest_of(run, summary, replicas, read_scaling(run))


def manifest_of(
    run: RunFolder, summary: Summary, replicas: ReplicaReport | None, scaling: list[ScalingPoint]
) -> Manifest:
    prediction = read_prediction(run)
    changes = describe_changes(summary.history, read_commits(run), _read_journals(run))
    config = load_config(run.config)
    data, commands = _data_facts(run), _read_commands(run)
    fresh = compose_manifest(config, summary, replicas, scaling, data, prediction, changes, commands)
    return carry_over(fresh, read_manifest(run))


def _read_commands(run: RunFolder) -> list[str]:
    """What was typed, from the keeper's orders; another launcher leaves none, and on a guest's machine nothing was."""
    try:
        found = json.loads(run.job.read_bytes()).get("commands", [])
    except (OSError, ValueError, AttributeError):
        return []
    return [str(command) for command in found] if isinstance(found, list) else []


def read_commits(run: RunFolder) -> list[Event]:
    return list(read_events(run.commits)) if run.commits.exists() else []


def _read_journals(run: RunFolder) -> Iterator[Event]:
    for path in run.journals():
        yield from read_events(path)


def read_manifest(run: RunFolder) -> Manifest | None:
    """The stored manifest; a broken one is as good as none, because it can be composed again."""
    try:
        return Manifest.model_validate_json(run.manifest.read_bytes())
    except (OSError, ValidationError):
        return None


def read_prediction(run: RunFolder) -> PredictionRecord | None:
    """What was predicted before the run, where somebody asked."""
    try:
        return PredictionRecord.model_validate_json(run.prediction.read_bytes())
    except (OSError, ValidationError):
        return None


def _data_facts(run: RunFolder) -> DataFacts | None:
    try:
        return read_facts(run)
    except DataError:
        return None  # the configuration still names the text; a manifest without its digest is better than none


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A full disk, a read-only folder or an unreadable file, said in words."""
    try:
        yield
    except OSError as error:
        raise ShoalError(
            f"cannot write into {folder}: {error.strerror or error}",
            why="what the run recorded is safe in events/; only files derived from it are missing",
            fix=f"make room or permissions there (df -h {folder}), then: python -m shoal.report.finish {folder}",
        ) from None


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) != 1:
            raise UsageError("expected one run folder", fix="python -m shoal.report.finish RUN")
        run = RunFolder.open(Path(arguments[0]))
        finish(run)
    except ShoalError as error:
        sys.stderr.write(error.render())
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
