"""Tries in the first steps of a run how the ranks of this machine share it best: threads, pins, shared memory or gloo.

The steps of a trial are steps of the training. What was measured is remembered by machine, model and torch version, so
that the next run begins with the best setup. Whatever the user has set is not tried.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from shoal.control.rank_env import DEFAULT_THREADS
from shoal.cost.machine_setup import (
    RankSetup,
    TrialSchedule,
    describe_fewer_ranks,
    explain_choice,
    is_worth_trying,
    list_candidates,
)
from shoal.engine import trial_memory
from shoal.engine.auto_sync import SyncChooser
from shoal.engine.exchanges import shapes_of
from shoal.engine.observers import SpeedObserver
from shoal.engine.recorder import last_event
from shoal.engine.replica import Replica
from shoal.engine.step import DoneStep
from shoal.events import Event
from shoal.host.facts import boot_id, cpu_name
from shoal.host.topology import cores_for_rank, this_topology, threads_for
from shoal.run_folder import RunFolder
from shoal.sync.replicas import gather_integers
from shoal.sync.world import World, barrier

_NS_PER_S = 1e9
# The first steps of a process allocate memory and load kernels.
_WARM_UP_STEPS = 3
_TASKS = Path("/proc/self/task")


class CorePins:
    """The cores of this rank: apart from the other ranks of its machine, or all that its process may use."""

    def __init__(self, own: tuple[int, ...] | None, computing: Collection[int] = ()) -> None:
        """`computing` are threads that exist by now and compute. All others, which are gloo's, stay free: they run on
        any idle core."""
        self.own = own  # None if this rank cannot have cores of its own
        self.is_pinned = False
        # Read before pinning: it has the cores that the machine gives this process.
        self.all_threads = threads_for(this_topology(), 1)
        self._all = os.sched_getaffinity(0) if own else set()
        self._free_threads = thread_ids() - {threading.get_native_id(), *computing}

    @property
    def cpus(self) -> tuple[int, ...] | None:
        return self.own if self.is_pinned else None

    def set(self, is_pinned: bool) -> None:
        """Pin the threads that compute, and those that they will start, or let them go."""
        if self.own is None or is_pinned == self.is_pinned:
            return
        try:
            for thread in thread_ids() - self._free_threads:
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, self.own if is_pinned else self._all)
        except OSError:
            # A container may forbid it.
            self.own, is_pinned = None, False
        self.is_pinned = is_pinned


def thread_ids() -> set[int]:
    with suppress(OSError):
        return {int(entry.name) for entry in _TASKS.iterdir()}
    return {threading.get_native_id()}


def choose_cores(world: World, setting: str) -> tuple[int, ...] | None:
    """Return cores for this rank that no other rank of its machine has; None if it should not be pinned.

    Emulated nodes share the cores of one machine, so ranks of the same machine count, not of the same node.
    """
    if setting == "off":
        return None
    # Every rank takes part, also one that computes on a GPU and is not pinned.
    machines = machine_ids(world)
    if world.device.type != "cpu":
        return None
    neighbours = [rank for rank, machine in enumerate(machines) if machine == machines[world.rank]]
    if setting == "auto" and len(neighbours) == 1:
        return None
    return cores_for_rank(this_topology(), neighbours.index(world.rank), len(neighbours), torch.get_num_threads())


def machine_ids(world: World) -> list[int]:
    """Return a number for every rank's machine, equal for ranks on the same machine."""
    name = boot_id() or socket.gethostname()
    own_id = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
    return [machine_id for [machine_id] in gather_integers(world, [own_id])]


class MachineTrial:
    """Called after every step, on all ranks. A new generation begins with the first setup again."""

    def __init__(self, replica: Replica, chooser: SyncChooser, pins: CorePins, speed: SpeedObserver) -> None:
        self._replica = replica
        self._chooser = chooser
        self._pins = pins
        self._speed = speed  # Ignores the steps of a trial.
        self._first_threads = torch.get_num_threads()
        self._is_pinned_first = pins.is_pinned
        self._generation: object = MachineTrial  # none yet
        self._warm_up_left = 0
        self._machines: list[int] = []
        self._candidates: list[RankSetup] = []
        self._schedule: TrialSchedule | None = None
        # Seconds of a step that one process would take, where that was measured.
        self.alone_s: float | None = None

    @property
    def cpus(self) -> tuple[int, ...] | None:
        """The cores of this rank, if it is pinned."""
        return self._pins.cpus

    @contextmanager
    def as_one_process(self) -> Iterator[None]:
        """Compute with all cores that this process may use, as if no other rank were on its machine."""
        was_pinned, threads = self._pins.is_pinned, torch.get_num_threads()
        self._pins.set(is_pinned=False)
        torch.set_num_threads(self._pins.all_threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            self._pins.set(was_pinned)

    def recall(self, run: RunFolder) -> None:
        """Use the setup that the run had when it was interrupted: others may round differently. All ranks call it."""
        world = self._replica.world
        setup = self._recorded_setup(last_event(run.events(world.id), "trial"))
        code = -1 if setup is None else ("", "shared", "gloo").index(setup.inside)
        codes = {code for [code] in gather_integers(world, [code])}
        if setup is not None and len(codes) == 1:
            self._generation, self._warm_up_left = world.generation, 0
            self._apply(setup)

    def _recorded_setup(self, event: Event) -> RankSetup | None:
        """Return the setup of an event as far as the settings leave it open; None if it was made by other ranks."""
        replica = self._replica
        try:
            step, ranks, threads, inside = (event[name] for name in ("step", "ranks", "threads", "inside"))
            if step > replica.progress.step or ranks != replica.world.size:
                return None
            can_choose_inside = replica.config.sync.inside == "auto" and replica.sync.inside.way == "shared"
            can_have = self._can_change_threads() and 1 <= int(threads) <= self._first_threads
            return RankSetup(
                inside if can_choose_inside and inside in ("shared", "gloo") else "",
                self._pins.is_pinned and (replica.config.train.pin != "auto" or bool(event["cpus"])),
                int(threads) if can_have else self._first_threads,
            )
        except (KeyError, TypeError, ValueError):
            return None

    def after_step(self, done: DoneStep) -> None:
        world = self._replica.world
        if self._generation != world.generation:
            self._generation, self._warm_up_left, self._schedule = world.generation, _WARM_UP_STEPS, None
            self._apply(RankSetup("", self._is_pinned_first, self._first_threads))
        # The same on all ranks: those that try exchange their times.
        if self._chooser.is_open or world.has_gpus:
            return
        if self._warm_up_left:
            self._warm_up_left -= 1
            if not self._warm_up_left:
                self._begin()
        elif self._schedule is not None:
            self._observe(self._schedule, done.times)

    def _begin(self) -> None:
        """Use the setup that an earlier run found, or start a trial."""
        replica, world = self._replica, self._replica.world
        if replica.config.sync.measure == "off":
            return
        self._machines = machine_ids(world)
        has_one_machine = len(set(self._machines)) == 1
        can_choose_inside = has_one_machine and replica.config.sync.inside == "auto"
        inside = "shared" if can_choose_inside and replica.sync.inside.way == "shared" else ""
        first = RankSetup(inside, self._pins.is_pinned, self._first_threads)
        can_pin = replica.config.train.pin == "auto" and self._pins.own is not None
        self._candidates = list_candidates(first, can_pin, self._can_change_threads())
        known = self._known_setup(world.size)
        index = self._candidates.index(known) if known in self._candidates else -1
        steps_left = replica.config.train.steps - replica.progress.step
        rows = gather_integers(world, [index, len(self._candidates), steps_left])
        if all(row[0] >= 0 for row in rows) and (len({row[0] for row in rows}) == 1 or not has_one_machine):
            self._keep(index, f"continues with {self._candidates[index]}, as a trial on this machine found before")
            return
        count = max(row[1] for row in rows)
        if is_worth_trying(count, steps_left):
            self._schedule = TrialSchedule(count)
            self._speed.pause()
            self._try(0)

    def _observe(self, schedule: TrialSchedule, times: dict[str, float]) -> None:
        replica, before = self._replica, schedule.current
        seconds = times["step"] - times.get("wait", 0.0)
        if len(set(self._machines)) > 1:
            seconds -= times.get("exposed", 0.0)
        rows = gather_integers(replica.world, [round(_NS_PER_S * seconds)])
        slowest: dict[int, float] = {}
        for machine, [taken_ns] in zip(self._machines, rows, strict=True):
            slowest[machine] = max(slowest.get(machine, 0.0), taken_ns / _NS_PER_S)
        schedule.observe(slowest)
        if schedule.current is None:
            self._finish(schedule, times)
        elif schedule.current != before:
            self._try(schedule.current)

    def _try(self, candidate: int) -> None:
        """Use a candidate in the next steps. A machine with fewer of them uses its first one meanwhile."""
        self._apply(self._candidates[candidate if candidate < len(self._candidates) else 0])

    def _finish(self, schedule: TrialSchedule, times: dict[str, float]) -> None:
        replica, machine = self._replica, self._machines[self._replica.world.rank]
        self._schedule = None
        # The same on all ranks of a machine. Those with fewer candidates tried their first setup in place of others.
        best = schedule.best(machine)
        best = best if best < len(self._candidates) else 0
        step_s = schedule.seconds(machine, best)
        if self._machines.index(machine) == replica.world.rank:
            entry = {**asdict(self._candidates[best]), "step_s": step_s}
            trial_memory.remember(trial_memory.trials_file(), self._key(replica.world.size), entry)
        self._keep(best, explain_choice(self._candidates, schedule, machine, best))
        # Emulated nodes are on one machine too, but their links count; and with weak scaling fewer ranks do less.
        is_local = replica.world.local_size == replica.world.size and replica.config.train.scaling == "strong"
        if replica.world.is_main and is_local:
            self._advise_fewer_ranks(step_s, times.get("optimizer", 0.0))

    def _keep(self, candidate: int, why: str) -> None:
        replica, setup = self._replica, self._candidates[candidate]
        self._apply(setup)
        # The speeds of ranks with other setups say nothing about the machines.
        self._speed.restart()
        fields: dict[str, Any] = {"threads": setup.threads, "cpus": self._pins.cpus, "inside": replica.sync.inside.way}
        fields |= {"step": replica.progress.step, "ranks": replica.world.size}
        replica.recorder.event("trial", why=why, changed=candidate > 0, **fields)

    def _advise_fewer_ranks(self, step_s: float, optimizer_s: float) -> None:
        """Note that fewer ranks are faster: by this run's own measurement of one process, or by earlier runs."""
        replica, ranks = self._replica, self._replica.world.size
        known = {fewer: self._known_step_s(fewer) for fewer in range(1, ranks)}
        if self.alone_s is not None:
            known[1] = self.alone_s + optimizer_s
        fewer, fewer_s = min(
            ((fewer, seconds) for fewer, seconds in known.items() if seconds is not None),
            key=lambda pair: pair[1],
            default=(0, step_s),
        )
        if fewer and (text := describe_fewer_ranks(ranks, step_s, fewer, fewer_s)):
            replica.recorder.event("note", step=replica.progress.step, text=text)

    def _apply(self, setup: RankSetup) -> None:
        replica = self._replica
        if torch.get_num_threads() != setup.threads:
            torch.set_num_threads(setup.threads)
            self._speed.set_threads(setup.threads)
        self._pins.set(setup.is_pinned)
        if setup.inside and setup.inside != replica.sync.inside.way:
            # After the barrier all ranks have done the last step, and none needs its exchange any more.
            barrier(replica.world)
            replica.recorder.commit()
            replica.change_sync(replica.config.sync.model_copy(update={"inside": setup.inside}))

    def _can_change_threads(self) -> bool:
        """Whether shoal chose the number of threads, and nothing is compiled for it."""
        chosen = os.environ.get(DEFAULT_THREADS)
        is_default = chosen == os.environ.get("OMP_NUM_THREADS") == str(self._first_threads)
        return is_default and not self._is_compiled

    @property
    def _is_compiled(self) -> bool:
        modules = self._replica.model.modules()
        return any(hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) for module in modules)

    def _known_setup(self, ranks: int) -> RankSetup | None:
        entry = self._recall(ranks)
        with suppress(KeyError, TypeError, ValueError):
            return RankSetup(str(entry["inside"]), bool(entry["is_pinned"]), int(entry["threads"]))
        return None

    def _known_step_s(self, ranks: int) -> float | None:
        with suppress(KeyError, TypeError, ValueError):
            return float(self._recall(ranks)["step_s"])
        return None

    def _recall(self, ranks: int) -> Any:
        return trial_memory.recall(trial_memory.trials_file(), self._key(ranks))

    def _key(self, ranks: int) -> str:
        """Return all that the times depend on."""
        replica = self._replica
        shapes = hashlib.sha256(repr(shapes_of(replica.state)).encode()).hexdigest()[:16]
        own = self._machines[replica.world.rank]
        here = ranks if len(set(self._machines)) == 1 else self._machines.count(own)
        machine = f"{cpu_name()} ({platform.machine()}), {self._pins.all_threads} cores, torch {torch.__version__}"
        model = f"model {shapes}{' compiled' if self._is_compiled else ''}, batch {replica.global_batch}"
        nodes = f" on {len(set(replica.world.nodes))} nodes" if replica.world.local_size < replica.world.size else ""
        return f"setup: {machine}, {model}, {replica.config.sync.mode}, {here} of {ranks} ranks{nodes}"
