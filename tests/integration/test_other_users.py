"""Attacks by another user of the same machine: planted caches and modules, forged process marks, an open store.

Exercises control.processes, data.prepare.
"""

from __future__ import annotations

import ast
import contextlib
import getpass
import os
import pickle
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import shoal as package
from shoal.agent.agent import refuse_leftovers
from shoal.cli import main
from shoal.control.orders import StartProcess
from shoal.control.processes import RunProcess, find_processes, is_alive
from shoal.control.rank_env import CACHE_VARIABLES, choose_caches, find_danger, make_private
from shoal.errors import DataError, UsageError
from shoal.records.final_states import open_state
from shoal.records.verify import verify_run
from shoal.run_folder import RunFolder, user_name
from shoal.runs.supervisor import python_words
from tests.support.agents import agents, go
from tests.support.labs import need_lab
from tests.support.needs import need_tool
from tests.support.programs import TINY, set_flags, shoal_command, shoal_in_new_python
from tests.support.run_samples import make_run

OTHER_USER = 65534
SOURCE = Path(package.__file__).parent
SHORT = ("train.steps=2", "train.global_batch=4", "train.eval_every=2", "train.precision=fp32")


@pytest.fixture
def as_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")


# Folders.


def make_folder(path: Path, mode: int = 0o700, owner: int | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, owner)
    return path


def test_a_folder_of_the_user_is_safe(tmp_path: Path) -> None:
    assert find_danger(make_folder(tmp_path / "a/b")) == ""
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert find_danger(tmp_path / "link" / "b") == ""
    assert find_danger(tmp_path / "a/b/../b") == ""


def test_a_sticky_parent_is_safe_and_a_sticky_folder_is_not(tmp_path: Path) -> None:
    shared = make_folder(tmp_path / "shared", 0o1777)
    assert find_danger(make_folder(shared / "own")) == ""
    assert find_danger(shared) == f"other users can write to {shared}"


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_parent_that_others_can_write_to_is_unsafe(tmp_path: Path, mode: int) -> None:
    parent = make_folder(tmp_path / "parent", mode)
    assert find_danger(make_folder(parent / "own")) == f"other users can write to {parent}"


def test_a_folder_or_link_of_another_user_is_unsafe(tmp_path: Path, as_root: None) -> None:
    foreign = make_folder(tmp_path / "foreign", owner=OTHER_USER)
    assert "belongs to user" in find_danger(foreign)
    assert "belongs to user" in find_danger(make_folder(foreign / "own"))
    make_folder(tmp_path / "own")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "own")
    os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)
    assert find_danger(link).startswith(f"{link} is a symbolic link of user ")
    # A link of the user may lead through a link of another user.
    (tmp_path / "first").symlink_to(link)
    assert find_danger(tmp_path / "first").startswith(f"{link} is a symbolic link of user ")


def test_group_write_permission_is_unsafe_except_for_the_owners_group(tmp_path: Path, as_root: None) -> None:
    folder = make_folder(tmp_path / "folder", 0o770)
    os.chown(folder, 0, OTHER_USER)
    assert find_danger(folder) == f"other users can write to {folder}"
    os.chown(folder, 0, 0)
    folder.chmod(0o770)
    assert find_danger(folder) == ""


def test_a_file_a_link_loop_and_a_missing_path_are_unsafe(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert find_danger(tmp_path / "file") == f"{tmp_path / 'file'} is not a folder"
    assert "too many symbolic links" in find_danger(tmp_path / "loop")
    assert "cannot be examined" in find_danger(tmp_path / "none")


def test_an_existing_cache_folder_becomes_private(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "cache", 0o755)
    assert stat.S_IMODE(make_private(folder).stat().st_mode) == 0o700
    assert stat.S_IMODE(make_private(tmp_path / "new").stat().st_mode) == 0o700


# torch's caches.


def test_the_compiler_cache_is_a_private_folder_of_the_user(tmp_path: Path) -> None:
    caches = choose_caches({"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    assert caches.variables == {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "shoal/torch/inductor")}
    assert caches.note == ""
    assert stat.S_IMODE((tmp_path / "shoal/torch/inductor").stat().st_mode) == 0o700
    claimed = tmp_path / f"torchinductor_{getpass.getuser()}"
    assert stat.S_IMODE(claimed.stat().st_mode) == 0o700, "torch keeps headers here even if the variable is set"


def test_temporary_files_move_when_others_can_write_to_torchs_default_folder(tmp_path: Path) -> None:
    make_folder(tmp_path / f"torchinductor_{getpass.getuser()}", 0o777)
    caches = choose_caches({"XDG_CACHE_HOME": str(tmp_path), "TMPDIR": str(tmp_path)})
    assert caches.variables["TMPDIR"] == str(tmp_path / "shoal/torch/tmp")
    assert "other users can write to" in caches.note


def test_root_with_another_users_environment_creates_nothing_in_that_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_root: None
) -> None:
    """Act as with `sudo -E`: the other user could not use files that root creates there."""
    home = make_folder(tmp_path / "home", owner=OTHER_USER)
    monkeypatch.setenv("LOGNAME", "alice")
    caches = choose_caches({"XDG_CACHE_HOME": str(home), "TMPDIR": str(tmp_path)})
    assert list(home.iterdir()) == []
    assert not (tmp_path / "torchinductor_alice").exists()
    assert f"{home} belongs to user" in caches.note


def test_in_a_user_namespace_links_of_other_users_are_unsafe(tmp_path: Path, as_root: None) -> None:
    """All users outside the namespace share one user id inside it, the real root included."""
    shared = make_folder(tmp_path / "shared", 0o1777)
    own = make_folder(tmp_path / "own", 0o700)
    (shared / "link").symlink_to(own)
    os.chown(shared / "link", 12345, 12345, follow_symlinks=False)
    program = (
        "import sys; from pathlib import Path; from shoal.control.rank_env import find_danger\n"
        "print([find_danger(Path(path)) for path in sys.argv[1:]])"
    )
    words = [
        "unshare",
        "--user",
        "--map-root-user",
        sys.executable,
        "-P",
        "-c",
        program,
        str(own),
        str(shared / "link"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()[-80:]}")
    safe, unsafe = ast.literal_eval(done.stdout)
    assert safe == ""
    assert "is a symbolic link of user" in unsafe


@pytest.mark.parametrize("name", CACHE_VARIABLES)
def test_a_cache_named_by_the_user_is_used_if_it_is_safe(tmp_path: Path, name: str) -> None:
    env = {name: str(tmp_path / "own"), "XDG_CACHE_HOME": str(tmp_path)}
    assert name not in choose_caches(env).variables
    (tmp_path / "own").chmod(0o777)
    with pytest.raises(UsageError, match="other users can write to") as caught:
        choose_caches(env)
    assert caught.value.seen.startswith(f"{name}={tmp_path / 'own'} cannot be used: ")


def test_without_a_safe_home_folder_caches_are_temporary_and_removed(tmp_path: Path) -> None:
    make_folder(tmp_path / "home", 0o777)
    program = (
        "import os, sys; from shoal.control.rank_env import torch_caches\n"
        "caches = torch_caches(); print(caches.note); print(*caches.variables.values(), sep='\\n')\n"
        "print(oct(os.stat(os.path.dirname(caches.variables['TRITON_CACHE_DIR'])).st_mode)[-3:])"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-P", "-c", program], env=env, capture_output=True, text=True, check=True)
    note, *folders, mode = done.stdout.splitlines()
    assert note.endswith(f"other users can write to {tmp_path / 'home'}")
    assert len(folders) == 4
    assert all(folder.startswith(f"{tmp_path}/shoal-torch-") for folder in folders)
    assert mode == "700"
    assert not list(tmp_path.glob("shoal-torch-*"))


_SHOW_CACHE = "import os; print(os.environ['TORCHINDUCTOR_CACHE_DIR'])"


def test_every_process_of_an_agent_gets_the_private_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with agents(tmp_path / "run", XDG_CACHE_HOME=str(cache), TORCHINDUCTOR_CACHE_DIR="") as (agent,):
        go([agent], [StartProcess("rank-0", (0,), (sys.executable, "-c", _SHOW_CACHE), {})])
        assert agent.code(30) == 0
    assert agent.run.log(agent.node, "rank-0").read_text() == f"{cache / 'shoal/torch/inductor'}\n"


def test_an_agent_refuses_a_cache_of_another_user_before_starting_processes(tmp_path: Path, as_root: None) -> None:
    foreign = make_folder(tmp_path / "foreign", owner=OTHER_USER)
    with agents(tmp_path / "run", TORCHINDUCTOR_CACHE_DIR=str(foreign)) as (agent,):
        assert agent.code(30) == 2
    (refusal,) = agent.said("refused")
    assert refusal["seen"].startswith(f"TORCHINDUCTOR_CACHE_DIR={foreign} cannot be used: ")
    assert "unset TORCHINDUCTOR_CACHE_DIR" in refusal["fix"]


def test_every_worker_program_protects_its_caches_itself() -> None:
    """A user may start a worker with torchrun directly."""
    paths = [path for part in ("train", "sync", "tools") for path in (SOURCE / part).rglob("*.py")]
    # The scripts of lessons are a learner's, and are started by shoal run.
    paths = [path for path in paths if "lessons" not in path.parts]
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in paths}
    programs = {
        name: text for name, text in texts.items() if "__main__" in text and re.search(r"(import|from) torch", text)
    }
    unprotected = [name for name, text in programs.items() if "use_private_caches()" not in text]
    # The one stores only torch's keys, the other is started by agents only, and its ranks protect themselves.
    assert sorted(unprotected) == ["sync/script_store.py", "train/template.py"]
    assert len(programs) > 4


class Exploit:
    """Run a shell command when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {shlex.quote(str(self.marker))}",)


_COMPILES = """
import torch
print(torch.compile(lambda x: x * 2 + 1)(torch.ones(4)).sum().item())
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_planted_pickles_in_the_predictable_cache_never_run(tmp_path: Path, as_root: None) -> None:
    """The other user has run the same script and replaced every file that it cached."""
    need_tool("g++")
    temporary, marker = make_folder(tmp_path / "tmp", 0o1777), tmp_path / "exploited"
    script = tmp_path / "compiles.py"
    script.write_text(_COMPILES)
    planted = temporary / "torchinductor_root"
    # torch takes the user name in the folder's name from these variables.
    env = {**os.environ, "TMPDIR": str(temporary), "LOGNAME": "root", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    env["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)

    def output_of(*words: str) -> str:
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=600, check=False)
        return done.stdout

    assert output_of(sys.executable, str(script)) == "12.0\n"
    files = [path for path in planted.rglob("*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(pickle.dumps(Exploit(marker)))
    for path in (planted, *planted.rglob("*")):
        os.chown(path, OTHER_USER, OTHER_USER)
    output_of(sys.executable, str(script))
    assert marker.exists(), "without protection the attack must succeed"
    marker.unlink()
    before = sorted(planted.rglob("*"))
    shown = output_of(*shoal_command("run", "--on", "local:1", "--out", tmp_path / "run", script))
    assert not marker.exists(), "the other user's code ran"
    assert shown == "[0] 12.0\n"
    assert sorted(planted.rglob("*")) == before, "the other user's folder was used"
    assert any((tmp_path / "cache/shoal/torch/inductor").iterdir())


# Modules in the current folder.

# Modules that Python, torch or shoal import early, late, or only if present.
PLANTED = (
    "random", "numpy", "runpy", "torch", "pydantic", "sitecustomize", "psutil", "pdb", "optree", "shoal",
    "__future__", "typing",
)  # fmt: skip


def plant_modules(folder: Path, marker: Path) -> Path:
    folder.mkdir()
    for name in PLANTED:
        (folder / f"{name}.py").write_text(
            f"open({str(marker)!r}, 'a').write('{name} ')\nraise ImportError('planted')\n"
        )
    return folder


def from_planted_folder(folder: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run as from a shell: the console script's own folder is first in the search path, never the current folder."""
    marker = folder / "marker"
    cwd = plant_modules(folder / "planted", marker)
    argv = [sys.executable, "-P", *shoal_command(*words)[1:]]
    # `export PYTHONPATH=$PYTHONPATH:/lib` leaves an empty entry, which means the current folder.
    env = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{folder / 'lib'}"}
    (cwd / "sitecustomize.py").unlink()
    (cwd / "shoal.py").unlink()
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert not marker.exists(), f"ran: {marker.read_text()}"
    return done


@pytest.mark.parametrize(
    "launcher",
    ["shoal", pytest.param("torchrun", marks=pytest.mark.long), pytest.param("spawn", marks=pytest.mark.long)],
)
def test_ranks_import_nothing_from_the_current_folder(tmp_path: Path, launcher: str) -> None:
    words = ("train", "--on", "local:2", "--launcher", launcher, "--out", tmp_path / "run")
    done = from_planted_folder(tmp_path, *words, *set_flags(*TINY, *SHORT))
    assert done.returncode == 0, done.stderr
    if launcher == "shoal":
        shutil.rmtree(tmp_path / "planted")
        done = from_planted_folder(tmp_path, "sample", tmp_path / "run", "--count", "1")
        assert done.returncode == 0, done.stderr


def test_a_worker_started_without_safe_path_does_not_import_from_the_current_folder(tmp_path: Path) -> None:
    """Start it as plain torchrun does. Modules that Python imports before shoal cannot be protected."""
    cwd = plant_modules(tmp_path / "planted", marker := tmp_path / "marker")
    for name in ("runpy", "shoal"):
        (cwd / f"{name}.py").unlink()
    for how, module in (("-m", "shoal.train.worker"), ("-um", "shoal")):
        words = [sys.executable, how, module, "--help"]
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    assert not marker.exists(), f"ran: {marker.read_text()}"


def test_a_script_imports_from_its_own_folder_only(tmp_path: Path) -> None:
    """Its child Python scripts do the same: PYTHONSAFEPATH is not passed on."""
    home = make_folder(tmp_path / "project")
    (home / "helper.py").write_text("text = 'from the project'\n")
    (home / "child.py").write_text("import helper; print('child:', helper.text)\n")
    (home / "main.py").write_text(
        "import subprocess, sys, random, os; import helper; print('script:', helper.text, flush=True)\n"
        "subprocess.run([sys.executable, os.path.join(os.path.dirname(__file__), 'child.py')], check=True)\n"
    )
    done = from_planted_folder(tmp_path, "run", "--on", "local:1", "--out", tmp_path / "run", home / "main.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0] script: from the project", "[0] child: from the project"]


def test_modules_are_found_in_the_current_folder_unless_others_can_write_there(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("print('module')\n")
    done = shoal_in_new_python("run", "--on", "local:1", "--out", tmp_path / "run", "-m", "own", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0] module\n"), done.stderr
    notes: list[str] = []
    script = ("-m", "own", "--flag")
    assert python_words(script, tmp_path, notes.append) == script
    shared = make_folder(tmp_path / "shared", 0o1777)
    assert python_words(script, shared, notes.append) == ("-P", *script)
    assert python_words(("/a/script.py",), shared, notes.append) == ("/a/script.py",)
    assert len(notes) == 1
    assert f"other users can write to {shared}" in notes[0]
    assert f"PYTHONPATH={shared} shoal run -m own" in notes[0]


# Files that may start Python without -P, and why.
MAY_OMIT_SAFE_PATH = {
    "plan.py": "a user's script",
    "remote_setup.py": "in a new environment, from the folder /",
}


def test_no_python_is_started_without_a_safe_path() -> None:
    start = re.compile(r"(?:\bsys\.executable|\.python)\)?,\s*[\x27\"]-[mc][\x27\"]")
    unprotected = {
        path.name: starts
        for path in sorted([*SOURCE.rglob("*.py"), *SOURCE.with_name("shoal_lab").rglob("*.py")])
        if path.name not in MAY_OMIT_SAFE_PATH and (starts := start.findall(path.read_text()))
    }
    assert unprotected == {}


# Processes that claim to belong to a run.


@contextlib.contextmanager
def forged_process(run: Path, user: int, *words: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    env = {"PATH": os.environ["PATH"], "SHOAL_RUN": str(run), "SHOAL_PART": "supervisor", **variables}
    with subprocess.Popen(words or ("sleep", "60"), env=env, user=user, group=user, cwd="/") as process:
        try:
            yield process
        finally:
            process.kill()


def processes_of(run: Path) -> list[RunProcess]:
    return [process for process in find_processes() if process.run == run]


@pytest.mark.usefixtures("as_root")
class TestForgedMarks:
    def test_only_processes_of_the_folders_owner_are_listed(self, tmp_path: Path) -> None:
        own_run, foreign = make_folder(tmp_path / "own"), make_folder(tmp_path / "foreign", owner=OTHER_USER)
        with forged_process(own_run, OTHER_USER), forged_process(tmp_path / "none", OTHER_USER):
            assert processes_of(own_run) == processes_of(tmp_path / "none") == []
        with forged_process(own_run, 0) as own, forged_process(foreign, OTHER_USER) as other:
            assert [process.pid for process in processes_of(own_run)] == [own.pid]
            assert [process.pid for process in processes_of(foreign)] == [other.pid]

    def test_a_foreign_link_to_the_run_folder_is_not_followed(self, tmp_path: Path) -> None:
        own_run = make_folder(tmp_path / "own")
        link = tmp_path / "link"
        link.symlink_to(own_run)
        os.chown(link, OTHER_USER, OTHER_USER, follow_symlinks=False)
        with forged_process(link, OTHER_USER):
            assert processes_of(link) == processes_of(own_run) == []

    def test_the_environment_of_a_set_user_id_program_is_ignored(self, tmp_path: Path) -> None:
        """Act as sudo at its password prompt: all its user ids are 0, its environment is another user's."""
        compiler = need_tool("g++")
        folder = make_folder(tmp_path / "bin", 0o755)
        program = folder / "asks"
        source = '#include <unistd.h>\nint main() { if (setuid(0)) return 1; write(1, "x", 1); pause(); }\n'
        subprocess.run([compiler, "-x", "c++", "-o", str(program), "-"], input=source, text=True, check=True)
        program.chmod(0o4755)
        # Not by its path: another user cannot enter this folder.
        descriptor = os.open(program, os.O_PATH)
        reading, writing = os.pipe()
        run = make_folder(tmp_path / "own")
        env = {"SHOAL_RUN": str(run), "SHOAL_PART": "supervisor"}
        with subprocess.Popen(
            [f"/proc/self/fd/{descriptor}"],
            env=env, user=OTHER_USER, group=OTHER_USER, cwd="/", stdout=writing, pass_fds=(descriptor,),
        ) as process:  # fmt: skip
            os.close(writing)
            try:
                if os.read(reading, 1) != b"x":
                    pytest.skip("set-user-ID programs have no effect on this disk")
                assert find_processes(run) == []
            finally:
                process.kill()
                os.close(reading)
                os.close(descriptor)

    def test_forged_marks_neither_delay_nor_block_a_run(self, tmp_path: Path) -> None:
        run = tmp_path / "run"
        words = ("train", "--on", "local:1", *set_flags(*TINY, *SHORT))
        assert shoal_in_new_python(*words, "--out", run).returncode == 0
        with forged_process(run, OTHER_USER, SHOAL_NODE="\x1b]0;owned\x07") as fake:
            refuse_leftovers(run, "local", is_new=True)
            stopped = shoal_in_new_python("stop", run, timeout_s=30)
            assert (stopped.returncode, fake.poll()) == (0, None)
            assert "was not running" in stopped.stdout
            assert str(run) not in shoal_in_new_python("ps", "--all").stdout
            resumed = shoal_in_new_python("train", "--resume", run, "--steps", "3")
            assert resumed.returncode == 0, resumed.stderr
            # By its number: a test beside this one may leave processes that are listed rightly.
            assert not re.search(rf"^ *{fake.pid} ", resumed.stderr, re.MULTILINE)

    def test_control_characters_in_process_marks_are_removed(self, tmp_path: Path) -> None:
        run = make_folder(tmp_path / "run")
        with forged_process(
            run, 0, "sh", "-c", "sleep 60; :", "\x1b[2Jx", SHOAL_NODE="a\x1b]52;c;eA==\x07b", SHOAL_PART="p\x9bm"
        ):
            (process, *_) = processes_of(run)
            assert (process.node, process.part) == ("ab", "p")
            assert is_alive(process)
            shown = shoal_in_new_python("ps", "--all").stdout
            assert "\x1b" not in shown
            assert "sleep" in shown


# The store of a script.

_REACH = """
import os, socket, sys
import torch.distributed as dist
dist.init_process_group("gloo")
port = int(os.environ["MASTER_PORT"])
for address in sys.argv[1:]:
    with socket.socket() as other:
        other.settimeout(5)
        print(address, "refused" if other.connect_ex((address, port)) else "ACCEPTED", flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def connections(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stderr + done.stdout
    return {line.partition("] ")[2] for line in done.stdout.splitlines()}


def test_the_store_of_a_script_listens_on_loopback_alone(tmp_path: Path) -> None:
    (tmp_path / "reach.py").write_text(_REACH)
    addresses = ["127.0.0.1", "127.0.0.2", *own_addresses()]
    done = shoal_in_new_python("run", "--on", "local:2", "--out", tmp_path / "run", tmp_path / "reach.py", *addresses)
    assert connections(done) == {"127.0.0.1 ACCEPTED", *(f"{address} refused" for address in addresses[1:])}


@pytest.mark.long
def test_the_store_of_a_script_on_several_nodes_listens_on_the_runs_address_alone(tmp_path: Path) -> None:
    need_lab()
    (tmp_path / "reach.py").write_text(_REACH)
    words = ("10.77.0.1", "127.0.0.1", "127.0.0.2")
    done = shoal_in_new_python("run", "--on", "lab:2", "--out", tmp_path / "run", tmp_path / "reach.py", *words)
    assert connections(done) == {"10.77.0.1 ACCEPTED", "127.0.0.1 refused", "127.0.0.2 refused"}
    assert "asks for no token: any program that reaches 10.77.0.1 port" in done.stderr


_DISTURB = """
import os, socket
import torch
import torch.distributed as dist
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
held = [socket.create_connection(place) for _ in range(200)]
for connection, data in zip(held, (b"\\xa5" * 96, b"GET / HTTP/1.0\\r\\n\\r\\n", bytes(4096), b"\\xff" * 65536)):
    connection.sendall(data)
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("sum", int(total), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.long
def test_the_store_of_a_script_serves_its_ranks_among_idle_connections_and_garbage(tmp_path: Path) -> None:
    (tmp_path / "disturb.py").write_text(_DISTURB)
    done = shoal_in_new_python("run", "--on", "local:2", "--out", tmp_path / "run", tmp_path / "disturb.py")
    assert connections(done) == {"sum 2"}


def own_addresses() -> list[str]:
    """Return this machine's addresses other than loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: the kernel only chooses the source address.
        probe.connect(("192.0.2.1", 9))
        return [probe.getsockname()[0]]
    return []


# A run folder of another user.


@pytest.fixture
def root_run(as_root: None) -> Iterator[RunFolder]:
    """Create a finished run of root in a folder that others can enter; private files have their usual mode."""
    parent_folder = Path(tempfile.mkdtemp())
    parent_folder.chmod(0o755)
    run = make_run(parent_folder / "run")
    run.supervisor.write_text('{"event":"supervising","rank":0}\n{"event":"ended","rank":0,"code":0}\n')
    save_file({"weight": np.zeros(3, dtype=np.float32)}, run.state(0))
    checkpoint = make_folder(run.checkpoints / "step-00000100", 0o755)
    run.checkpoints.chmod(0o755)
    (checkpoint / "model.safetensors").write_bytes(b"secret")
    (checkpoint / "manifest.json").write_text('{"sha256": {"model.safetensors": "of a file that others may not read"}}')
    for path in (run.supervisor, run.state(0), checkpoint / "model.safetensors"):
        path.chmod(0o600)
    yield run
    shutil.rmtree(parent_folder)


@contextlib.contextmanager
def as_other_user() -> Iterator[None]:
    os.seteuid(OTHER_USER)
    try:
        yield
    finally:
        os.seteuid(0)


def run_as_other_user(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    """Run `shoal WORDS` as another user. Import its modules first: that user may not read root's Python."""
    arguments = [str(word) for word in words]
    main.load_command(str(words[0]))
    if words[0] == "report":
        main.run([*arguments[:2], "--json"], debug=False)
        capsys.readouterr()
    with as_other_user():
        code = main.run(arguments, debug=False)
    out, err = capsys.readouterr()
    return code, out, err


def test_unreadable_files_are_not_reported_as_wrong(root_run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    whole = verify_run(root_run)
    with as_other_user():
        verdict = verify_run(root_run)
    wrong = {finding.file for finding in verdict.findings if finding.is_wrong}
    assert wrong < {finding.file for finding in whole.findings if finding.is_wrong}
    locked = {finding.file: finding.text for finding in verdict.findings if not finding.is_wrong}
    private = {"supervisor.jsonl", "state-rank-0.safetensors", "checkpoints/step-00000100/model.safetensors"}
    assert locked.keys() >= private
    me = user_name(OTHER_USER)
    assert {locked[name] for name in private} == {
        f"user {me} may not read it: it belongs to user root, who can verify it"
    }


def test_an_unreadable_state_is_not_reported_as_missing(root_run: RunFolder) -> None:
    with as_other_user(), pytest.raises(DataError) as refusal:
        open_state(root_run.state(0))
    assert refusal.value.seen == f"{root_run.state(0)} cannot be read by user {user_name(OTHER_USER)}"
    assert refusal.value.why == f"{root_run.state(0)} belongs to user root, and its mode is 0600"
    assert "sudo -u root" in refusal.value.fix
    # It may hold a secret.
    assert "chmod" not in refusal.value.fix


def test_the_run_of_another_user_is_not_resumed(root_run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_as_other_user(capsys, "train", "--resume", root_run.path, "--steps", "200")
    assert (code, out) == (2, "")
    assert f"cannot write to {root_run.path}" in err
    assert "it belongs to user root" in err
    assert f"sudo -u root shoal train --resume {root_run.path}" in err


def test_a_report_on_the_run_of_another_user_needs_another_folder(
    root_run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run_as_other_user(capsys, "report", root_run.path)
    assert (code, out) == (3, "")
    assert "permission denied" in err
    assert f"shoal report {root_run.path} --out FOLDER" in err
    assert "python -m" not in err
    own_folder = make_folder(root_run.path.parent / "own", owner=OTHER_USER)
    code, out, err = run_as_other_user(capsys, "report", root_run.path, "--out", own_folder / "new")
    assert (code, err) == (0, "")
    assert out == f"{own_folder / 'new' / 'report.html'}\n"
    assert (own_folder / "new" / "report.html").stat().st_uid == OTHER_USER


@pytest.mark.parametrize("words", ["verify", "report", "sample", "logs", "attach", "stop", "explain", "train --resume"])
def test_a_folder_without_access_is_reported_with_its_owner_and_mode(
    root_run: RunFolder, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    root_run.path.chmod(0o700)
    code, out, err = run_as_other_user(capsys, *words.split(), root_run.path)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {root_run.path} cannot be read by user {user_name(OTHER_USER)}\n")
    assert f"{root_run.path} belongs to user root, and its mode is 0700" in err


def test_a_running_run_of_another_user_is_not_reported_as_ended(
    root_run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    with root_run.held():
        code, _, err = run_as_other_user(capsys, "stop", root_run.path)
    assert code == 2
    assert "is running, and user" in err
    assert f"sudo -u root shoal stop {root_run.path}" in err
    assert run_as_other_user(capsys, "stop", root_run.path)[1].endswith("was not running\n")
