"""The model and the images of `examples/images.py`, for the same training with several libraries."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, SIZE = 10, 16
STEPS, GLOBAL_BATCH = 400, 48
# Set it to make one of the 2,000 images not a number: the loss of the rank that reads it becomes NaN.
SPOILED = "SPOILED_IMAGE"


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


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        Residual(16),
        nn.MaxPool2d(4),
        Residual(16),
        nn.Flatten(),
        nn.Linear(16 * (SIZE // 4) ** 2, CLASSES),
    )


def make_images(count: int = 2000) -> tuple[Tensor, Tensor]:
    """Return noisy images of ten patterns, and which pattern each one is."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.randn(CLASSES, 3, SIZE, SIZE, generator=generator)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    images = patterns[labels] + 2 * torch.randn(count, 3, SIZE, SIZE, generator=generator)
    if SPOILED in os.environ:
        images[int(os.environ[SPOILED])] = float("nan")
    return images, labels
