"""`run_ranks`: real gloo processes for tests, forked from a warm server.

Ranks are forked from a server that has imported torch once, so a world of two costs a tenth of a second instead of six.
They rendezvous through a file store in the test's own folder: no port, no collision.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.support.preloaded"])


def run_ranks(
    function: Callable[..., T],
    world_size: int,
    folder: Path,
    *arguments: Any,
    deadline_s: float = 60.0,
    dying: Collection[int] = (),
) -> list[T]:
    """Run `function(world, *arguments)` on every rank; return one value per rank or raise the first traceback.

    Values are plain data and numpy arrays: a torch tensor would be sent as a handle that dies with its rank.
    Ranks in `dying` are not expected to return a value: theirs is None.
    """
    store = folder / f"store-{time.monotonic_ns()}"
    pipes = [FORKSERVER.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        FORKSERVER.Process(target=_rank, args=(function, rank, world_size, store, pipes[rank][1], arguments))
        for rank in range(world_size)
    ]
    try:
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        values = _collect([reader for reader, _ in pipes], time.monotonic() + deadline_s, dying)
        for process in () if dying else processes:
            # A rank that outlived a peer would wait for it in the last barrier.
            process.join(5)
        return values
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def _collect(readers: list[Connection], deadline: float, dying: Collection[int]) -> list[Any]:
    values: dict[int, Any] = {}
    waiting: dict[Any, int] = {reader: rank for rank, reader in enumerate(readers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} gave no answer in time")
        for reader in ready:
            rank = waiting.pop(reader)
            values[rank] = _receive(readers[rank], rank, rank in dying)
    return [values[rank] for rank in range(len(readers))]


def _receive(reader: Connection, rank: int, is_dying: bool) -> Any:
    try:
        ok, value = reader.recv()
    except EOFError:
        if is_dying:
            return None
        raise AssertionError(f"rank {rank} died without a word") from None
    finally:
        reader.close()
    if not ok:
        raise AssertionError(f"rank {rank} failed:\n{value}")
    return value


def _rank(
    function: Callable[..., Any], rank: int, size: int, store: Path, answer: Connection, arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    from shoal.sync.world import World

    # Workers of a loader are forked, as they are for a user; another server would import torch for each rank.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        meeting = dist.FileStore(str(store), size)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=size, timeout=timedelta(seconds=20))
        group = dist.group.WORLD
        assert group is not None
        world = World(
            rank, size, rank, size, "local", "gloo", torch.device("cpu"), "lo", group, meeting, tuple(range(size))
        )
        answer.send((True, function(world, *arguments)))
        # The end of a whole training leaves the world itself.
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        answer.send((False, traceback.format_exc()))
    finally:
        answer.close()


class WorkerProcess:
    """`python -m shoal.train.worker WORDS` in a fork of the server, with the methods of `subprocess.Popen`.

    `sockets` are inherited; the variables that name them get their numbers. A `program` runs in place of the worker.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        sockets: Mapping[str, socket.socket],
        program: Callable[[], None] | None = None,
    ) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._process = FORKSERVER.Process(target=_work, args=(list(words), dict(env), log, dict(sockets), program))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise TimeoutError(f"rank {self.pid} did not end within {timeout} s")
        return code

    def send_signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def kill(self) -> None:
        self._process.kill()


def _work(
    words: list[str],
    env: Mapping[str, str],
    log: Path,
    sockets: Mapping[str, socket.socket],
    program: Callable[[], None] | None,
) -> None:
    import torch

    from shoal.train import worker

    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    for name, inherited in sockets.items():
        inherited.set_inheritable(True)
        os.environ[name] = str(inherited.detach())
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # OMP_NUM_THREADS is read when torch is loaded, which the server did.
    torch.set_num_threads(1)
    if program is None:
        sys.exit(worker.main(words))
    program()


def standing_helpers() -> set[int]:
    """Return the pids of processes that outlive a test on purpose: the fork server and multiprocessing's tracker."""
    server: Any = multiprocessing.forkserver._forkserver
    tracker: Any = multiprocessing.resource_tracker._resource_tracker
    return {pid for pid in (server._forkserver_pid, tracker._pid) if pid}
