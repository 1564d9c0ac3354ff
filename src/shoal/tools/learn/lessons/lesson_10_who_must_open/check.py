"""Shut the firewalls of two nodes, let doctor find which one matters, open that one, and look at who dialled."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result

SCRIPT = Path(__file__).with_name("ring.py")
NODES = ("node1", "node2")
PORTS = "22,29500"


def run(experiment: Experiment) -> Result:
    name = f"learn-10-{os.getpid()}"
    lab = ("--name", name)
    experiment.at_end("lab", "down", *lab)
    up = experiment.shoal("lab", "up", "2", *lab, "--json").json()
    addresses = {node["name"]: node["address"] for node in up["nodes"]}
    for node in NODES:
        experiment.shoal("lab", "firewall", node, "--allow", PORTS, *lab)
    doctor = ("doctor", "--on", f"lab:{name}", "--port", "29500", "--json")
    before = blocked(experiment.shoal(*doctor, codes=(0, 1)).json())
    machines = sorted({finding["node"] for finding in before})
    for finding in before:
        rule = shlex.split(finding["fix"].removeprefix("sudo "))
        experiment.shoal("lab", "exec", finding["node"], *lab, "--", *rule)
    # The ring is the proof of the short form.
    proof = ("--no-proof",) if experiment.is_quick else ()
    after = experiment.shoal(*doctor, *proof, codes=(0, 1)).json()
    (experiment.folder / SCRIPT.name).write_text(SCRIPT.read_text())
    experiment.shoal("run", "--on", f"lab:{name}", "--port", "29500", "--out", "ring", SCRIPT.name)
    ranks = [json.loads((experiment.folder / f"ring-{rank}.json").read_text()) for rank in (0, 1)]
    dialled = [(rank["node"], address) for rank in ranks for address in rank["dialled"]]
    expected = [("node2", addresses["node1"])]
    rounds = list(zip(*(rank["rounds"] for rank in ranks), strict=True))
    return Result(
        theory={"machine": "node1", "rule": "address"},
        measured={
            "machine": None if not machines else machines[0] if len(machines) == 1 else "both",
            "rule": kind_of_rule(before, addresses),
        },
        checks=[
            Check("after the rule that doctor printed, doctor is content", bool(after["healthy"])),
            Check("node2 dialled node1, once", dialled == expected, describe_dialled(dialled)),
            Check("the ring by hand gave what gloo's all-reduce gave", all(rank["is_equal"] for rank in ranks)),
            Check(
                "each rank sent 2(N−1)/N of the gradients",
                all(rank["sent_of_gradients"] == 2 * (len(ranks) - 1) / len(ranks) for rank in ranks),
                f"{ranks[0]['sent_of_gradients']:.2f}×",
            ),
        ],
        figures={
            "dialled": f"{describe_dialled(dialled)}.",
            "rounds": len(rounds),
            "story": "; ".join(f"{number}: {describe(moves)}" for number, moves in enumerate(rounds, 1)),
        },
        picture=Bars(
            "Connections that gloo needs and a firewall blocks",
            "",
            NODES,
            {"before": count(before), "after the rule": count(blocked(after))},
        ),
    )


def count(findings: list[dict[str, Any]]) -> list[float]:
    """Return how many of the findings are of each node."""
    return [float(sum(finding["node"] == node for finding in findings)) for node in NODES]


def blocked(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return doctor's findings of connections that gloo needs and that do not get through."""
    return [finding for finding in document["findings"] if finding["id"] == "reach.pair"]


def kind_of_rule(findings: list[dict[str, Any]], addresses: dict[str, str]) -> str | None:
    """Return what the rules let in; None if they are none of these."""
    peers = {finding["node"]: set(addresses.values()) - {addresses[finding["node"]]} for finding in findings}
    by_address = [any(f"saddr {peer} accept" in one["fix"] for peer in peers[one["node"]]) for one in findings]
    return "address" if by_address and all(by_address) else None


def describe_dialled(dialled: list[tuple[str, str]]) -> str:
    return " and ".join(f"{node} dialled {address}" for node, address in dialled) or "no rank dialled"


def describe(moves: tuple[dict[str, Any], ...]) -> str:
    return " and ".join(f"{move['from']} sends chunk {move['chunk'] + 1} to {move['to']}" for move in moves)
