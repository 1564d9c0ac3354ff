"""How wrong the plan is: predicted against measured step times over a grid of labs, models and levers.

    .venv/bin/python benchmarks/plan_grid.py -o grid.json --picture grid.png    # needs the right to make a lab; 25 min

Each lab is probed once, before any run on it. Then every model trains on it with every lever: micro-batches between
two exchanges (1, 4) and the type on the wire (fp32, fp16). Predictions are made from the profile alone. For each lab
and model the lever with the highest predicted speed is held against the one that was really the fastest.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import cycle, groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import options
from shoal.tools.draw.palette import IDEAL, SERIES
from shoal.tools.draw.pictures import new_figure, save_figure, set_log_ticks
from shoal_lab.lab import Lab
from shoal_lab.spec import make_spec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Name, flags of `train`, sequences of a micro-batch.
MODELS = {"grammar": ((), 8), "depth:6": (("--depth", "6"), 4)}
LINKS = ("100mbit", "1gbit", "none")
ACCUMULATION = (1, 4)
WIRES = ("fp32", "fp16")
# Enough steps for a median, and no more time than this.
RUN_S, LEAST_STEPS, MOST_STEPS = 10.0, 6, 40
CLOSE = 0.05


@dataclass(frozen=True)
class Case:
    nodes: int
    link: str
    model: str
    accumulation: int
    wire: str
    tokens: int
    predicted_s: float
    measured_s: float
    phases: dict[str, list[float]]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def predicted_speed(self) -> float:
        return self.tokens / self.predicted_s

    @property
    def measured_speed(self) -> float:
        return self.tokens / self.measured_s


def main() -> None:
    quick = {"nodes": "2", "links": "1gbit", "models": "grammar", "accumulation": "1", "wires": "fp32", "budget": 10}
    parser = options(__doc__, quick=quick)
    parser.add_argument("--nodes", default="2,3")
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--accumulation", default=",".join(map(str, ACCUMULATION)), help="micro-batches of a step")
    parser.add_argument("--wires", default=",".join(WIRES))
    parser.add_argument("--budget", type=int, default=60, help="seconds of each probe")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for profiles and runs, to look at or learn from")
    parser.add_argument("--picture", type=Path)
    chosen = parser.parse_args()
    levers = list(product(chosen.models.split(","), map(int, chosen.accumulation.split(",")), chosen.wires.split(",")))
    cases: list[Case] = []
    for nodes, link in product(map(int, chosen.nodes.split(",")), chosen.links.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            kept = chosen.keep / f"{nodes}-{link}" if chosen.keep else Path(folder)
            kept.mkdir(parents=True, exist_ok=True)
            cases += on_lab(nodes, link, levers, chosen.budget, kept)
    document = {"cases": [asdict(case) for case in cases], **verdict(cases)}
    if chosen.output:
        chosen.output.write_text(json.dumps(document, indent=1) + "\n")
    if chosen.picture:
        draw(cases, chosen.picture)
    print(json.dumps(verdict(cases), indent=2))


def on_lab(nodes: int, link: str, levers: list[tuple[str, int, str]], budget_s: int, folder: Path) -> list[Case]:
    # Three nodes on two cores: each gets its part of them, so that every step has the same.
    cores = os.cpu_count() or 1
    cpu = None if nodes <= cores else f"{cores / nodes:.2f}"
    lab = Lab.build(make_spec(nodes, name=f"grid-{os.getpid()}", link=link, cpu=cpu), owner=os.getpid())
    try:
        profile = folder / "profile.toml"
        names = [word for name in dict.fromkeys(model for model, _, _ in levers) for word in ("--model", name)]
        _shoal("probe", "--on", f"lab:{lab.name}", "--budget", str(budget_s), *names, "-o", str(profile))
        return [one_case(lab, nodes, link, model, accumulation, wire, profile) for model, accumulation, wire in levers]
    finally:
        lab.close()


def one_case(lab: Lab, nodes: int, link: str, model: str, accumulation: int, wire: str, profile: Path) -> Case:
    flags, micro_batch = MODELS[model]
    run = profile.parent / f"{model.replace(':', '-')}-{accumulation}-{wire}"
    batch = nodes * micro_batch * accumulation
    settings = ("--set", "train.eval_every=100000", "--set", "train.checkpoint_every=100000")
    words = ("train", "grammar", "--on", f"lab:{lab.name}", *flags, *settings, "--wire", wire, "--out", str(run))
    sizes = ("--global-batch", str(batch), "--micro-batch", str(micro_batch))
    steps = max(LEAST_STEPS, min(MOST_STEPS, int(RUN_S / _expected_s(micro_batch * accumulation, link, model))))
    manifest = json.loads(_shoal(*words, *sizes, "--steps", str(steps), "--profile", str(profile), "--json"))
    return _told(Case(nodes, link, model, accumulation, wire, *_outcome(manifest)))


def _expected_s(sequences: int, link: str, model: str) -> float:
    """A guess by rule of thumb: the plan's own figure must not decide how it is tested."""
    sequence_s, exchange_s = {"grammar": (0.03, 0.05), "depth:6": (0.18, 0.4)}[model]
    return sequences * sequence_s + exchange_s * (10 if link == "100mbit" else 1)


def _outcome(manifest: dict[str, Any]) -> tuple[int, float, float, dict[str, list[float]]]:
    said, seen = manifest["prediction"], manifest["phases"]
    measured = {
        "compute": seen["forward"] + seen["backward"],
        "exposed": seen["exposed"],
        "wait": seen["wait"],
        "optimizer": seen["optimizer"],
        "other": seen["data"] + seen["other"],
        "comm": 1e-3 * manifest["allreduce_p50_ms"],
    }
    phases = {name: [round(said[f"{name}_s"], 5), round(seconds, 5)] for name, seconds in measured.items()}
    tokens = round(said["tokens_per_s"] * said["step_s"])
    return tokens, said["step_s"], manifest["step_s_measured"], phases


def _told(case: Case) -> Case:
    phases = "  ".join(f"{name} {said * 1e3:.0f}/{seen * 1e3:.0f}" for name, (said, seen) in case.phases.items())
    where = f"{case.nodes} nodes {case.link:>7} {case.model:8} K={case.accumulation} {case.wire}"
    times = f"predicted {case.predicted_s * 1e3:7.1f} ms  measured {case.measured_s * 1e3:7.1f} ms  {case.error:+6.1%}"
    print(f"{where}  {times}   [{phases}]  load {os.getloadavg()[0]:.1f}", flush=True)
    return case


def verdict(cases: list[Case]) -> dict[str, Any]:
    errors = [abs(case.error) for case in cases]
    groups = [list(group) for _, group in groupby(cases, key=lambda case: (case.nodes, case.link, case.model))]
    lost = [_lost(group) for group in groups]
    return {
        "runs": len(cases),
        "median error %": round(100 * statistics.median(errors), 1),
        "worst error %": round(100 * max(errors), 1),
        "recommended lever within 5% of the best": f"{sum(each <= CLOSE for each in lost)} of {len(lost)}",
        "most lost by following it %": round(100 * max(lost), 1),
    }


def _lost(group: list[Case]) -> float:
    advised = max(group, key=lambda case: case.predicted_speed)
    return 1 - advised.measured_speed / max(case.measured_speed for case in group)


def draw(cases: list[Case], path: Path) -> None:
    found = verdict(cases)
    errors = f"{found['median error %']:g}% off in the median of {found['runs']} runs, {found['worst error %']:g}%"
    with new_figure(8, 5.6, f"Predicted steps are {errors} at worst") as figure:
        _draw_steps(figure.subplots(), cases)
    save_figure(figure, path, "the picture goes where --picture says")


def _draw_steps(axes: Axes, cases: list[Case]) -> None:
    low, high = (f(f(case.predicted_s, case.measured_s) for case in cases) for f in (min, max))
    ends = [0.8 * low, 1.25 * high]
    axes.fill_between(ends, [0.9 * end for end in ends], [1.1 * end for end in ends], color=IDEAL, alpha=0.2, lw=0)
    axes.plot(ends, ends, color=IDEAL, linestyle="--", lw=1, label="as measured, ±10%")
    places = sorted({(case.nodes, case.link) for case in cases})
    for (nodes, link), marker, colour in zip(places, cycle("os^vDP"), cycle(SERIES), strict=False):
        here = [case for case in cases if (case.nodes, case.link) == (nodes, link)]
        x, y = [case.measured_s for case in here], [case.predicted_s for case in here]
        name = f"{nodes} nodes, {'unshaped' if link == 'none' else link}"
        axes.scatter(x, y, marker=marker, s=28, color=colour, label=name)
    axes.set(xscale="log", yscale="log", xlabel="measured step (seconds)", ylabel="predicted step (seconds)")
    for axis in (axes.xaxis, axes.yaxis):
        set_log_ticks(axis, *ends)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)


def _shoal(*words: str) -> str:
    done = subprocess.run((sys.executable, "-m", "shoal", *words), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"shoal {' '.join(words)}\n{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
