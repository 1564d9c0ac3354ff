"""An agent's orders on disk, while it works: what it takes to start it again on its machine after its end."""

from __future__ import annotations

from dataclasses import replace

from shoal.errors import RunFailed
from shoal.launch.orders import Go, Meet, read_go, read_meet, to_line
from shoal.runfolder import RunFolder, write_durably


def keep_orders(run: RunFolder, meet: Meet, go: Go) -> None:
    """Readable by its owner alone: it has the run's token. Whole or not at all, and on disk before it is relied on."""
    path = run.orders(meet.node)
    write_durably(path, to_line(meet) + to_line(go), path.with_name(f".{path.name}.new"), 0o600)


def read_orders(run: RunFolder, node: str) -> tuple[Meet, Go]:
    """For the agent's next life."""
    try:
        first, second = run.orders(node).read_bytes().splitlines()
        meet, go = read_meet(first), read_go(second)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFailed(
            f"{node} cannot take part in {run.path} again: {run.orders(node)} cannot be read",
            why=getattr(error, "strerror", None) or "its agent has ended as it should, or the file is damaged",
            fix="if the run goes on elsewhere, let this machine in as a new one: shoal host RUN, there",
        ) from None
    return replace(meet, life=meet.life + 1), go


def forget_orders(run: RunFolder, node: str) -> None:
    """An agent that ends by itself has nothing to come back to."""
    run.orders(node).unlink(missing_ok=True)
