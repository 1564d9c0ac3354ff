"""Notes for the user about the ranks of a launch, each written once although several agents report the same."""

from __future__ import annotations

import shlex
import time
from collections.abc import Hashable, Sequence

from shoal.cluster.node import Rendezvous
from shoal.control.agent_events import RanksJoined
from shoal.errors import RunFailed
from shoal.events import EventLog
from shoal.launch.failure import ProcessEnd
from shoal.run_folder import RunFolder
from shoal.units import format_duration, rank_list, rank_names

# Ranks of a script that run this much longer than the first that ended are mentioned.
NOTE_RUNNING_AFTER_S = 60.0


class LaunchNotes:
    def __init__(self, run: RunFolder, log: EventLog) -> None:
        self._run = run
        self._log = log
        self.rendezvous: Rendezvous | None = None  # of a script's ranks, once the agents are ready
        self.has_named_unjoined = False
        self._written: set[Hashable] = set()
        self._joined: dict[str, RanksJoined] = {}  # by node
        self._first_end_at: float | None = None

    def write(self, text: str) -> None:
        self._log.write("note", text=text)

    def write_once(self, key: Hashable, text: str) -> None:
        if key not in self._written:
            self._written.add(key)
            self.write(text)

    def note_bad_lines(self, node: str) -> None:
        """Once for each node: a journal with many such lines must not fill the user's screen."""
        self.write_once(
            ("journal", node),
            f"the journal of {node} has lines that cannot be used and are ignored: its shoal is another "
            f"version, or the file was damaged ({self._run.journal(node)})",
        )

    def add_joined(self, node: str, report: RanksJoined, nodes: int) -> None:
        """Name the ranks that have not joined the process group, once the agents of all nodes have reported.

        A rank may wait for one of another node, so a single report shows too little.
        """
        self._joined[node] = report
        if self.rendezvous is None or len(self._joined) < nodes:
            return
        joined = sorted(rank for report in self._joined.values() for rank in report.met)
        missing = sorted(rank for report in self._joined.values() for rank in report.missing)
        if missing and not self.has_named_unjoined:
            place = self.rendezvous.address, self.rendezvous.port
            after_s = max(float(report.after_s) for report in self._joined.values())
            warning = (
                ranks_wait_for_others(joined, missing, *place, after_s, shlex.quote(str(self._run.path)))
                if joined
                else no_rank_joined(missing, *place, after_s)
            )
            self.has_named_unjoined = True
            self.write(f"{warning.seen}: {warning.why} ({warning.fix})")

    def note_open_store(self, nodes: int) -> None:
        """Note that the ranks of a script meet in a store without a token. Those of a session do not."""
        if self.rendezvous is not None and nodes > 1:
            self.write_once(
                "open store",
                f"the script's store is torch's own and asks for no token: any program that reaches "
                f"{self.rendezvous.address} port {self.rendezvous.port} can write into it. Use a network you trust.",
            )

    def note_still_running(self, ends: Sequence[ProcessEnd], running: list[int]) -> None:
        """Name the ranks of a script that still run long after others have ended well."""
        if not ends or not running or any(end.code for end in ends):
            return
        now = time.monotonic()
        self._first_end_at = now if self._first_end_at is None else self._first_end_at
        after_s = now - self._first_end_at
        if after_s > NOTE_RUNNING_AFTER_S:
            ended = [rank for end in ends for rank in end.ranks]
            text = ranks_still_running(ended, running, after_s, shlex.quote(str(self._run.path)))
            self.write_once("still running", text)


def stop_note(grace_s: float | None) -> str:
    """Return the note after the first Ctrl-C: what happens now, and how to end it sooner."""
    now = "shoal stop --now ends them at once"
    if grace_s is None:
        return f"the ranks finish their step and save; {now}"
    if not grace_s:
        return "the ranks are ended at once (--grace 0)"
    return (
        f"the ranks were asked to stop; those that still run in {format_duration(grace_s)} are ended (--grace); {now}"
    )


def no_rank_joined(alone: list[int], address: str, port: int, after_s: float) -> RunFailed:
    """Return the warning for a world in which no rank joined: shown, not raised, for the script may be right."""
    have = "has" if len(alone) == 1 else "have"
    return RunFailed(
        f"{rank_names(alone)} {have} not met the others at {address}:{port} in {after_s:.0f} s",
        why="a script that makes no process group trains once on every rank; one that meets elsewhere is fine",
        fix="call torch.distributed.init_process_group(), use shoal.Session, or tell Lightning its strategy, devices "
        "and num_nodes",
    )


def ranks_wait_for_others(
    met: list[int], missing: list[int], address: str, port: int, after_s: float, run: str
) -> RunFailed:
    """Return the warning for ranks that wait for others in the store."""
    those, others = rank_list(met), rank_list(missing)
    waits = "waits" if len(met) == 1 else "wait"
    return RunFailed(
        f"{those} {waits} for {others}, not seen at {address}:{port} in {after_s:.0f} s",
        why=f"{others} hangs or is busy before init_process_group, or makes no process group",
        fix=f"see what it prints: shoal logs {run} --rank {min(missing)}; and what it does: py-spy dump --pid PID",
    )


def no_rank_ever_joined(ranks: int) -> str:
    """Return the warning for a script that ended well and left no key in the store of its ranks."""
    return (
        f"no rank joined a process group: each of the {ranks} ranks ran the whole script alone, unless they met "
        "elsewhere (call torch.distributed.init_process_group(), or tell Lightning its strategy, devices and num_nodes)"
    )


def ranks_still_running(ended: list[int], running: list[int], after_s: float, run: str) -> str:
    """Return the warning for ranks that still run long after others have ended well."""
    those, others = rank_list(ended), rank_list(running)
    return (
        f"{those} ended {after_s:.0f} s ago with exit code 0, and {others} still runs: if it waits for an exchange "
        f"with {those}, that never comes, and torch gives up after its timeout (gloo: 30 minutes, "
        f"NCCL: 10). To end it now: shoal stop {run}"
    )
