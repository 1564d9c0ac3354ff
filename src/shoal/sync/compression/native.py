"""Compiles `kernels.cpp` with this machine's compiler and loads it; without a compiler there are no kernels.

They only save time: each gives the same bits as a few lines of torch, and a test compares both. The library lies in the
user's cache. Its name depends on the CPU, the compiler, the options and the source, so each combination has its own.
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
_FLAGS: tuple[str, ...] = ("-O3", "-funroll-loops", "-march=native", "-std=c++17", "-shared", "-fPIC")
# Every operation is rounded by itself, as in torch.
_FLAGS += ("-ffp-contract=off", "-fno-math-errno")
_COMPILERS = ("g++", "c++", "clang++")
_COMPILE_TIMEOUT_S = 20.0
_CPU_KEYS = ("flags", "Features", "CPU part", "model name")


class Kernels:
    """The compiled functions, for contiguous tensors on the CPU.

    They release the interpreter lock, so backward continues.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._int8_reduce = _declared(library, "int8_reduce", pointer, pointer, pointer, whole, pointer, whole)
        self._int8_decode = _declared(library, "int8_decode", pointer, pointer, whole)
        self._bf16_reduce = _declared(library, "bf16_reduce", pointer, pointer, whole, pointer, whole)
        self._bf16_decode = _declared(library, "bf16_decode", pointer, pointer, whole)
        self._product = _declared(library, "thin_product", pointer, pointer, pointer, whole, whole, whole)
        self.has_halves = hasattr(library, "half_pack")
        if self.has_halves:
            self._pack = _declared(library, "half_pack", pointer, pointer, real, whole)
            self._unpack = _declared(library, "half_unpack", pointer, pointer, real, whole)

    def int8_encode(self, gradient: Tensor, residual: Tensor, records: Tensor) -> None:
        self.int8_reduce(gradient, residual, (), records)

    def int8_reduce(self, gradient: Tensor, residual: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        own = (gradient.data_ptr(), residual.data_ptr())
        self._int8_reduce(*own, _pointers(others), len(others), records.data_ptr(), gradient.numel())

    def int8_decode(self, records: Tensor, gradient: Tensor) -> None:
        self._int8_decode(records.data_ptr(), gradient.data_ptr(), gradient.numel())

    def bf16_reduce(self, gradient: Tensor, others: Sequence[Tensor], records: Tensor) -> None:
        pointers = _pointers(others)
        self._bf16_reduce(gradient.data_ptr(), pointers, len(others), records.data_ptr(), gradient.numel())

    def bf16_decode(self, records: Tensor, gradient: Tensor) -> None:
        self._bf16_decode(records.data_ptr(), gradient.data_ptr(), gradient.numel())

    def thin_product(self, p: Tensor, lines: Tensor, product: Tensor) -> None:
        sizes = (*product.shape, len(lines))
        self._product(p.data_ptr(), lines.data_ptr(), product.data_ptr(), *sizes)

    def to_half(self, full: Tensor, half: Tensor, scale: float) -> None:
        self._pack(full.data_ptr(), half.data_ptr(), scale, full.numel())

    def from_half(self, half: Tensor, full: Tensor, scale: float) -> None:
        self._unpack(half.data_ptr(), full.data_ptr(), scale, full.numel())


@cache
def load_kernels() -> Kernels | None:
    """Return the kernels, or None.

    The first build takes a second or two; ranks that build at once write their own file.
    """
    try:
        # In a private folder: a library that another user put there would run as this one.
        return Kernels(ctypes.CDLL(str(_find_or_build(make_private(user_cache(os.environ) / "kernels")))))
    except (OSError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return None


def _pointers(tensors: Sequence[Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def _declared(library: ctypes.CDLL, name: str, *arguments: type) -> ctypes._NamedFuncPointer:
    function = library[name]
    function.argtypes, function.restype = arguments, None
    return function


def _find_or_build(folder: Path) -> Path:
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler")
    library = folder / f"{_digest(compiler)}.so"
    if not library.exists():
        _build(compiler, library)
    return library


def _build(compiler: str, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    unfinished = library.with_name(f".{library.name}.{secrets.token_hex(4)}")
    command = [compiler, *_FLAGS, "-o", str(unfinished), str(_SOURCE)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
        unfinished.replace(library)
    finally:
        unfinished.unlink(missing_ok=True)


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=10).stdout
    parts = [_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), version, _cpu().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _cpu() -> str:
    """Describe the CPU: machines with different processors may share a home folder."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(_CPU_KEYS)})) + os.uname().machine
