"""Keeps the machine from going to sleep while it trains, where systemd is there to be asked."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_WORDS = ("--what=idle:sleep", "--who=shoal", "--mode=block")


@contextmanager
def awake(why: str) -> Iterator[None]:
    """The lock is held by a child that reads our pipe: it ends when we do, however that happens."""
    tool = shutil.which("systemd-inhibit")
    if tool is None:
        yield
        return
    words = (tool, *_WORDS, f"--why={why}", "cat")
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True):
        yield
