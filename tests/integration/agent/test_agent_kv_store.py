"""The agents' key-value store keeps the contract of torch's own: code written for one runs with the other.

Exercises agent.kv_store, sync.kv_store_client.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.agent.kv_store import KvStore, read_request, to_frame
from shoal.sync.kv_store_client import AgentStore
from shoal.sync.world import World
from tests.support.ranks import run_ranks

OpenStore = Callable[[], dist.Store]
TIMEOUT = timedelta(seconds=20)
SHORT_TIMEOUT = timedelta(seconds=0.3)


async def serve(keys: KvStore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            writer.write(to_frame(await keys.answer(await read_request(reader))))
            await writer.drain()
    writer.close()


async def serve_all(path: Path, ready: threading.Event, stop: threading.Event) -> None:
    keys = KvStore()
    async with await asyncio.start_unix_server(lambda reader, writer: serve(keys, reader, writer), path):
        ready.set()
        while not stop.is_set() or len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def served_store(path: Path) -> Iterator[None]:
    """Serve a key-value store on a socket, as an agent serves it to its ranks."""
    ready, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve_all(path, ready, stop)))
    thread.start()
    try:
        assert ready.wait(5)
        yield
    finally:
        stop.set()
        thread.join()


def connect(path: Path, timeout: timedelta = TIMEOUT) -> AgentStore:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return AgentStore(connection.detach(), timeout)


@pytest.fixture(params=["torch", "agents", "agents with a prefix"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Return a function that opens the one store for another rank at each call."""
    if request.param == "torch":
        hash_store = dist.HashStore()
        hash_store.set_timeout(TIMEOUT)
        yield lambda: hash_store
        return
    path = tmp_path / "keys"
    # torch holds only the C++ half of an AgentStore; the caller has to keep the Python half alive.
    opened: list[AgentStore] = []

    def open_one() -> dist.Store:
        opened.append(connect(path))
        return dist.PrefixStore("prefix", opened[-1]) if "prefix" in request.param else opened[-1]

    with served_store(path):
        yield open_one
        for store in opened:
            store._socket.close()


def test_get_returns_the_value_that_was_set(open_store: OpenStore) -> None:
    store, other_store = open_store(), open_store()
    store.set("word", "täglich")
    store.set("bytes", b"\x00\xff\n")  # type: ignore[arg-type]  # torch takes bytes, too, but its stubs do not list them
    store.set("nothing", "")
    store.set("large", "x" * 1_000_000)
    assert other_store.get("word") == "täglich".encode()
    assert other_store.get("bytes") == b"\x00\xff\n"
    assert other_store.get("nothing") == b""
    assert other_store.get("large") == b"x" * 1_000_000
    store.set("word", "anew")
    assert other_store.get("word") == b"anew"


def test_add_returns_the_sum(open_store: OpenStore) -> None:
    store, other_store = open_store(), open_store()
    assert store.add("count", 3) == 3
    assert other_store.add("count", -5) == -2
    assert store.get("count") == b"-2"
    store.set("from text", "40")
    assert other_store.add("from text", 2) == 42


def test_add_to_a_value_that_is_not_a_number_is_refused(open_store: OpenStore) -> None:
    store = open_store()
    store.set("word", "seven")
    with pytest.raises((ValueError, RuntimeError)):
        store.add("word", 1)
    assert store.get("word") == b"seven", "the store still answers"


def test_keys_are_checked_together_and_without_waiting(open_store: OpenStore) -> None:
    store = open_store()
    store.set("a", "1")
    store.set("b", "2")
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert store.check([])


def test_compare_set_replaces_only_the_expected_value(open_store: OpenStore) -> None:
    store = open_store()
    assert store.compare_set("key", "", "first") == b"first", "an empty expectation sets a missing key"
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "third") == b"third"
    assert store.compare_set("key", "", "fourth") == b"third"
    assert store.compare_set("missing", "something", "fifth") == b"something"
    assert not store.check(["missing"])


def test_deleted_keys_are_removed_and_not_counted(open_store: OpenStore) -> None:
    store, other_store = open_store(), open_store()
    before = store.num_keys()
    store.set("a", "1")
    store.add("b", 1)
    assert other_store.num_keys() == before + 2
    assert other_store.delete_key("a")
    assert not store.delete_key("a")
    assert not store.check(["a"])
    assert store.num_keys() == before + 1


def test_get_and_wait_block_until_the_key_is_set(open_store: OpenStore) -> None:
    """Two threads of one process share its connection: neither blocks the other."""
    store = open_store()
    with ThreadPoolExecutor() as threads:
        got = threads.submit(store.get, "late")
        waited = threads.submit(store.wait, ["late", "later"])
        time.sleep(0.3)
        assert not got.done()
        store.set("late", "value")
        assert got.result(5) == b"value"
        assert not waited.done()
        open_store().set("later", "")
        waited.result(5)


def test_a_key_that_is_never_set_raises_after_the_timeout(open_store: OpenStore) -> None:
    store = open_store()
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], SHORT_TIMEOUT)
    if not isinstance(store, dist.PrefixStore):
        store.set_timeout(SHORT_TIMEOUT)
        with pytest.raises(dist.DistStoreError):
            store.get("never")
        with pytest.raises(dist.DistStoreError):
            store.wait(["never"])
    store.set("never", "set later")
    assert store.get("never") == b"set later"


def test_concurrent_adds_are_all_counted(open_store: OpenStore) -> None:
    stores = [open_store(), open_store()]

    def count(number: int) -> None:
        for _ in range(50):
            stores[number % 2].add("count", 1)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(count, number) for number in range(4)]:
            done.result(10)
    assert stores[0].add("count", 0) == 200


def test_an_unknown_request_gets_an_error_reply(tmp_path: Path) -> None:
    """A rank without a reply would hang forever."""
    with served_store(tmp_path / "keys"):
        store = connect(tmp_path / "keys")
        for request in ({"op": "dance"}, {"op": "set"}, {"op": "set", "key": "a", "value": 7}, {}):
            with pytest.raises(dist.DistStoreError):
                store._request(**request)
        store.set("a", "b")
        assert store.get("a") == b"b"
        store._socket.close()


def test_a_store_whose_agent_is_gone_raises() -> None:
    rank_socket, agent_socket = socket.socketpair()
    store = AgentStore(rank_socket.detach(), TIMEOUT)
    agent_socket.close()
    with pytest.raises((dist.DistStoreError, OSError)):
        store.get("key")
    store._socket.close()


def form_group(world: World, path: str) -> tuple[int, float]:
    """Make a second group, beside the one with which the test's ranks were started."""
    store = connect(Path(path))
    group = dist.distributed_c10d._new_process_group_helper(
        world.size,
        world.rank,
        list(range(world.size)),
        "gloo",
        dist.PrefixStore("group", store),
        group_name=dist.distributed_c10d.GroupName("over agents"),
        timeout=timedelta(seconds=10),
    )[0]
    value = torch.tensor([float(world.rank + 1)])
    group.allreduce([value]).wait()
    store._socket.close()
    return os.getpid(), value.item()


def test_a_gloo_group_forms_over_the_agents_store(tmp_path: Path) -> None:
    with served_store(tmp_path / "keys"):
        answers = run_ranks(form_group, 2, tmp_path, str(tmp_path / "keys"))
    assert [value for _, value in answers] == [3.0, 3.0]
    assert len({pid for pid, _ in answers}) == 2
