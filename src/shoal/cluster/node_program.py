"""The loop of a program that runs on a node and answers requests of `cluster.node.RemoteProgram`.

It needs the standard library only: `shoal doctor` also looks at machines whose Python has nothing installed.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def answer_requests(answers: Mapping[str, Answer]) -> None:
    """Answer each JSON line on stdin with one on stdout, until stdin ends. `answers` are found by a request's "do".

    A request that fails is answered with its error; the traceback goes to stderr.
    """
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = answers[request["do"]](request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
