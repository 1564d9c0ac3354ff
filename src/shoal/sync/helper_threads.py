"""Keeps the threads that help a rank from computing with teams of their own.

OpenMP gives every thread that calls torch a team of as many threads as the rank has, and an idle team spins for
milliseconds before it sleeps. A rank has one thread that computes; those that exchange its gradients would get a second
and a third team, which take the cores of the first: on 16 cores a step took 211 ms instead of 32 (docs/inside.md).
"""

from __future__ import annotations

import threading

import torch


def compute_alone() -> None:
    """Let torch compute without a team in the calling thread."""
    # Asked first: torch sets the number of a thread when it is first asked for.
    threads = torch.get_num_threads()
    if threads == 1:
        return
    torch.set_num_threads(1)
    # torch gives the last number that was set to threads that start later: set it back, in a thread that then ends.
    setter = threading.Thread(target=torch.set_num_threads, args=(threads,))
    setter.start()
    setter.join()


def compute_alone_in_foreign_thread() -> None:
    """`compute_alone`, if the calling thread is gloo's. A callback may also run in the thread that computes."""
    if isinstance(threading.current_thread(), threading._DummyThread):
        compute_alone()
