"""Waiting for an exchange, but not for longer than the generation lasts.

gloo tells a rank that waits to *receive* when a connection closes. One whose *send* waits for a peer that has left is
told nothing, and waits for the whole deadline (torch 2.13; seen in all-gathers and in a barrier). So the training waits
for futures of our own, which also end when the generation does; gloo's thread stays behind.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import torch.distributed as dist
from torch.futures import Future

from shoal.sync.membership.fence import Over

T = TypeVar("T")


class Release:
    """Frees whoever waits in a generation that is over. The same object for all generations of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._is_over = False

    def begin(self) -> None:
        with self._lock:
            self._is_over = False

    def end(self) -> None:
        with self._lock:
            self._is_over = True
            waiting, self._waiting = self._waiting, set()
        for future in waiting:
            future.set_result(_over())

    def check(self) -> None:
        """Raises `Over` when the generation is."""
        with self._lock:
            is_over = self._is_over
        if is_over:
            raise _over()

    def guard(self, future: Future[T]) -> Future[T]:
        """Ends as that one does, or when the generation does."""
        own: Future[Any] = Future()
        # Only an error that is raised in here is one for torch's C++ half, too.
        outcome: Future[T] = own.then(_unwrap)
        with self._lock:
            is_over = self._is_over
            if not is_over:
                self._waiting.add(own)
        if is_over:
            own.set_result(_over())
        else:
            future.add_done_callback(lambda done: self._pass_on(own, done))
        return outcome

    def _pass_on(self, own: Future[Any], done: Future[T]) -> None:
        with self._lock:
            if own not in self._waiting:
                return
            self._waiting.discard(own)
        try:
            own.set_result(done.value())
        except Exception as error:
            own.set_result(error)


def await_work(work: dist.Work | None, release: Release | None) -> None:
    """Raises what the exchange raised, or `Over`."""
    if work is None:
        return
    if release is not None and not work.is_completed():
        release.guard(work.get_future()).wait()
    work.wait()


def _over() -> Over:
    return Over("its generation was over before an exchange was")


def _unwrap(done: Future[Any]) -> Any:
    value = done.value()
    if isinstance(value, Exception):
        raise value
    return value
