"""An agent before it has met anybody: it looks at its machine, begins to listen, and says what others must know."""

from __future__ import annotations

import os
import secrets
import shlex
import socket
from pathlib import Path
from typing import Any

from shoal.cluster.node import listen_at
from shoal.control.devices import this_machine_is_cpu_only
from shoal.control.hello import introduce
from shoal.control.machine import physical_cores
from shoal.control.membership.promisefile import PromiseFile
from shoal.control.private import torch_caches
from shoal.control.route import interface_for
from shoal.errors import RunFailed
from shoal.launch.found import KEEPER, MESSENGER, find
from shoal.launch.mesh import Mesh
from shoal.launch.orders import Meet
from shoal.runfolder import RunFolder


async def get_ready(orders: Meet, run: RunFolder, mesh: Mesh) -> tuple[dict[str, Any], socket.socket | None]:
    """What the launcher is told, and the socket at which the store of a user's script will be served."""
    refuse_leftovers(run.path, orders.node, is_new=orders.life == 0)
    # Refused here, before any rank is started.
    torch_caches()
    interface = interface_for(orders.address, orders.interface, orders.node)
    mark = secrets.token_hex(16)
    me = introduce(orders.member, orders.node, mark, orders.config, orders.data, orders.life)
    port = await mesh.listen(orders.address, me, orders.token, orders.port)
    held = None if orders.script_port is None else listen_at(orders.address, orders.script_port)
    said = {
        "node": orders.node,
        "mark": mark,
        "pid": os.getpid(),
        "port": port,
        "script_port": held and held.getsockname()[1],
        "interface": interface,
        "cores": physical_cores(),
        "cpu_only": this_machine_is_cpu_only(),
        "life": orders.life,
        "highest": PromiseFile(run.votes(orders.node)).load().highest,
    }
    return said, held


def refuse_leftovers(run: Path, node: str, is_new: bool) -> None:
    """Ranks of an earlier launch whose keeper was killed still write into this very folder. Whoever comes back finds
    those of other emulated nodes there, as it should."""
    others = [found for found in find(run) if found.part not in (KEEPER, MESSENGER)]
    left = [found for found in others if is_new or found.node == node]
    if left:
        raise RunFailed(
            f"an earlier launch of {run} still works on {node}: process {', '.join(str(found.pid) for found in left)}",
            why="whoever kept it was killed, and its agent goes on",
            fix=f"end it first: shoal stop {shlex.quote(str(run))}",
        )


def as_bug(error: Exception, node: str) -> RunFailed:
    return RunFailed(
        f"the agent on {node} failed: {type(error).__name__}: {error}",
        why="that is a bug in shoal, or the machine is in trouble",
        fix=f"its log has the traceback: agents/{node}.log in the run folder",
    )
