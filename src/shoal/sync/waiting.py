"""Waiting for an exchange, but not for longer than the generation lasts.

gloo tells a rank that waits to *receive* when a connection closes. One whose *send* waits for a peer that has left is
told nothing, and waits for the whole deadline (torch 2.13; seen in an all-gather and in a barrier). So the training's
thread waits for the outcome itself, and is free as soon as its generation is over; gloo's own thread stays behind.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist

from shoal.sync.membership.fence import Over

_LOOK_S = 0.1


def await_work(work: dist.Work | None, is_over: Callable[[], bool]) -> None:
    """Raises what the exchange raised, or `Over`."""
    if work is None:
        return
    if not work.is_completed():
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        while not done.wait(_LOOK_S):
            if is_over():
                raise Over("its generation was over before an exchange was")
    work.wait()
