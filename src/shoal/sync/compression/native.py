"""Kernels made by this machine's own compiler, kept in the user's cache; without a compiler there are none.

Nothing depends on them but the time: each does what a few lines of torch do as well, to the bit, and a test compares
both. The file in the cache is named after everything that went into it, so another CPU, compiler or version of the
source makes its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from shoal.control.rank_env import make_private, user_cache

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = (
    "-O3",
    "-funroll-loops",
    "-march=native",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-std=c++17",
    "-shared",
    "-fPIC",
)
_COMPILERS = ("g++", "c++", "clang++")
_COMPILE_TIMEOUT_S = 20.0
_CPU_KEYS = ("flags", "Features", "CPU part", "model name")


class Kernels:
    """Tensors are contiguous and on the CPU. The interpreter is not held meanwhile, so backward goes on beside."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._settle = _declared(library, "int8_settle", pointer, pointer, pointer, whole, pointer, whole)
        self._spread = _declared(library, "int8_spread", pointer, pointer, whole)
        self._bf16_settle = _declared(library, "bf16_settle", pointer, pointer, whole, pointer, whole)
        self._bf16_spread = _declared(library, "bf16_spread", pointer, pointer, whole)
        self._product = _declared(library, "thin_product", pointer, pointer, pointer, whole, whole, whole)
        self.has_halves = hasattr(library, "half_pack")
        if self.has_halves:
            self._pack = _declared(library, "half_pack", pointer, pointer, real, whole)
            self._unpack = _declared(library, "half_unpack", pointer, pointer, real, whole)

    def int8_send(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None:
        self.int8_settle(gradient, residual, (), records)

    def int8_settle(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        mine = (gradient.data_ptr(), residual.data_ptr())
        self._settle(*mine, _pointers(others), len(others), records.data_ptr(), gradient.numel())

    def int8_spread(self, records: Tensor, gradient: Tensor) -> None:
        self._spread(records.data_ptr(), gradient.data_ptr(), gradient.numel())

    def bf16_settle(self, gradient: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        theirs = (_pointers(others), len(others))
        self._bf16_settle(gradient.data_ptr(), *theirs, records.data_ptr(), gradient.numel())

    def bf16_spread(self, records: Tensor, gradient: Tensor) -> None:
        self._bf16_spread(records.data_ptr(), gradient.data_ptr(), gradient.numel())

    def thin_product(self, p: Tensor, lines: Tensor, product: Tensor) -> None:
        sizes = (*product.shape, len(lines))
        self._product(p.data_ptr(), lines.data_ptr(), product.data_ptr(), *sizes)

    def to_half(self, full: Tensor, half: Tensor, scale: float) -> None:
        self._pack(full.data_ptr(), half.data_ptr(), scale, full.numel())

    def from_half(self, half: Tensor, full: Tensor, scale: float) -> None:
        self._unpack(half.data_ptr(), full.data_ptr(), scale, full.numel())


@cache
def load_kernels() -> Kernels | None:
    """Takes a second or two where nobody has built them before; ranks that build at once each bring their own file."""
    try:
        # A library that another user put there would run as this one.
        return Kernels(ctypes.CDLL(str(_obtain(make_private(user_cache(os.environ) / "kernels")))))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return None


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _declared(library: ctypes.CDLL, name: str, *arguments: type) -> ctypes._NamedFuncPointer:
    function = library[name]
    function.argtypes, function.restype = arguments, None
    return function


def _obtain(folder: Path) -> Path:
    compiler = next((found for name in _COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    library = folder / f"{_digest(compiler)}.so"
    if not library.exists():
        _build(compiler, library)
    return library


def _build(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    workpiece = library.with_name(f".{library.name}.{secrets.token_hex(4)}")
    command = [compiler, *_FLAGS, "-o", str(workpiece), str(_SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
        workpiece.replace(library)
    finally:
        workpiece.unlink(missing_ok=True)


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=10).stdout
    parts = [_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), version, _cpu().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _cpu() -> str:
    """A home folder may be shared by machines whose processors are not the same."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(_CPU_KEYS)})) + os.uname().machine
