"""A loop without DDP: its optimizer averages gradients by reduce-scatter, updates a part and gathers the parameters.

All collectives are asynchronous. `divided_adamw.py work` waits for the Work of each, `future` for the Future where gloo
has one. Rank 1 is slower, by `sleep` seconds a step.
"""

import sys
import time
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

how, sleep_s = sys.argv[1], float(sys.argv[2])


class DividedAdamW(torch.optim.Optimizer):
    """AdamW whose moments are divided over the ranks by rows, or kept whole where a parameter has too few."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        rank, world_size = dist.get_rank(), dist.get_world_size()
        reduced = []
        for parameter in self.param_groups[0]["params"]:
            if parameter.shape[0] % world_size:
                part = parameter.grad
                work = dist.all_reduce(part, async_op=True)
            else:
                part = torch.empty_like(parameter.grad.chunk(world_size)[0])
                work = dist.reduce_scatter_tensor(part, parameter.grad, async_op=True)
            reduced.append((parameter, part, work))
        gathered = []
        for parameter, part, work in reduced:
            work.wait()
            own = parameter if part.shape == parameter.shape else parameter.chunk(world_size)[rank]
            self.update(own, part / world_size, self.state[parameter])
            if own is not parameter:
                work = dist.all_gather_into_tensor(parameter, own.clone(), async_op=True)
                gathered.append(work.get_future() if how == "future" else work)
        if how == "future":
            torch.futures.collect_all(gathered).wait()
        for work in gathered:
            work.wait()

    def update(self, own: Tensor, gradient: Tensor, state: dict[str, Tensor]) -> None:
        if not state:
            state.update(mean=torch.zeros_like(own), square=torch.zeros_like(own))
        state["mean"].lerp_(gradient, 0.1)
        state["square"].lerp_(gradient.square(), 0.01)
        own.addcdiv_(state["mean"], state["square"].sqrt() + 1e-8, value=-self.param_groups[0]["lr"])


dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = DividedAdamW(model.parameters(), lr=0.01)
x = torch.linspace(-1, 1, 48).reshape(24, 2)[dist.get_rank() :: 2]
for _ in range(40):
    optimizer.zero_grad()
    (model(x) - x.prod(dim=1, keepdim=True)).square().mean().backward()
    time.sleep(sleep_s * dist.get_rank())
    optimizer.step()
print(sum(parameter.sum().item() for parameter in model.parameters()))
dist.destroy_process_group()
