"""Train one model from one seed with three learning rates for a large batch."""

from __future__ import annotations

from itertools import pairwise

from shoal.tools.learn.experiment import Check, Experiment, Lines, Result, TrainedRun

SMALL, LARGE, RATE = 2, 128, 0.002
FACTOR = LARGE / SMALL
PEAKS = {"keep": RATE, "linear": FACTOR * RATE, "root": FACTOR**0.5 * RATE}
# What may differ from machine to machine, and from seed to seed, is less.
CLEAR = 0.05
# One thread and characters as tokens: small enough for any machine.
SETTINGS = """\
train = {{ global_batch = {batch}, warmup_steps = 10, seed = 1, eval_every = 1000000, compile = "off" }}
model = {{ layers = 2, heads = 2, width = 32, seq_len = 32 }}
data = {{ tokenizer = "char" }}
run = {{ threads = 1 }}
"""


def run(experiment: Experiment) -> Result:
    steps = int(experiment.steps(60, quick=40))
    (experiment.folder / "small.toml").write_text(SETTINGS.format(batch=LARGE))
    # For the linear rule shoal is told the small batch, and scales by itself; for the others, the rate as it is.
    runs = {
        name: experiment.train(
            name,
            *("--on", "local:2", "--config", "small.toml", "--steps", str(steps)),
            *("--set", f"train.lr={RATE if name == 'linear' else peak:g}"),
            *("--set", f"train.base_batch={SMALL if name == 'linear' else LARGE}"),
        )
        for name, peak in PEAKS.items()
    }
    losses = {name: float(trained.manifest["val_loss"]) for name, trained in runs.items()}
    order = sorted(losses, key=lambda name: losses[name])
    peaks = {name: max(event["lr"] for event in trained.events("step")) for name, trained in runs.items()}
    gaps = [losses[worse] - losses[better] for better, worse in pairwise(order)]
    return Result(
        theory={"best": "root", "worst": "linear"},
        measured={"best": order[0], "worst": order[-1]},
        checks=[
            Check(
                "each run reached the rate of its rule",
                all(abs(peaks[name] / peak - 1) < 1e-6 for name, peak in PEAKS.items()),
                ", ".join(f"{name} {peak:g}" for name, peak in peaks.items()),
            ),
            Check(
                f"each run had {steps} batches of {LARGE} sequences",
                all([event["samples"] for event in one.events("step")] == steps * [LARGE] for one in runs.values()),
            ),
            Check(f"the losses are at least {CLEAR} apart", min(gaps) >= CLEAR, f"{min(gaps):.2f}"),
        ],
        figures={name: losses[name] for name in PEAKS},
        picture=Lines(
            "One batch of 128, three learning rates",
            "step",
            "training loss",
            {f"{name}: {PEAKS[name]:g}": curve_of(trained) for name, trained in runs.items()},
        ),
    )


def curve_of(trained: TrainedRun) -> tuple[list[float], list[float]]:
    losses = {event["step"]: event["loss"] for event in [*trained.events("step"), *trained.events("loss")]}
    return sorted(losses), [losses[step] for step in sorted(losses)]
