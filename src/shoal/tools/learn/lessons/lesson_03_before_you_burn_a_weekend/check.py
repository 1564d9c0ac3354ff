"""Compute the exchange of a large model on four links, and compare with `shoal plan`."""

from __future__ import annotations

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result

PARAMETERS = 760e6
GRADIENT_BYTES = 2
NODES = 2
PAYLOAD = 0.94
LINKS = {
    "gbit_1": ("1gbe", 1e9),
    "gbit_2_5": ("2.5gbe", 2.5e9),
    "gbit_10": ("10gbe", 10e9),
    "gbit_400": ("400gbe", 4e11),
}


def run(experiment: Experiment) -> Result:
    sent = 2 * (NODES - 1) / NODES * PARAMETERS * GRADIENT_BYTES
    theory = {name: 8 * sent / (PAYLOAD * rate) for name, (_, rate) in LINKS.items()}
    links = ",".join(link for link, _ in LINKS.values())
    words = ("--params", "760e6", "--grad-dtype", "bf16", "--sync", "ddp", "--nodes", str(NODES), "--links", links)
    rows = {row["link"]: row for row in experiment.shoal("plan", *words, "--json").json()["links"]}
    planned = {name: float(rows[link]["comm_s"]) for name, (link, _) in LINKS.items()}
    wires = [name for name in LINKS if name != "gbit_10"]
    checks = [
        Check("the plan counts the same bytes", rows["1gbe"]["wire_bytes"] == sent, f"{sent / 1e9:.2f} GB"),
        Check(
            "where the wire is the limit, the plan is within 10% of the formula",
            all(abs(planned[name] / theory[name] - 1) <= 0.1 for name in wires),
            ", ".join(f"{LINKS[name][0]} {planned[name]:.3g} s" for name in wires),
        ),
        Check(
            "on 10 Gbit/s gloo is the limit, so the plan is longer",
            planned["gbit_10"] > 1.1 * theory["gbit_10"],
            f"{planned['gbit_10']:.2f} s",
        ),
    ]
    return Result(
        theory=theory,
        checks=checks,
        figures={
            "gradients": sent / 1e9,
            "one": theory["gbit_1"],
            "fast": 1e3 * theory["gbit_400"],
            "ten": theory["gbit_10"],
            "plan_ten": planned["gbit_10"],
            "compute": rows["1gbe"]["compute_s"],
        },
        picture=Bars(
            "Exchanging 1.52 GB of gradients between two nodes",
            "seconds",
            [link for link, _ in LINKS.values()],
            {"formula": list(theory.values()), "shoal plan": list(planned.values())},
        ),
    )
