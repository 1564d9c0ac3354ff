"""From how the processes ended to one sentence: who failed first, why, and what the others only suffered. Pure."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from shoal.cost.relief import RELIEF
from shoal.errors import Interrupted, OutOfMemory, PeerLost, RunFailed, ShoalError, from_dict
from shoal.events import Event


@dataclass(frozen=True)
class Ending:
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
    endings: Iterable[Ending], faults: Mapping[int, Event], log_tail: Mapping[str, str], relief: str = RELIEF
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
    why = [error.why, *_others(others, faults)]
    error.why = "; ".join(filter(None, why))
    # A fault that explains itself stands in the log in the same words.
    if (fault is None or not fault.get("why")) and (tail := log_tail.get(first.name, "").strip()):
        error.why += f"\nthe end of its log:\n{tail}"
    return error


def outlived(endings: Iterable[Ending]) -> list[Ending]:
    """Where machines come and go: if ranks ended well, those that were killed or lost on the way were done without."""
    found = list(endings)
    if not any(ending.code in (0, Interrupted.exit_code) for ending in found):
        return found
    return [ending for ending in found if ending.code >= 0]


def first_to_fail(endings: Iterable[Ending], faults: Mapping[int, Event]) -> Ending | None:
    """A lost node is noticed last and was first; a rank that only lost its peer comes after everybody else."""
    return min(
        _failed(endings),
        key=lambda ending: (_is_consequence(ending, faults), not ending.lost, ending.order),
        default=None,
    )


def _failed(endings: Iterable[Ending]) -> list[Ending]:
    return [ending for ending in endings if ending.code not in (0, Interrupted.exit_code) and not ending.by_us]


def _says_why(ending: Ending, fault: Event | None) -> bool:
    """A fault may bring its own explanation; a process that was killed from outside has none in its log."""
    if fault is None:
        return bool(ending.lost) or ending.code == -signal.SIGKILL
    return bool(fault.get("why") or fault.get("fix"))


def _others(failed: list[Ending], faults: Mapping[int, Event]) -> Iterator[str]:
    """Those that failed after the first: most only lost a peer; some met the same trouble themselves."""
    suffered = [rank for ending in failed if _is_consequence(ending, faults) for rank in ending.ranks]
    alike = [rank for ending in failed if not _is_consequence(ending, faults) for rank in ending.ranks]
    if suffered:
        yield f"rank {', '.join(map(str, sorted(suffered)))} then ended because a peer was gone"
    if alike:
        yield f"rank {', '.join(map(str, sorted(alike)))} failed too"


def caused(faults: Mapping[int, Event]) -> bool:
    """Whether a rank failed by itself, not only because a peer was gone."""
    return any(fault.get("error") != PeerLost.__name__ for fault in faults.values())


def _is_consequence(ending: Ending, faults: Mapping[int, Event]) -> bool:
    fault = _fault_of(ending, faults)
    return fault is not None and fault.get("error") == PeerLost.__name__


def _fault_of(ending: Ending, faults: Mapping[int, Event]) -> Event | None:
    """A process that stands for several ranks: the first fault that is nobody else's consequence."""
    own = [faults[rank] for rank in ending.ranks if rank in faults]
    return min(own, key=lambda fault: (fault.get("error") == PeerLost.__name__, fault.get("time", 0)), default=None)


def _explain(ending: Ending, fault: Event | None, relief: str) -> ShoalError:
    who = f"rank {ending.ranks[0]}" if len(ending.ranks) == 1 else ending.name
    if fault is not None:
        error = from_dict(fault)
        if isinstance(error, RunFailed) and "rank" not in error.seen:
            error.seen = f"rank {fault.get('rank', ending.ranks[0])} on {ending.node}: {error.seen}"
        return error
    log = f"read its log: less {shlex.quote(ending.log)}"
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
