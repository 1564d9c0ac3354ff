"""`shoal emit`: the shells can run and read what it prints.

Exercises launch.emit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from shoal.cluster.node import Node
from shoal.config.load import build_config
from shoal.launch.emit import make_job, slurm_text, torchrun_commands
from tests.support.needs import need_tool
from tests.unit.launch.test_emit import job, manifest


def test_an_unknown_interface_is_looked_up_where_the_command_runs() -> None:
    alone = (Node("here", "127.0.0.1", "", 1, 0),)
    [emitted] = torchrun_commands(make_job(build_config(), alone, Path("run"), sys.executable), 29500)
    lookup, _, start = emitted.command.partition(" && ")
    done = subprocess.run(
        ["/bin/sh", "-c", f"{lookup} && env {start.partition(sys.executable)[0]} env"], capture_output=True
    )
    assert b"\nGLOO_SOCKET_IFNAME=lo\n" in done.stdout
    assert b"\nNCCL_SOCKET_IFNAME=lo\n" in done.stdout


def test_the_shell_can_read_the_pods_script_for_any_data_path() -> None:
    for name in ("it's", '"q"', "a: b # c", "ü", 'tab\\tand "\\u007f"'):
        [pod] = manifest(f"data.path={json.dumps(name)}")[1]["spec"]["template"]["spec"]["containers"]
        subprocess.run(["/bin/sh", "-n"], input=pod["args"][0], text=True, check=True)


def test_the_shells_can_read_the_slurm_script() -> None:
    text = slurm_text(job("data.path=it's here.txt"), new_folder=True)
    subprocess.run([need_tool("bash"), "-n"], input=text, text=True, check=True)
    inner = text.partition("<<'END_OF_NODE_SCRIPT'\n")[2].partition("\nEND_OF_NODE_SCRIPT\n")[0]
    assert inner.startswith("set -eu\n")
    subprocess.run(["/bin/sh", "-n"], input=inner, text=True, check=True)
