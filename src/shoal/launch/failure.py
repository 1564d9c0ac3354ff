"""From how the processes ended to one sentence: who failed first, why, and what the others only suffered. Pure."""

from __future__ import annotations

import re
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.cost.memory import RELIEF
from shoal.errors import Interrupted, OutOfMemory, PeerLost, RunFailed, ShoalError, from_dict
from shoal.events import Event

# torch puts the rank before each line of a traceback.
_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+)')
_LIBRARY = re.compile(r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib[/\\]python3|^<")
# Warnings of torch and of Python's own shutdown follow the exception that ended a process.
_LINES_AFTER = 20
_LONGEST_EXCEPTION = 300
# Of the ranks that failed after the first, so many are quoted.
_QUOTED = 3
LOG_TAIL = "the end of its log:"


@dataclass(frozen=True)
class ProcessEnd:
    """How one process ended; `order` counts the endings as the launcher saw them. `starved`: the kernel killed for lack
    of memory meanwhile. `lost`: how its whole node was lost, so that nobody knows the process's own end."""

    name: str
    node: str
    ranks: tuple[int, ...]
    code: int
    order: int
    by_us: bool = False
    log: str = ""
    starved: bool = False
    lost: str = ""


def failure(
    endings: Iterable[ProcessEnd], faults: Mapping[int, Event], log_tail: Mapping[str, str], relief: str = RELIEF
) -> ShoalError | None:
    """The error that explains the run's failure, or None when every process ended well. `relief` is what helps against
    a lack of memory."""
    failed = _failed(endings)
    first = first_to_fail(failed, faults)
    if first is None:
        return None
    fault = _fault_of(first, faults)
    error = _explain(first, fault, relief)
    others = [ending for ending in failed if ending is not first]
    if isinstance(error, RunFailed) and not _says_why(first, fault):
        error.logs = tuple(ending.log for ending in (first, *others))
    why = [error.why, *_others(others, faults, fault)]
    error.why = "; ".join(filter(None, why))
    # A fault that explains itself stands in the log in the same words.
    if (fault is None or not fault.get("why")) and (tail := log_tail.get(first.name, "").strip()):
        error.why = "\n".join(filter(None, (error.why, f"{LOG_TAIL}\n{tail}")))
    return error


def outlived(endings: Iterable[ProcessEnd]) -> list[ProcessEnd]:
    """Where machines come and go: if ranks ended well, those that were killed or lost on the way were done without."""
    found = list(endings)
    if not any(ending.code in (0, Interrupted.exit_code) for ending in found):
        return found
    return [ending for ending in found if ending.code >= 0]


def first_to_fail(endings: Iterable[ProcessEnd], faults: Mapping[int, Event]) -> ProcessEnd | None:
    """A lost node is noticed last and was first; a rank that only lost its peer comes after everybody else."""
    return min(
        _failed(endings),
        key=lambda ending: (_is_consequence(ending, faults), not ending.lost, ending.order),
        default=None,
    )


def _failed(endings: Iterable[ProcessEnd]) -> list[ProcessEnd]:
    return [ending for ending in endings if ending.code not in (0, Interrupted.exit_code) and not ending.by_us]


def _says_why(ending: ProcessEnd, fault: Event | None) -> bool:
    """A fault may bring its own explanation; a process that was killed from outside has none in its log."""
    if fault is None:
        return bool(ending.lost) or ending.code == -signal.SIGKILL
    return bool(fault.get("why") or fault.get("fix"))


def _others(failed: list[ProcessEnd], faults: Mapping[int, Event], first: Event | None) -> Iterator[str]:
    """Those that failed after the first: most only lost a peer; some met the same trouble themselves."""
    suffered = [rank for ending in failed if _is_consequence(ending, faults) for rank in ending.ranks]
    alike = [rank for ending in failed if not _is_consequence(ending, faults) for rank in ending.ranks]
    raised = {rank: faults.get(rank, {}).get("raised") for rank in alike}
    same = [rank for rank in alike if raised[rank] and first is not None and raised[rank] == first.get("raised")]
    quoted = [rank for rank in alike if raised[rank] and rank not in same][:_QUOTED]
    if suffered:
        yield f"{_ranks(suffered)} then ended because a peer was gone"
    if same:
        yield f"{_ranks(same)} failed in the same way"
    yield from (f"rank {rank} failed too: {raised[rank]}" for rank in quoted)
    if rest := [rank for rank in alike if rank not in {*same, *quoted}]:
        yield f"{_ranks(rest)} failed too"


def _ranks(ranks: Iterable[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))}"


def caused(faults: Mapping[int, Event]) -> bool:
    """Whether a rank failed by itself, not only because a peer was gone."""
    return any(fault.get("error") != PeerLost.__name__ for fault in faults.values())


def _is_consequence(ending: ProcessEnd, faults: Mapping[int, Event]) -> bool:
    fault = _fault_of(ending, faults)
    return fault is not None and fault.get("error") == PeerLost.__name__


def _fault_of(ending: ProcessEnd, faults: Mapping[int, Event]) -> Event | None:
    """A process that stands for several ranks: the first fault that is nobody else's consequence."""
    own = [faults[rank] for rank in ending.ranks if rank in faults]
    return min(own, key=lambda fault: (fault.get("error") == PeerLost.__name__, fault.get("time", 0)), default=None)


def _explain(ending: ProcessEnd, fault: Event | None, relief: str) -> ShoalError:
    who = f"rank {ending.ranks[0]}" if len(ending.ranks) == 1 else ending.name
    log = f"read its log: less {shlex.quote(ending.log)}"
    if fault is not None:
        error = from_dict(fault)
        if isinstance(error, RunFailed) and "rank" not in error.seen:
            error.seen = f"rank {fault.get('rank', ending.ranks[0])} on {ending.node}: {error.seen}"
        if "raised" in fault:
            error.fix = log
        return error
    if ending.lost:
        return RunFailed(f"{ending.node} is gone, and {who} with it", why=ending.lost, fix=log)
    if ending.starved:
        seen = f"{who} on {ending.node} was killed (SIGKILL) when the machine ran out of memory"
        return OutOfMemory(seen, why="the kernel ends a process when there is no memory left", fix=relief)
    return RunFailed(f"{who} on {ending.node} {_how(ending.code)}", fix=log)


def _how(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    # Real-time signals have no name of their own.
    name = {int(known): known.name for known in signal.Signals}.get(-code, f"signal {-code}")
    if -code == signal.SIGKILL:
        return f"was killed ({name}) by somebody; the machine did not run out of memory meanwhile"
    return f"was killed by {name}"


@dataclass(frozen=True)
class RaisedException:
    """The exception that ended a Python program. `place` is the innermost line of the program's own code."""

    text: str
    place: str = ""

    def __str__(self) -> str:
        short = self.text if len(self.text) <= _LONGEST_EXCEPTION else self.text[: _LONGEST_EXCEPTION - 1] + "…"
        return f"{short} ({self.place})" if self.place else short


def last_exception(log: str, is_consequence: Callable[[str], bool] = lambda text: False) -> RaisedException | None:
    """The exception that ended the program. Of a chain the last, which the program did not handle, unless it only
    follows from a lost peer: then the last one before it that does not.

    None where other output follows the last traceback: the program has gone on after it.
    """
    chain: list[RaisedException] = []
    frames: list[tuple[str, str]] | None = None
    is_chained, after = False, 0
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
            chain.append(RaisedException(line.strip(), _place(frames)))
            frames, after = None, 0
        elif line in _CHAINED:
            is_chained = True
        elif not line.startswith((" ", "\t")):
            # Indented lines belong to the message, such as a list of mismatched weights.
            after += bool(line)
    if not chain or after > _LINES_AFTER:
        return None
    # A first exception that only tells of a lost peer is what the others follow from.
    causes = [] if is_consequence(chain[0].text) else [each for each in chain if not is_consequence(each.text)]
    return causes[-1] if causes else chain[0]


def _place(frames: list[tuple[str, str]]) -> str:
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    return f"{Path(own[-1][0]).name} line {own[-1][1]}" if own else ""


def script_faults(
    endings: Iterable[ProcessEnd], read_log: Callable[[ProcessEnd], str], is_consequence: Callable[[str], bool]
) -> dict[int, Event]:
    """What the ranks of a script would have said of themselves, told from the exceptions in their logs.

    `is_consequence` knows the messages of a rank that only lost its peer."""
    faults: dict[int, Event] = {}
    for ending in _failed(endings):
        # An exception ends a program with exit code 1. One that is killed may have printed one that it handled.
        if ending.lost or ending.starved or ending.code <= 0:
            continue
        if (raised := last_exception(read_log(ending), is_consequence)) is None:
            continue
        rank = ending.ranks[0]
        faults[rank] = {
            "rank": rank,
            "error": (PeerLost if is_consequence(raised.text) else RunFailed).__name__,
            "seen": f"rank {rank} on {ending.node} {_how(ending.code)}: {raised}",
            "raised": str(raised),
        }
    return faults


def left_early(endings: Iterable[ProcessEnd], faults: Mapping[int, Event]) -> str:
    """Where the first failure is a lost peer that had ended well: the ranks did not exchange equally often."""
    all_endings = list(endings)
    first = first_to_fail(all_endings, faults)
    if first is None or not _is_consequence(first, faults):
        return ""
    gone = [rank for ending in all_endings if not ending.code and ending.order < first.order for rank in ending.ranks]
    if not gone:
        return ""
    return (
        f"{_ranks(gone)} had ended before with exit code 0, while others still exchanged: every rank must make the "
        "same number of steps, and an uneven share of the data is the usual cause"
    )
