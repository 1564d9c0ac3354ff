"""`python -P -m shoal.net.gauge`: answers one JSON line with one, until its stdin ends.

    {"do": "facts"}                                         →  {"cpu": …, "cores": …, "iperf3": "3.12", …}
    {"do": "listen", "address": "10.77.0.2", "token": …}    →  {"port": 40123}
    {"do": "round_trip", "address": …, "port": …, …}        →  {"median_s": 0.0002, …}

Bytes are sent in the background, so that several flows, in both directions, can go on at once:
`expect` where they arrive, `send` where they come from, `sent` there to wait for the end, and `received` for the rate.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from shoal.net.gauge import echo, flow, iperf, listen, machine

_TOOLS = {"shoal": flow, "iperf3": iperf}


def _by_tool(step: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        done: dict[str, Any] = getattr(_TOOLS[request["tool"]], step)(request)
        return done

    return answer


ANSWERS = {
    "facts": machine.facts,
    "listen": listen.listen,
    "round_trip": echo.round_trip,
    "expect": _by_tool("expect"),
    "send": _by_tool("send"),
    "sent": _by_tool("sent"),
    "received": _by_tool("received"),
}


def main() -> None:
    try:
        answer_all()
    finally:
        iperf.end_all()


def answer_all() -> None:
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
