"""A divided model in a world that changes: real ranks, a scripted agent.

Exercises engine.sharded_recovery, engine.sharded_checkpoint, sync.sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.engine.test_recover import STEPS, check_run, make_run
from tests.support.scripted_agent import ScriptedAgent

SETTINGS = {
    "zero1": ("sync.mode=zero1",),
    "zero1-int8": ("sync.mode=zero1", "sync.wire=int8"),
    "zero2": ("sync.mode=zero2",),
    "zero3": ("sync.mode=zero3",),
}


@pytest.fixture(params=SETTINGS)
def agent(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ScriptedAgent]:
    run = make_run(tmp_path / "run", *SETTINGS[request.param])
    with ScriptedAgent(run, 3) as agent:
        agent.start(0, 1, 2)
        agent.form((0, 1, 2))
        yield agent


def test_survivors_continue_from_the_copies_of_a_lost_ranks_part(agent: ScriptedAgent) -> None:
    agent.await_step(0, 5)
    agent.kill(1)
    agent.regroup((0, 2))
    agent.await_step(0, 12)
    agent.kill(2)
    agent.regroup((0,))
    agent.await_end((0,))
    check_run(agent.run.path, (0,))
    assert not agent.events(0, "recovery"), "no step was lost: nothing returned to a checkpoint"


def test_a_rank_that_returns_gets_its_part(agent: ScriptedAgent) -> None:
    agent.await_step(0, 5)
    agent.kill(0)
    agent.regroup((1, 2))
    agent.await_step(1, 12)
    agent.start(0)
    agent.regroup((0, 1, 2), joining=(0,), after_step=True)
    agent.await_end((0, 1, 2))
    check_run(agent.run.path, (0, 1, 2))


def test_losses_and_moments_are_those_of_ddp(tmp_path: Path) -> None:
    """Ranks come and go in both runs at the same steps; what they have learned is the same but for rounding."""
    ends = {}
    for name, settings in (("ddp", ("sync.mode=ddp", "sync.inside=gloo")), ("zero1", ("sync.mode=zero1",))):
        with ScriptedAgent(make_run(tmp_path / name, *settings), 3) as agent:
            agent.start(0, 1, 2)
            agent.form((0, 1, 2))
            agent.await_step(0, 5)
            agent.kill(1)
            agent.regroup((0, 2))
            agent.await_end((0, 2))
            folder = agent.run.path / f"checkpoints/step-{STEPS:08d}"
            ends[name] = load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")
    assert ends["ddp"].keys() == ends["zero1"].keys()
    for name, tensor in ends["ddp"].items():
        torch.testing.assert_close(ends["zero1"][name], tensor, rtol=1e-2, atol=2e-4)
