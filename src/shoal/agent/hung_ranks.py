"""Local ranks that hang: named after each timeout that they cause, restarted after some, and given up if that fails.

When an exchange reaches its timeout, all ranks are told to leave the generation. Each rank has a thread that answers
the agent, also while its training hangs. So the training itself reports when it has left (`RankWaits`): one that does
not is what the others waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shoal.agent.local_ranks import LocalRank, LocalRanks
from shoal.control.agent_events import AgentEvent, RankHung
from shoal.control.membership.settings import STACKS_S, STUCK_AFTER_S
from shoal.control.membership.types import NEVER, Ballot
from shoal.control.rank_messages import LeftGeneration, RankReady, RankWaits, StepCommitted, ToAgent
from shoal.control.rank_stacks import RankStacks
from shoal.errors import RunFailed
from shoal.units import format_duration, pluralize


class RankControl(Protocol):
    """The part of `RankEnvironment` that this module uses."""

    node: str

    def ask_for_stacks(self, name: str) -> None: ...
    def read_stacks(self, name: str) -> RankStacks | None: ...
    def kill(self, name: str) -> None: ...
    def note(self, text: str) -> None: ...
    def write(self, event: AgentEvent) -> None: ...


@dataclass
class RankActivity:
    """What the training of a rank did last."""

    active_at: float
    step: int = 0  # the last step of its state
    left: Ballot = NEVER  # the newest generation that it has left, to wait for the next one
    commits: int = 0  # since its start and since the last timeout that it caused
    timeouts: int = 0  # that it has caused since it did a step
    was_killed: bool = False  # because it hung, and has not done a step since

    def record_commit(self) -> None:
        """Count a commit. The first one of a rank that enters a generation is that of the copied state's step."""
        self.commits += 1
        if self.commits > 1:
            self.timeouts, self.was_killed = 0, False


class HungRanks:
    def __init__(self, ranks: LocalRanks, control: RankControl, tries: int, now: float) -> None:
        self._ranks = ranks
        self._control = control
        self._tries = tries
        self._activity = {rank.start.name: RankActivity(now) for rank in ranks.ranks}
        self._timed_out = NEVER  # the newest generation in which a rank did not come in time
        self._is_launching = False  # that was the first one of a launch
        self._ask_at: float | None = None
        self._read_at: float | None = None
        self._stuck: list[LocalRank] = []  # were asked for their stacks

    def record_message(self, rank: LocalRank, message: ToAgent, now: float) -> None:
        activity = self._activity[rank.start.name]
        match message:
            case LeftGeneration():
                # From the thread that answers the agent: no sign of the training.
                activity.step = message.state.step if message.state else activity.step
                return
            case RankReady():
                activity.left, activity.commits, activity.timeouts = NEVER, 0, 0
            case RankWaits():
                activity.left = message.generation
            case StepCommitted():
                activity.record_commit()
        activity.active_at = now

    def record_timeout(self, generation: Ballot, is_launching: bool, now: float) -> None:
        """Look for stuck ranks soon: those that waited for them need a moment to leave the generation."""
        newest = max((rank.generation for rank in self._ranks.ranks if rank.generation), default=NEVER)
        if self._timed_out < generation <= newest:
            self._timed_out, self._is_launching, self._ask_at = generation, is_launching, now + STUCK_AFTER_S

    def tick(self, now: float) -> bool:
        """Ask stuck ranks for their stacks, and act when these are written; return whether the run has to end."""
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at, self._read_at = None, now + STACKS_S
            self._stuck = [rank for rank in self._ranks.ranks if self._is_stuck(rank)]
            for rank in self._stuck:
                self._control.ask_for_stacks(rank.start.name)
        if self._read_at is None or now < self._read_at:
            return False
        self._read_at = None
        # One that has come back meanwhile was only slow.
        hang_again = [self._handle(rank, now) for rank in self._stuck if self._is_stuck(rank)]
        return any(hang_again)

    def _is_stuck(self, rank: LocalRank) -> bool:
        if not rank.is_alive or rank.has_finished or rank.generation is None or rank.generation < self._timed_out:
            return False
        if self._is_launching or not rank.is_ready:
            # The first group has not formed: all ranks that have come wait for those that are not ready.
            return not rank.is_ready
        # The order to leave has reached the rank, or a newer one to enter the next generation.
        was_told = rank.has_left or rank.generation > self._timed_out
        return was_told and self._activity[rank.start.name].left < self._timed_out

    def _handle(self, rank: LocalRank, now: float) -> bool:
        """Name a stuck rank, and kill it after too many timeouts; return whether it hangs again after its restart."""
        activity, name = self._activity[rank.start.name], rank.start.name.replace("-", " ")
        activity.timeouts, activity.commits = activity.timeouts + 1, 0
        place = self.describe_place(rank.start.name)
        # One that is not ready may be importing on a slow machine: killed, it would import once more.
        is_last = rank.is_ready and 0 < self._tries <= activity.timeouts
        if is_last and activity.was_killed:
            self._control.write(RankHung(hangs_again(f"{name} on {self._control.node}", activity.step, place)))
            return True
        where = f"since step {activity.step}" if activity.step else "and no step yet"
        then, restart = "", "killed and started again" if self._ranks.restarts else "killed"
        if is_last:
            then = f" It has caused {pluralize(activity.timeouts, 'timeout')} and is {restart} (members.hung_tries)."
        elif self._tries and rank.is_ready:
            left = pluralize(self._tries - activity.timeouts, "more timeout")
            then = f" If it causes {left}, it is {restart} (members.hung_tries)."
        self._control.note(
            f"{name} keeps the others waiting: it has done nothing for {format_duration(now - activity.active_at)}, "
            f"{where}. It is at {place}.{then} The stacks of all ranks: shoal stacks RUN"
        )
        if is_last:
            activity.was_killed = True
            self._control.kill(rank.start.name)
        return False

    def describe_place(self, name: str) -> str:
        """Return the line of the user's code that the rank was in when it wrote its stacks."""
        stacks = self._control.read_stacks(name)
        return str(stacks.place) if stacks else "an unknown line: it has written no stacks"


def hangs_again(rank: str, step: int, place: str) -> RunFailed:
    return RunFailed(
        f"{rank} hangs after step {step}, at {place}",
        why="it kept the others waiting until it was killed and started again, and then hung again",
        fix="look at what that line waits for; if it only takes long, give it more time: --set sync.timeout_s=…\n"
        "resume from the last checkpoint: shoal train --resume RUN",
    )
