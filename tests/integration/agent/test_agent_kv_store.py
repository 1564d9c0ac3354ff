"""The store that the agents keep, against the contract of torch's own: whoever used one can use the other."""

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
PATIENCE = timedelta(seconds=20)
SOON = timedelta(seconds=0.3)


async def serve(keys: KvStore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(EOFError, OSError):
        while True:
            writer.write(to_frame(await keys.answer(await read_request(reader))))
            await writer.drain()
    writer.close()


async def serve_all(path: Path, ready: threading.Event, over: threading.Event) -> None:
    keys = KvStore()
    async with await asyncio.start_unix_server(lambda reader, writer: serve(keys, reader, writer), path):
        ready.set()
        while not over.is_set() or len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def kept_keys(path: Path) -> Iterator[None]:
    """A key store behind a socket, as an agent serves it to its ranks."""
    ready, over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve_all(path, ready, over)))
    thread.start()
    try:
        assert ready.wait(5)
        yield
    finally:
        over.set()
        thread.join()


def connect(path: Path, timeout: timedelta = PATIENCE) -> AgentStore:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(path))
    return AgentStore(connection.detach(), timeout)


@pytest.fixture(params=["torch's", "the agents'", "the agents', behind a prefix"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """Each call is another rank's view of one store."""
    if request.param == "torch's":
        one = dist.HashStore()
        one.set_timeout(PATIENCE)
        yield lambda: one
        return
    path = tmp_path / "keys"
    # torch holds only the C++ half of a store of ours; whoever opened it holds the rest.
    opened: list[AgentStore] = []

    def open_one() -> dist.Store:
        opened.append(connect(path))
        return dist.PrefixStore("mine", opened[-1]) if "prefix" in request.param else opened[-1]

    with kept_keys(path):
        yield open_one
        for store in opened:
            store._socket.close()


def test_a_value_comes_back_as_it_was_set(open_store: OpenStore) -> None:
    ours, theirs = open_store(), open_store()
    ours.set("word", "täglich")
    ours.set("bytes", b"\x00\xff\n")  # type: ignore[arg-type]  # torch takes bytes, too, and its stubs do not say so
    ours.set("nothing", "")
    ours.set("large", "x" * 1_000_000)
    assert theirs.get("word") == "täglich".encode()
    assert theirs.get("bytes") == b"\x00\xff\n"
    assert theirs.get("nothing") == b""
    assert theirs.get("large") == b"x" * 1_000_000
    ours.set("word", "anew")
    assert theirs.get("word") == b"anew"


def test_numbers_are_added_up(open_store: OpenStore) -> None:
    ours, theirs = open_store(), open_store()
    assert ours.add("count", 3) == 3
    assert theirs.add("count", -5) == -2
    assert ours.get("count") == b"-2"
    ours.set("from text", "40")
    assert theirs.add("from text", 2) == 42


def test_what_is_no_number_cannot_be_added_to(open_store: OpenStore) -> None:
    store = open_store()
    store.set("word", "seven")
    with pytest.raises((ValueError, RuntimeError)):
        store.add("word", 1)
    assert store.get("word") == b"seven", "and the store goes on"


def test_keys_are_checked_together_and_without_waiting(open_store: OpenStore) -> None:
    store = open_store()
    store.set("a", "1")
    store.set("b", "2")
    assert store.check(["a", "b"])
    assert not store.check(["a", "c"])
    assert store.check([])


def test_a_value_is_swapped_only_for_the_expected_one(open_store: OpenStore) -> None:
    store = open_store()
    assert store.compare_set("key", "", "first") == b"first", "an empty expectation sets a missing key"
    assert store.compare_set("key", "other", "second") == b"first"
    assert store.compare_set("key", "first", "third") == b"third"
    assert store.compare_set("key", "", "fourth") == b"third"
    assert store.compare_set("missing", "something", "fifth") == b"something"
    assert not store.check(["missing"])


def test_deleted_keys_are_gone_and_not_counted(open_store: OpenStore) -> None:
    ours, theirs = open_store(), open_store()
    before = ours.num_keys()
    ours.set("a", "1")
    ours.add("b", 1)
    assert theirs.num_keys() == before + 2
    assert theirs.delete_key("a")
    assert not ours.delete_key("a")
    assert not ours.check(["a"])
    assert ours.num_keys() == before + 1


def test_a_key_that_is_set_later_is_waited_for(open_store: OpenStore) -> None:
    """Also by two threads of one process, which share its connection: neither keeps the other from its turn."""
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


def test_a_key_that_never_comes_is_an_error_in_time(open_store: OpenStore) -> None:
    store = open_store()
    with pytest.raises(dist.DistStoreError):
        store.wait(["never"], SOON)
    if not isinstance(store, dist.PrefixStore):
        store.set_timeout(SOON)
        with pytest.raises(dist.DistStoreError):
            store.get("never")
        with pytest.raises(dist.DistStoreError):
            store.wait(["never"])
    store.set("never", "say never")
    assert store.get("never") == b"say never"


def test_many_at_once_lose_no_number(open_store: OpenStore) -> None:
    stores = [open_store(), open_store()]

    def count(number: int) -> None:
        for _ in range(50):
            stores[number % 2].add("count", 1)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(count, number) for number in range(4)]:
            done.result(10)
    assert stores[0].add("count", 0) == 200


def test_a_question_that_nobody_understands_is_answered(tmp_path: Path) -> None:
    """An agent that left a rank without an answer would leave it hanging for ever."""
    with kept_keys(tmp_path / "keys"):
        store = connect(tmp_path / "keys")
        for request in ({"op": "dance"}, {"op": "set"}, {"op": "set", "key": "a", "value": 7}, {}):
            with pytest.raises(dist.DistStoreError):
                store._request(**request)
        store.set("a", "b")
        assert store.get("a") == b"b"
        store._socket.close()


def test_a_rank_whose_agent_is_gone_hears_of_it() -> None:
    ours, theirs = socket.socketpair()
    store = AgentStore(ours.detach(), PATIENCE)
    theirs.close()
    with pytest.raises((dist.DistStoreError, OSError)):
        store.get("key")
    store._socket.close()


def form_group(world: World, path: str) -> tuple[int, float]:
    """A second group, beside the one by which the test's ranks were started."""
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


def test_a_gloo_group_forms_over_it(tmp_path: Path) -> None:
    with kept_keys(tmp_path / "keys"):
        answers = run_ranks(form_group, 2, tmp_path, str(tmp_path / "keys"))
    assert [value for _, value in answers] == [3.0, 3.0]
    assert len({pid for pid, _ in answers}) == 2
