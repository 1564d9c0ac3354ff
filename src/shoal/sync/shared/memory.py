"""Memory that several processes map: a row for each, without a name in any file system.

A memfd has no place in /dev/shm, so Docker's 64 MB there do not limit it, and the kernel frees it with the last process
that maps it, however that one ended.
"""

from __future__ import annotations

import mmap
import os

import psutil
import torch
from torch import Tensor

# A row of its own pages for every rank: the kernel then puts them near whoever writes them first.
_PAGE = mmap.PAGESIZE


class Memory:
    """`rows` of `row_bytes` each, rounded up to whole pages."""

    def __init__(self, fd: int, rows: int, row_bytes: int) -> None:
        self._map = mmap.mmap(fd, rows * whole_pages(row_bytes))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8).view(rows, -1)

    def rows(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self._bytes.view(dtype).unbind(0)


def whole_pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def create(rows: int, row_bytes: int) -> int:
    """A descriptor of memory that `Memory` can map; OSError where the kernel or a limit forbids it."""
    size = rows * whole_pages(row_bytes)
    if (available := psutil.virtual_memory().available) < size:
        raise OSError(f"{size >> 20} MB of memory are wanted and {available >> 20} MB are free")
    fd = os.memfd_create("shoal", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd
