"""Training loops as well-known projects write them, small, each beside the same loop in a session.

`plain` is the body of the project's loop over its batches; `converted` that of `for step in session: with step:`.
`python -m tests.support.conversions NAME RESULT` trains the second, and its rank 1 kills itself once in step 10.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

STEPS = 50
SAMPLES = 96
VOCABULARY = 20


class Conversion:
    """A project: what it trains, its data, and its loop in both forms."""

    batch = 8
    session: dict[str, Any] = {}  # noqa: RUF012 - more arguments of its session, read only
    attached: tuple[Any, ...]  # What `session.attach` gets.
    data: tuple[Tensor, ...]

    def plain(self, *batch: Tensor) -> Tensor:
        raise NotImplementedError

    def converted(self, step: Any) -> None:
        raise NotImplementedError


def texts(length: int = 12) -> Tensor:
    """Return rows of tokens, in which each follows from the one before."""
    rows = torch.randint(0, VOCABULARY, (SAMPLES, 1), generator=torch.Generator().manual_seed(5))
    return (rows + 3 * torch.arange(length + 1)) % VOCABULARY


def images(size: int = 8) -> Tensor:
    return torch.rand(SAMPLES, 1, size, size, generator=torch.Generator().manual_seed(6))


def labels(classes: int) -> Tensor:
    return torch.randint(0, classes, (SAMPLES,), generator=torch.Generator().manual_seed(7))


class LanguageModel(nn.Module):
    """Tokens to logits, with a tied embedding."""

    def __init__(self, body: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.body = body
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embedding(tokens)))
        return logits


class CausalTransformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        output: Tensor = self.layer(x, src_mask=mask, is_causal=True)
        return output


class NanoGPT(Conversion):
    """Tied weights, two groups of AdamW, clipping, a warm-up and a cosine."""

    def __init__(self) -> None:
        self.model = LanguageModel(CausalTransformer(0.0))
        decayed = [p for p in self.model.parameters() if p.dim() >= 2]
        others = [p for p in self.model.parameters() if p.dim() < 2]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        self.attached = (self.model, self.optimizer, self.scheduler)
        self.data = (texts(),)

    @staticmethod
    def rate(step: int) -> float:
        return (step + 1) / 5 if step < 5 else 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 5) / STEPS))

    def plain(self, *batch: Tensor) -> Tensor:
        (rows,) = batch
        logits = self.model(rows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def converted(self, step: Any) -> None:
        for (rows,) in step.batches(self.data):
            logits = self.model(rows[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            step.backward(loss, mean_of=rows[:, 1:].numel())
        step.update(clip=1.0)


class Makemore(Conversion):
    """An MLP over the last three characters, trained by SGD with a rate that the loop lowers itself."""

    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Embedding(VOCABULARY, 8), nn.Flatten(), nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, VOCABULARY)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.attached = (self.model, self.optimizer)
        rows = texts(3)
        self.data = (rows[:, :3], rows[:, 3])

    def plain(self, *batch: Tensor) -> Tensor:
        context, following = batch
        loss = F.cross_entropy(self.model(context), following)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def converted(self, step: Any) -> None:
        for context, following in step.batches(self.data):
            loss = F.cross_entropy(self.model(context), following)
            step.backward(loss, mean_of=len(context))
        step.update()


class Mnist(Conversion):
    """A convolutional network with dropout, log-softmax and Adadelta."""

    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten(), nn.Linear(36, 10)
        )
        self.optimizer = torch.optim.Adadelta(self.model.parameters(), lr=1.0)
        self.attached = (self.model, self.optimizer)
        self.data = (images(), labels(10))

    def plain(self, *batch: Tensor) -> Tensor:
        data, target = batch
        self.optimizer.zero_grad()
        output = F.log_softmax(self.model(data), dim=1)
        loss = F.nll_loss(output, target)
        loss.backward()
        self.optimizer.step()
        return loss

    def converted(self, step: Any) -> None:
        for data, target in step.batches(self.data):
            output = F.log_softmax(self.model(data), dim=1)
            loss = F.nll_loss(output, target)
            step.backward(loss, mean_of=len(data))
        step.update()


class Vae(Conversion):
    """Reconstruction plus divergence: a sum over the batch, as the example has it."""

    def __init__(self) -> None:
        self.model = nn.ModuleDict({"encode": nn.Linear(64, 8), "decode": nn.Linear(4, 64)})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.attached = (self.model, self.optimizer)
        self.data = (images(),)

    def loss(self, data: Tensor) -> Tensor:
        pixels = data.flatten(1)
        mean, log_variance = self.model["encode"](pixels).chunk(2, dim=1)
        hidden = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        made = torch.sigmoid(self.model["decode"](hidden))
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return F.binary_cross_entropy(made, pixels, reduction="sum") + divergence

    def plain(self, *batch: Tensor) -> Tensor:
        (data,) = batch
        self.optimizer.zero_grad()
        loss = self.loss(data) / len(data)
        loss.backward()
        self.optimizer.step()
        return loss

    def converted(self, step: Any) -> None:
        for (data,) in step.batches(self.data):
            step.backward(self.loss(data))
        step.update()


class SuperResolution(Conversion):
    """Pixel shuffle and a mean squared error over all pixels."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.PixelShuffle(2))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.attached = (self.model, self.optimizer)
        large = images(16)
        self.data = (F.avg_pool2d(large, 2), large)

    def plain(self, *batch: Tensor) -> Tensor:
        small, target = batch
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(small), target)
        loss.backward()
        self.optimizer.step()
        return loss

    def converted(self, step: Any) -> None:
        for small, target in step.batches(self.data):
            loss = F.mse_loss(self.model(small), target)
            step.backward(loss, mean_of=target.numel())
        step.update()


class Gcn(Conversion):
    """A graph network: every rank computes the whole graph, and its samples are nodes with a label."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(8)
        edges = (torch.rand(SAMPLES, SAMPLES, generator=generator) < 0.05).float()
        graph = edges + edges.T + torch.eye(SAMPLES)
        self.graph = graph / graph.sum(1, keepdim=True)
        self.features = torch.rand(SAMPLES, 12, generator=generator)
        self.model = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 4)])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01, weight_decay=5e-4)
        self.attached = (self.model, self.optimizer)
        self.data = (torch.arange(SAMPLES), labels(4))

    def forward(self) -> Tensor:
        hidden = F.dropout(F.relu(self.graph @ self.model[0](self.features)), 0.5)
        logits: Tensor = self.graph @ self.model[1](hidden)
        return logits

    def plain(self, *batch: Tensor) -> Tensor:
        nodes, classes = batch
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.forward()[nodes], classes)
        loss.backward()
        self.optimizer.step()
        return loss

    def converted(self, step: Any) -> None:
        for nodes, classes in step.batches(self.data):
            loss = F.cross_entropy(self.forward()[nodes], classes)
            step.backward(loss, mean_of=len(nodes))
        step.update()


class TransformerLm(Conversion):
    """A Transformer language model with dropout, log-likelihood over tokens, clipping at 0.25."""

    def __init__(self) -> None:
        self.model = LanguageModel(CausalTransformer(0.2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.attached = (self.model, self.optimizer)
        self.data = (texts(),)

    def plain(self, *batch: Tensor) -> Tensor:
        (rows,) = batch
        self.model.zero_grad()
        output = F.log_softmax(self.model(rows[:, :-1]), dim=-1).flatten(0, 1)
        loss = F.nll_loss(output, rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
        self.optimizer.step()
        return loss

    def converted(self, step: Any) -> None:
        for (rows,) in step.batches(self.data):
            output = F.log_softmax(self.model(rows[:, :-1]), dim=-1).flatten(0, 1)
            loss = F.nll_loss(output, rows[:, 1:].flatten())
            step.backward(loss, mean_of=rows[:, 1:].numel())
        step.update(clip=0.25)


class LlamaBlock(nn.Module):
    """RMS norms, rotary positions and a gated feed-forward, as in Llama."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 32, bias=False), nn.Linear(width, 32, bias=False)
        self.down = nn.Linear(32, width, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] / 10000 ** (torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        x = x + self.out(F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True))
        y = self.norms[1](x)
        output: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return output


class Llama(Conversion):
    """A model in the shape of a Hugging Face one: padding counts in no loss, and rows have other numbers of tokens."""

    session = {"count_varies": True}  # noqa: RUF012

    def __init__(self) -> None:
        self.model = LanguageModel(LlamaBlock())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.attached = (self.model, self.optimizer)
        rows = texts()
        lengths = torch.randint(4, 13, (SAMPLES, 1), generator=torch.Generator().manual_seed(9))
        self.data = (rows[:, :-1], rows[:, 1:].masked_fill(torch.arange(12) >= lengths, -100))

    def plain(self, *batch: Tensor) -> Tensor:
        tokens, targets = batch
        loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def converted(self, step: Any) -> None:
        for tokens, targets in step.batches(self.data):
            loss = F.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten(), ignore_index=-100)
            step.backward(loss, mean_of=int((targets != -100).sum()))
        step.update()


class Adapter(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) + self.up(self.down(x))
        return output


class Lora(Conversion):
    """Frozen weights and low-rank adapters, as peft makes them."""

    def __init__(self) -> None:
        self.model = nn.Sequential(Adapter(nn.Linear(64, 32)), nn.GELU(), Adapter(nn.Linear(32, 10)))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.attached = (self.model, self.optimizer)
        self.data = (images().flatten(1), labels(10))

    def plain(self, *batch: Tensor) -> Tensor:
        inputs, classes = batch
        loss = F.cross_entropy(self.model(inputs), classes)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def converted(self, step: Any) -> None:
        for inputs, classes in step.batches(self.data):
            loss = F.cross_entropy(self.model(inputs), classes)
            step.backward(loss, mean_of=len(inputs))
        step.update()


class MixedPrecision(Conversion):
    """Autocast, a gradient scaler, and clipping between them."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        self.attached = (self.model, self.optimizer, self.scaler)
        self.data = (images().flatten(1), labels(10))

    def plain(self, *batch: Tensor) -> Tensor:
        inputs, classes = batch
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.model(inputs).float(), classes)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def converted(self, step: Any) -> None:
        for inputs, classes in step.batches(self.data):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(self.model(inputs).float(), classes)
            step.backward(loss, mean_of=len(inputs))
        step.update(clip=1.0)


class Dcgan(Conversion):
    """Two models with BatchNorm, updated one after the other on the same fakes."""

    def __init__(self) -> None:
        self.judge = nn.Sequential(
            nn.Conv2d(1, 4, 4, 2, 1), nn.BatchNorm2d(4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 1)
        )
        self.maker = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        self.judge_optimizer = torch.optim.Adam(self.judge.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.maker_optimizer = torch.optim.Adam(self.maker.parameters(), lr=2e-3, betas=(0.5, 0.999))
        self.attached = (self.judge, self.maker, self.judge_optimizer, self.maker_optimizer)
        self.data = (images(), torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3)))

    def verdict(self, pictures: Tensor, label: float) -> Tensor:
        logits = self.judge(pictures)
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, label))

    def plain(self, *batch: Tensor) -> Tensor:
        real, noise = batch
        self.judge.zero_grad()
        self.verdict(real, 1.0).backward()
        fake = self.maker(noise).view_as(real)
        self.verdict(fake.detach(), 0.0).backward()
        self.judge_optimizer.step()
        self.maker.zero_grad()
        loss = self.verdict(fake, 1.0)
        loss.backward()
        self.maker_optimizer.step()
        return loss

    def converted(self, step: Any) -> None:
        fakes = []
        with step.part(self.judge_optimizer):
            for real, noise in step.batches(self.data):
                fakes.append(self.maker(noise).view_as(real))
                loss = self.verdict(real, 1.0) + self.verdict(fakes[-1].detach(), 0.0)
                step.backward(loss, mean_of=len(real))
        for fake in fakes:
            step.backward(self.verdict(fake, 1.0), mean_of=len(fake))
        step.update()


class ActorCritic(Conversion):
    """Episodes of a bandit; the critic is updated first, and the actor with its new estimate."""

    def __init__(self) -> None:
        self.actor = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
        self.critic = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), lr=0.01)
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=0.01)
        self.attached = (self.actor, self.critic, self.actor_optimizer, self.critic_optimizer)
        generator = torch.Generator().manual_seed(4)
        self.data = (torch.randn(SAMPLES, 5, generator=generator), torch.rand(SAMPLES, 3, generator=generator))

    def play(self, states: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
        actions = self.actor(states).argmax(1, keepdim=True)
        return actions, rewards.gather(1, actions)

    def actor_loss(self, states: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        chosen = F.log_softmax(self.actor(states), dim=1).gather(1, actions)
        advantages: Tensor = (returns - self.critic(states)).detach()
        return -(chosen * advantages).mean()

    def plain(self, *batch: Tensor) -> Tensor:
        states, rewards = batch
        actions, returns = self.play(states, rewards)
        self.critic_optimizer.zero_grad()
        F.mse_loss(self.critic(states), returns).backward()
        self.critic_optimizer.step()
        self.actor_optimizer.zero_grad()
        loss = self.actor_loss(states, actions, returns)
        loss.backward()
        self.actor_optimizer.step()
        return loss

    def converted(self, step: Any) -> None:
        with step.part(self.critic_optimizer):
            for states, rewards in step.batches(self.data):
                _, returns = self.play(states, rewards)
                step.backward(F.mse_loss(self.critic(states), returns), mean_of=len(states))
        for states, rewards in step.batches(self.data):
            actions, returns = self.play(states, rewards)
            step.backward(self.actor_loss(states, actions, returns), mean_of=len(states))
        step.update()


class Clip(Conversion):
    """Two encoders and a contrastive loss over the samples of all ranks, in both directions."""

    def __init__(self) -> None:
        self.model = nn.ModuleDict({"left": nn.Linear(8, 4), "right": nn.Linear(6, 4)})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.attached = (self.model, self.optimizer)
        generator = torch.Generator().manual_seed(2)
        hidden = torch.randn(SAMPLES, 5, generator=generator)
        mixers = torch.randn(5, 8, generator=generator), torch.randn(5, 6, generator=generator)
        self.data = (hidden @ mixers[0], hidden @ mixers[1])

    def encode(self, xs: Tensor, ys: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.model["left"](xs)), F.normalize(self.model["right"](ys))

    def plain(self, *batch: Tensor) -> Tensor:
        xs, ys = batch
        left, right = self.encode(xs, ys)
        numbers = torch.arange(len(left))
        loss = F.cross_entropy(10 * left @ right.T, numbers) + F.cross_entropy(10 * right @ left.T, numbers)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    def converted(self, step: Any) -> None:
        for xs, ys in step.batches(self.data):
            left, right = self.encode(xs, ys)
            (lefts, own), (rights, _) = step.gather(left), step.gather(right)
            numbers = torch.arange(len(lefts))[own]
            loss = F.cross_entropy(10 * left @ rights.T, numbers) + F.cross_entropy(10 * right @ lefts.T, numbers)
            step.backward(loss, mean_of=len(left))
        step.update()


CONVERSIONS: dict[str, type[Conversion]] = {
    "nanogpt": NanoGPT,
    "makemore": Makemore,
    "mnist": Mnist,
    "vae": Vae,
    "super_resolution": SuperResolution,
    "gcn": Gcn,
    "transformer": TransformerLm,
    "llama": Llama,
    "lora": Lora,
    "mixed_precision": MixedPrecision,
    "dcgan": Dcgan,
    "actor_critic": ActorCritic,
    "clip": Clip,
}


class RecordedStep:
    """A step that notes which samples its batches have."""

    def __init__(self, step: Any, samples: list[int]) -> None:
        self._step = step
        self._samples = samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def batches(self, data: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
        self._samples.clear()
        for *batch, numbers in self._step.batches((*data, NUMBERS)):
            self._samples.extend(numbers.tolist())
            yield batch


NUMBERS = torch.arange(SAMPLES)


def make(name: str) -> Conversion:
    torch.manual_seed(1)
    return CONVERSIONS[name]()


def main(name: str, result: Path) -> None:
    killed = result.with_suffix(".killed")
    project = make(name)
    session = shoal.Session(STEPS, project.batch, settings={"train.pin": "off"}, **project.session)
    session.attach(*project.attached)
    for step in session:
        if killed.exists() and session.world_size == 1 and step.number < STEPS - 5:
            # Its restart imports torch: the training is not to end before it is back.
            time.sleep(0.25)
        with step:
            if step.number == 10 and session.rank == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            project.converted(step)
    if session.is_main:
        result.write_text(json.dumps({"ranks": session.world_size}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
