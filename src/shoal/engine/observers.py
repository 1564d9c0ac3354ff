"""What is called after every step, in turn, through one list: a step knows none of its observers.

An observer may exchange with the other ranks: all of them call the same observers after the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.control.membership.types import Ballot
from shoal.engine.balance import RankTime, describe_change, describe_left_out, useless_warning
from shoal.engine.replica import Replica
from shoal.engine.step import DoneStep
from shoal.engine.stragglers import Stragglers
from shoal.host.node_stats import NodeWatch
from shoal.sync.step_stats import StepStats


class StepObserver(Protocol):
    def after_step(self, done: DoneStep) -> None:
        """Take a step that is done, between two steps. Not called after the last step of the training."""


class SpeedObserver:
    """Watches how fast the ranks are: warns of stragglers, and lets the shares of the batch follow the speeds."""

    def __init__(
        self,
        replica: Replica,
        watch: NodeWatch | None = None,
        stragglers: Stragglers | None = None,
        leave_out: Callable[[], None] | None = None,
    ) -> None:
        self._replica = replica
        self._watch = watch
        self._stragglers = stragglers or Stragglers()
        # Makes this machine a spare; None where members cannot change.
        self._leave_out = leave_out
        # Not the world itself: a reference to it would keep the process group of an ended generation alive.
        self._generation: Ballot | None = None
        self._is_paused = False

    def pause(self) -> None:
        """Ignore the next steps: their times say nothing about the machines."""
        self._is_paused = True

    def set_threads(self, threads: int) -> None:
        """Note how many threads this rank computes with from now on."""
        if self._watch is not None:
            self._watch.threads = threads

    def restart(self) -> None:
        """Judge anew: the ranks compute in another way from now on."""
        replica, self._is_paused = self._replica, False
        self._generation = replica.world.generation
        self._stragglers.reset(replica.world.names, replica.division.follows_speed(replica.world))
        replica.division.balance.reset()

    def after_step(self, done: DoneStep) -> None:
        if self._generation != self._replica.world.generation:
            # The same on ranks that were there and on those that join: all count the steps by which shares are judged.
            self.restart()
        if done.stats and not self._is_paused:
            self._warn_of_stragglers(done)
            self._rebalance(done.stats)

    def _warn_of_stragglers(self, done: DoneStep) -> None:
        """Judge on all ranks, and warn on one: the slow rank itself, which alone knows the programs on its machine."""
        replica = self._replica
        division, world, step = replica.division, replica.world, replica.progress.step
        top_process = "" if self._watch is None else self._watch.top_process
        work, least = division.balance.work_of(division.plan), division.limits().unit
        step_s, exposed_s = done.times["step"], done.times.get("exposed", 0.0)
        for stats in done.stats:
            for slow in self._stragglers.observe(
                stats.by_rank, division.plan.shares, step_s, exposed_s, step, top_process, work, least
            ):
                if world.is_main if slow.rank is None else world.rank == slow.rank:
                    replica.recorder.warn(slow, step=step, **slow.fields)

    def _rebalance(self, known: Sequence[StepStats]) -> None:
        """Let the shares follow the speeds. All ranks know the same times, so all change their shares in this step.

        Where replicas train alone, a rank's share is its weight in the next exchange: it changes with the round.
        """
        replica = self._replica
        balance, world, step = replica.division.balance, replica.world, replica.progress.step
        follows_speed = replica.division.follows_speed(world)
        if not follows_speed and replica.config.members.drop_slower_than is None:
            return
        for stats in known:
            balance.observe([RankTime(rank.work_s, rank.ready_s - rank.work_s) for rank in stats.by_rank])
        lag_steps = replica.outer.lag_steps
        if step % replica.outer.round_steps:
            return
        change = None
        if follows_speed:
            change = balance.judge(replica.plan, replica.division.limits(), world.ids, lag_steps)
        if change is None:
            self._judge_machines()
            return
        replica.change_plan(change.plan)
        self._stragglers.change_shares(lag_steps)
        replica.recorder.event(
            "shares",
            step=step,
            micro_batch=change.plan.micro_batch,
            shares=list(change.plan.shares),
            ids=list(world.ids),
            speeds=list(change.speeds),
            why=describe_change(change, world.names),
        )

    def _judge_machines(self) -> None:
        """Leave out a machine that is too slow, if the user wants that; otherwise name one that does not help.

        All ranks know the same times. Each machine's agent decides nothing: its ranks send it the decision.
        """
        replica, world, members = self._replica, self._replica.world, self._replica.config.members
        balance, recorder, step = replica.division.balance, replica.recorder, replica.progress.step
        count, limit = len(set(world.nodes)), members.drop_slower_than
        slow = balance.slow_machine(replica.plan, replica.division.limits(), world.nodes if count > 1 else world.names)
        if slow is None:
            return
        can_leave_out = self._leave_out is not None and count > max(1, members.min_nodes)
        if can_leave_out and limit is not None and slow.most_speed < limit:
            if not balance.leave_out([world.ids[rank] for rank in slow.ranks], count):
                return
            if world.rank in slow.ranks and self._leave_out is not None:
                self._leave_out()
            elif world.rank == min(rank for rank in range(world.size) if rank not in slow.ranks):
                recorder.event("note", step=step, text=describe_left_out(slow, limit))
        elif slow.is_useless and balance.is_news(slow.name) and world.is_main:
            recorder.warn(useless_warning(slow, replica.plan, can_leave_out), step=step)
