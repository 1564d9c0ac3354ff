"""Provoke failures: processes on this machine and on lab nodes, each with its own log, all ended afterwards."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from shoal_lab.lab import Lab
from shoal_lab.spec import make_spec
from tests.support.waiting import wait_until

HERE = Path(__file__).parent
WRONG = HERE / "wrong.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SHOAL = (sys.executable, "-m", "shoal")
FIRST, SECOND, THIRD = "node1", "node2", "node3"
STORE_PORT = "29500"

Env = Mapping[str, str]
NOTHING: Env = {}


class Bench:
    """One failure: its folder, the failing processes, and their output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[bytes]] = []

    def start(
        self, argv: Sequence[str], env: Env = NOTHING, lab: Lab | None = None, node: str = ""
    ) -> subprocess.Popen[bytes]:
        """Start a process on this machine or on a node of a lab."""
        log = self.folder / f"log-{len(self._started):02}"
        if lab is not None:
            process: subprocess.Popen[bytes] = lab.start(node, argv, env, log)
        else:
            with log.open("ab") as output:
                process = subprocess.Popen(
                    argv, env={**os.environ, **env}, stdout=output, stderr=subprocess.STDOUT, cwd=self.folder
                )
        self._started.append(process)
        return process

    def run(self, argv: Sequence[str], env: Env = NOTHING, timeout_s: float = 120) -> int:
        return self.start(argv, env).wait(timeout_s)

    def ranks(self, name: str, world: int = 2, env: Env = NOTHING) -> list[subprocess.Popen[bytes]]:
        """Start the ranks of one of the wrong programs on this machine."""
        meeting = {**meeting_here(), "GLOO_SOCKET_IFNAME": "lo"}
        return [self.start(wrong(name), {**meeting, **place(rank, world), **env}) for rank in range(world)]

    def ranks_on(self, lab: Lab, nodes: Sequence[str], name: str, env: Env = NOTHING) -> list[subprocess.Popen[bytes]]:
        """Start one rank per node; rank 0 on the first node."""
        meeting = meeting_at(lab, nodes[0])
        return [
            self.start(wrong(name), {**meeting, **place(rank, len(nodes)), **env}, lab, node)
            for rank, node in enumerate(nodes)
        ]

    def wait(self, timeout_s: float = 90) -> None:
        """Wait until all have ended or the time is over: some processes wait forever, which is their failure."""
        deadline = time.monotonic() + timeout_s
        for process in self._started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))

    def wait_for(self, words: str, count: int = 1, timeout_s: float = 90) -> None:
        wait_until(lambda: self.text().count(words) >= count, timeout_s, lambda: f"no {words!r} in:\n{self.text()}")

    def text(self) -> str:
        logs = sorted(self.folder.glob("log-*"))
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return path

    def close(self) -> None:
        for process in self._started:
            for pid in (*descendants(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


class Labs:
    """One lab for all failures that need one, built on first use."""

    def __init__(self) -> None:
        self._lab: Lab | None = None

    def get(self) -> Lab:
        if self._lab is None:
            self._lab = Lab.build(make_spec(3, name=f"failures-{os.getpid()}", link="1gbit", sshd=True))
        return self._lab

    def close(self) -> None:
        if self._lab is not None:
            self._lab.close()


def wrong(name: str, *words: str, torch: str = "") -> list[str]:
    return [older_python(torch) if torch else sys.executable, str(WRONG), name, *words]


def older_python(torch: str) -> str:
    """Return a Python that has this version of torch, for example `2.0`."""
    return os.environ.get(f"TORCH_{torch.replace('.', '_')}", "")


def older_pythons() -> list[str]:
    return [path for name, path in os.environ.items() if re.fullmatch(r"TORCH_\d+_\d+", name)]


def place(rank: int, world: int) -> dict[str, str]:
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}


def meeting_here() -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def meeting_at(lab: Lab, node: str) -> dict[str, str]:
    address = lab.state.spec.node(node).address
    return {"MASTER_ADDR": address, "MASTER_PORT": STORE_PORT, "GLOO_SOCKET_IFNAME": "eth0"}


def descendants(pid: int) -> list[int]:
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
