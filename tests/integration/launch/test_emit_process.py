"""`shoal emit`: the shells can run and read what it prints.

Exercises launch.emit, launch.emit_slurm.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shoal.cluster.node import Node
from shoal.config.load import build_config
from shoal.launch.emit import make_job, torchrun_commands
from shoal.launch.emit_slurm import slurm_text, training_job
from tests.unit.launch.test_emit import EQUAL, job


def test_an_unknown_interface_is_looked_up_where_the_command_runs() -> None:
    alone = (Node("here", "127.0.0.1", "", 1, 0),)
    [emitted] = torchrun_commands(make_job(build_config(), alone, Path("run"), sys.executable), 29500)
    lookup, _, start = emitted.command.partition(" && ")
    done = subprocess.run(
        ["/bin/sh", "-c", f"{lookup} && env {start.partition(sys.executable)[0]} env"], capture_output=True
    )
    assert b"\nGLOO_SOCKET_IFNAME=lo\n" in done.stdout
    assert b"\nNCCL_SOCKET_IFNAME=lo\n" in done.stdout


def test_the_shell_can_read_the_slurm_script() -> None:
    text = slurm_text(training_job(job("data.path=it's here.txt", nodes=EQUAL), new_folder=True))
    subprocess.run(["/bin/sh", "-n"], input=text, text=True, check=True)
