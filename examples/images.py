"""Classify synthetic images with a small ResNet: any PyTorch loop on one or several machines.

shoal run --on local:2 examples/images.py
shoal run --on lab:3,link=1gbit examples/images.py
torchrun --nproc-per-node=2 examples/images.py
python examples/images.py
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

CLASSES, SIZE = 10, 16


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.layers(x))


def make_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy images of ten patterns, and which pattern each one is."""
    patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return patterns[labels] + 2 * torch.randn(count, 3, SIZE, SIZE, generator=generator), labels


session = shoal.Session(steps=60, global_batch=48)
torch.manual_seed(1)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1), Residual(16), nn.MaxPool2d(4), Residual(16), nn.Flatten(), nn.LazyLinear(CLASSES)
)
model(torch.zeros(2, 3, SIZE, SIZE))  # The lazy layer gets its shape.
model.to(session.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)
session.attach(model, optimizer, scheduler)
images, test_images = make_images(2000, seed=1), make_images(400, seed=2)


@session.every(20)
def evaluate() -> None:
    accuracy = session.evaluate(test_images, lambda batch: (model(batch[0]).argmax(1) == batch[1]).sum())
    session.log(accuracy=accuracy)
    session.best(accuracy, lower=False)
    if session.is_main:
        print(f"step {session.step}: accuracy {accuracy:.3f}", flush=True)


for step in session:
    with step:
        for inputs, labels in step.batches(images):
            step.backward(F.cross_entropy(model(inputs), labels, reduction="sum"))
        step.update(clip=1.0)
