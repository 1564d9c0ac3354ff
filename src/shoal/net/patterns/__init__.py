"""Every failure that is known, by who prints it. Nearly each was provoked for real: see tests/failures/produce.py."""

from __future__ import annotations

from shoal.net.pattern import Pattern
from shoal.net.patterns.cuda import CUDA
from shoal.net.patterns.gloo import GLOO
from shoal.net.patterns.launching import LAUNCHING
from shoal.net.patterns.ourselves import OURSELVES
from shoal.net.patterns.ssh import SSH
from shoal.net.patterns.store import STORE
from shoal.net.patterns.system import SYSTEM
from shoal.net.patterns.torchrun import TORCHRUN
from shoal.net.patterns.training import TRAINING

PATTERNS: tuple[Pattern, ...] = (*GLOO, *STORE, *LAUNCHING, *TORCHRUN, *TRAINING, *CUDA, *SYSTEM, *SSH, *OURSELVES)
