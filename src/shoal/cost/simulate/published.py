"""The simulator against what others measured and published. No constant here was chosen to hit a figure: each is
published, follows from published ones, or stands in the row's assumptions.

Sources: [L] Llama Team, The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3. [R] Kokolis et al., Revisiting
Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680, HPCA 2025. [H] Sergeev and Del Balso,
Horovod, arXiv 1802.05799, and Horovod's docs/benchmarks.rst. [T] TensorFlow benchmarks of May 2017, tensorflow/docs
site/en/r1/guide/performance/benchmarks.md. [D] Li et al., PyTorch Distributed, arXiv 2006.15704, VLDB 2020. [N] He et
al., Deep Residual Learning, arXiv 1512.03385, table 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.cost.collectives import ring_bytes
from shoal.cost.simulate.forecast import Forecast, simulate
from shoal.cost.simulate.interval import best_every
from shoal.cost.simulate.scenario import Checkpoints, Cluster, Failures, Recovery, Scenario, divided_work
from shoal.cost.simulate.straggling import Lognormal, Slowest, Steady

HOUR = 3600.0
DAY = 24 * HOUR
GPUS_PER_NODE = 8

# [L]: 54 days, 16,384 GPUs, 419 unexpected interruptions, above 90% effective time.
LLAMA_GPUS, LLAMA_DAYS, LLAMA_INTERRUPTIONS = 16_384, 54, 419
# [L]: 405e9 parameters, 16M tokens a step, about 400 TFLOP/s a GPU; six operations a parameter and token.
LLAMA_PARAMETERS, LLAMA_STEP_TOKENS, LLAMA_FLOPS = 405e9, 16e6, 400e12
LLAMA_STEP_S = 6 * LLAMA_PARAMETERS * LLAMA_STEP_TOKENS / (LLAMA_GPUS * LLAMA_FLOPS)
# bf16 weights and fp32 weights and moments, at the storage's sustained 2 TB/s [L].
LLAMA_CHECKPOINT_S = LLAMA_PARAMETERS * 14 / 2e12
# [L]: the cluster had 24K GPUs, 16K of which took part.
LLAMA_SPARES = (24_000 - LLAMA_GPUS) // GPUS_PER_NODE
# [R]: measured 7.9 h at 1,024 GPUs and 47.7 days at 8; projected from 6.50 failures in 1,000 node-days: the others.
MEASURED_MTTF_H = {8: 47.7 * 24, 1024: 7.9}
PROJECTED_MTTF_H = {16_384: 1.8, 131_072: 0.23}
PROJECTED_FROM = 6.5e-3 / DAY
# [T]: images a second of one P100, batch 64, synthetic. ResNet-101 lies between ResNet-50 (219) and -152 (91.8) as its
# operations do [N]: 7.6 between 3.8 and 11.3.
P100_S = {
    "Inception V3": 64 / 142,
    "ResNet-101": 64 * (1 / 219 + (7.6 - 3.8) / (11.3 - 3.8) * (1 / 91.8 - 1 / 219)),
    "VGG-16": 64 / 154,
}
PARAMETERS = {"Inception V3": 23.8e6, "ResNet-101": 44.5e6, "VGG-16": 138.4e6, "ResNet-50": 25.6e6}
HOROVOD = {"Inception V3": 0.90, "ResNet-101": 0.90, "VGG-16": 0.68}
# Backward does twice the work of forward, and only backward can hide an exchange.
BACKWARD = 2 / 3


@dataclass(frozen=True)
class Row:
    what: str
    source: str
    published: str
    simulated: str
    assumptions: str = ""

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def validation(seeds: int = 20) -> list[Row]:
    return [*_llama_rows(seeds), *_reliability_rows(seeds), *_horovod_rows(), *_ddp_rows()]


# Failures


def llama(mtbf_s: float, down_s: float, seeds: int = 20) -> Forecast:
    """`down_s` from a failure to the next step, which nobody published."""
    nodes = LLAMA_GPUS // GPUS_PER_NODE
    cluster = Cluster(
        nodes, divided_work(LLAMA_STEP_S, nodes, "strong"), LLAMA_STEP_TOKENS, GPUS_PER_NODE, spares=LLAMA_SPARES
    )
    checkpoints, failures = Checkpoints(1, LLAMA_CHECKPOINT_S), Failures(mtbf_s)
    every = best_every(cluster, failures, Steady(), checkpoints)
    recovery = Recovery("restart", 0.0, down_s, 0.0, 0.0, repair_s=DAY)
    world = Scenario(cluster, failures, recovery, Checkpoints(every, LLAMA_CHECKPOINT_S), LLAMA_DAYS * DAY)
    return simulate(world, seeds)


def llama_mtbf_s() -> float:
    """Of a node, from the interruptions themselves."""
    return LLAMA_DAYS * DAY * (LLAMA_GPUS // GPUS_PER_NODE) / LLAMA_INTERRUPTIONS


def mttf_h(gpus: int, node_rate: float, seeds: int = 20) -> float:
    """The simulator's mean time to failure of a whole job, from about 200 failures a seed."""
    nodes = max(1, gpus // GPUS_PER_NODE)
    horizon_s = 200 / (nodes * node_rate)
    cluster = Cluster(nodes, divided_work(60.0, nodes, "strong"), 1.0, GPUS_PER_NODE, spares=nodes)
    recovery = Recovery("restart", 0.0, 0.0, 0.0, 0.0, 0.0)
    found = simulate(Scenario(cluster, Failures(1 / node_rate), recovery, Checkpoints(None, 0.0), horizon_s), seeds)
    return horizon_s / found.failures.median / HOUR


def _llama_rows(seeds: int) -> list[Row]:
    own, other = llama(llama_mtbf_s(), 600.0, seeds), llama(1 / PROJECTED_FROM, 600.0, seeds)
    known = "node MTBF of 264 days from the 419 themselves: says only that the engine draws what it is told"
    rows = [
        Row("interruptions, 16,384 GPUs, 54 days", "[L]", "419", _span(own, "failures"), known),
        Row("the same, foretold", "[L]", "419", _span(other, "failures"), "the rate of another cluster, from [R]"),
    ]
    for minutes in (5, 10, 15, 20):
        found = llama(llama_mtbf_s(), 60.0 * minutes, seeds)
        text = f"{minutes} min from failure to next step; checkpoints of 2.8 s at Daly's interval"
        rows.append(Row("effective time, the same", "[L]", "> 90%", _span(found, "goodput"), text))
    return rows


def _reliability_rows(seeds: int) -> list[Row]:
    measured = 1 / (MEASURED_MTTF_H[1024] * HOUR * 128)
    rows = [
        _mttf_row(gpus, hours, measured, "node MTBF of 1,011 h, from the 7.9 h", seeds)
        for gpus, hours in MEASURED_MTTF_H.items()
    ]
    rows += [
        _mttf_row(gpus, hours, PROJECTED_FROM, "6.50 failures in 1,000 node-days", seeds)
        for gpus, hours in PROJECTED_MTTF_H.items()
    ]
    clash = "the same rate: measured and projected figures of [R] do not lie on one line"
    return [*rows, _mttf_row(1024, MEASURED_MTTF_H[1024], PROJECTED_FROM, clash, seeds)]


def _mttf_row(gpus: int, published_h: float, rate: float, assumptions: str, seeds: int) -> Row:
    what = f"mean time to failure, {gpus:,} GPUs"
    return Row(what, "[R]", _hours(published_h), _hours(mttf_h(gpus, rate, seeds)), assumptions)


# Communication


def exchange_s(model: str, ranks: int, link_gbps: float) -> float:
    """A ring all-reduce of fp32 gradients; each machine's link carries the ring once, however many ranks it has."""
    return 8e-9 * ring_bytes(ranks, round(4 * PARAMETERS[model])) / link_gbps


def efficiency(compute_s: float, exposed_s: float) -> float:
    return compute_s / (compute_s + exposed_s)


def bounds(compute_s: float, exchanged_s: float) -> tuple[float, float]:
    """Nothing of the exchange hidden, and as much as backward can hide."""
    return efficiency(compute_s, exchanged_s), efficiency(compute_s, max(0.0, exchanged_s - BACKWARD * compute_s))


def hidden_part(model: str) -> float:
    """Of the exchange, if the published efficiency is right."""
    exposed_s = P100_S[model] * (1 / HOROVOD[model] - 1)
    return 1 - exposed_s / exchange_s(model, 512, 25)


def _horovod_rows() -> list[Row]:
    hidden = hidden_part("VGG-16")
    rows = []
    for model, published in HOROVOD.items():
        exchanged_s = exchange_s(model, 512, 25)
        low, high = bounds(P100_S[model], exchanged_s)
        rows.append(
            Row(
                f"efficiency of {model}, 512 GPUs",
                "[H]",
                f"{published:.0%}",
                f"{low:.0%}–{high:.0%}",
                "P100 speeds of [T]; 25 Gbit/s a server at full rate; nothing hidden – all that backward can hide",
            )
        )
        if model != "VGG-16":
            found = efficiency(P100_S[model], (1 - hidden) * exchanged_s)
            text = f"hidden part of {hidden:.0%} taken from VGG-16's 68%"
            rows.append(Row(f"the same, {model} from VGG-16", "[H]", f"{published:.0%}", f"{found:.0%}", text))
    return rows


def _ddp_rows() -> list[Row]:
    compute_s = 64 / (219 * 15.7 / 10.6)
    low, high = bounds(compute_s, exchange_s("ResNet-50", 256, 100))
    text = "P100's 219 images/s [T] times fp32 peaks 15.7 ÷ 10.6 for a V100, batch 64; 100 Gbit/s a server"
    rows = [Row("efficiency of ResNet-50, 256 GPUs", "[D]", "near-linear", f"{low:.0%}–{high:.0%}", text)]
    for sigma in (0.01, 0.03):
        found = 1 / Slowest(Lognormal(sigma), 256).mean
        text = f"slowest of 256 ranks alone, lognormal:{sigma:g}"
        rows.append(Row("the same, stragglers", "[D]", "near-linear", f"{found:.0%}", text))
    return rows


def _span(found: Forecast, name: str) -> str:
    if name == "failures":
        band = found.failures
        return f"{band.median:.0f} ({band.low:.0f}–{band.high:.0f})"
    band = found.goodput
    return f"{band.median:.1%} ({band.low:.1%}–{band.high:.1%})"


def _hours(hours: float) -> str:
    return f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.3g} h"
