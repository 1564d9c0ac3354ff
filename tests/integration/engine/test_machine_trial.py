"""Trials of threads, pins and shared memory in the first steps of real ranks.

Exercises engine.machine_trial, cost.machine_setup.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.control.rank_env import DEFAULT_THREADS
from shoal.cost.machine_setup import TrialSchedule
from shoal.engine import machine_trial
from shoal.engine.machine_trial import CorePins, MachineTrial, thread_ids
from shoal.engine.recorder import last_event
from shoal.engine.replica import Replica
from shoal.engine.step import DoneStep
from shoal.host.topology import this_topology
from shoal.sync.helper_threads import compute_alone
from shoal.sync.world import World
from tests.support.ranks import run_ranks as run_some_ranks
from tests.support.trainings import GptTraining, make_run

# Whole trainings, some with more threads than cores: they may take long beside other tests.
run_ranks = partial(run_some_ranks, deadline_s=110.0)
STEPS = ("train.steps=140", "train.eval_every=1000", "members.digest_every=1000", "train.checkpoint_every=1000")


def train_with_trial(
    world: World, path: Path, cache: Path, faked_s: dict[str, float], resume: bool = False
) -> dict[str, Any]:
    """Train; a step with a setup of `faked_s` takes so long for the trial. Return what was tried and kept."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    os.environ[DEFAULT_THREADS] = os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())
    training = GptTraining(world, path, resume)
    tried: list[tuple[int, str, bool, int]] = []

    def look(replica: Replica) -> None:
        pinned = os.sched_getaffinity(0) != everywhere
        tried.append((replica.progress.step + 1, replica.sync.inside.way, pinned, torch.get_num_threads()))

    observe = MachineTrial._observe

    def faked_observe(self: MachineTrial, schedule: Any, times: dict[str, float]) -> None:
        setup = str(self._candidates[schedule.current]) if schedule.current < len(self._candidates) else ""
        observe(self, schedule, {"step": faked_s.get(setup, 1.0)})

    MachineTrial._observe = faked_observe  # type: ignore[method-assign]
    everywhere = os.sched_getaffinity(0)
    try:
        training.train(look)
    finally:
        MachineTrial._observe = observe  # type: ignore[method-assign]
        os.sched_setaffinity(0, everywhere)
    weights = sum(parameter.double().sum().item() for parameter in training.replica.model.parameters())
    return {"tried": tried, "event": last_event(training.run.events(world.rank), "trial"), "weights": weights}


def test_the_fastest_setup_is_kept_and_remembered(tmp_path: Path) -> None:
    """Two ranks with one thread: gloo is made the fastest. The next run begins with it, without a trial."""
    cache, fastest = tmp_path / "cache", {"1 thread, pinned, gloo between the ranks": 0.5}
    can_pin = this_topology().usable >= 2
    if not can_pin:
        fastest = {"1 thread, not pinned, gloo between the ranks": 0.5}
    first = run_ranks(train_with_trial, 2, tmp_path, make_run(tmp_path / "a", 2, *STEPS).path, cache, fastest)
    for rank in first:
        ways = {way for _, way, _, _ in rank["tried"]}
        assert ways == {"shared", "gloo"}
        assert {pinned for _, _, pinned, _ in rank["tried"]} == ({True, False} if can_pin else {False})
        assert rank["event"]["inside"] == "gloo"
        assert rank["event"]["changed"]
        # After the trial nothing changes any more.
        kept = [rest for step, *rest in rank["tried"] if step > rank["event"]["step"]]
        assert {tuple(rest) for rest in kept} == {("gloo", can_pin, 1)}
    second = run_ranks(train_with_trial, 2, tmp_path, make_run(tmp_path / "b", 2, *STEPS).path, cache, {})
    for rank in second:
        assert rank["event"]["why"].endswith("gloo between the ranks, as a trial on this machine found before")
        assert rank["event"]["step"] == 3
        assert {way for step, way, _, _ in rank["tried"] if step > 3} == {"gloo"}
    assert first[0]["weights"] == first[1]["weights"]


def test_a_resumed_run_has_the_setup_of_the_interrupted_one(tmp_path: Path) -> None:
    """It is the same training to the bit: no step of it may be done with another setup."""
    run = make_run(tmp_path / "a", 2, *STEPS, "train.checkpoint_every=70")
    fastest = {"1 thread, pinned, gloo between the ranks": 0.5, "1 thread, not pinned, gloo between the ranks": 0.5}
    run_ranks(train_with_trial, 2, tmp_path, run.path, tmp_path / "cache", fastest)
    config = run.config.read_text().replace("steps = 140", "steps = 180")
    run.config.write_text(config)
    resumed = run_ranks(train_with_trial, 2, tmp_path, run.path, tmp_path / "other-cache", {}, True)
    for rank in resumed:
        assert [step for step, *_ in rank["tried"]] == list(range(141, 181))
        assert {way for _, way, _, _ in rank["tried"]} == {"gloo"}


def test_machines_with_other_candidates_end_their_trial_together(tmp_path: Path) -> None:
    """The second machine has one candidate, and what it measures for the others is noise."""
    run = make_run(tmp_path, 2, *STEPS)
    ranks = run_ranks(train_on_two_machines, 2, tmp_path, run.path, tmp_path / "cache")
    assert [rank["event"]["threads"] for rank in ranks] == [2, 1]
    assert ranks[0]["weights"] == ranks[1]["weights"]


def train_on_two_machines(world: World, path: Path, cache: Path) -> dict[str, Any]:
    """Rank 0 has four threads, rank 1 one; both are faster with the second candidate."""
    machine_trial.machine_ids = lambda world: list(range(world.size))
    torch.set_num_threads(4 if world.rank == 0 else 1)
    observe = TrialSchedule.observe

    def faked(self: TrialSchedule, seconds: dict[int, float]) -> None:
        observe(self, dict.fromkeys(seconds, 0.5 if self.current == 1 else 1.0))

    TrialSchedule.observe = faked  # type: ignore[method-assign,assignment]
    return train_with_trial(world, path, cache, {})


def test_a_setting_of_the_user_is_not_tried(tmp_path: Path) -> None:
    sets = (*STEPS, "sync.inside=shared", "train.pin=off")
    ranks = run_ranks(train_with_trial, 2, tmp_path, make_run(tmp_path, 2, *sets).path, tmp_path / "cache", {})
    for rank in ranks:
        assert {(way, pinned) for _, way, pinned, _ in rank["tried"]} == {("shared", False)}


def test_a_short_run_has_no_trial(tmp_path: Path) -> None:
    sets = (*STEPS, "train.steps=60")
    ranks = run_ranks(train_with_trial, 2, tmp_path, make_run(tmp_path, 2, *sets).path, tmp_path / "cache", {})
    assert all(rank["event"] == {} for rank in ranks)


def try_threads(world: World, path: Path, cache: Path) -> dict[str, Any]:
    torch.set_num_threads(4)
    return train_with_trial(world, path, cache, {"2 threads, not pinned": 0.5})


def test_fewer_threads_are_tried(tmp_path: Path) -> None:
    [rank] = run_ranks(
        try_threads, 1, tmp_path, make_run(tmp_path, 1, *STEPS, "train.steps=90").path, tmp_path / "cache"
    )
    assert {threads for *_, threads in rank["tried"]} == {4, 2}
    assert rank["event"]["threads"] == 2
    assert [threads for step, *_, threads in rank["tried"] if step > rank["event"]["step"]][-1] == 2


def step_beside_a_gpu(world: World) -> None:
    """Do what follows five steps on a rank of which the world says that rank 0 has a GPU."""
    device = torch.device("cuda" if world.rank == 0 else "cpu")
    replica = SimpleNamespace(world=replace(world, device=device, devices=("cuda:0", "cpu")))
    chooser, speed = SimpleNamespace(is_open=False), SimpleNamespace()
    trial = MachineTrial(replica, chooser, CorePins(None), speed)  # type: ignore[arg-type]
    for _ in range(5):
        trial.after_step(DoneStep())


def test_no_rank_waits_for_one_with_a_gpu_which_tries_nothing(tmp_path: Path) -> None:
    run_some_ranks(step_beside_a_gpu, 2, tmp_path, deadline_s=30.0)


def look_at_pins(world: World) -> list[set[int]]:
    """Return how many processors the threads of a team have: pinned when it is made, let go, and pinned again."""
    before = thread_ids() - {threading.get_native_id()}
    torch.set_num_threads(2)
    pins, found = CorePins((min(os.sched_getaffinity(0)),)), []
    for is_pinned in (True, False, True):
        pins.set(is_pinned)
        torch.randn(1 << 20).add_(1)
        found.append({len(os.sched_getaffinity(thread)) for thread in thread_ids() - before})
    return found


def test_pins_move_the_threads_that_compute_and_let_them_go(tmp_path: Path) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    everywhere = len(os.sched_getaffinity(0))
    assert run_ranks(look_at_pins, 1, tmp_path) == [[{1}, {everywhere}, {1}]]


def compute_in_helper(world: World, is_alone: bool) -> tuple[int, int, int]:
    """Return how many threads came with a thread that computes beside this one, and both threads' numbers."""
    torch.set_num_threads(4)
    numbers = torch.randn(1 << 20)
    numbers.add_(1)
    before, found, may_end, has_computed = len(thread_ids()), [], threading.Event(), threading.Event()

    def work() -> None:
        if is_alone:
            compute_alone()
        numbers.mul(2)
        found.append(torch.get_num_threads())
        has_computed.set()
        may_end.wait()

    helper = threading.Thread(target=work)
    helper.start()
    has_computed.wait()
    came = len(thread_ids()) - before
    may_end.set()
    helper.join()
    return came, found[0], torch.get_num_threads()


def test_a_helper_thread_gets_no_team(tmp_path: Path) -> None:
    [(with_team, helper, own)] = run_ranks(compute_in_helper, 1, tmp_path, False)
    assert (with_team, helper, own) == (4, 4, 4)
    [(alone, helper, own)] = run_ranks(compute_in_helper, 1, tmp_path, True)
    assert (alone, helper, own) == (1, 1, 4)
