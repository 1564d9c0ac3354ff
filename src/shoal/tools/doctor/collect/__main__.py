"""`python -P -m shoal.tools.doctor.collect`: answers one JSON line with one, until its stdin ends.

    {"do": "observe", "peers": ["10.77.0.2"], …}  →  {"machine": {…}, "names": {…}, "network": {…}, …}

Each topic is a module with `observe(request)`; what a topic cannot see it leaves out, and says why under "failed".
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from typing import Any

from shoal.tools.doctor.collect import machine, network, trials

TOPICS = {
    "machine": machine.observe,
    "names": network.names_observe,
    "network": network.observe,
    "processes": machine.processes_observe,
}


def observe(request: dict[str, Any]) -> dict[str, Any]:
    seen: dict[str, Any] = {"failed": {}}
    for topic, look in TOPICS.items():
        try:
            seen[topic] = look(request)
        except Exception as error:
            # One unreadable file must not hide everything else that is there to see.
            seen["failed"][topic] = f"{type(error).__name__}: {error}"
    return seen


def clock(_: dict[str, Any]) -> dict[str, Any]:
    """Asked by itself, so that the answer's way is short: the asker takes the middle between question and answer."""
    return {"time": time.time()}


ANSWERS = {
    "observe": observe,
    "clock": clock,
    "listen": trials.listen,
    "dial": trials.dial,
    "burst": trials.burst,
    "send": trials.send,
    "hear": trials.hear,
}


def main() -> None:
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = ANSWERS[request["do"]](request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
