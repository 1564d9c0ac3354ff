"""`python -P -m shoal.tools.doctor.collect`: answer each JSON line on stdin with one on stdout, until stdin ends.

    {"do": "observe", "peers": ["10.77.0.2"], …}  →  {"machine": {…}, "names": {…}, "network": {…}, …}

A topic that cannot be read is left out; the reason is under "failed".
"""

from __future__ import annotations

import time
from typing import Any

from shoal.cluster.node_program import answer_requests
from shoal.tools.doctor.collect import gpu, machine, network, trials

TOPICS = {
    "machine": machine.observe,
    "gpu": gpu.observe,
    "names": network.observe_names,
    "network": network.observe,
    "processes": machine.observe_processes,
}


def observe(request: dict[str, Any]) -> dict[str, Any]:
    facts: dict[str, Any] = {"failed": {}}
    for topic, collect in TOPICS.items():
        try:
            facts[topic] = collect(request)
        except Exception as error:
            # One unreadable file must not hide all other facts.
            facts["failed"][topic] = f"{type(error).__name__}: {error}"
    return facts


def read_clock(_: dict[str, Any]) -> dict[str, Any]:
    """Return the time alone: a short answer makes the estimate, the middle of the round trip, precise."""
    return {"time": time.time()}


ANSWERS = {
    "observe": observe,
    "clock": read_clock,
    "listen": trials.listen,
    "dial": trials.dial,
    "burst": trials.burst,
    "send": trials.send,
    "received": trials.received,
}


if __name__ == "__main__":
    answer_requests(ANSWERS)
