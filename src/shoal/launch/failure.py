"""Finds which process of a run failed first and why, and which ones only lost a peer. Pure functions.

Input are the ends of all processes, the `fault` events of the ranks, and the exceptions in the logs of a script.
"""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.control.rank_stacks import is_library
from shoal.cost.memory import OUT_OF_MEMORY_ADVICE
from shoal.errors import Interrupted, OutOfMemory, PeerLost, RunFailed, ShoalError, from_dict
from shoal.events import Event
from shoal.units import format_si, rank_list

# torch puts the rank before each line of a traceback.
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)')
# Warnings of torch and of Python's shutdown follow the exception that ended a process.
_LINES_AFTER = 20
_LONGEST_EXCEPTION = 300
# How many exceptions of ranks that failed after the first are quoted.
_MOST_QUOTED = 3
LOG_TAIL = "the end of its log:"


@dataclass(frozen=True)
class ProcessEnd:
    name: str
    node: str
    ranks: tuple[int, ...]
    code: int  # the exit code, or the negative number of the signal that killed it
    order: int  # counts the ends in the order in which the launcher saw them
    by_agent: bool = False  # its own agent killed it
    log: str = ""
    out_of_memory: bool = False  # the kernel killed processes for lack of memory meanwhile
    memory_limit_bytes: int | None = None  # of the control group in which it ran out of memory
    lost: str = ""  # how its whole node was lost, so that the process's own end is unknown


def count_cut_off(
    ends: Iterable[ProcessEnd], lost_by: Mapping[str, Mapping[str, str]], nodes: Sequence[str]
) -> list[ProcessEnd]:
    """Count ranks as lost whose node was cut off, though their agent has killed them.

    Behind a cut, the agents of both sides report the other side. A node is cut off that more than half of the others
    have lost; where that is every node, as with two, the first one remains.
    """
    cut_off = [node for node in nodes if 2 * len(lost_by.get(node, ())) > len(nodes) - 1]
    if len(cut_off) == len(nodes):
        cut_off = cut_off[1:]
    return [
        replace(end, by_agent=False, lost=next(iter(lost_by[end.node].values()))) if end.node in cut_off else end
        for end in ends
    ]


def diagnose(
    ends: Iterable[ProcessEnd],
    faults: Mapping[int, Event],
    log_tails: Mapping[str, str],
    relief: str = OUT_OF_MEMORY_ADVICE,
) -> ShoalError | None:
    """Return the error that explains the run's failure, or None if every process ended well.

    `relief` is the advice against a lack of memory.
    """
    failed = _failed(ends)
    first = first_to_fail(failed, faults)
    if first is None:
        return None
    fault = _fault_of(first, faults)
    error = _as_error(first, fault, relief)
    others = [end for end in failed if end is not first]
    if fault is None:
        # A process that was killed from outside has no explanation in its log.
        is_explained = bool(first.lost) or first.code == -signal.SIGKILL
    else:
        is_explained = bool(fault.get("why") or fault.get("fix"))
    if isinstance(error, RunFailed) and not is_explained:
        error.logs = tuple(end.log for end in (first, *others))
    error.why = "; ".join(filter(None, (error.why, *_describe_others(others, faults, fault))))
    # A fault that is explained is in the log in the same words.
    if (fault is None or not is_explained) and (tail := log_tails.get(first.name, "").strip()):
        error.why = "\n".join(filter(None, (error.why, f"{LOG_TAIL}\n{tail}")))
    return error


def drop_survived(ends: Iterable[ProcessEnd]) -> list[ProcessEnd]:
    """Drop killed and lost ranks of an elastic run if other ranks ended well: the run continued without them."""
    all_ends = list(ends)
    if not any(end.code in (0, Interrupted.exit_code) for end in all_ends):
        return all_ends
    return [end for end in all_ends if end.code >= 0]


def first_to_fail(ends: Iterable[ProcessEnd], faults: Mapping[int, Event]) -> ProcessEnd | None:
    """Return the process whose failure caused the others.

    A lost node is noticed last although it failed first. A rank that only lost its peer comes after all others.
    """
    return min(_failed(ends), key=lambda end: (_is_consequence(end, faults), not end.lost, end.order), default=None)


def _failed(ends: Iterable[ProcessEnd]) -> list[ProcessEnd]:
    return [end for end in ends if end.code not in (0, Interrupted.exit_code) and not end.by_agent]


def _describe_others(failed: list[ProcessEnd], faults: Mapping[int, Event], first: Event | None) -> Iterator[str]:
    """Describe the ranks that failed after the first: most only lost a peer, some had the same failure."""
    lost_peer = [rank for end in failed if _is_consequence(end, faults) for rank in end.ranks]
    own_cause = [rank for end in failed if not _is_consequence(end, faults) for rank in end.ranks]
    kinds = {rank: _kind_of(faults[rank]) for rank in own_cause if rank in faults}
    same = [rank for rank, kind in kinds.items() if first is not None and kind == _kind_of(first)]
    quoted = [rank for rank in kinds if rank not in same][:_MOST_QUOTED]
    if lost_peer:
        yield f"{rank_list(lost_peer)} then ended because a peer was gone"
    if same:
        is_all = len(same) == len(failed)
        yield f"{f'all {len(same) + 1} ranks' if is_all else rank_list(same)} failed in the same way"
    yield from (f"rank {rank} failed too: {faults[rank].get('raised') or faults[rank]['seen']}" for rank in quoted)
    if rest := [rank for rank in own_cause if rank not in {*same, *quoted}]:
        yield f"{rank_list(rest)} failed too"


def _kind_of(fault: Event) -> object:
    """Return what equal failures have in common; errors of shoal's own may name a rank or a size in what was seen."""
    advice = fault.get("why"), fault.get("fix")
    return fault.get("raised") or (advice if any(advice) else fault.get("seen"))


def has_own_fault(faults: Mapping[int, Event]) -> bool:
    """Return whether a rank failed by itself, and not only because a peer was gone."""
    return any(fault.get("error") != PeerLost.__name__ for fault in faults.values())


def _is_consequence(end: ProcessEnd, faults: Mapping[int, Event]) -> bool:
    fault = _fault_of(end, faults)
    return fault is not None and fault.get("error") == PeerLost.__name__


def _fault_of(end: ProcessEnd, faults: Mapping[int, Event]) -> Event | None:
    """Return the first fault of a process's ranks, one with its own cause before one that is a lost peer."""
    own = [faults[rank] for rank in end.ranks if rank in faults]
    return min(own, key=lambda fault: (fault.get("error") == PeerLost.__name__, fault.get("time", 0)), default=None)


def _as_error(end: ProcessEnd, fault: Event | None, relief: str) -> ShoalError:
    process = f"rank {end.ranks[0]}" if len(end.ranks) == 1 else end.name
    read_log = f"read its log: less {shlex.quote(end.log)}"
    if fault is not None:
        error = from_dict(fault)
        if isinstance(error, RunFailed) and "rank" not in error.seen:
            error.seen = f"rank {fault.get('rank', end.ranks[0])} on {end.node}: {error.seen}"
        if "raised" in fault:
            error.fix = read_log
        return error
    if end.lost:
        return RunFailed(f"{end.node} is gone, and {process} with it", why=end.lost, fix=read_log)
    if end.out_of_memory:
        seen = f"{process} on {end.node} was killed (SIGKILL) when the machine ran out of memory"
        why = "the kernel ends a process when there is no memory left"
        if end.memory_limit_bytes is not None:
            limit = format_si(end.memory_limit_bytes, "B")
            seen = f"{process} was killed (SIGKILL) when {end.node} had reached its memory limit of {limit}"
            why = "a control group has this limit (a container, a batch system, a lab), and the kernel enforces it"
        return OutOfMemory(seen, why=why, fix=relief)
    return RunFailed(f"{process} on {end.node} {_how_it_ended(end.code)}", fix=read_log)


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    # Real-time signals have no name of their own.
    name = {int(known): known.name for known in signal.Signals}.get(-code, f"signal {-code}")
    if -code == signal.SIGKILL:
        return f"was killed ({name}) from outside; the machine did not run out of memory meanwhile"
    return f"was killed by {name}"


@dataclass(frozen=True)
class RaisedException:
    """The exception that ended a Python program."""

    text: str
    place: str = ""  # the innermost line of the program's own code

    def __str__(self) -> str:
        short = self.text if len(self.text) <= _LONGEST_EXCEPTION else self.text[: _LONGEST_EXCEPTION - 1] + "…"
        return f"{short} ({self.place})" if self.place else short


def last_exception(log: str, is_consequence: Callable[[str], bool] = lambda text: False) -> RaisedException | None:
    """Return the exception that ended the program; None if it printed other output after the last traceback.

    Of a chain that is the last exception, which the program did not handle. If that one only reports a lost peer, it is
    the last one before it that does not.
    """
    chain: list[RaisedException] = []
    frames: list[tuple[str, str]] | None = None
    is_chained, lines_after = False, 0
    for line in (_RANK_PREFIX.sub("", line, count=1) for line in log.splitlines()):
        frame = _FRAME.match(line)
        # The traceback of a SyntaxError has no head and no function.
        # A progress bar or a prompt may stand before the head, on a line that it left open.
        if line.endswith(_TRACEBACK) or (frame and frames is None and frame.end() == len(line)):
            chain, frames = (chain if is_chained else []), []
            is_chained = False
        if frame and frames is not None:
            frames.append((frame["file"], frame["line"]))
        elif frames is not None and line and not line.startswith(" ") and not line.endswith(_TRACEBACK):
            own = [frame for frame in frames if not is_library(frame[0])]
            place = f"{Path(own[-1][0]).name} line {own[-1][1]}" if own else ""
            chain.append(RaisedException(line.strip(), place))
            frames, lines_after = None, 0
        elif line in _CHAINED:
            is_chained = True
        elif not line.startswith((" ", "\t")):
            # Indented lines belong to the message, such as a list of mismatched weights.
            lines_after += bool(line)
    if not chain or lines_after > _LINES_AFTER:
        return None
    # If the first exception reports a lost peer, the others follow from it.
    causes = [] if is_consequence(chain[0].text) else [error for error in chain if not is_consequence(error.text)]
    return causes[-1] if causes else chain[0]


def script_faults(
    ends: Iterable[ProcessEnd], read_log: Callable[[ProcessEnd], str], is_consequence: Callable[[str], bool]
) -> dict[int, Event]:
    """Make the fault events of a script's ranks from the exceptions in their logs.

    `is_consequence` recognises the messages of a rank that only lost its peer.
    """
    faults: dict[int, Event] = {}
    for end in _failed(ends):
        # An exception ends a program with exit code 1. A killed program may have printed one that it handled.
        if end.lost or end.out_of_memory or end.code <= 0:
            continue
        if (raised := last_exception(read_log(end), is_consequence)) is None:
            continue
        rank = end.ranks[0]
        faults[rank] = {
            "rank": rank,
            "error": (PeerLost if is_consequence(raised.text) else RunFailed).__name__,
            "seen": f"rank {rank} on {end.node} {_how_it_ended(end.code)}: {raised}",
            "raised": str(raised),
        }
    return faults


def explain_early_exit(ends: Iterable[ProcessEnd], faults: Mapping[int, Event]) -> str:
    """Explain a first failure that is a lost peer which had ended well; empty for any other failure."""
    all_ends = list(ends)
    first = first_to_fail(all_ends, faults)
    if first is None or not _is_consequence(first, faults):
        return ""
    gone = [rank for end in all_ends if not end.code and end.order < first.order for rank in end.ranks]
    if not gone:
        return ""
    return (
        f"{rank_list(gone)} had ended before with exit code 0, while others still exchanged: every rank must make the "
        "same number of steps, and an uneven share of the data is the usual cause"
    )
