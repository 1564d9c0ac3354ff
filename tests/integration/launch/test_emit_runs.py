"""What `shoal emit` prints really trains: the commands, the Slurm script, the pods' script.

Exercises launch.emit.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from shoal.cluster.lab import as_nodes
from shoal.config.load import build_config
from shoal.launch.emit import EmitJob, Pods, k8s_text, make_job, slurm_text, torchrun_commands
from shoal_lab.lab import Lab
from shoal_lab.processes import NodeProcess
from tests.integration.cluster.test_lab_training import wait_for_ledger
from tests.support.labs import running_lab
from tests.support.needs import need_tool
from tests.support.programs import TINY, read_jsonl, set_flags, shoal
from tests.support.waiting import wait_until

RUN = Path("runs/lab")
STEPS = 6


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a folder that all nodes share, as the machines of a cluster must."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONWARNINGS", "")


def make_lab_job(lab: Lab, slots: Sequence[int], *sets: str) -> EmitJob:
    nodes = [replace(node, slots=count) for node, count in zip(as_nodes(lab.state.spec), slots, strict=True)]
    settings = (*TINY, "train.global_batch=12", f"train.steps={STEPS}", "train.checkpoint_every=2", *sets)
    return make_job(build_config(sets=settings), nodes, RUN, sys.executable)


def run_on_nodes(lab: Lab, argv: Mapping[str, Sequence[str]], env: Mapping[str, Mapping[str, str]]) -> list[int]:
    """Return the exit codes when all processes have ended; kill them on an error."""
    processes = [
        lab.start(node, words, env.get(node, {}), Path(f"{node}.log").absolute()) for node, words in argv.items()
    ]
    try:
        return [process.wait(90) for process in processes]
    finally:
        end(processes)


def end(processes: Sequence[NodeProcess]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def read_logs() -> str:
    return "\n".join(f"{path.name}\n{path.read_text()}" for path in sorted(Path().glob("*.log")))


def check_run(run: Path, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Check that all nodes trained, that one rank wrote the files, and that all replicas are identical."""
    manifest: dict[str, Any] = json.loads((run / "manifest.json").read_text())
    assert {node["name"]: node["ranks"] for node in manifest["nodes"]} == ranks
    assert {node["interface"] for node in manifest["nodes"]} == {"eth0"}
    assert (manifest["status"], manifest["launcher"]) == ("finished", "torchrun")
    assert manifest["wire_bytes_per_step"] > 0
    commits = read_jsonl(run / "commits.jsonl")
    assert [commit["step"] for commit in commits] == list(range(1, STEPS + 1))
    assert all(commit["loss"] > 0 for commit in commits)
    supervisors = [rank for rank in range(sum(ranks.values())) if "checkpoint" in kinds(run, rank)]
    assert supervisors == [0]
    assert shoal("verify", run).stdout.startswith(f"identical: {sum(ranks.values())} replicas")
    return manifest


def kinds(run: Path, rank: int) -> list[str]:
    return [event["event"] for event in read_jsonl(run / "events" / f"rank-{rank}.jsonl")]


@pytest.mark.long
def test_the_torchrun_commands_train_on_unequal_nodes() -> None:
    with running_lab(2) as lab:
        commands = torchrun_commands(make_lab_job(lab, (2, 1)), 29500)
        argv = {command.node: ["sh", "-c", command.command] for command in commands}
        assert run_on_nodes(lab, argv, {}) == [0, 0], read_logs()
    manifest = check_run(RUN, {"node1": 2, "node2": 1})
    assert [node["link_mbps"] for node in manifest["nodes"]] == [1000, 1000]


def shim(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


# An srun for the lab: it records the command and the variables, and exits with the code that the test writes.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
env -0 >bin/env
printf '%s\\0' "$@" >bin/words.new
mv bin/words.new bin/words
until [[ -s bin/code ]]; do sleep 0.05; done
exit "$(<bin/code)"
"""
SCONTROL = "#!/bin/bash\nprintf 'node1\\nnode2\\n'\n"


@pytest.mark.long
def test_the_slurm_script_trains_on_two_nodes() -> None:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        shim(Path("bin"), name, text)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_CPUS_PER_TASK": "1"}
    with running_lab(2) as lab:
        Path("job.sbatch").write_text(slurm_text(make_lab_job(lab, (1, 1)), new_folder=True))
        path = f"{Path('bin').absolute()}:{os.environ['PATH']}"
        batch = lab.start("node1", ["bash", "job.sbatch"], {**slurm, "PATH": path}, Path("batch.log").absolute())
        try:
            words, variables = srun_request(batch)
            assert variables["MASTER_ADDR"] == "10.77.0.1"
            node_variables = {
                node: {**variables, "SLURM_NODEID": str(number), "SLURMD_NODENAME": node}
                for number, node in enumerate(("node1", "node2"))
            }
            codes = run_on_nodes(lab, dict.fromkeys(node_variables, words), node_variables)
            Path("bin/code").write_text(str(max(codes)))
            assert (codes, batch.wait(10)) == ([0, 0], 0), read_logs()
        finally:
            end([batch])
    check_run(Path("runs/lab-7"), {"node1": 1, "node2": 1})


def srun_request(batch: NodeProcess) -> tuple[list[str], dict[str, str]]:
    def has_begun() -> bool:
        assert batch.poll() is None, Path("batch.log").read_text()
        return Path("bin/words").exists()

    wait_until(has_begun, 20)
    words = Path("bin/words").read_text().split("\0")[:-1]
    return words, dict(entry.split("=", 1) for entry in Path("bin/env").read_text().split("\0")[:-1])


@pytest.mark.long
def test_the_pods_script_trains_on_two_nodes() -> None:
    with running_lab(2) as lab:
        job = make_lab_job(lab, (1, 1))
        _, work = yaml.safe_load_all(k8s_text(job, Pods("shoal:1")))
        [pod] = work["spec"]["template"]["spec"]["containers"]
        given = {entry["name"]: entry["value"] for entry in pod["env"] if "value" in entry}
        env = {
            # The variables of Kubernetes, and the address to which its DNS resolves the first pod's name.
            node.name: {**given, "MASTER_ADDR": "node1", "SHOAL_NODE": node.name, "JOB_COMPLETION_INDEX": str(number)}
            for number, node in enumerate(job.nodes)
        }
        argv = {node: [*pod["command"], *pod["args"]] for node in env}
        assert run_on_nodes(lab, argv, env) == [0, 0], read_logs()
    check_run(RUN, {"node1": 1, "node2": 1})


# Shims for a machine without Slurm: one host, and an srun that starts its one task here.
ONE_HOST = '#!/bin/bash\n[[ "$*" == "show hostnames c1" ]] && echo c1\n'
START_HERE = """#!/bin/bash
printf '%s\\n' "$@" >"${0%/*}/srun-words"
while [[ $1 == --* ]]; do shift; done
export SLURM_NODEID=0 SLURMD_NODENAME=c1
exec "$@"
"""


def free_port() -> int:
    """Return a free port of the script's range, 10000 to 29999, which is below the kernel's ephemeral ports."""
    for port in range(10_000 + os.getpid() % 19_000, 30_000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no free port")


class Slurm:
    """Replace Slurm on one host, for one job."""

    def __init__(self, folder: Path, steps: int) -> None:
        for name, text in (("scontrol", ONE_HOST), ("srun", START_HERE)):
            shim(folder / "bin", name, text)
        done = shoal("emit", "slurm", "--on", "local:2", *set_flags(*TINY, f"train.steps={steps}"), cwd=folder)
        assert done.returncode == 0, done.stderr
        (folder / "job.sbatch").write_text(done.stdout)
        self._folder = folder
        self._job = free_port() - 10_000
        self.run = folder / "runs" / f"grammar-{self._job}"

    def submit(self, **variables: str) -> subprocess.Popen[bytes]:
        slurm = {
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONWARNINGS": "",
            "SLURM_JOB_ID": str(self._job),
            "SLURM_JOB_NODELIST": "c1",
            "SLURM_NNODES": "1",
            "SLURM_CPUS_PER_TASK": "2",
        }
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                [need_tool("bash"), "job.sbatch"],
                cwd=self._folder,
                env={**os.environ, **slurm, **variables},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def finish(self, batch: subprocess.Popen[bytes]) -> int:
        try:
            return batch.wait(90)
        finally:
            batch.kill()
            batch.wait()

    @property
    def output(self) -> str:
        return (self._folder / "log").read_text()


@pytest.mark.long
def test_the_slurm_script_trains(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, steps=4)
    assert slurm.finish(slurm.submit()) == 0, slurm.output
    run = slurm.run
    manifest = json.loads((run / "manifest.json").read_text())
    assert [(node["name"], node["ranks"], node["threads"]) for node in manifest["nodes"]] == [("c1", 2, 1)]
    assert manifest["status"] == "finished"
    assert shoal("verify", run).stdout.startswith("identical: 2 replicas")
    assert {"--nodes=1", "--cpus-per-task=2"} <= set((tmp_path / "bin/srun-words").read_text().splitlines())


@pytest.mark.exhaustive
def test_a_slurm_job_saves_at_its_time_limit_and_resumes_in_the_next(tmp_path: Path) -> None:
    slurm = Slurm(tmp_path, steps=800)
    first = slurm.submit()
    wait_for_ledger(slurm.run, first)
    # Every process of the script was replaced by exec: this is torchrun, which would get Slurm's signal.
    first.terminate()
    assert slurm.finish(first) != 0
    assert 0 < len(read_jsonl(slurm.run / "commits.jsonl")) < 800
    assert slurm.finish(slurm.submit(SHOAL_RESUME=str(slurm.run))) == 0, slurm.output
    assert [commit["step"] for commit in read_jsonl(slurm.run / "commits.jsonl")] == list(range(1, 801))
    assert shoal("verify", slurm.run).returncode == 0
