"""A training on the nodes of a lab that somebody keeps alive: torchrun, torchft or shoal."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from rivals.journal import Done, read_journals, read_run
from rivals.workload import SHOAL_SETTINGS
from shoal.events import read_events
from shoal.run_folder import RunFolder
from shoal_lab.lab import Lab
from shoal_lab.processes import NodeProcess

LEADER = "node1"
_BENCHMARKS = Path(__file__).resolve().parents[1]
_END_S = 30


class Job(ABC):
    """`rank_word` and `leader_word` tell a rank, and whoever leads, from the other processes of a node."""

    settings: str
    rank_word: str
    leader_word: str

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.folder = folder
        self.nodes = [node.name for node in lab.state.spec.nodes]

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def steps(self) -> list[Done]: ...

    @abstractmethod
    def why_over(self, nodes: list[str]) -> str:
        """How it ended on these nodes, or nothing while it may still go on."""

    @abstractmethod
    def end(self) -> None:
        """Before the lab goes, whose processes end with it."""

    def rank(self, node: str) -> int:
        return self._find(node, self.rank_word)

    def leader(self) -> int:
        return self._find(LEADER, self.leader_word)

    def _find(self, node: str, word: str) -> int:
        """The child, where a parent only waits for one with the same command."""
        found = [
            pid for pid, command in self.lab.processes(node) if re.search(rf"(^|[ /]){re.escape(word)}( |$)", command)
        ]
        if not found:
            raise RuntimeError(f"no process of {node} has {word} in its command: {self.lab.processes(node)}")
        return max(found)


class NodeJob(Job):
    """One program a node, started by us."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder)
        self.processes: dict[str, NodeProcess] = {}

    def start(self) -> None:
        for node in self.nodes:
            self.processes[node] = self.run_on(node, node, self.words(node))

    @abstractmethod
    def words(self, node: str) -> list[str]: ...

    def run_on(self, node: str, name: str, words: list[str]) -> NodeProcess:
        path = f"{_BENCHMARKS}:{_BENCHMARKS.parent / 'src'}"
        env = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", **self.environment(node)}
        return self.lab.start(node, words, env, self.folder / f"{name}.log")

    def environment(self, node: str) -> dict[str, str]:
        return {}

    def steps(self) -> list[Done]:
        return read_journals(self.folder / "steps")

    def why_over(self, nodes: list[str]) -> str:
        codes = {node: self.processes[node].poll() for node in nodes}
        if any(code is None for code in codes.values()):
            return ""
        return ", ".join(f"{node} ended with {code}" for node, code in codes.items())

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(_END_S)


class Torchrun(NodeJob):
    """Elastic, with the defaults of torch."""

    settings = "--nnodes=1:3 --max-restarts=3, c10d; rendezvous and gloo with torch's default time-outs"
    rank_word = "rivals.torchrun_ddp"
    leader_word = "torch.distributed.run"
    restarts = 3
    rendezvous: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def words(self, node: str) -> list[str]:
        # Inside of a namespace nobody takes itself for the host of the endpoint unless told.
        conf = ",".join((f"is_host={str(node == LEADER).lower()}", *self.rendezvous))
        flags = ["--nnodes=1:3", "--nproc-per-node=1", f"--max-restarts={self.restarts}", "--rdzv-backend=c10d"]
        flags += [f"--rdzv-endpoint={self.lab.state.spec.node(LEADER).address}:29500", "--rdzv-id=recovery"]
        flags += [f"--rdzv-conf={conf}", f"--local-addr={self.lab.state.spec.node(node).address}"]
        script = ["-m", self.rank_word, "--folder", str(self.folder), "--name", node, *self.arguments]
        return [sys.executable, "-m", "torch.distributed.run", *flags, *script]

    def rank(self, node: str) -> int:
        """The agent's command names the script too."""
        agents = {pid for pid, command in self.lab.processes(node) if self.leader_word in command.split()}
        found = [pid for pid, command in self.lab.processes(node) if self.rank_word in command.split()]
        return max(pid for pid in found if pid not in agents)


class TunedTorchrun(Torchrun):
    """The same with every documented wait made short, but for the last call: agents that begin apart, because
    one came a second later, keep the address of a store each and never meet again (seen with 1 s on a busy machine)."""

    settings = (
        "--nnodes=1:3 --max-restarts=100, c10d with last_call_timeout=10, keep_alive_interval=1, "
        "keep_alive_max_attempt=3, join_timeout=60; gloo timeout 60 s to begin with, then 5 s"
    )
    restarts = 100
    rendezvous = ("last_call_timeout=10", "keep_alive_interval=1", "keep_alive_max_attempt=3", "join_timeout=60")
    arguments = ("--timeout-s", "5")


class Torchft(NodeJob):
    """One replica group a node under a torchrun of its own, and a lighthouse, as torchft's README starts them."""

    settings = (
        "torchft_lighthouse --min_replicas 1 --quorum_tick_ms 100 --join_timeout_ms 10000; gloo timeout 5 s, "
        "manager timeout 10 s; torchrun --nnodes=1 --max-restarts=3 for each replica group"
    )
    rank_word = "rivals.torchft_ddp"
    leader_word = "--quorum_tick_ms"
    python: Path

    def start(self) -> None:
        flags = ["--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        lighthouse = [str(self.python.with_name("torchft_lighthouse")), "--bind", "[::]:29510", *flags]
        self.processes["lighthouse"] = self.run_on(LEADER, "lighthouse", lighthouse)
        super().start()

    def words(self, node: str) -> list[str]:
        address = self.lab.state.spec.node(node).address
        flags = ["--nnodes=1", "--nproc-per-node=1", "--max-restarts=3", "--master-port=29600"]
        script = ["-m", self.rank_word, "--folder", str(self.folder), "--name", node, "--address", address]
        return [str(self.python), "-m", "torch.distributed.run", *flags, *script]

    def environment(self, node: str) -> dict[str, str]:
        return {"TORCHFT_LIGHTHOUSE": f"http://{self.lab.state.spec.node(LEADER).address}:29510"}

    def rank(self, node: str) -> int:
        found = [(pid, words.split()) for pid, words in self.lab.processes(node)]
        return max(pid for pid, words in found if self.rank_word in words and "torch.distributed.run" not in words)


class Shoal(Job):
    settings = "shoal train --on lab:NAME --detach, members.* at their defaults"
    rank_word = "shoal.train.worker"
    leader_word = "shoal.agent.agent"

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder)
        self.run = RunFolder(folder / "run")

    def start(self) -> None:
        words = ["train", "grammar", "--on", f"lab:{self.lab.name}", "--detach", "--out", str(self.run.path)]
        self._shoal(*words, *(f"--set={setting}" for setting in SHOAL_SETTINGS))

    def steps(self) -> list[Done]:
        return read_run(self.run)

    def why_over(self, nodes: list[str]) -> str:
        ended = [event for event in read_events(self.run.supervisor) if event["event"] == "ended"]
        return f"the run ended with {ended[-1]['code']}: {ended[-1].get('message', '')}" if ended else ""

    def end(self) -> None:
        if self.run.supervisor.exists() and not self.why_over(self.nodes):
            self._shoal("stop", str(self.run.path), "--now")

    def _shoal(self, *words: str, **variables: str) -> None:
        argv = [sys.executable, "-m", "shoal", *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, env={**os.environ, **variables})
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}")


class ShoalSession(Shoal):
    """A user's own loop, by `shoal run`."""

    settings = "shoal run --on lab:NAME --detach, a loop of the user's own with shoal.Session"
    rank_word = "session_gpt.py"

    def start(self) -> None:
        script = Path(__file__).with_name("session_gpt.py")
        words = ["run", "--on", f"lab:{self.lab.name}", "--detach", "--threads", "1", "--out", str(self.run.path)]
        folder = str(script.parent.parent)
        self._shoal(
            *words, str(script), PYTHONPATH=os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        )
