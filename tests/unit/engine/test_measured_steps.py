"""Times of a measured step from its marks: closures, collectives of a script's own, and what is not known."""

from __future__ import annotations

from shoal.engine.measured_steps import Exchange, StepClock, TimedStep


def own_step(began: float, *stays: tuple[str, float, float]) -> TimedStep:
    """Return a step of one second with collectives of the script's own; the optimizer takes the last 0.2 seconds."""
    step = TimedStep(began, updated=began + 0.8, ended=began + 1.0)
    for kind, begin, end in stays:
        step.collectives[kind][0] += 1
        step.collectives[kind][1] += 8
        step.add_stay(kind, began + begin, began + end)
        if begin < 0.8:
            step.stayed_before_update_s = step.stayed_s
    return step


def test_backward_in_the_closure_of_the_optimizer() -> None:
    clock = StepClock()
    clock.has_ddp = True
    step = TimedStep(0.0, ended=1.0, exchanges=[Exchange(0.2, 0.3), Exchange(0.6, 0.7)], grad_bytes=8)
    times = clock.divide(step)
    assert (times["allreduce_s"], times["tail_s"], times["exchanges"]) == (0.2, 0.1, 2)
    assert "optimizer_s" not in times, "its own time is not known"


def test_own_collectives_are_summed_by_kind_and_divide_the_step() -> None:
    clock = StepClock()
    stays = (("reduce-scatter", 0.3, 0.5), ("all-gather", 0.8, 0.9), ("all-gather", 0.9, 0.95))
    first, second = (clock.divide(own_step(began, *stays)) for began in (0.0, 1.0))
    assert second["collectives"] == {
        "reduce-scatter": {"calls": 1, "bytes": 8, "waited_s": 0.2},
        "all-gather": {"calls": 2, "bytes": 16, "waited_s": 0.15},
    }
    assert (second["tail_s"], second["exchanged_s"]) == (0.35, 0.95)
    # From the end of one step's last collective to that of the next, without the time in collectives.
    assert ("ready_s" in first, second["ready_s"]) == (False, 0.65)
    assert second["optimizer_s"] == 0.05, "the time in collectives is not that of the optimizer"
    assert "allreduce_s" not in second
    assert clock.divide(own_step(2.0, ("all-reduce", 0.1, 0.2)))["allreduce_s"] == 0.1


def test_what_is_not_seen_is_not_zero() -> None:
    clock = StepClock()
    times = clock.divide(own_step(0.0))
    assert times == {"step_s": 1.0, "optimizer_s": 0.2}
    assert clock.exchange_count == 0


def test_setup_and_barriers_are_no_exchanges() -> None:
    clock = StepClock()
    clock.divide(own_step(0.0, ("broadcast", 0.1, 0.2)))
    clock.divide(own_step(1.0, ("barrier", 0.1, 0.2)))
    assert clock.exchange_count == 0
    clock.divide(own_step(2.0, ("all-reduce", 0.1, 0.2)))
    assert clock.exchange_count == 1


def test_a_wait_beside_ddp_is_no_work_of_the_rank() -> None:
    clock = StepClock()
    clock.has_ddp = True
    for began in (0.0, 1.0):
        step = own_step(began, ("broadcast", 0.1, 0.3))
        step.exchanges.append(Exchange(began + 0.6, began + 0.7))
        times = clock.divide(step)
    assert (times["tail_s"], times["allreduce_s"], times["ready_s"]) == (0.3, 0.1, 0.7)
