"""Training and scripts on hosts over SSH, and on machines that join: emulated nodes with a real sshd.

Nodes of a lab share one disk, so each host has its own folder, which stands for its disk.

Exercises cluster.hosts, runs.join.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from shoal.config.load import load_config
from shoal.control.processes import find_processes
from shoal.runs.manage import end_processes
from shoal_lab.lab import Lab
from tests.integration.runs.test_run_script import LINE, loss_of_one_process
from tests.support.labs import running_lab
from tests.support.needs import need_tool
from tests.support.paths import SCRIPTS
from tests.support.programs import TINY, read_jsonl, set_flags, shoal, shoal_command, steps_of
from tests.support.waiting import wait_until

LONG = ("--steps", "1000000", *set_flags("train.compile=off"))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    need_tool("sshd")
    with running_lab(2, sshd=True) as built:
        if not built.state.spec.sshd:
            pytest.skip("; ".join(built.state.notes))
        yield built


@pytest.fixture
def hosts(lab: Lab, tmp_path: Path) -> Iterator[Path]:
    """Write a hosts file; end processes that the test leaves on the hosts."""
    need_python = Path(shoal_command()[0])
    tables = [
        f'[[host]]\nhost = "node{number}"\npython = "{need_python}"\nfolder = "{tmp_path}/disk{number}"\n'
        for number in (1, 2)
    ]
    file = tmp_path / "hosts.toml"
    file.write_text(f'ssh_config = "{lab.folder}/ssh/config"\n' + "".join(tables))
    yield file
    end_processes([process for process in find_processes() if process.run.is_relative_to(tmp_path)])


@contextlib.contextmanager
def ended(process: subprocess.Popen[str], run: Path) -> Iterator[subprocess.Popen[str]]:
    """End the run when the test fails: it would never end by itself."""
    try:
        yield process
    finally:
        end_processes(find_processes(run))
        process.communicate(timeout=20)


def at(lab: Lab, node: str, *words: str | Path) -> list[str]:
    return lab.command(node, shoal_command(*words))


def done(lab: Lab, *words: str | Path, node: str = "switch") -> subprocess.CompletedProcess[str]:
    return subprocess.run(at(lab, node, *words), capture_output=True, text=True, timeout=180, check=False)


def notes(run: Path) -> str:
    return " ".join(event.get("text", "") for event in read_jsonl(run / "supervisor.jsonl"))


@pytest.mark.long
def test_two_hosts_train_to_identical_replicas_and_the_run_folder_is_complete(
    lab: Lab, hosts: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = set_flags(*TINY, "train.checkpoint_every=4")
    trained = done(lab, "train", "--on", hosts, "--out", run, "--json", "--steps", "6", *flags)
    assert trained.returncode == 0, trained.stderr
    manifest = json.loads(trained.stdout)
    assert manifest["byte_equivalent"] is True
    assert [node["name"] for node in manifest["nodes"]] == ["node1", "node2"]
    assert [path.name for path in sorted((run / "events").iterdir())] == ["rank-0.jsonl", "rank-1.jsonl"]
    assert "rank 1 of 2" in (run / "logs/node2/rank-1.log").read_text()
    assert [commit["step"] for commit in read_jsonl(run / "commits.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000006"]
    # The states, and each machine's own checkpoints and ledger, were not copied to the launcher.
    assert not list(run.glob("state-*"))
    for number in (1, 2):
        assert len(list((tmp_path / f"disk{number}/runs").glob("run-*/state-rank-*"))) == 1
        assert len(list((tmp_path / f"disk{number}/runs").glob("run-*/checkpoints/step-*"))) == 2
        assert len(list((tmp_path / f"disk{number}/runs").glob("run-*/commits.jsonl"))) == 1
    verdict = shoal("verify", run)
    assert verdict.returncode == 0
    assert "2 replicas by their digests" in verdict.stdout
    resumed = done(lab, "train", "--resume", run, "--steps", "8", "--set", "run.weights=1/0.34")
    assert resumed.returncode == 0, resumed.stderr
    assert "continues after step 6" in resumed.stderr
    assert [step["step"] for step in steps_of(run)] == list(range(1, 9))
    # Other settings for the rest of the run are the same on every machine.
    configs = [*(tmp_path.glob("disk?/runs/run-*/config.toml")), run / "config.toml"]
    assert len(configs) == 3
    assert {(config.run.weights, config.train.steps) for config in map(load_config, configs)} == {("1/0.34", 8)}
    assert shoal("verify", run).returncode == 0


@pytest.mark.long
def test_a_lost_connection_ends_no_rank_and_a_stop_ends_all(lab: Lab, hosts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert done(lab, "train", "--on", hosts, "--out", run, "--detach", *LONG, *set_flags(*TINY)).returncode == 0
    wait_until(lambda: len(steps_of(run, 1)) > 2)
    os.kill(connection_to("node2", run), signal.SIGKILL)
    wait_until(lambda: "the connection to node2 is back" in notes(run))
    seen = len(steps_of(run, 1))
    wait_until(lambda: len(steps_of(run, 1)) > seen)
    # Events that were written while the connection was lost were fetched, without a gap or a duplicate.
    assert [step["step"] for step in steps_of(run, 1)] == list(range(1, len(steps_of(run, 1)) + 1))
    stacks = done(lab, "stacks", run, "--json")
    assert stacks.returncode == 0, stacks.stderr
    answers = json.loads(stacks.stdout)["ranks"]
    assert [(answer["rank"], answer["node"]) for answer in answers] == [(0, "node1"), (1, "node2")]
    assert all("main" in {frame["function"] for frame in answer["threads"][0]} for answer in answers)
    listing = json.loads(done(lab, "ps", "--on", hosts, "--json").stdout)["hosts"]
    parts = {name: [process["part"] for run in runs for process in run["processes"]] for name, runs in listing.items()}
    assert {name: sorted(names) for name, names in parts.items()} == {
        "node1": ["agent", "messenger", "rank-0", "template"],
        "node2": ["agent", "messenger", "rank-1", "template"],
    }
    stopped = done(lab, "stop", run)
    assert "finished its step and stopped" in stopped.stdout, stopped.stderr
    assert not [process for process in find_processes() if process.run.is_relative_to(tmp_path)]
    assert list((run / "checkpoints").iterdir()), "the last checkpoint was copied to the launcher"


def connection_to(node: str, run: Path) -> int:
    """Return the pid of the SSH client of this run's launcher: another run may have hosts of the same names."""
    for parent in find_processes(run):
        for process in psutil.Process(parent.pid).children():
            words = process.cmdline()
            if words[:1] == ["ssh"] and words[-3:] == [node, "sh", "-s"]:
                return process.pid
    raise AssertionError(f"no connection to {node}")


@pytest.mark.long
def test_a_host_that_is_lost_ends_the_run_within_seconds(lab: Lab, hosts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = at(lab, "switch", "train", "--on", hosts, "--out", run, *LONG, *set_flags(*TINY, "members.on_loss=end"))
    with ended(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True), run) as training:
        wait_until(lambda: steps_of(run, 1))
        lab.node("node2").kill()
        try:
            _, stderr = training.communicate(timeout=15)
        finally:
            lab.node("node2").restart()
    assert training.returncode == 3
    assert "error: node2 is gone, and rank 1 with it" in stderr
    assert not [process for process in find_processes() if process.run.is_relative_to(tmp_path)]


@pytest.mark.long
def test_a_killed_host_rejoins_with_the_command_installed_on_it(lab: Lab, hosts: Path, tmp_path: Path) -> None:
    """The host has its own Python and no `shoal` on its path."""
    run, disk = tmp_path / "run", tmp_path / "disk2"
    assert done(lab, "train", "--on", hosts, "--out", run, "--detach", *LONG, *set_flags(*TINY)).returncode == 0
    wait_until(lambda: len(steps_of(run, 1)) > 2)
    end_processes([process for process in find_processes() if process.run.is_relative_to(disk)])
    wait_until(lambda: len(members_of(run)) == 1)
    [host_run] = disk.glob("runs/run-*")
    words = lab.command("node2", [str(disk / "bin/shoal"), "join", str(host_run)])
    with ended(subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True), run) as joined:
        wait_until(lambda: len(members_of(run)) == 2)
        assert done(lab, "stop", run).returncode == 0
        _, stderr = joined.communicate(timeout=30)
    assert "Traceback" not in stderr


def members_of(run: Path) -> list[int]:
    """Return the members that did the last step."""
    commits = read_jsonl(run / "commits.jsonl")
    return list(commits[-1]["members"]) if commits else []


@pytest.mark.long
def test_stop_reaches_hosts_without_a_supervisor(lab: Lab, hosts: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert done(lab, "train", "--on", hosts, "--out", run, "--detach", *LONG, *set_flags(*TINY)).returncode == 0
    end_processes([process for process in find_processes(run) if process.part == "supervisor"])
    wait_until(
        lambda: (
            "messenger" not in [process.part for process in find_processes() if process.run.is_relative_to(tmp_path)]
        )
    )
    stopped = done(lab, "stop", run)
    assert stopped.returncode == 0, stopped.stderr
    assert not [process for process in find_processes() if process.run.is_relative_to(tmp_path)]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param("plain_ddp.py", ["--epochs", "3"], marks=pytest.mark.long),
        pytest.param("accelerate_train.py", [], marks=pytest.mark.exhaustive),
        pytest.param("fabric_train.py", ["--num-nodes", "2"], marks=pytest.mark.exhaustive),
    ],
)
def test_an_unmodified_script_runs_over_ssh(lab: Lab, hosts: Path, tmp_path: Path, name: str, words: list[str]) -> None:
    project = tmp_path / "my project"
    project.mkdir()
    script = project / name
    script.write_text((SCRIPTS / name).read_text())
    ran = done(lab, "run", "--on", hosts, "--out", tmp_path / "run", script, *words)
    assert ran.returncode == 0, ran.stderr
    lines = sorted(match.groups() for match in LINE.finditer(ran.stdout))
    assert [line[:4] for line in lines] == [("0", "0", "2", "node1"), ("1", "1", "2", "node2")]
    assert len({weights for *_, weights in lines}) == 1
    assert float(lines[0][5]) == pytest.approx(loss_of_one_process(), abs=2e-6)
    # The script ran from its copy on each host.
    assert len(list(tmp_path.glob(f"disk?/projects/*/{name}"))) == 2
    assert "the script's store is torch's own and asks for no token" in ran.stderr


@pytest.mark.long
def test_a_machine_joins_with_one_command(lab: Lab, tmp_path: Path) -> None:
    """The second node has another cache, as another machine has. Wrong and used codes are refused."""
    run, part = tmp_path / "host", tmp_path / "guest"
    words = at(lab, "node1", "host", "--steps", "4", "--out", run, "--json", *set_flags(*TINY))
    with ended(subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True), run) as host:
        wait_until(lambda: (run / "supervisor.jsonl").exists() and "works once" in notes(run))
        invitation = notes(run)
        place, code = invitation.split("shoal join ")[1].split()[0], invitation.split()[-1]
        wrong_code = code[:-1] + ("a" if code[-1] != "a" else "b")
        wrong = done(lab, "join", f"{place}#{wrong_code}", "--out", part, node="node2")
        assert wrong.returncode == 3
        assert "did not accept the code" in wrong.stderr
        assert "other users of this machine can read a code given as an argument" in wrong.stderr
        assert not part.exists()
        env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
        command = at(lab, "node2", "join", place, "--out", part)
        joined = subprocess.run(command, input=code, capture_output=True, text=True, timeout=180, check=False, env=env)
        assert joined.returncode == 0, joined.stderr
        stdout, _ = host.communicate(timeout=20)
    assert host.returncode == 0
    manifest = json.loads(stdout)
    assert manifest["byte_equivalent"] is True
    assert [node["name"] for node in manifest["nodes"]] == ["node1", "node2"]
    assert (run / "logs/node2/rank-1.log").read_text() == (part / "logs/node2/rank-1.log").read_text()
    assert "token" not in {path.name for path in part.iterdir()}
    assert "node2 (10.77.0.2; it says its user is 'root') has joined: 2 of 2 machines" in notes(run)
    again = done(lab, "join", f"{place}#{code}", "--out", tmp_path / "again", node="node2")
    assert again.returncode == 3
    assert "no shoal answers at 10.77.0.1" in again.stderr
    assert done(lab, "join", "nonsense", node="node2").returncode == 2
