"""The environment of a script under `shoal run`: torchrun's and the user's variables, standard input, Python.

Exercises launch.plan, agent.rank_processes.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from shoal.cluster.node import LOOPBACK, Node, Rendezvous
from shoal.config.schema import RunConfig
from shoal.errors import UsageError
from shoal.launch.plan import plan_script, settings_notes
from shoal.run_folder import RunFolder
from shoal.runs.manage import grace_of
from shoal.runs.start import StdinSource, active_environment, choose_python, choose_stdin
from tests.support.programs import shoal, shoal_command

HERE = Node("local", LOOPBACK, "lo", 2, 8)
LAB = [Node("node1", "10.77.0.1", "eth0", 1, 2), Node("node2", "10.77.0.2", "eth0", 1, 2)]
RENDEZVOUS = Rendezvous(LOOPBACK, 4711)
USER_ENV = {"OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "wlan0", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


def variables(run: RunConfig, nodes: list[Node], user_env: dict[str, str]) -> list[dict[str, str]]:
    return [command.env for command in plan_script(run, ["a.py"], nodes, RENDEZVOUS, user_env=user_env)]


def test_every_variable_of_torchrun_is_set(tmp_path: Path) -> None:
    """The names are read from torch's agent. The error file is set, too, in the folder of the logs."""
    source = inspect.getsource(LocalElasticAgent._start_workers) + inspect.getsource(
        LocalElasticAgent._set_local_rank_env
    )
    names = set(re.findall(r'"([A-Z_]+)": ', source)) | set(re.findall(r'worker_env\["([A-Z_]+)"\]', source))
    assert {"ROLE_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "LOCAL_RANK"} <= names
    for env in variables(RunConfig(), LAB, {}):
        assert names - env.keys() <= {"CUDA_VISIBLE_DEVICES"}
    first, second = variables(RunConfig(), LAB, {})
    assert [variables_of_rank["ROLE_RANK"] for variables_of_rank in (first, second)] == ["0", "1"]
    assert (first["ROLE_WORLD_SIZE"], first["GROUP_WORLD_SIZE"], first["ROLE_NAME"]) == ("2", "2", "default")


def test_the_users_own_variables_win_on_this_machine() -> None:
    for env in variables(RunConfig(), [HERE], USER_ENV):
        assert env.items() >= USER_ENV.items()
        assert env["NCCL_SOCKET_IFNAME"] == "lo"
    assert list(settings_notes(RunConfig(), [HERE], USER_ENV)) == [
        "GLOO_SOCKET_IFNAME=wlan0 of your environment is used; shoal would set lo",
        "OMP_NUM_THREADS=3 of your environment is used; shoal would set 4",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=0 of your environment is used; shoal would set 1",
    ]
    assert variables(RunConfig(), [HERE], {})[0]["OMP_NUM_THREADS"] == "4"
    assert list(settings_notes(RunConfig(), [HERE], {"OMP_NUM_THREADS": "4"})) == []


def test_an_option_wins_over_the_environment_with_a_note() -> None:
    run = RunConfig(threads=2)
    assert variables(run, [HERE], USER_ENV)[0]["OMP_NUM_THREADS"] == "2"
    assert "OMP_NUM_THREADS=3 of your environment is not used: --threads says 2" in settings_notes(
        run, [HERE], USER_ENV
    )


def test_interface_names_of_this_machine_are_not_used_on_other_nodes() -> None:
    """wlan0 of the laptop does not exist on an emulated node: gloo would refuse to start."""
    assert {env["GLOO_SOCKET_IFNAME"] for env in variables(RunConfig(), LAB, USER_ENV)} == {"eth0"}
    assert {env["OMP_NUM_THREADS"] for env in variables(RunConfig(), LAB, USER_ENV)} == {"3"}
    notes = list(settings_notes(RunConfig(), LAB, USER_ENV))
    assert len(notes) == 3
    assert notes[0].startswith("GLOO_SOCKET_IFNAME=wlan0 of your environment is not used: interfaces have other names")


def environment(folder: Path, has_torch: bool) -> Path:
    """Make a prefix whose python exits with 0 if it has torch."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f"#!/bin/sh\nexit {0 if has_torch else 3}\n")
    python.chmod(0o755)
    return folder


def test_the_activated_environment_runs_the_script(tmp_path: Path) -> None:
    prefix = environment(tmp_path / "project", has_torch=True)
    python, note = choose_python("", "local:2", {"VIRTUAL_ENV": str(prefix)})
    assert python == str(prefix / "bin/python")
    assert note.startswith(f"the script runs with {python}, of the activated environment")
    assert choose_python("", "lab:2", {"CONDA_PREFIX": str(prefix), "CONDA_DEFAULT_ENV": "mine"})[0] == python


def test_an_activated_environment_without_torch_is_named(tmp_path: Path) -> None:
    prefix = environment(tmp_path / "project", has_torch=False)
    python, note = choose_python("", "local:2", {"VIRTUAL_ENV": str(prefix)})
    assert python == ""
    assert f"the activated environment {prefix} has no torch" in note


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"VIRTUAL_ENV": sys.prefix},
        {"VIRTUAL_ENV": "/no/such/environment"},
        {"CONDA_PREFIX": "/", "CONDA_DEFAULT_ENV": "base"},
    ],
)
def test_without_another_environment_shoals_own_python_runs_the_script(env: dict[str, str]) -> None:
    assert active_environment(env) is None
    assert choose_python("", "local:2", env) == ("", "")


def test_a_python_that_cannot_run_the_script_is_refused(tmp_path: Path) -> None:
    prefix = environment(tmp_path / "project", has_torch=False)
    with pytest.raises(UsageError, match="bin/python has no torch"):
        choose_python(str(prefix / "bin/python"), "local:2", {})
    with pytest.raises(UsageError, match="--python no-such is no program"):
        choose_python("no-such", "local:2", {"PATH": "/usr/bin"})
    broken = prefix / "bin" / "broken"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with pytest.raises(UsageError, match="cannot be run"):
        choose_python(str(broken), "local:2", {})


def test_a_python_that_is_a_link_is_not_resolved() -> None:
    """The python of an environment is a link; its target has no packages."""
    assert choose_python(sys.executable, "local:2", {}) == (sys.executable, "")


@contextlib.contextmanager
def pipe(text: bytes) -> Iterator[int]:
    reading, writing = os.pipe()
    try:
        os.write(writing, text)
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def test_standard_input_is_passed_on_only_to_local_foreground_runs() -> None:
    with pipe(b"hello") as fd:
        assert choose_stdin("local:2", False, fd) == (StdinSource.INHERITED, "")
        passes, note = choose_stdin("lab:2", False, fd)
        assert (passes, "is not passed on: only rank 0 of local:N can read it" in note) == (StdinSource.NONE, True)
        passes, note = choose_stdin("local:2", True, fd)
        assert (passes, "is not passed on: the run is detached" in note) == (StdinSource.NONE, True)
    with pipe(b"") as fd:
        # An empty pipe of a CI or of cron needs no note.
        assert choose_stdin("lab:2", False, fd) == (StdinSource.NONE, "")
    with Path(os.devnull).open() as null:
        assert choose_stdin("local:2", False, null.fileno()) == (StdinSource.NONE, "")
    assert choose_stdin("local:2", False, 987) == (StdinSource.NONE, "")


CHOOSE = """
import os
from shoal.runs.start import choose_stdin
print(choose_stdin("local:2", False)[0].name, flush=True)
if os.fork() == 0:
    os.setpgid(0, 0)
    print(choose_stdin("local:2", False)[0].name, flush=True)
    os._exit(0)
os.wait()
"""


def test_a_terminal_is_read_only_in_the_foreground() -> None:
    """In the background of a shell, rank 0 would read the user's next command line."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", CHOOSE])  # noqa: S606
    output = b""
    with contextlib.suppress(OSError):
        while part := os.read(terminal, 1000):
            output += part
    os.waitpid(pid, 0)
    os.close(terminal)
    assert output.decode().split() == ["TERMINAL", "NONE"], output


RELAY = """
import os, signal, sys, time
from shoal.runs.start import relay_terminal
with relay_terminal() as reading:
    print("ready", flush=True)
    print("got", os.read(reading, 100).decode().strip(), flush=True)
    # Another job has the terminal now, as after Ctrl-Z and bg.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    if (other := os.fork()) == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpgrp())
        print("other", flush=True)
        print("shell", sys.stdin.readline().strip(), flush=True)
        os._exit(0)
    os.waitpid(other, 0)
    os.set_blocking(reading, False)
    time.sleep(0.3)
    try:
        print("stolen", os.read(reading, 100), flush=True)
    except BlockingIOError:
        print("nothing", flush=True)
"""


def test_input_for_another_foreground_job_is_not_passed_on() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", RELAY])  # noqa: S606
    output = b""

    def read_until(word: bytes) -> None:
        nonlocal output
        while word not in output:
            output += os.read(terminal, 1000)

    try:
        read_until(b"ready")
        os.write(terminal, b"for the rank\n")
        read_until(b"other")
        os.write(terminal, b"for the shell\n")
        read_until(b"nothing")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)
    assert b"got for the rank" in output
    assert b"shell for the shell" in output


PRINT_ENVIRONMENT = """
import os, sys
print(os.environ["RANK"], repr(sys.stdin.read()), os.environ["OMP_NUM_THREADS"], sys.executable, flush=True)
assert os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"]).endswith("run/logs/local")
assert "SHOAL_STDIN_FD" not in os.environ
"""


def test_rank_0_reads_the_piped_input(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text(PRINT_ENVIRONMENT)
    done = subprocess.run(
        shoal_command("run", "--on", "local:2", "--out", tmp_path / "run", "--python", sys.executable, script),
        input="two\nlines\n",
        env={**os.environ, "OMP_NUM_THREADS": "7"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        rf"[0] 0 'two\nlines\n' 7 {sys.executable}",
        f"[1] 1 '' 7 {sys.executable}",
    ]
    assert "note: OMP_NUM_THREADS=7 of your environment is used; shoal would set " in done.stderr


def test_cluster_and_threads_can_be_given_as_settings(tmp_path: Path) -> None:
    script = tmp_path / "show.py"
    script.write_text("import os; print(os.environ['WORLD_SIZE'], os.environ['OMP_NUM_THREADS'])")
    settings = ("--set", "run.on=local:1", "--set", "run.threads=19")
    done = shoal("run", *settings, "--out", tmp_path / "run", script)
    assert (done.returncode, done.stdout) == (0, "[0] 1 19\n"), done.stderr
    assert "without effect" not in done.stderr


@pytest.mark.parametrize(
    ("words", "seen", "why"),
    [
        (("--thread", "2", "a.py"), "No such option: --thread", "did you mean '--threads'?"),
        (("--grase=3", "a.py"), "No such option: --grase", "did you mean '--grace'?"),
    ],
)
def test_an_unknown_option_is_not_read_as_a_script(words: tuple[str, ...], seen: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.py").touch()
    done = shoal("run", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {seen}\n  why:  {why}\n")


def test_an_existing_run_folder_is_refused_without_advice_to_resume(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    (tmp_path / "a.py").touch()
    done = shoal("run", "--out", tmp_path / "run", tmp_path / "a.py")
    assert done.returncode == 2
    assert done.stderr.endswith("next: choose another --out\n")


@pytest.mark.parametrize("grace", ["inf", "nan", "1e9"])
def test_a_grace_that_never_ends_is_refused(grace: str, tmp_path: Path) -> None:
    script = tmp_path / "x.py"
    script.write_text("")
    done = shoal("run", "--grace", grace, "--out", tmp_path / "run", script)
    assert done.returncode == 2
    assert "--grace" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_stop_waits_as_long_as_the_ranks_of_a_script_may_take(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", is_training=False)
    for script, expected in ((["x.py"], 120.0), ([], 0.0)):
        run.job.write_text(json.dumps({"script": script, "grace_s": 120.0}))
        assert grace_of(run) == expected
    run.job.write_text("{")
    assert grace_of(run) == 0.0
