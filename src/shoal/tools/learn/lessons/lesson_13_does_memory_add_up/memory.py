"""Count the bytes that a rank keeps of weights, gradients and moments, in its last step.

shoal run --on local:2 --sync zero1 memory.py OUT LAYERS
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

import shoal

WIDTH, BATCH, STEPS = 1024, 8, 3


def main() -> None:
    out, layers = sys.argv[1], int(sys.argv[2])
    session = shoal.Session(steps=STEPS, global_batch=BATCH)
    torch.manual_seed(35_000)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))).to(session.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session.attach(model, optimizer)
    dataset = torch.utils.data.TensorDataset(torch.randn(BATCH, WIDTH))
    kept: dict[str, int] = {}
    for step in session:
        with step:
            for (rows,) in step.batches(dataset):
                step.backward(model(rows).square().mean(dim=1).sum())
            # Before the update: that is when a rank has all three.
            kept = count_bytes(model, optimizer)
            step.update()
    kept["parameters"] = sum(weight.numel() for weight in model.parameters())
    Path(f"{out}-{session.rank}.json").write_text(json.dumps(kept))


def count_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    weights = list(model.parameters())
    states = optimizer.state.values()
    return {
        "weights": memory_of(weights),
        "gradients": memory_of([weight.grad for weight in weights if weight.grad is not None]),
        "moments": memory_of([one for state in states for one in state.values() if isinstance(one, torch.Tensor)]),
    }


def memory_of(tensors: list[torch.Tensor]) -> int:
    """Return the bytes behind the tensors; those that share memory count once."""
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


if __name__ == "__main__":
    main()
