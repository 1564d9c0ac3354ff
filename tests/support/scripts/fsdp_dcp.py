"""FSDP2 with a checkpoint of torch.distributed.checkpoint, which makes the optimizer's state before the first step."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)


def save_and_load() -> None:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.save(state, checkpoint_id=sys.argv[1])
    dcp.load(state, checkpoint_id=sys.argv[1])
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


save_and_load()
x = torch.linspace(-1, 1, 48).reshape(24, 2)[dist.get_rank() :: 2]
for _ in range(80):
    optimizer.zero_grad()
    (model(x) - x.prod(dim=1, keepdim=True)).square().mean().backward()
    optimizer.step()
save_and_load()
dist.destroy_process_group()
