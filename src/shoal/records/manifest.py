"""Compose a run's manifest and write the files derived from its events: `manifest.json` and `timings.jsonl`.

Everything here can be repeated at any time, on a running, finished or dead run:
`python -m shoal.records.manifest RUN`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from shoal.config.load import load_settings
from shoal.config.manifest import ChoiceRecord, Manifest, NodeRecord, PredictionRecord, SyncRecord
from shoal.config.schema import Config, EngineConfig
from shoal.cost.buckets import STOCK_MB, bucket_mb_for
from shoal.data.prepare import DataFacts, read_data_facts
from shoal.errors import DataError, ShoalError, UsageError
from shoal.events import read_events
from shoal.records.documents import read_document
from shoal.records.explain_run import (
    explain_choice,
    explain_prediction,
    explain_scaling,
    explain_step_time,
    read_choice,
)
from shoal.records.final_states import ReplicaReport, judge_replicas
from shoal.records.history import Changes, describe_changes
from shoal.records.rank_log import is_number
from shoal.records.scaling import SCALING_FILE, ScalingPoint, read_scaling, to_json
from shoal.records.summary import RunSummary, summarize, timing_rows
from shoal.run_folder import RunFolder, write_atomically
from shoal.units import TOKENS


def compose_manifest(
    config: EngineConfig,
    summary: RunSummary,
    replicas: ReplicaReport | None = None,
    scaling: list[ScalingPoint] | None = None,
    data: DataFacts | None = None,
    prediction: PredictionRecord | None = None,
    changes: Changes | None = None,
    commands: Sequence[str] = (),
) -> Manifest:
    """Build the manifest from what the ranks recorded, and from the configuration where they recorded nothing."""
    changes = changes or describe_changes(summary.history, (), ())
    chosen = read_choice(summary.choice)
    sections: dict[str, Any] = {
        **_what_ran(config, summary),
        **_what_trained(config, summary.start),
        **_measurements(summary, scaling or []),
        **_members(summary, changes),
    }
    return Manifest(
        **sections,
        commands=list(commands),
        data_source=data.source if data else _configured_text(config),
        data_digest=data.digest if data else None,
        strategy=_sync_record(config, summary.start, chosen),
        step_s_predicted=prediction.step_s if prediction else None,
        prediction=prediction,
        prediction_notes=explain_prediction(prediction, summary, chosen),
        byte_equivalent=replicas.byte_equivalent if replicas and replicas.ranks > 1 else None,
        max_abs_diff=replicas.max_abs_diff if replicas and replicas.ranks > 1 else None,
        choice_notes=explain_choice(config.sync, chosen, summary),
        lesson_notes=_lesson_notes(summary, scaling or []),
    )


def _what_ran(config: EngineConfig, summary: RunSummary) -> dict[str, Any]:
    start, created = summary.start, summary.started_at
    return {
        "created": None if created is None else datetime.fromtimestamp(created, UTC).isoformat(timespec="seconds"),
        "status": summary.status,
        "on": config.run.on,
        "lab": config.run.on if config.run.on.partition(":")[0] == "lab" else None,
        "duration_s": summary.duration_s,
        "launcher": _text(start, "launcher") or config.run.launcher,
        "backend": _backend(summary),
        "process_group": _text(start, "backend"),
        "world_size": summary.world_size,
        "nodes": _nodes(summary),
        "versions": _versions(start),
        "steps": summary.steps_done,
        "steps_planned": summary.steps_done if start.get("measured") else config.train.steps,
    }


def _what_trained(config: EngineConfig, start: dict[str, Any]) -> dict[str, Any]:
    return {
        "trains": "gpt" if isinstance(config, Config) else "script",
        "preset": config.run.preset,
        "seed": config.train.seed,
        "model_params": _whole(start, "params"),
        "global_batch": _whole(start, "global_batch") or config.train.global_batch,
        "micro_batch": _whole(start, "micro_batch") or config.train.micro_batch,
        "scaling": config.train.scaling,
        "sync": _text(start, "sync") or config.sync.mode,
        "wire": _text(start, "wire") or config.sync.wire,
        "measure": config.sync.measure,
        "inside": _text(start, "inside") or "gloo",
    }


def _measurements(summary: RunSummary, scaling: list[ScalingPoint]) -> dict[str, Any]:
    speeds, allreduce = _speeds(summary, scaling), summary.allreduce_s
    return {
        "final_loss": summary.final_loss,
        "val_loss": summary.final_val_loss,
        "logged": {name: values[max(values)] for name, values in summary.logged.items()},
        "step_s_measured": summary.step_s.median if summary.step_s else None,
        "phases": summary.phases,
        "allreduce_mean_ms": allreduce.mean * 1e3 if allreduce else None,
        "allreduce_p50_ms": allreduce.median * 1e3 if allreduce else None,
        "allreduce_p95_ms": allreduce.p95 * 1e3 if allreduce else None,
        "collectives": {kind: calls._asdict() for kind, calls in summary.collectives.items()},
        "wire_bytes_per_step": summary.wire_bytes_per_step,
        "theoretical_bytes_per_step": summary.theoretical_bytes_per_step,
        "peak_memory_bytes": summary.peak_memory_bytes,
        "unit": "tokens" if summary.unit is TOKENS else "samples",
        "samples_per_sec": {summary.world_size: summary.samples_per_s} if summary.samples_per_s else {},
        "tokens_per_sec": speeds,
        "tokens_per_sec_1proc": speeds.get(1),
        "tokens_per_sec_2proc": speeds.get(2),
    }


def _members(summary: RunSummary, changes: Changes) -> dict[str, Any]:
    return {
        "members": list(summary.members),
        "generations": changes.generations,
        "lineage": changes.lineage,
        "recoveries": changes.recoveries,
        "membership_notes": changes.notes,
        "redone_steps": changes.redone_steps,
        "abandoned_steps": changes.abandoned_steps,
    }


def _lesson_notes(summary: RunSummary, scaling: list[ScalingPoint]) -> str:
    step_time = explain_step_time(summary)
    return f"{explain_scaling(scaling)} {step_time}" if len(scaling) > 1 else step_time


def _configured_text(config: EngineConfig) -> str:
    """Name the text of the GPT; empty for a user's script, which has data of its own."""
    if not isinstance(config, Config):
        return ""
    return str(config.data.path or f"the built-in text {config.data.builtin}")


def carry_over(fresh: Manifest, stored: Manifest | None) -> Manifest:
    """Keep the stored result of a replica comparison, unless the run has continued since."""
    if stored is None or (stored.steps, stored.created) != (fresh.steps, fresh.created):
        return fresh
    if fresh.byte_equivalent is not None:
        return fresh
    kept = {"byte_equivalent": stored.byte_equivalent, "max_abs_diff": stored.max_abs_diff}
    return fresh.model_copy(update=kept)


def _backend(summary: RunSummary) -> str | None:
    """Name what carries gradients: ranks of one machine may use shared memory, machines use the process group."""
    group = _text(summary.start, "backend")
    if _text(summary.start, "inside") in (None, "gloo") or group is None:
        return group
    machines = {rank.hardware.get("boot_id") or rank.node for rank in summary.ranks.values()}
    return "shared memory" if len(machines) == 1 else f"shared memory, {group} between machines"


def _speeds(summary: RunSummary, scaling: list[ScalingPoint]) -> dict[int, float]:
    """Return tokens/s by number of ranks: the scaling experiment's, and the run's own where it has no point."""
    own = {summary.world_size: summary.tokens_per_s} if summary.tokens_per_s else {}
    return dict(sorted({**own, **{point.ranks: point.tokens_per_s for point in scaling}}.items()))


def _nodes(summary: RunSummary) -> list[NodeRecord]:
    first = {rank.node: rank for rank in reversed(summary.ranks.values())}
    ranks_on = Counter(rank.node for rank in summary.ranks.values())
    records = []
    for name, rank in sorted(first.items()):
        hardware, start = rank.hardware, rank.start
        record = NodeRecord(
            name=name,
            cpu=_text(hardware, "cpu"),
            cores=_whole(hardware, "cores"),
            memory_bytes=_whole(hardware, "memory_bytes"),
            arch=_text(hardware, "arch"),
            os=_text(hardware, "os"),
            device=_text(start, "device"),
            threads=_whole(start, "threads"),
            ranks=ranks_on[name],
            interface=_text(start, "interface"),
            link_mbps=start["link_mbps"] if is_number(start.get("link_mbps")) else None,
        )
        records.append(record)
    return records


def _sync_record(config: EngineConfig, start: dict[str, Any], chosen: ChoiceRecord | None) -> SyncRecord:
    parameters = _whole(start, "params")
    bucket_mb = config.sync.bucket_mb or (bucket_mb_for(4 * parameters) if parameters else None)
    return SyncRecord(
        accumulation=_whole(start, "micro_batches"),
        bucket_mb=STOCK_MB if config.sync.mode == "stock" else bucket_mb,
        overlap=config.sync.measure != "barrier",
        wire=_text(start, "wire") or config.sync.wire,
        every=_whole(start, "round_steps") or config.sync.round_steps,
        asked=config.sync.mode,
        choice=chosen,
    )


def _versions(start: dict[str, Any]) -> dict[str, str]:
    versions = start.get("versions")
    return {str(name): str(version) for name, version in versions.items()} if isinstance(versions, dict) else {}


def _whole(record: dict[str, Any], key: str) -> int | None:
    value = record.get(key)
    return int(value) if is_number(value) else None


def _text(record: dict[str, Any], key: str) -> str | None:
    value = record.get(key)
    return str(value) if value is not None else None


def write_derived_files(
    run: RunFolder, replicas: ReplicaReport | None = None, scaling: list[ScalingPoint] | None = None
) -> Manifest:
    """Write the derived files of a run folder. `replicas` and `scaling`, where given, are stored too."""
    with explain_write_errors(run.path):
        if scaling:
            write_atomically(run.path / SCALING_FILE, to_json(scaling))
        rows = (json.dumps(row, separators=(",", ":")) + "\n" for row in timing_rows(run.read_all_events()))
        write_atomically(run.timings, "".join(rows))
        manifest = current_manifest(run, replicas)
        write_atomically(run.manifest, manifest.model_dump_json(indent=2) + "\n")
    return manifest


def current_manifest(run: RunFolder, replicas: ReplicaReport | None = None) -> Manifest:
    """Compose the manifest of the folder as it is now, without writing it."""
    summary = summarize(run.read_all_events())
    return manifest_of(run, summary, replicas, read_scaling(run))


def manifest_of(
    run: RunFolder, summary: RunSummary, replicas: ReplicaReport | None, scaling: list[ScalingPoint]
) -> Manifest:
    prediction = read_prediction(run)
    commits = list(read_events(run.commits)) if run.commits.exists() else []
    journals = (event for path in run.journals() for event in read_events(path))
    changes = describe_changes(summary.history, commits, journals)
    config = load_settings(run.config)
    data, commands = _data_facts(run), _read_commands(run)
    fresh = compose_manifest(config, summary, replicas, scaling, data, prediction, changes, commands)
    if host := run.joined_host():
        # In place of the `--on` of the host.
        fresh = fresh.model_copy(update={"on": f"joined {host}"})
    return carry_over(fresh, read_manifest(run))


def _read_commands(run: RunFolder) -> list[str]:
    """Return the commands that the user typed, from the supervisor's orders.

    Other launchers and machines that joined have none.
    """
    commands = read_document(run.job).get("commands")
    return [str(command) for command in commands] if isinstance(commands, list) else []


def read_manifest(run: RunFolder) -> Manifest | None:
    """Read the stored manifest. A broken one counts as none, because it can be composed again."""
    try:
        return Manifest.model_validate_json(run.manifest.read_bytes())
    except (OSError, ValidationError):
        return None


def read_prediction(run: RunFolder) -> PredictionRecord | None:
    """Read the prediction made before the run, if any."""
    try:
        return PredictionRecord.model_validate_json(run.prediction.read_bytes())
    except (OSError, ValidationError):
        return None


def _data_facts(run: RunFolder) -> DataFacts | None:
    try:
        return read_data_facts(run)
    except DataError:
        return None  # the configuration still names the text; the manifest only lacks its digest


@contextmanager
def explain_write_errors(folder: Path) -> Iterator[None]:
    """Turn a full disk, a read-only folder or an unreadable file into an error message."""
    try:
        yield
    except OSError as error:
        raise ShoalError(
            f"cannot write into {folder}: {error.strerror or error}",
            why="what the run recorded is safe in events/; only files derived from it are missing",
            fix=f"make room or permissions there (df -h {folder}), then: python -m shoal.records.manifest {folder}",
        ) from None


def compare_if_finished(run: RunFolder) -> ReplicaReport | None:
    """Compare the final states; None where the run has not finished, or a state is missing."""
    if summarize(run.read_all_events()).status != "finished":
        return None
    try:
        return judge_replicas(run)
    except ShoalError:
        return None


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) != 1:
            raise UsageError("expected one run folder", fix="python -m shoal.records.manifest RUN")
        run = RunFolder.open(Path(arguments[0]))
        write_derived_files(run, compare_if_finished(run))
    except ShoalError as error:
        sys.stderr.write(error.render())
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
