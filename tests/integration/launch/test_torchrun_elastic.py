"""Shoal's worker under elastic torchrun: restarted workers resume from the checkpoint with the remaining nodes.

Exercises train.worker.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shoal.sync.world import agree_on_attempt
from shoal_lab.lab import Lab
from shoal_lab.processes import NodeProcess
from tests.support.labs import running_lab
from tests.support.programs import TINY, events_of, read_jsonl, set_flags, steps_of
from tests.support.waiting import wait_until

STEPS = 400
EVERY = 20
WORKER = "shoal.train.worker"
SETTINGS = (
    *TINY,
    f"train.steps={STEPS}",
    f"train.checkpoint_every={EVERY}",
    "train.eval_every=400",
    "sync.timeout_s=5",
)
# Observed: nodes that join after the last call each open their own store, and torchrun never unites them again.
RENDEZVOUS_SETTINGS = "last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"


def agree_all(store: dist.Store, ranks: list[int], world_size: int) -> list[int]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda rank: agree_on_attempt(store, rank, world_size, timeout_s=10), ranks))


def test_ranks_agree_on_an_attempt_number_that_was_never_used() -> None:
    store = dist.HashStore()
    assert agree_all(store, [0, 1, 2], 3) == [0, 0, 0]
    assert agree_all(store, [1, 2, 0], 3) == [1, 1, 1]
    assert agree_all(store, [1, 0], 2) == [2, 2], "a smaller world continues the count"


def test_a_rank_that_is_early_does_not_reuse_the_last_attempt() -> None:
    store = dist.HashStore()
    agree_all(store, [0, 1], 2)
    with pytest.raises(RuntimeError, match="came in time"):
        agree_on_attempt(store, 1, 2, timeout_s=0.3)
    with pytest.raises(RuntimeError, match="came in time"):
        agree_on_attempt(store, 0, 3, timeout_s=0.3)
    assert agree_all(store, [1, 0], 2) == [2, 2], "an attempt that failed has used its number"


def start_torchruns(lab: Lab, folder: Path) -> dict[str, NodeProcess]:
    env = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    return {
        node.name: lab.start(node.name, torchrun(lab, node.name, folder), env, folder / f"{node.name}.log")
        for node in lab.state.spec.nodes
    }


def torchrun(lab: Lab, node: str, folder: Path) -> list[str]:
    spec = lab.state.spec
    flags = [f"--nnodes=1:{len(spec.nodes)}", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
    flags += [f"--rdzv-endpoint={spec.nodes[0].address}:29500", f"--local-addr={spec.node(node).address}"]
    flags += [f"--rdzv-conf=is_host={str(node == spec.nodes[0].name).lower()},{RENDEZVOUS_SETTINGS}", "--rdzv-id=test"]
    worker = ["-m", WORKER, "grammar", "--out", str(folder / "run"), *set_flags(*SETTINGS)]
    return [sys.executable, "-m", "torch.distributed.run", *flags, *worker]


def wait_for(done: Callable[[], bool], what: str, folder: Path, seconds: float = 240) -> None:
    def logs() -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log")))

    wait_until(done, seconds, why=lambda: f"{what}\n{logs()}")


def starts(folder: Path) -> list[dict[str, Any]]:
    return events_of(folder / "run", "start")


def has_reached(folder: Path, step: int) -> bool:
    return any(event["step"] >= step for event in steps_of(folder / "run"))


def end(processes: Iterable[NodeProcess]) -> None:
    for process in processes:
        process.kill()
        process.wait(10)


def rank_on(lab: Lab, node: str) -> int:
    """Return the pid of the worker; torchrun's own command line contains its name, too."""
    commands = [(pid, command.split()) for pid, command in lab.processes(node)]
    return next(pid for pid, words in commands if WORKER in words and "torch.distributed.run" not in words)


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["rank", "node"])
def test_a_killed_worker_resumes_from_the_checkpoint(fault: str, tmp_path: Path) -> None:
    with running_lab(3) as lab, ExitStack() as stack:
        torchruns = start_torchruns(lab, tmp_path)
        stack.callback(end, torchruns.values())
        # Not while a checkpoint is written: the timeout for a silent peer is then that of a slow disk.
        wait_for(lambda: has_reached(tmp_path, EVERY + 2), "the first checkpoint", tmp_path)
        assert starts(tmp_path)[0]["world_size"] == 3
        if fault == "rank":
            os.kill(rank_on(lab, "node3"), signal.SIGKILL)
        else:
            lab.node("node3").kill()
        left = [torchruns[node] for node in ("node1", "node2")]
        wait_for(lambda: all(process.poll() is not None for process in left), "the rest of the training", tmp_path)
    assert [process.returncode for process in left] == [0, 0], (tmp_path / "node1.log").read_text()[-3000:]
    last = starts(tmp_path)[-1]
    assert last["resumed_from"] >= EVERY
    assert last["resumed_from"] % EVERY == 0
    # On a busy machine torchrun starts without a rank that is slow to restart.
    assert last["world_size"] in ((2, 3) if fault == "rank" else (2,))
    assert f'on = "local:{last["world_size"]}"' in (tmp_path / "run" / "config.toml").read_text()
    done = [commit["step"] for commit in read_jsonl(tmp_path / "run" / "commits.jsonl")]
    assert set(done) == set(range(1, STEPS + 1))
    assert (tmp_path / "run" / "manifest.json").exists()
