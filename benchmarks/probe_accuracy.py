"""How far the probe can be trusted: raw figures against the rate a lab was asked for, and times it has not seen.

    .venv/bin/python benchmarks/probe_accuracy.py --rounds 3       # needs the right to make a lab

Raw is TCP payload, as in iperf3. A lab gives the rate that was asked for to IP packets; of the 1,500 bytes of
each, 52 are headers (IP 20, TCP 20, time stamps 12), so payload can be at most 96.5% of it: that is the second column.
Unshaped, there is no rate to compare with, and our own probe is compared with iperf3, which must be installed.
A held-out size is one that the probe measured but did not fit. Beside it, each size of 1 MiB and more is predicted from
all others, the largest too.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import options
from shoal.cluster.cluster import start_on_nodes
from shoal.config.load import read_profile
from shoal.config.profile import CollectiveProfile, Profile
from shoal.cost.network import fit_alpha_beta
from shoal.tools.probe.run import LINK_METER, STREAMS, FlowPlan, measure_links
from shoal.units import parse_rate
from shoal_lab.lab import Lab
from shoal_lab.spec import make_spec

LINKS = ("100mbit", "1gbit", "none")
PAYLOAD = 1448 / 1500
LEAST_BYTES = 1 << 20


def main() -> None:
    parser = options(__doc__, rounds_=3, steps=60, quick={"steps": 10, "links": "1gbit"})
    parser.add_argument("--links", default=",".join(LINKS))
    parser.add_argument("--nodes", type=int, default=2)
    chosen = parser.parse_args()
    found = {}
    for link in chosen.links.split(","):
        rounds = [one_round(link, chosen.nodes, budget_s=chosen.steps) for _ in range(chosen.rounds)]
        found[link] = {name: _middle([each[name] for each in rounds]) for name in rounds[0]}
    print(json.dumps(found, indent=2))


def one_round(link: str, nodes: int, budget_s: int) -> dict[str, float]:
    lab = Lab.build(make_spec(nodes, name=f"bench-{os.getpid()}", link=link), owner=os.getpid())
    try:
        raw = {"iperf3": _iperf3_gbps(lab), "shoal": _own_gbps(lab)}
        profile = _probe(lab, budget_s)
    finally:
        lab.close()
    reduce_ = profile.collective("all-reduce")
    assert reduce_ is not None
    assert reduce_.held_out is not None
    figures = {**_raw_figures(link, raw), **_predictions(reduce_), "probe took s": profile.took_s}
    figures["stack efficiency"] = profile.summary.stack_efficiency or 0.0
    load = os.getloadavg()[0]
    print(
        f"{link:>8}  load {load:.1f}  " + "  ".join(f"{name} {value:.4g}" for name, value in figures.items()),
        flush=True,
    )
    return figures


def _own_gbps(lab: Lab) -> list[float]:
    with start_on_nodes(f"lab:{lab.name}", LINK_METER) as programs:
        plan = FlowPlan(2.0, (("node1", "node2"),), (("node1", "node2"), ("node2", "node1")))
        links = measure_links(programs, plan, lambda text: None)
    return [rate for link in links for rate in (link.gbps, link.gbps_4_streams)]


def _iperf3_gbps(lab: Lab) -> list[float]:
    """Median of its intervals as the receiver counts them, without the first fifth; both directions, all streams."""
    rates = []
    for source, target, address in (("node1", "node2", "10.77.0.2"), ("node2", "node1", "10.77.0.1")):
        for streams in STREAMS:
            server_words = lab.command(target, ["iperf3", "--server", "--one-off", "--interval", "0.1", "--json"])
            with subprocess.Popen(server_words, stdout=subprocess.PIPE) as server:
                time.sleep(0.5)
                client = ["iperf3", "--client", address, "--time", "2", "--parallel", str(streams), "--json"]
                subprocess.run(lab.command(source, client), check=True, capture_output=True)
                intervals = [entry["sum"] for entry in json.loads(server.communicate(timeout=20)[0])["intervals"]]
            counted = [entry for entry in intervals if entry["start"] >= 0.4 and entry["seconds"] > 0.05]
            rates.append(8e-9 * statistics.median(entry["bytes"] / entry["seconds"] for entry in counted))
    return rates


def _probe(lab: Lab, budget_s: int) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.toml"
        argv = [sys.executable, "-m", "shoal", "probe", "--on", f"lab:{lab.name}", "--budget", str(budget_s)]
        subprocess.run([*argv, "-o", str(file)], check=True, capture_output=True)
        return read_profile(file)


def _raw_figures(link: str, rates: dict[str, list[float]]) -> dict[str, float]:
    """Where there is a rate: the figure that is furthest from it, of both directions, one stream and four."""
    if link == "none":
        ratio = statistics.median(rates["shoal"]) / statistics.median(rates["iperf3"])
        return {"iperf3 Gbit/s": statistics.median(rates["iperf3"]), "own ÷ iperf3": ratio}
    asked = 1e-9 * parse_rate(link)
    figures: dict[str, float] = {}
    for tool, measured in rates.items():
        furthest = max(measured, key=lambda rate: abs(rate / asked - 1))
        figures |= {f"{tool} ÷ asked": furthest / asked, f"{tool} ÷ payload": furthest / asked / PAYLOAD}
    return figures


def _predictions(reduce_: CollectiveProfile) -> dict[str, float]:
    assert reduce_.held_out is not None
    samples = [(point.bytes, point.seconds) for point in reduce_.points]
    errors = [
        abs(fit_alpha_beta([other for other in samples if other != sample]).error(sample))
        for sample in samples
        if sample[0] >= LEAST_BYTES
    ]
    held = reduce_.held_out
    return {
        "held-out MiB": held.bytes / 2**20,
        "held-out error %": 100 * held.error,
        "one left out, median %": 100 * statistics.median(errors),
    }


def _middle(values: list[float]) -> list[float]:
    return [round(value, 4) for value in (min(values), statistics.median(values), max(values))]


if __name__ == "__main__":
    main()
