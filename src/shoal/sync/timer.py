"""Where the time of a step goes, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class StepTimer:
    """Adds up named phases of one step.

        timer = StepTimer()
        for batch in batches:
            timer.start()
            with timer.phase("forward"):
                loss = model(batch)
            ...
            print(timer.finish())     # {"forward": 0.021, ..., "other": 0.001, "step": 0.034}

    On a GPU pass `synchronize=torch.cuda.synchronize`: kernels run behind the program's back, and without it a phase
    would only show how long it took to queue them.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self.seconds: dict[str, float] = {}
        self.began = time.perf_counter()

    def start(self) -> None:
        self.seconds = {}
        self.began = self.now()

    def now(self) -> float:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter()

    def phase(self, name: str) -> AbstractContextManager[None]:
        return _Phase(self, name)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def move(self, source: str, target: str, seconds: float) -> None:
        """Part of one phase turned out to be another: the end of backward was spent waiting for the network."""
        self.add(source, -seconds)
        self.add(target, seconds)

    def finish(self) -> dict[str, float]:
        """The phases, what none of them covered as `other`, and the whole as `step`."""
        step = self.now() - self.began
        return {**self.seconds, "other": step - sum(self.seconds.values()), "step": step}


class WholeStepTimer(StepTimer):
    """Times the step and none of its phases: what instrumentation costs is measured against this."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def add(self, name: str, seconds: float) -> None:
        pass

    def finish(self) -> dict[str, float]:
        return {"step": self.now() - self.began}


class _Phase(AbstractContextManager[None]):
    def __init__(self, timer: StepTimer, name: str) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> None:
        self._began = self._timer.now()

    def __exit__(self, *_: object) -> None:
        self._timer.add(self._name, self._timer.now() - self._began)
