"""Verify a run folder: compare all its files with each other.

A training is recorded three times, independently: in the ledger (commit log), in the events of each rank, and in the
checkpoints with the final states. A file that was truncated, edited, replaced or lost contradicts the other two. Each
contradiction is a `VerifyFinding` that names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, computed_field

from shoal.config.load import load_config
from shoal.config.manifest import Manifest
from shoal.config.schema import Config
from shoal.control.membership.types import NEVER, Ballot
from shoal.errors import ShoalError
from shoal.event_schema import parse_event
from shoal.events import Event, FileMark, has_mark
from shoal.records.commit_log import LedgerReport, check_ledger
from shoal.records.final_states import ReplicaReport, StateFile, compare_digests, judge_replicas, open_state
from shoal.records.history import Logs, is_joined, last_members, ranks_elsewhere
from shoal.records.manifest import current_manifest
from shoal.records.measured_script import exchange_findings, is_measured
from shoal.records.rank_log import as_float, is_step, read_ballot, read_rank_logs
from shoal.records.sharded_parts import PartsReport, check_parts
from shoal.run_folder import RunFolder, is_accessible, is_plain_name, user_name
from shoal.units import format_spans, pluralize, to_spans

_CHECKPOINT = re.compile(r"step-(\d{8})")
# Fields of a manifest that follow from events, ledger and configuration alone, in every version of shoal.
_MANIFEST_FACTS = (
    "created", "status", "preset", "seed", "world_size", "model_params", "data_digest", "steps", "steps_planned",
    "global_batch", "micro_batch", "final_loss", "val_loss", "members", "redone_steps", "abandoned_steps",
)  # fmt: skip


class VerifyFinding(BaseModel):
    file: str
    text: str
    is_wrong: bool = True  # false for what could not be checked


class VerifyResult(BaseModel):
    status: str  # finished, interrupted or unfinished, from the events
    step: int  # the last step in the ledger
    replicas: ReplicaReport | None  # None without final states to compare
    ledger: LedgerReport
    findings: list[VerifyFinding]
    parts: PartsReport | None = None  # of a model that was divided among the ranks
    is_measured: bool = False  # a script that `shoal run --measure` recorded: it has no ledger
    draws: bool = False  # samples were drawn with replacement: the ledger counts positions of the stream of draws

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ok(self) -> bool:
        equal = self.replicas is None or self.replicas.byte_equivalent
        return equal and self.ledger.ok and not any(finding.is_wrong for finding in self.findings)


@dataclass
class _Folder:
    """A run folder as it was read, and the findings so far."""

    run: RunFolder
    config: Config | None = None
    commits: list[Event] = field(default_factory=list)
    lines: list[bytes] = field(default_factory=list)  # of the ledger
    events: dict[int, list[Event]] = field(default_factory=dict)
    supervisor: list[Event] = field(default_factory=list)
    journals: set[str] = field(default_factory=set)  # nodes whose agents have written here
    logs: Logs = field(default_factory=dict)
    torn: list[Path] = field(default_factory=list)  # files whose last line has no newline
    findings: list[VerifyFinding] = field(default_factory=list)

    def wrong(self, path: Path, text: str) -> None:
        self.findings.append(VerifyFinding(file=_name(self.run, path), text=text))

    def unknown(self, path: Path, text: str) -> None:
        self.findings.append(VerifyFinding(file=_name(self.run, path), text=text, is_wrong=False))

    def locked(self, path: Path) -> None:
        """Report a file that this user may not read: that is not a fault of the run."""
        owner, me = user_name(path.stat().st_uid), user_name(os.geteuid())
        self.unknown(path, f"user {me} may not read it: it belongs to user {owner}, who can verify it")

    @property
    def is_joined(self) -> bool:
        return self.config is not None and is_joined(self.config.run.on, self.logs)

    @property
    def is_shared(self) -> bool:
        """Return whether all ranks write into this folder, so that no file may be missing."""
        return self.config is not None and self.config.run.on.startswith(("local", "lab")) and not self.is_joined

    @property
    def members(self) -> list[int]:
        """Return the last members whose files belong into this folder."""
        away = ranks_elsewhere(self.logs, self.is_joined)
        return [rank for rank in last_members(self.logs) if rank not in away]

    @property
    def status(self) -> str:
        ends = {self.logs[rank].ended if rank in self.logs else None for rank in self.members}
        return next(iter(ends)) or "unfinished" if len(ends) == 1 else "unfinished"

    @property
    def lag(self) -> int:
        """Return how many steps may be done but not committed: the current one, or a round of outer steps."""
        rounds = [log.start.get("round_steps") for log in self.logs.values()]
        return 2 + 2 * max((steps for steps in rounds if is_step(steps)), default=1)

    @property
    def newest_start(self) -> Event:
        """Return the `start` event of the rank that started last; empty without any."""
        starts = [event for events in self.events.values() for event in events if event.get("event") == "start"]
        return max(starts, key=lambda event: as_float(event.get("time"), 0.0), default={})

    @property
    def read_configs(self) -> set[str]:
        """Return the digests of config.toml as the ranks read it at their last start; a joined machine has its own."""
        starts = ([event for event in events if event.get("event") == "start"] for events in self.events.values())
        return {digest for events in starts if events and isinstance(digest := events[-1].get("config_sha256"), str)}

    @property
    def has_unread_config(self) -> bool:
        """Return whether `shoal train --resume` has changed the settings and no rank has read them yet."""
        known = self.read_configs
        if not known or self.config is None or (now := _sha256(self.run.config)) in known:
            return False
        for event in self.supervisor:
            if event.get("event") == "config" and event.get("before") in known:
                known.add(str(event.get("after")))
        return now in known

    def since_start(self, rank: int, kind: str) -> list[Event]:
        """Return the events of that kind since the rank's last start."""
        events: list[Event] = []
        for event in self.events.get(rank, ()):
            if event.get("event") == "start":
                events.clear()
            elif event.get("event") == kind:
                events.append(event)
        return events


def verify_run(run: RunFolder) -> VerifyResult:
    folder = _read(run)
    ledger = check_ledger(folder.commits)
    if is_measured(folder.logs):
        return _verify_measured(folder, ledger)
    if not ledger.ok:
        folder.wrong(run.commits, "does not prove that every sample was used exactly once")
    if ledger.misdivided:
        steps = format_spans(to_spans(ledger.misdivided))
        folder.wrong(run.commits, f"step {steps}: the shares of the members do not add up to the global batch")
    _check_torn(folder)
    _check_config(folder)
    _check_event_files(folder)
    _check_journals(folder)
    _check_ending(folder)
    _check_divergence(folder)
    _check_last_step(folder, ledger)
    _check_ledger_lines(folder)
    _check_recorded_steps(folder)
    _check_ledger_order(folder)
    _check_checkpoints(folder, ledger)
    replicas = _check_states(folder)
    parts = _check_parts(folder)
    _check_manifest(folder)
    findings = list({(finding.file, finding.text): finding for finding in folder.findings}.values())
    return VerifyResult(
        status=folder.status,
        step=ledger.last,
        replicas=replicas,
        ledger=ledger,
        findings=findings,
        parts=parts,
        draws=any(event.get("event") == "draw" for events in folder.events.values() for event in events),
    )


def _verify_measured(folder: _Folder, ledger: LedgerReport) -> VerifyResult:
    """Verify a measured script by what its ranks recorded: they keep no ledger and no states."""
    _check_torn(folder)
    _check_event_files(folder)
    _check_journals(folder)
    for text, is_wrong in exchange_findings(folder.logs):
        folder.findings.append(VerifyFinding(file="events", text=text, is_wrong=is_wrong))
    steps = {folder.logs[rank].end.get("step") for rank in folder.members if rank in folder.logs}
    if folder.status == "finished" and len(steps) > 1:
        folder.wrong(folder.run.path / "events", f"the ranks ended at different steps: {sorted(map(str, steps))}")
    replicas = judge_replicas(folder.run) if folder.status == "finished" else None
    if replicas is not None and not replicas.digests:
        replicas = None
    elif replicas is not None and replicas.ranks < len(folder.members):
        folder.wrong(folder.run.path / "events", "not all ranks have recorded a digest of their parameters")
    _check_manifest(folder)
    done = max((int(log.steps.numbers[-1]) for log in folder.logs.values() if len(log.steps)), default=0)
    return VerifyResult(
        status=folder.status, step=done, replicas=replicas, ledger=ledger, findings=folder.findings, is_measured=True
    )


def _read(run: RunFolder) -> _Folder:
    folder = _Folder(run)
    try:
        folder.config = load_config(run.config)
    except ShoalError as error:
        folder.wrong(run.config, f"cannot be read: {error.seen}")
    if run.commits.exists():
        folder.commits = list(_records(folder, run.commits, folder.lines))
    for rank, path in run.event_files().items():
        folder.events[rank] = list(_records(folder, path))
        other_lines = sum(event.get("rank") != rank for event in folder.events[rank])
        if other_lines:
            folder.wrong(path, f"{other_lines} of its lines are not of rank {rank}")
    if run.supervisor.exists():
        folder.supervisor = list(_records(folder, run.supervisor))
    folder.journals = {path.stem for path in run.journals() if list(_records(folder, path))}
    folder.logs = read_rank_logs(event for events in folder.events.values() for event in events)
    return folder


def _records(folder: _Folder, path: Path, lines: list[bytes] | None = None) -> Iterator[Event]:
    """Yield every record of a file. Report unreadable lines."""
    unreadable: list[int] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                record = parse_event(line)
                if not line.endswith(b"\n"):
                    folder.torn.append(path)
                elif record is None:
                    unreadable.append(number)
                if record is not None:
                    if lines is not None:
                        lines.append(line)
                    yield record
    except PermissionError:
        folder.locked(path)
    except OSError as error:
        folder.wrong(path, f"cannot be read: {error.strerror}")
    if unreadable:
        folder.wrong(
            path,
            f"{pluralize(len(unreadable), 'line')} cannot be read: number {format_spans(to_spans(unreadable))}",
        )


def _check_torn(folder: _Folder) -> None:
    """Report truncated last lines. A live or killed writer may leave one; a writer that ended normally does not."""
    for path in folder.torn:
        if folder.status != "unfinished":
            folder.wrong(path, "its last line is cut off")
        else:
            folder.unknown(path, "its last line is not complete: it is being written, or its writer was killed")


def _check_config(folder: _Folder) -> None:
    """Check that the settings are those that the last launch read, or those that a resume has written since."""
    newest = folder.newest_start
    if folder.config is None or not newest:
        return
    path = folder.run.config
    if folder.has_unread_config:
        folder.unknown(path, "shoal train --resume has changed it, and no rank has started with it yet")
    elif not folder.read_configs:
        folder.unknown(path, "the ranks did not record its digest, so a later change cannot be noticed")
    elif _sha256(path) not in folder.read_configs:
        folder.wrong(path, "it was changed: it is not the file that the ranks read when they started")
    if newest.get("seed") not in (None, folder.config.train.seed):
        folder.wrong(path, f"train.seed is {folder.config.train.seed}, the ranks used {newest['seed']}")


def _check_event_files(folder: _Folder) -> None:
    """Check that every rank that took part from the start of a launch wrote events into this folder."""
    first_ranks = {
        rank for log in folder.logs.values() for entry in log.entered if entry.is_first for rank in entry.ids
    }
    expected = sorted(first_ranks | set(folder.members)) if folder.is_shared or first_ranks else folder.members
    for rank in expected:
        if rank in folder.logs:
            continue
        if folder.is_joined:
            folder.unknown(folder.run.events(rank), f"rank {rank} took part, on another machine")
        else:
            folder.wrong(folder.run.events(rank), f"is missing: rank {rank} took part")
    if not folder.logs and folder.commits:
        folder.wrong(folder.run.path / "events", "no rank's events are here, although steps were committed")


def _check_journals(folder: _Folder) -> None:
    """Check that the supervisor and the agents of all ranks whose events are here have written too.

    Each writes before a rank starts. A training under torchrun has neither, and a machine that joined no supervisor.
    """
    run = folder.run
    silent: dict[Path, str] = {}
    if run.job.is_file() and folder.logs and not folder.supervisor:
        silent[run.supervisor] = f"a supervisor has started the ranks, {run.job.name} is its job"
    if run.job.is_file() or run.joined.is_file():
        nodes = {
            str(log.start["node"]): rank for rank, log in folder.logs.items() if is_plain_name(log.start.get("node"))
        }
        for node in sorted(nodes.keys() - folder.journals):
            silent[run.journal(node)] = f"an agent has started rank {nodes[node]} on {node}"
    for path, why in silent.items():
        if not path.exists() or is_accessible(path, os.R_OK):
            folder.wrong(path, f"{'has no record' if path.exists() else 'is missing'}: {why}")


def _check_ending(folder: _Folder) -> None:
    """Check that all ranks ended at the same step, as planned, and as the supervisor recorded it."""
    ends = {rank: folder.logs[rank].end for rank in folder.members if rank in folder.logs and folder.logs[rank].end}
    steps = {end.get("step") for end in ends.values()}
    if len(steps) > 1:
        folder.wrong(folder.run.path / "events", f"the ranks ended at different steps: {sorted(map(str, steps))}")
    last = folder.supervisor[-1] if folder.supervisor else {}
    if last.get("event") == "ended" and last.get("code") == 0:
        for rank in folder.members:
            # A program that has called session.stop() ends in good order too.
            if rank in folder.logs and folder.logs[rank].ended not in ("finished", "interrupted"):
                folder.wrong(
                    folder.run.events(rank),
                    f"rank {rank} has no end, although {folder.run.supervisor.name} says it finished",
                )
    if folder.status == "finished" and folder.config is not None and steps:
        planned = folder.newest_start.get("steps") if folder.has_unread_config else folder.config.train.steps
        is_early = any(end.get("is_early") is True for end in ends.values())
        if planned is not None and steps != {planned} and not is_early:
            folder.wrong(
                folder.run.config, f"train.steps is {planned}, the ranks finished at step {', '.join(map(str, steps))}"
            )


def _check_divergence(folder: _Folder) -> None:
    """Report replicas that were found to differ and could not be made equal: the run ended with that."""
    for rank in sorted(folder.logs):
        for event in folder.since_start(rank, "divergence"):
            if event.get("healed_from") is None and event.get("back_to") is None:
                folder.wrong(
                    folder.run.events(rank),
                    f"after step {event.get('step')} the replicas differed, first in {event.get('tensor')}, and no "
                    "majority showed which was right: the run ended there",
                )
                return


def _check_last_step(folder: _Folder, ledger: LedgerReport) -> None:
    """Check that the ledger ends where the ranks ended. While they run, it may lag behind by `lag` steps."""
    path, members = folder.run.commits, [rank for rank in folder.members if rank in folder.logs]
    ends = [step for rank in members if is_step(step := folder.logs[rank].end.get("step"))]
    if folder.status != "unfinished" and ends:
        if ledger.last != max(ends):
            absent = "is missing or empty" if not folder.commits else f"ends at step {ledger.last}"
            folder.wrong(path, f"{absent}, the ranks ended at step {max(ends)}")
        return
    done = max((_last_step(folder.events[rank]) for rank in members), default=0)
    # Lines of a step that will be repeated stay until then.
    recorded = max((int(log.steps.numbers[-1]) for log in folder.logs.values() if len(log.steps)), default=0)
    if ledger.last < done - folder.lag:
        # A run may do many steps between the reading of the ledger and that of a rank's file.
        now = (record.get("step") for record in _records(_Folder(folder.run), path))
        if max(filter(is_step, now), default=0) >= done - folder.lag:
            return
        absent = "is missing or empty" if not folder.commits else f"ends at step {ledger.last}"
        folder.wrong(path, f"{absent}, the ranks have done step {done}")
    elif ledger.last > max(done, recorded) + folder.lag and members and folder.is_shared:
        folder.wrong(path, f"has step {ledger.last}, the ranks have recorded no more than step {max(done, recorded)}")


def _check_ledger_lines(folder: _Folder) -> None:
    """Check each ledger line against the ranks' events: members, generation, number of samples, loss."""
    path, logs = folder.run.commits, folder.logs
    entered = {entry.generation: (entry.lineage, set(entry.ids)) for log in logs.values() for entry in log.entered}
    starts = [event for events in folder.events.values() for event in events if event.get("event") == "start"]
    batches = {event["global_batch"] for event in starts if is_step(event.get("global_batch"))}
    losses = {rank: _losses(folder, rank) for rank in logs}
    wrong: dict[str, list[int]] = {}
    unknown: list[int] = []
    last = {(record.get("step"), str(record.get("generation"))): record for record in folder.commits}
    for record in folder.commits:
        step, members = record.get("step"), record.get("members")
        generation, lineage = read_ballot(record.get("generation")), read_ballot(record.get("lineage"))
        if not is_step(step) or generation is None:
            continue
        match record.get("samples"):
            case [int(first), int(end)] if batches and end - first not in batches:
                sizes = " or ".join(map(str, sorted(batches)))
                wrong.setdefault(f"the ranks used {sizes} samples a step, the ledger has another number", []).append(
                    step
                )
        if members is None:
            continue
        if not isinstance(members, list) or not all(map(is_step, members)):
            wrong.setdefault("members are not ranks", []).append(step)
            continue
        if generation in entered and (lineage, set(members)) != entered[generation]:
            wrong.setdefault("members or lineage are not those that the ranks recorded", []).append(step)
        elif generation not in entered and generation != NEVER:
            if set(members) <= logs.keys():
                wrong.setdefault("no rank was in that generation", []).append(step)
            else:
                unknown.append(step)
        elif generation == NEVER and logs and not set(members) <= logs.keys():
            wrong.setdefault("members are not ranks of this run", []).append(step)
        # The recorded loss is the mean over all ranks: it can only be compared with the events of all of them.
        is_known = not record.get("partial") and set(members) <= logs.keys()
        if is_known and last[step, str(record.get("generation"))] is record:
            recorded = [loss for rank in members if (loss := losses.get(rank, {}).get((step, generation))) is not None]
            if recorded and record.get("loss") not in recorded:
                wrong.setdefault("the loss is not the one that the ranks recorded", []).append(step)
    for text, steps in wrong.items():
        folder.wrong(path, f"step {format_spans(to_spans(steps))}: {text}")
    if unknown:
        folder.unknown(
            path, f"step {format_spans(to_spans(unknown))}: done by ranks whose events are on other machines"
        )


def _check_recorded_steps(folder: _Folder) -> None:
    """Check that a rank's events have every step that the ledger attributes to it.

    The last steps of a generation may be missing: a rank that was lost during a step never recorded it. A machine that
    joined anew after the host's resume has the steps before in its earlier folder.
    """
    by_generation: dict[str, list[tuple[int, list[Any]]]] = {}
    for record in folder.commits:
        if is_step(record.get("step")) and isinstance(record.get("members"), list):
            by_generation.setdefault(str(record.get("generation")), []).append((record["step"], record["members"]))
    for rank, log in folder.logs.items():
        done, lacking = set(log.steps.numbers.tolist()), set()
        for lines in by_generation.values():
            highest = max(step for step, _ in lines)
            expected = {step for step, members in lines if rank in members and step <= highest - folder.lag}
            lacking |= expected - done
        earlier = _first_resumed_from(folder.events[rank]) if folder.is_joined else 0
        if before := {step for step in lacking if step <= earlier}:
            folder.unknown(
                folder.run.events(rank),
                f"step {format_spans(to_spans(before))}: recorded before this machine joined with this folder",
            )
        if lacking := lacking - before:
            folder.wrong(
                folder.run.events(rank),
                f"lacks step {format_spans(to_spans(lacking))}, which the ledger has for rank {rank}",
            )


def _first_resumed_from(events: list[Event]) -> int:
    """Return the step after which a rank first started in this folder."""
    first = next((event.get("resumed_from") for event in events if event.get("event") == "start"), 0)
    return first if is_step(first) else 0


def _check_ledger_order(folder: _Folder) -> None:
    """Check that the ledger's lines are in order and unique: one rank at a time writes a machine's ledger.

    Machines that share a folder may write at the same time, so theirs is not checked.
    """
    nodes = {log.start.get("node") for log in folder.logs.values()}
    if len(nodes) > 1:
        return
    twice = [number for line, number in Counter(folder.lines).items() if number > 1 and b'"step"' in line]
    if twice:
        folder.wrong(folder.run.commits, f"{pluralize(len(twice), 'line')} stand there more than once")
    went_back = any(event.get("event") == "divergence" for events in folder.events.values() for event in events)
    newest: dict[Ballot, int] = {}
    seen: set[tuple[int, Ballot, str]] = set()
    for record in folder.commits:
        generation, step = read_ballot(record.get("generation")), record.get("step")
        if generation is None or generation == NEVER or not is_step(step):
            continue
        # A joining rank may record a step twice: the same step of the same generation is the same step.
        key = step, generation, str(record.get("samples"))
        if key in seen:
            continue
        seen.add(key)
        if step < newest.get(generation, 0) and not went_back:
            folder.wrong(folder.run.commits, f"its lines are not in order: step {step} stands behind a later one")
            return
        newest[generation] = step


def _check_checkpoints(folder: _Folder, ledger: LedgerReport) -> None:
    """Check every checkpoint: its SHA-256 sums, the step in its name, and the part of the ledger that it saw."""
    run = folder.run
    checkpoints = sorted(path for path in run.checkpoints.glob("step-*") if _CHECKPOINT.fullmatch(path.name))
    for path in checkpoints:
        _check_checkpoint(folder, path)
    saved = [event for rank in folder.members for event in folder.since_start(rank, "checkpoint")]
    ends = [folder.logs[rank].end.get("step") for rank in folder.members if rank in folder.logs]
    names = {path.name for path in checkpoints}
    for step in {event["step"] for event in saved if is_step(event.get("step"))}:
        name = f"step-{step:08d}"
        is_last = folder.status != "unfinished" and step in ends
        if folder.is_shared and name not in names and (is_last or not names):
            folder.wrong(run.checkpoints / name, "is missing: a rank wrote it")
    if checkpoints and ledger.last < (newest := int(checkpoints[-1].name.removeprefix("step-"))) and not ledger.holes:
        folder.wrong(run.commits, f"ends at step {ledger.last}, the newest checkpoint is of step {newest}")


def _check_checkpoint(folder: _Folder, path: Path) -> None:
    try:
        sums = json.loads((path / "manifest.json").read_bytes())["sha256"]
        for name, expected in sums.items():
            if _sha256(path / name) != expected:
                folder.wrong(path / name, "is damaged: its SHA-256 is not the one that was written")
        step = json.loads((path / "state.json").read_bytes())["step"]
        if f"step-{step:08d}" != path.name:
            folder.wrong(path / "state.json", f"says step {step}")
        if "ledger.json" in sums:
            mark = FileMark(**json.loads((path / "ledger.json").read_bytes()))
            if not has_mark(folder.run.commits, mark):
                folder.wrong(
                    folder.run.commits,
                    f"was cut or changed: its first {mark.size:,} bytes are not those that {path.name} saw",
                )
    except FileNotFoundError as error:
        folder.wrong(Path(str(error.filename)), "is missing")
    except PermissionError as error:
        folder.locked(Path(str(error.filename)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        folder.wrong(path, f"cannot be checked: {error}")


def _check_states(folder: _Folder) -> ReplicaReport | None:
    """Check that the final states have the digests that the ranks recorded, and are equal to each other."""
    run, states = folder.run, folder.run.state_files()
    known = set(folder.logs) | {rank for log in folder.logs.values() for entry in log.entered for rank in entry.ids}
    for record in folder.commits:
        known.update(filter(is_step, record["members"]) if isinstance(record.get("members"), list) else ())
    for rank in states.keys() - known:
        folder.wrong(states[rank], "belongs to no rank of this run")
    if folder.status != "finished" or folder.config is None:
        return None
    recorded = {rank: folder.since_start(rank, "digest") for rank in folder.members}
    for rank in folder.members:
        path, digests = run.state(rank), recorded[rank]
        if not digests:
            folder.wrong(run.events(rank), f"rank {rank} has recorded no digest of its final state")
        if rank in states and not is_accessible(path, os.R_OK):
            folder.locked(path)
        elif rank in states:
            _check_state(folder, path, digests)
        elif folder.is_shared or not digests:
            folder.wrong(path, f"is missing: rank {rank} wrote it when it finished")
    if not all(is_accessible(path, os.R_OK) for path in states.values()):
        # Compare what the ranks recorded instead of the files.
        last_digests = {rank: str(digests[-1].get("sha256")) for rank, digests in recorded.items() if digests}
        return compare_digests(last_digests) if last_digests else None
    try:
        return judge_replicas(run)
    except ShoalError as error:
        folder.wrong(run.path, error.seen)
    return None


def _check_parts(folder: _Folder) -> PartsReport | None:
    """Check that every element of a divided model has one owner, and that copies are equal to their owners' parts."""
    if folder.status != "finished":
        return None
    last = {rank: events[-1] for rank in folder.members if (events := folder.since_start(rank, "digest"))}
    report, wrong = check_parts(last, ranks_elsewhere(folder.logs, folder.is_joined))
    for rank, text in wrong:
        folder.wrong(folder.run.events(rank), text)
    return report


def _check_state(folder: _Folder, path: Path, digests: list[Event]) -> None:
    try:
        digest = _state_digest(open_state(path))
    except ShoalError as error:
        folder.wrong(path, error.seen)
        return
    if digests and digests[-1].get("sha256") != digest:
        folder.wrong(path, "is not the state that its rank wrote: the digest in the rank's events is another")


def _check_manifest(folder: _Folder) -> None:
    """Check that the manifest of an ended run follows from the other files."""
    path, last = folder.run.manifest, folder.supervisor[-1] if folder.supervisor else {}
    if last.get("event") != "ended" or folder.config is None or folder.status == "unfinished":
        return
    try:
        stored = Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        folder.wrong(path, "is missing: it is written when a run ends")
        return
    except (OSError, ValidationError) as error:
        folder.wrong(path, f"cannot be read: {str(error).splitlines()[0]}")
        return
    try:
        fresh = current_manifest(folder.run)
    except ShoalError as error:
        folder.unknown(path, f"cannot be checked: {error.seen}")
        return
    facts = [name for name in _MANIFEST_FACTS if name != "steps_planned" or not folder.has_unread_config]
    changed = [name for name in facts if repr(getattr(stored, name)) != repr(getattr(fresh, name))]
    if changed:
        folder.wrong(
            path,
            f"says {', '.join(f'{name} {getattr(stored, name)}' for name in changed)}; events, ledger and settings say "
            f"{', '.join(str(getattr(fresh, name)) for name in changed)}",
        )


def _state_digest(state: StateFile) -> str:
    """Return the digest that a rank records of its final state: names and bytes, in the order of names."""
    value = hashlib.sha256()
    for name in sorted(state.tensors):
        value.update(name.encode())
        for block in state.blocks(state.tensors[name]):
            value.update(block)
    return value.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _losses(folder: _Folder, rank: int) -> dict[tuple[int, Ballot], float]:
    log = folder.logs[rank]
    generations = (NEVER if entry is None else entry.generation for entry in log.steps.generations())
    return {
        (step, generation): loss
        for step, generation, loss in zip(
            log.steps.numbers.tolist(), generations, log.steps.column("loss").tolist(), strict=True
        )
    }


def _last_step(events: Iterable[Event]) -> int:
    """Return the step of the newest `step` event, or the step that the rank was resumed from."""
    last = 0
    for event in events:
        if event.get("event") == "start" and is_step(event.get("resumed_from")):
            last = event["resumed_from"]
        elif event.get("event") == "step" and is_step(event.get("step")):
            last = event["step"]
    return last


def _name(run: RunFolder, path: Path) -> str:
    return str(path.relative_to(run.path)) if path.is_relative_to(run.path) else str(path)
