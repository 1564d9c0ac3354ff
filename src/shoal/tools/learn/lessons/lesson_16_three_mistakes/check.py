"""Make three mistakes in a lab, see what a plain script does, let shoal name them, correct them, and try again."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result

HERE = Path(__file__).parent
NODES = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
FOUND_BEFORE = {("names.loopback", "node1"), ("names.loopback", "node2"), ("sameness.torch", "node2")}
CORRECT = "GLOO_SOCKET_IFNAME=eth0"
# Another torch: what differs in this one is a default of one optimizer.
OTHER_DEFAULT = """
_init = SGD.__init__


def _init_of_other_version(self, params, lr=1e-3, momentum=0, dampening=0, weight_decay=0.01, **options):
    _init(self, params, lr, momentum, dampening, weight_decay, **options)


SGD.__init__ = _init_of_other_version
"""


class TwoMachines:
    """A lab of two nodes, and what is done there."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.lab = f"learn-16-{os.getpid()}"
        for script in ("job.py", "on_both.py"):
            (experiment.folder / script).write_text((HERE / script).read_text())
        experiment.at_end("lab", "down", "--name", self.lab)
        experiment.shoal("lab", "up", "2", "--name", self.lab)

    def on_node(self, node: str, *words: str) -> None:
        self.experiment.shoal("lab", "exec", "--name", self.lab, node, "--", *words)

    def train(self, name: str, *variables: str) -> list[dict[str, Any]]:
        ranks: list[dict[str, Any]] = self.experiment.python("on_both.py", self.lab, name, *variables).json()
        return ranks

    def explain(self, name: str) -> str:
        """Return the name of the first explanation."""
        explained = self.experiment.shoal("explain", f"{name}.log", "--json", codes=(0, 1)).json()
        return next((str(one["id"]) for one in explained["explanations"]), "nothing")

    def doctor(self) -> dict[tuple[str, str], str]:
        """Return the command that corrects it, for each finding of these mistakes and its node."""
        words = ("--on", f"lab:{self.lab}", "--no-proof", "--json")
        findings = self.experiment.shoal("doctor", *words, codes=(0, 1)).json()["findings"]
        return {
            (one["id"], one["node"]): one["fix"]
            for one in findings
            if one["id"] in ("names.loopback", "sameness.torch")
        }


def run(experiment: Experiment) -> Result:
    two = TwoMachines(experiment)
    tries = {"interface": two.train("interface", "GLOO_SOCKET_IFNAME=eth9")}
    explained = [two.explain("interface")]
    for node in NODES:
        two.on_node(node, "mount", "--bind", write_hosts(experiment.folder, node), "/etc/hosts")
    tries["name"] = two.train("name")
    explained.append(two.explain("name"))
    files = write_other_torch(experiment.folder)
    for changed, installed in files.items():
        two.on_node("node2", "mount", "--bind", changed, installed)
    tries["versions"] = two.train("versions", CORRECT)
    before = two.doctor()
    refused = experiment.shoal("train", "--on", f"lab:{two.lab}", "--steps", "2", "--out", "refused", codes=range(256))
    for installed in files.values():
        two.on_node("node2", "umount", installed)
    for (kind, node), fix in before.items():
        if kind == "names.loopback":
            two.on_node(node, "sh", "-c", fix)
    corrected, after = two.train("corrected"), two.doctor()
    checks = [
        Check(
            "shoal explain names the interface and the name from the logs",
            explained == ["gloo.interface", "gloo.loopback"],
            ", ".join(explained),
        ),
        Check(
            "shoal doctor names both host names, and node2's torch, without a run",
            before.keys() == FOUND_BEFORE,
            ", ".join(f"{kind} on {node}" for kind, node in sorted(before)),
        ),
        Check("shoal train refuses two versions", refused.code != 0 and "cannot train together: torch" in refused.err),
        Check("corrected, the same script trains equal weights", outcome_of(corrected) == "right"),
        Check("and doctor finds none of the three", not after, ", ".join(kind for kind, _ in after)),
    ]
    return make_result(tries, checks)


def make_result(tries: dict[str, list[dict[str, Any]]], checks: list[Check]) -> Result:
    seconds = {name: max(rank["seconds"] for rank in ranks) for name, ranks in tries.items()}
    return Result(
        theory={"interface": "error", "name": "hang", "versions": "silence"},
        measured={name: outcome_of(ranks) for name, ranks in tries.items()},
        checks=checks,
        figures={
            "interface": 1e3 * seconds["interface"],
            "first": 1e3 * min(rank["seconds"] for rank in tries["name"]),
            "name": seconds["name"],
            "versions": seconds["versions"],
            "digests": " and ".join(rank["digest"][:8] or "(none)" for rank in tries["versions"]),
        },
        picture=Bars("Until the last of two ranks has ended", "s", list(seconds), {"seconds": [*seconds.values()]}),
    )


def outcome_of(ranks: list[dict[str, Any]]) -> str:
    if all(rank["outcome"] == "trained" for rank in ranks):
        return "right" if len({rank["digest"] for rank in ranks}) == 1 else "silence"
    return "hang" if any(rank["seconds"] >= rank["timeout_s"] for rank in ranks) else "error"


def write_hosts(folder: Path, node: str) -> str:
    """Write the node's /etc/hosts as Debian's installer does: its own name is 127.0.1.1."""
    others = [f"{address} {name}" for name, address in NODES.items() if name != node]
    (folder / f"hosts-{node}").write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 {node}", *others, ""]))
    return f"hosts-{node}"


def write_other_torch(folder: Path) -> dict[str, str]:
    """Write two files of another torch, its version and an optimizer; return the installed file for each."""
    torch = importlib.metadata.distribution("torch")
    major, minor, *_ = torch.version.split(".")
    [about] = [file for file in torch.files or () if file.match("torch-*.dist-info/METADATA")]
    installed = {"METADATA": Path(str(about.locate())), "sgd.py": Path(str(torch.locate_file("torch/optim/sgd.py")))}
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {major}.{int(minor) - 1}.0\n")
    (folder / "sgd.py").write_text(installed["sgd.py"].read_text() + OTHER_DEFAULT)
    return {changed: str(path.resolve()) for changed, path in installed.items()}
