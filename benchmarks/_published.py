"""Compare the simulator with published measurements. No constant here was chosen to hit a figure: each is published,
follows from published ones, or is named in the row's assumptions.

Sources: [L] Llama Team, The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3. [R] Kokolis et al., Revisiting
Reliability in Large-Scale Machine Learning Research Clusters, arXiv 2410.21680, HPCA 2025. [H] Sergeev and Del Balso,
Horovod, arXiv 1802.05799, and Horovod's docs/benchmarks.rst. [T] TensorFlow benchmarks of May 2017, tensorflow/docs
site/en/r1/guide/performance/benchmarks.md. [D] Li et al., PyTorch Distributed, arXiv 2006.15704, VLDB 2020. [N] He et
al., Deep Residual Learning, arXiv 1512.03385, table 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shoal.cost.network import ring_bytes
from shoal.tools.plan.scenario import (
    Checkpoints,
    Failures,
    Lognormal,
    RecoveryModel,
    SimulatedCluster,
    SimulationScenario,
    Slowest,
    Steady,
    divided_work,
)
from shoal.tools.plan.simulation import Forecast, best_every, simulate

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
# [R]: measured 7.9 h at 1,024 GPUs and 47.7 days at 8; the others are projected from 6.50 failures in 1,000 node-days.
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
class SimulationRow:
    what: str
    source: str
    published: str
    simulated: str
    assumptions: str = ""

    def as_dict(self) -> dict[str, Any]:
        return vars(self)


def validation(seeds: int = 20) -> list[SimulationRow]:
    return [*_llama_rows(seeds), *_reliability_rows(seeds), *_horovod_rows(), *_ddp_rows()]


# Failures


def llama(mtbf_s: float, down_s: float, seeds: int = 20) -> Forecast:
    """Simulate Llama 3's training; `down_s` from a failure to the next step was not published."""
    nodes = LLAMA_GPUS // GPUS_PER_NODE
    cluster = SimulatedCluster(
        nodes, divided_work(LLAMA_STEP_S, nodes, "strong"), LLAMA_STEP_TOKENS, GPUS_PER_NODE, spares=LLAMA_SPARES
    )
    failures = Failures(mtbf_s)
    every = best_every(cluster, failures, Steady(), Checkpoints(1, LLAMA_CHECKPOINT_S))
    recovery = RecoveryModel("restart", 0.0, down_s, 0.0, 0.0, repair_s=DAY)
    checkpoints = Checkpoints(every, LLAMA_CHECKPOINT_S)
    return simulate(SimulationScenario(cluster, failures, recovery, checkpoints, LLAMA_DAYS * DAY), seeds)


def llama_mtbf_s() -> float:
    """Return the time between failures of a node, from the published interruptions."""
    return LLAMA_DAYS * DAY * (LLAMA_GPUS // GPUS_PER_NODE) / LLAMA_INTERRUPTIONS


def mttf_h(gpus: int, node_rate: float, seeds: int = 20) -> float:
    """Return the simulated mean time to failure of a whole job, from about 200 failures per seed."""
    nodes = max(1, gpus // GPUS_PER_NODE)
    horizon_s = 200 / (nodes * node_rate)
    cluster = SimulatedCluster(nodes, divided_work(60.0, nodes, "strong"), 1.0, GPUS_PER_NODE, spares=nodes)
    recovery = RecoveryModel("restart", 0.0, 0.0, 0.0, 0.0, 0.0)
    scenario = SimulationScenario(cluster, Failures(1 / node_rate), recovery, Checkpoints(None, 0.0), horizon_s)
    return horizon_s / simulate(scenario, seeds).failures.median / HOUR


def _llama_rows(seeds: int) -> list[SimulationRow]:
    def interruptions(forecast: Forecast) -> str:
        return f"{forecast.failures.median:.0f} ({forecast.failures.low:.0f}–{forecast.failures.high:.0f})"

    own, other = llama(llama_mtbf_s(), 600.0, seeds), llama(1 / PROJECTED_FROM, 600.0, seeds)
    own_rate = "node MTBF of 264 days from the 419 themselves: shows only that the engine draws what it is given"
    other_rate = "the rate of another cluster, from [R]"
    rows = [
        SimulationRow("interruptions, 16,384 GPUs, 54 days", "[L]", "419", interruptions(own), own_rate),
        SimulationRow("the same, predicted", "[L]", "419", interruptions(other), other_rate),
    ]
    for minutes in (5, 10, 15, 20):
        band = llama(llama_mtbf_s(), 60.0 * minutes, seeds).goodput
        goodput = f"{band.median:.1%} ({band.low:.1%}–{band.high:.1%})"
        text = f"{minutes} min from failure to next step; checkpoints of 2.8 s at Daly's interval"
        rows.append(SimulationRow("effective time, the same", "[L]", "> 90%", goodput, text))
    return rows


def _reliability_rows(seeds: int) -> list[SimulationRow]:
    def row(gpus: int, published_h: float, rate: float, assumptions: str) -> SimulationRow:
        simulated = _hours(mttf_h(gpus, rate, seeds))
        return SimulationRow(f"mean time to failure, {gpus:,} GPUs", "[R]", _hours(published_h), simulated, assumptions)

    measured = 1 / (MEASURED_MTTF_H[1024] * HOUR * 128)
    clash = "the same rate: measured and projected figures of [R] do not lie on one line"
    return [
        *(row(gpus, h, measured, "node MTBF of 1,011 h, from the 7.9 h") for gpus, h in MEASURED_MTTF_H.items()),
        *(row(gpus, h, PROJECTED_FROM, "6.50 failures in 1,000 node-days") for gpus, h in PROJECTED_MTTF_H.items()),
        row(1024, MEASURED_MTTF_H[1024], PROJECTED_FROM, clash),
    ]


def _hours(hours: float) -> str:
    return f"{hours / 24:.1f} days" if hours > 48 else f"{hours:.3g} h"


# Communication


def exchange_s(model: str, ranks: int, link_gbps: float) -> float:
    """Return the time of a ring all-reduce of fp32 gradients; the link of a machine carries the ring once, whatever its
    number of ranks."""
    return 8e-9 * ring_bytes(ranks, round(4 * PARAMETERS[model])) / link_gbps


def efficiency(compute_s: float, exposed_s: float) -> float:
    return compute_s / (compute_s + exposed_s)


def bounds(compute_s: float, exchanged_s: float) -> tuple[float, float]:
    """Return the efficiency with nothing of the exchange hidden, and with as much as backward can hide."""
    return efficiency(compute_s, exchanged_s), efficiency(compute_s, max(0.0, exchanged_s - BACKWARD * compute_s))


def hidden_part(model: str) -> float:
    """Return the hidden fraction of the exchange that follows from the published efficiency."""
    exposed_s = P100_S[model] * (1 / HOROVOD[model] - 1)
    return 1 - exposed_s / exchange_s(model, 512, 25)


def _horovod_rows() -> list[SimulationRow]:
    hidden = hidden_part("VGG-16")
    rows = []
    for model, published in HOROVOD.items():
        exchanged_s = exchange_s(model, 512, 25)
        low, high = bounds(P100_S[model], exchanged_s)
        text = "P100 speeds of [T]; 25 Gbit/s a server at full rate; nothing hidden – all that backward can hide"
        what, figure = f"efficiency of {model}, 512 GPUs", f"{published:.0%}"
        rows.append(SimulationRow(what, "[H]", figure, f"{low:.0%}–{high:.0%}", text))
        if model != "VGG-16":
            simulated = efficiency(P100_S[model], (1 - hidden) * exchanged_s)
            text = f"hidden part of {hidden:.0%} taken from VGG-16's 68%"
            rows.append(SimulationRow(f"the same, {model} from VGG-16", "[H]", figure, f"{simulated:.0%}", text))
    return rows


def _ddp_rows() -> list[SimulationRow]:
    compute_s = 64 / (219 * 15.7 / 10.6)
    low, high = bounds(compute_s, exchange_s("ResNet-50", 256, 100))
    text = "P100's 219 images/s [T] times fp32 peaks 15.7 ÷ 10.6 for a V100, batch 64; 100 Gbit/s a server"
    rows = [SimulationRow("efficiency of ResNet-50, 256 GPUs", "[D]", "near-linear", f"{low:.0%}–{high:.0%}", text)]
    for sigma in (0.01, 0.03):
        simulated = 1 / Slowest(Lognormal(sigma), 256).mean
        text = f"slowest of 256 ranks alone, lognormal:{sigma:g}"
        rows.append(SimulationRow("the same, stragglers", "[D]", "near-linear", f"{simulated:.0%}", text))
    return rows
