"""Start job.py on both nodes of a lab, as torchrun does on real machines: on_both.py LAB NAME [VARIABLE=VALUE …]

Their output is kept in NAME.log; printed is the last line of each node.
"""

import json
import sys
from pathlib import Path

from shoal_lab import Lab

MEETING = {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29516", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}


def main(lab: str, name: str, *variables: str) -> None:
    # The files of another torch on one node must not reach the compiled files of all.
    given = {"PYTHONDONTWRITEBYTECODE": "1", **dict(variable.split("=", 1) for variable in variables)}
    ranks = []
    for rank, node in enumerate(Lab.open(lab).nodes):
        log = Path(f"{name}-{node.name}.log")
        ranks.append((node.start(sys.executable, "job.py", log=log, env={**MEETING, **given, "RANK": str(rank)}), log))
    results = []
    for process, log in ranks:
        code, lines = process.wait(240), log.read_text().splitlines()
        if code != 0 or not lines:
            sys.exit(f"job.py ended with exit code {code}: see {log}")
        results.append(json.loads(lines[-1]))
    Path(f"{name}.log").write_text("".join(log.read_text() for _, log in ranks))
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
