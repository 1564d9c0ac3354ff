"""What a rank of `sharded.py` needs in every way: the model, its samples, and the meter that measures it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from rivals.sharded_task import ShardedTask
from shoal.model.gpt import GPT

INTERFACE = "eth0"
CLIP = 1.0


def read_task(argument: str) -> ShardedTask:
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # As every training of shoal does, so that no way computes on other numbers.
    torch.set_flush_denormal(True)
    return ShardedTask(**json.loads(argument))


def make_model(task: ShardedTask) -> GPT:
    torch.manual_seed(1)
    return GPT(task.shape)


def make_tokens(task: ShardedTask) -> Tensor:
    """Return made-up samples, inputs and targets in one row."""
    generator = torch.Generator().manual_seed(2)
    return torch.randint(task.vocab_size, (1024, task.seq_len + 1), generator=generator)


def micro_batches(task: ShardedTask, tokens: Tensor, step: int, rank: int, world: int) -> list[Tensor]:
    """Return this rank's samples of a step."""
    count = task.micro_batch * task.accumulate
    start = (step * world + rank) * count
    rows = tokens[torch.arange(start, start + count) % len(tokens)]
    return list(rows.split(task.micro_batch))


def mean_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean over tokens; the model returns the sum."""
    loss: Tensor = model(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()
    return loss


@dataclass
class Meter:
    """Records the time, the sent bytes and the memory of a rank after every step."""

    task: ShardedTask
    rank: int
    before_bytes: int = 0  # resident before the model was made
    start_bytes: int = 0  # the peak from then to the end of the warm-up
    ends: list[float] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)
    between_bytes: list[int] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)  # of all threads of this process

    def start(self) -> None:
        """Take what the process has by now as the base. Called before the model is made."""
        _load_kernels()
        self.before_bytes = _status_bytes("VmRSS")
        _reset_peak()

    def step_done(self) -> None:
        self.between_bytes.append(_status_bytes("VmRSS"))
        self.sent_bytes.append(_sent_bytes())
        self.cpu_s.append(time.process_time())
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.task.warm_up:
            self.start_bytes = _status_bytes("VmHWM")
            _reset_peak()
        if len(self.ends) == self.task.warm_up + self.task.steps:
            self._write()

    def _write(self) -> None:
        first = self.task.warm_up - 1
        figures = {
            "step_s": [end - begin for begin, end in zip(self.ends[first:], self.ends[first + 1 :], strict=False)],
            "cpu_s": (self.cpu_s[-1] - self.cpu_s[first]) / self.task.steps,
            "sent_bytes": (self.sent_bytes[-1] - self.sent_bytes[first]) / self.task.steps,
            "peak_bytes": _status_bytes("VmHWM") - self.before_bytes,
            "start_peak_bytes": self.start_bytes - self.before_bytes,
            "between_bytes": max(self.between_bytes[first:]) - self.before_bytes,
        }
        # Renamed: a file that is there is complete.
        path = Path(self.task.folder) / f"rank-{self.rank}.json"
        half = path.with_suffix(".half")
        half.write_text(json.dumps(figures), encoding="utf-8")
        half.replace(path)


def _load_kernels() -> None:
    """Train a tiny model for a step: the pages of torch's code belong to no way."""
    task = ShardedTask(layers=1, heads=1, width=16, seq_len=8, vocab_size=32)
    model = make_model(task)
    optimizer = AdamW(model.parameters(), fused=True)
    mean_loss(model, make_tokens(task)[:2]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def _reset_peak() -> None:
    """Make the peak (VmHWM) begin again at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _sent_bytes() -> int:
    """Return what this node has sent since it exists, TCP and IP headers included."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.split(":")[0].strip() == INTERFACE).split(":")[1].split()[8])
