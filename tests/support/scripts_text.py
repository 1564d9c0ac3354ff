"""Programs of users, for tests that write them into a folder of their own."""

PLAIN_DDP = """\
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights = [torch.zeros(1, 4) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
print("rank", dist.get_rank(), "equal", all(torch.equal(each, weights[0]) for each in weights))
dist.destroy_process_group()
"""
SESSION = """\
import torch
import shoal

torch.manual_seed(0)
session = shoal.Session(steps=100_000, global_batch=8)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session.attach(model, optimizer)
samples = torch.utils.data.TensorDataset(torch.randn(64, 4))
for step in session:
    with step:
        for (inputs,) in step.batches(samples):
            step.backward(model(inputs).square().sum())
        step.update()
"""
