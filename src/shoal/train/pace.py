"""How long a rank takes for a micro-batch and for the update, phase by phase, with the threads that a run gives it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.config.schema import ModelConfig
from shoal.model.gpt import GPT
from shoal.model.kernels import prefer_blas
from shoal.sync.wires.whole import from_half, to_half
from shoal.train.clip import clip

_PHASES = ("forward", "backward", "optimizer")
_LEAST_RUNS = 3
_GROWTH = 2
_MOST_MICRO_BATCH = 64
_CLIP = 1.0
# Parameters of one of DDP's buckets.
_BUCKET = 25 * 2**20 // 4


@dataclass
class Updates:
    """AdamW and clipping as a training does them.

    By the kernel of `AdamW(fused=True)` alone: the first optimizer of a process imports torch's compiler, for seconds.
    """

    parameters: list[Tensor]
    _means: list[Tensor] = field(init=False)
    _squares: list[Tensor] = field(init=False)
    _steps: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._means, self._squares = ([torch.zeros_like(each) for each in self.parameters] for _ in range(2))
        self._steps = [torch.zeros(()) for _ in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        clip(self.parameters, _CLIP)
        torch._fused_adamw_(
            self.parameters,
            [each.grad for each in self.parameters if each.grad is not None],
            self._means,
            self._squares,
            [],
            self._steps,
            lr=1e-4,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )
        for each in self.parameters:
            each.grad = None


def halving_s(budget_s: float) -> float:
    """Seconds a parameter to make fp16 of a bucket of gradients and fp32 of the sum.

    Of numbers like gradients: where this is done one by one, equal ones go through in half the time.
    """
    bucket = 1e-3 * torch.randn(_BUCKET)
    half = torch.empty_like(bucket, dtype=torch.float16)
    times: list[float] = []
    until = time.perf_counter() + budget_s
    while len(times) < _LEAST_RUNS or time.perf_counter() < until:
        began = time.perf_counter()
        from_half(to_half(bucket, half), bucket)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / _BUCKET


class Pacer:
    """One model on one rank. `measure` gives the times of growing micro-batches, as many as fit into the time."""

    def __init__(self, model: ModelConfig) -> None:
        # As a training does.
        prefer_blas()
        self._config = model
        self._model = GPT(model)
        self._updates = Updates(list(self._model.parameters()))
        self._last_s = 0.0

    def measure(self, budget_s: float) -> Iterator[dict[str, float]]:
        deadline = time.perf_counter() + budget_s
        size = 1
        while size <= _MOST_MICRO_BATCH:
            began = time.perf_counter()
            # A quarter of what is left: each one is twice as large as the last, and needs as many runs.
            yield {"micro_batch": size, **self._timed(size, (deadline - began) / 4)}
            if deadline - time.perf_counter() < _GROWTH * (1 + _LEAST_RUNS) * self._last_s:
                return
            size *= _GROWTH

    def _timed(self, micro_batch: int, budget_s: float) -> dict[str, float]:
        tokens = torch.randint(self._config.vocab_size, (micro_batch, self._config.seq_len))
        self._run(tokens)
        runs: list[dict[str, float]] = []
        until = time.perf_counter() + budget_s
        while len(runs) < _LEAST_RUNS or time.perf_counter() < until:
            runs.append(self._run(tokens))
        medians = {f"{name}_s": statistics.median(run[name] for run in runs) for name in _PHASES}
        whole = [run["forward"] + run["backward"] for run in runs]
        self._last_s = statistics.median(whole)
        return {**medians, "spread": statistics.pstdev(whole) / statistics.mean(whole)}

    def _run(self, tokens: Tensor) -> dict[str, float]:
        marks = [time.perf_counter()]
        loss = self._model(tokens, tokens) / tokens.numel()
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self._updates.step()
        marks.append(time.perf_counter())
        return {name: after - before for name, before, after in zip(_PHASES, marks, marks[1:], strict=False)}
