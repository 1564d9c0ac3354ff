"""Failures of shoal's runs, on this machine and on the nodes of a lab."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

from shoal_lab.lab import Lab
from tests.support.failures.bench import FIRST, SECOND, SHOAL, Bench, free_port, meeting_here, place
from tests.support.failures.on_machine import memory_limit
from tests.support.failures.registry import here, on_lab
from tests.support.programs import TINY, set_flags
from tests.support.waiting import wait_until

INVITATION = re.compile(r"shoal join (10\.77\.0\.\d+:\d+)\n.*works once: (\S+)")
KILLS_ITSELF = "import os, time\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\ntime.sleep(9)\n"
SESSION = """
import os, time
import torch
import shoal

session = shoal.Session(steps=500, global_batch=8)
model = torch.nn.Linear(4, 1)
session.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
for step in session:
    with step:
        if os.environ["RANK"] == "1" and step.number > 2:
            FAULT
        time.sleep(0.1)
        for inputs, targets in step.batches((torch.ones(64, 4), torch.ones(64, 1))):
            step.backward(((model(inputs) - targets) ** 2).sum())
        step.update()
"""


@here("shoal.memory")
def shoal_out_of_memory(bench: Bench) -> None:
    eat = bench.write("eat.py", "eaten = []\nwhile True: eaten.append(bytearray(1 << 22))\n")
    with memory_limit(400 << 20) as group:
        command = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh", *SHOAL, "run", "--on", "local:1"]
        bench.run([*command, "--out", str(bench.folder / "run"), str(eat)])


@here("shoal.diverged")
def diverged(bench: Bench) -> None:
    flags = set_flags(*TINY, "train.lr=1e30")
    bench.run([*SHOAL, "train", "--out", str(bench.folder / "run"), "--steps", "20", *flags])


@here("shoal.rank-killed")
def rank_killed(bench: Bench) -> None:
    script = bench.write("train.py", KILLS_ITSELF)
    bench.run([*SHOAL, "run", "--out", str(bench.folder / "run"), str(script)])


def run_session(bench: Bench, fault: str, *settings: str) -> None:
    """Run a session whose rank 1 has a fault once it has done two steps."""
    script = bench.write("train.py", SESSION.replace("FAULT", fault))
    bench.run(
        [*SHOAL, "run", "--on", "local:2", "--out", str(bench.folder / "run"), *set_flags(*settings), str(script)]
    )


@here("shoal.hung")
def hung(bench: Bench) -> None:
    run_session(bench, "time.sleep(10000)", "sync.timeout_s=4", "sync.join_timeout_s=10", "members.hung_tries=1")


@here("shoal.members")
def member_lost(bench: Bench) -> None:
    run_session(bench, "os.kill(os.getpid(), 9)", "members.restarts=0")


@here("shoal.port-taken")
def shoal_port_taken(bench: Bench) -> None:
    script = bench.write("train.py", "print('never')\n")
    port = str(free_port())
    server = [sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1", "--directory", str(bench.folder)]
    with subprocess.Popen(server, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as holder:
        wait_until(lambda: is_taken(int(port)), 10, lambda: "the server did not start")
        bench.run([*SHOAL, "run", "--port", port, "--out", str(bench.folder / "run"), str(script)])
        holder.kill()


def is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@here("shoal.not-formed")
def not_formed(bench: Bench) -> None:
    """Start one of two ranks as torchrun would."""
    command = [sys.executable, "-m", "shoal.train.worker", "grammar", "--out", str(bench.folder / "run")]
    bench.run([*command, *set_flags(*TINY, "sync.join_timeout_s=3")], {**place(0, 2), **meeting_here()})


@here("shoal.error")
def other_error(bench: Bench) -> None:
    bench.run([*SHOAL, "train", "--set", "train.stpes=3", "--out", str(bench.folder / "run")])


@on_lab("shoal.node-gone")
def node_gone(bench: Bench, lab: Lab) -> None:
    train_on(bench, lab, "1000000")
    wait_for_commit(bench)
    lab.node(SECOND).kill()
    bench.wait(40)
    lab.node(SECOND).restart()


@on_lab("shoal.cannot-meet")
def agents_behind_firewall(bench: Bench, lab: Lab) -> None:
    lab.node(FIRST).set_firewall("22")
    train_on(bench, lab, "3")
    bench.wait(60)


def train_on(bench: Bench, lab: Lab, steps: str) -> None:
    command = (*SHOAL, "train", "--on", f"lab:{lab.name}", "--steps", steps, "--out", str(bench.folder / "run"))
    bench.start([*command, *set_flags(*TINY)])


def wait_for_commit(bench: Bench) -> None:
    ledger = bench.folder / "run" / "commits.jsonl"
    wait_until(lambda: ledger.exists() and ledger.stat().st_size, why=bench.text)


@on_lab("shoal.code")
def wrong_code(bench: Bench, lab: Lab) -> None:
    line = host(bench, lab)
    bench.start([*SHOAL, "join", line.partition("#")[0] + "#wrng-code-here-2345"], lab=lab, node=SECOND)
    bench.wait_for("error: ")


@on_lab("shoal.different")
def different_torch(bench: Bench, lab: Lab) -> None:
    """The environment of the second machine reports a different torch."""
    about = bench.folder / "other" / "torch-2.12.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.12.0\n", encoding="ascii")
    line = host(bench, lab)
    paths = ":".join([str(about.parent), *filter(None, sys.path)])
    command = [*SHOAL, "join", line, "--out", str(bench.folder / "joined")]
    bench.start(command, {"PYTHONPATH": paths}, lab, SECOND)
    bench.wait_for("error: ")


def host(bench: Bench, lab: Lab) -> str:
    """Start a run that waits for one more machine; return the join command for it."""
    command = [*SHOAL, "host", "--address", "10.77.0.1", "--steps", "3", "--out", str(bench.folder / "run")]
    bench.start([*command, *set_flags(*TINY)], lab=lab, node=FIRST)
    bench.wait_for("works once")
    match = INVITATION.search(bench.text())
    if match is None:
        raise TimeoutError(f"no invitation in {bench.text()!r}")
    return f"{match[1]}#{match[2]}"
