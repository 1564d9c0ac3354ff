"""Measure five ways to exchange gradients over a slow link: bytes of a batch, and their order by speed."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result, Value

LEVERS = ("stock", "ddp", "accumulate:4", "fp16", "int8")
# From the fastest to the slowest over 100 Mbit/s, by the bytes of a batch and what is hidden behind backward.
THEORY = "aifds"
PARAMETERS, BLOCK = 1_663_488, 256
# Levers that are closer change places from run to run.
_CLOSE = 1.1


def run(experiment: Experiment) -> Result:
    levers = ("ddp", "int8") if experiment.is_quick else LEVERS
    bench = ("bench", "levers", "--on", "lab:2,link=100mbit", "--levers", ",".join(levers), "--out", "levers")
    rows = experiment.shoal(*bench, "--steps", experiment.steps(10, quick=4), "--json").json()["rows"]
    for row in rows:
        experiment.note_load(row["other_programs_cores"])
    measured = {row["lever"]: row for row in rows if row["lever"] in levers}
    batches = {lever: 4 if lever == "accumulate:4" else 1 for lever in measured}
    megabytes: dict[str, Value | None] = {}
    for lever, row in measured.items():
        sent = row["wire_bytes_per_step"]
        megabytes[lever.partition(":")[0]] = None if sent is None else 1e-6 * sent / batches[lever]
    fastest = sorted(measured, key=lambda lever: -measured[lever]["tokens_per_s"])
    seen = "".join(lever[0] for lever in fastest)
    order = str(experiment.answers.get("order", THEORY)).lower()
    given = "".join(letter for letter in order if letter in seen)
    swaps = count_swaps(given, {lever[0]: row["tokens_per_s"] for lever, row in measured.items()})
    return Result(
        theory={
            "ddp": 4e-6 * PARAMETERS,
            "accumulate": 1e-6 * PARAMETERS,
            "fp16": 2e-6 * PARAMETERS,
            "int8": (BLOCK + 4) / BLOCK * 1e-6 * PARAMETERS,
            "order": THEORY,
        },
        measured={**{name: value for name, value in megabytes.items() if name != "stock"}, "order": seen},
        checks=[
            Check(
                "your order, with at most one swap of neighbours that are more than 10% apart",
                swaps <= 1,
                f"{given}, measured {seen}",
                is_timing=True,
            ),
            Check("every lever was measured", measured.keys() == set(levers), ", ".join(measured)),
        ],
        figures={"order": ", ".join(f"{lever} {measured[lever]['tokens_per_s']:,.0f}" for lever in fastest)},
        picture=Bars(
            "Tokens per second over 100 Mbit/s",
            "tokens/s",
            fastest,
            {"measured": [measured[lever]["tokens_per_s"] for lever in fastest]},
        ),
    )


def count_swaps(given: str, speeds: Mapping[str, float]) -> int:
    """Return how many pairs stand the other way round in this order; those of nearly the same speed do not count."""
    return sum(
        speeds[later] > _CLOSE * speeds[one] for number, one in enumerate(given) for later in given[number + 1 :]
    )
