"""All known failures by the program that prints them; tests/support/failures/produce.py provokes nearly all of them."""

from __future__ import annotations

from shoal.explain.pattern import Pattern
from shoal.explain.patterns.cuda import CUDA
from shoal.explain.patterns.gloo import GLOO
from shoal.explain.patterns.launch import LAUNCHING, SSH, TORCHRUN
from shoal.explain.patterns.store import STORE
from shoal.explain.patterns.system import SHOAL, SYSTEM
from shoal.explain.patterns.training import TRAINING

PATTERNS: tuple[Pattern, ...] = (*GLOO, *STORE, *LAUNCHING, *TORCHRUN, *TRAINING, *CUDA, *SYSTEM, *SSH, *SHOAL)
