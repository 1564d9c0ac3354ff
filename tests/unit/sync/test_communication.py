"""A lost peer is recognised by the error of torch, and never by words in an error of the user's code."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from shoal.errors import PeerLost, RunFailed
from shoal.sync.communication import communication
from shoal.sync.fence import GenerationEnded
from shoal.sync.interruptible import GroupInterrupt, await_future, await_work
from shoal.sync.kv_store_client import AgentStore

PAIR = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] "
CALLBACK = "Got the following error when running the callback: "


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (RuntimeError("[unbound_buffer.cc:129] Timed out waiting 60000ms for send operation to complete"), None),
        (RuntimeError(PAIR + "Connection closed by peer [127.0.0.1]:41610. This is typically …"), None),
        (RuntimeError(PAIR + "writev [10.0.0.1]:41610: Broken pipe"), None),
        # Raised by the collectives beside the one that reached its timeout.
        (RuntimeError("[pair.cc:553] Application timeout caused pair closure"), None),
        (RuntimeError(f"Gloo connectFullMesh failed with {PAIR}no error"), None),
        (RuntimeError(f"{CALLBACK}RuntimeError: {PAIR}Socket closed\n\nAt:\n  a.py(4): b\n"), f"{PAIR}Socket closed"),
        (RuntimeError(f"{CALLBACK}RuntimeError: {CALLBACK}PeerLost: rank 1 is gone\n\nAt:\n"), "rank 1 is gone"),
        (RuntimeError("DistStoreError: no rank set a in time\n\nAt:\n"), "no rank set a in time"),
        (dist.DistStoreError("wait timeout after 300000ms, keys: a"), None),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), None),
        (dist.DistBackendError("NCCL error: Call to recv failed : Connection reset by peer"), None),
    ],
)
def test_an_error_of_the_connection_is_a_lost_peer(error: RuntimeError, seen: str | None) -> None:
    with pytest.raises(PeerLost) as raised, communication():
        raise error
    assert raised.value.seen == (seen or str(error))
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Connection reset by peer"),
        RuntimeError("DataLoader worker 0: Connection closed by peer"),
        RuntimeError("Timed out waiting for the next batch"),
        RuntimeError("[Errno 32] Broken pipe"),
        ConnectionResetError(104, "Connection reset by peer"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x5 and 6x5)"),
        RuntimeError(PAIR + "data type mismatch"),
        dist.DistBackendError("NCCL error: invalid usage"),
        RunFailed("Connection closed by peer"),
        GenerationEnded("the generation is over"),
    ],
)
def test_any_other_error_passes_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, communication():
        raise error
    assert raised.value is error


def test_a_lost_peer_passes_unchanged() -> None:
    lost = PeerLost("rank 2 is gone", why="it was killed")
    with pytest.raises(PeerLost) as raised, communication():
        raise lost
    assert raised.value is lost


class FailedWork(dist.Work):
    """A collective whose connection was closed."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta | None = None) -> bool:
        raise RuntimeError(PAIR + "Connection closed by peer [127.0.0.1]:41610")

    def get_future(self) -> Future[bool]:
        future: Future[bool] = Future()
        future.set_result(True)
        return future.then(lambda _: self.wait())


@pytest.mark.parametrize("release", [None, GroupInterrupt()])
def test_waiting_for_a_collective_raises_a_lost_peer(release: GroupInterrupt | None) -> None:
    with pytest.raises(PeerLost, match="Connection closed by peer"):
        await_work(FailedWork(), release)


def test_waiting_for_a_future_raises_a_lost_peer() -> None:
    """Its type is lost between the thread that raised it and the one that waits."""
    begun: Future[nn.Module] = Future()

    def lose(_: Future[nn.Module]) -> None:
        raise PeerLost("rank 2 is gone")

    future = begun.then(lose)
    begun.set_result(nn.Identity())
    with pytest.raises(PeerLost, match=r"^rank 2 is gone$"):
        await_future(future)


def test_a_future_with_another_error_raises_it() -> None:
    begun: Future[int] = Future()
    future = begun.then(lambda _: int("Connection reset by peer"))
    begun.set_result(1)
    with pytest.raises(RuntimeError, match="ValueError: invalid literal"):
        await_future(future)


def test_a_store_without_its_agent_is_a_lost_peer() -> None:
    own, agents = socket.socketpair()
    store = AgentStore(os.dup(own.fileno()), timedelta(seconds=5))
    own.close()
    agents.close()
    with pytest.raises(PeerLost, match="closed the connection"), communication():
        store.get("a key")
    with pytest.raises(PeerLost, match="closed the connection"), communication():
        dist.PrefixStore("prefix", store).get("a key")
    store._socket.close()
