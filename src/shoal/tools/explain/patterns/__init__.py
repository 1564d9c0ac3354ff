"""All known failures by the program that prints them; tests/support/failures/produce.py provokes nearly all of them."""

from __future__ import annotations

from shoal.tools.explain.pattern import Pattern
from shoal.tools.explain.patterns.cuda import CUDA
from shoal.tools.explain.patterns.gloo import GLOO
from shoal.tools.explain.patterns.launch import LAUNCHING, SSH, TORCHRUN
from shoal.tools.explain.patterns.store import STORE
from shoal.tools.explain.patterns.system import SHOAL, SYSTEM
from shoal.tools.explain.patterns.training import TRAINING

PATTERNS: tuple[Pattern, ...] = (*GLOO, *STORE, *LAUNCHING, *TORCHRUN, *TRAINING, *CUDA, *SYSTEM, *SSH, *SHOAL)
