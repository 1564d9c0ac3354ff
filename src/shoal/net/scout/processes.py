"""Who else is here: ranks that nobody looks after any more, runs of shoal, whoever has the port, and how many files a
process may open."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.net.scout.ports import listeners
from shoal.net.scout.proc import describe, is_orphan, owner_of, pids, user_name, variables

_RUN, _PART = "SHOAL_RUN", "SHOAL_PART"
_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def observe(request: dict[str, Any]) -> dict[str, Any]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found: dict[str, Any] = {
        "files": {"soft": _limit(soft), "hard": _limit(hard)},
        "user": user_name(os.geteuid()),
        "has_command": shutil.which("shoal") is not None,
        "over_ssh": "SSH_CONNECTION" in os.environ,
        **workers(),
    }
    port = int(request.get("port") or 0)
    return {**found, "port": {"number": port, "holders": holders(port)}} if port else found


def _limit(number: int) -> int | None:
    return None if number == resource.RLIM_INFINITY else number


def workers() -> dict[str, list[dict[str, Any]]]:
    """`marked` are all that carry the name of a run of shoal, `strays` orphaned ranks of anybody else."""
    marked, strays = [], []
    for pid in pids():
        # It may end while we look at it.
        with contextlib.suppress(ProcessLookupError):
            own = variables(pid)
            if _is_another(own, (_RUN,)) and _is_owners(pid, own):
                marked.append({**describe(pid), **_mark(own), "orphan": is_orphan(pid)})
            elif _is_another(own, _RANK) and is_orphan(pid):
                strays.append({**describe(pid), **{name.lower(): own[name] for name in _RANK}})
    return {"marked": marked, "strays": strays}


def _is_another(own: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Variables that we have too say nothing: in the container of a job, everybody has its rank."""
    return all(name in own for name in names) and any(own[name] != os.environ.get(name) for name in names)


def _is_owners(pid: int, own: Mapping[str, str]) -> bool:
    """Any process can carry the name of any run: those of this user, or of the run folder's owner, are believed."""
    try:
        owner = owner_of(pid)
        return owner is not None and (owner == os.geteuid() or owner == Path(own[_RUN]).stat().st_uid)
    except OSError:
        return False


def _mark(own: Mapping[str, str]) -> dict[str, Any]:
    """`has_folder`: the run is still there to be stopped by its name."""
    run = Path(own[_RUN])
    whole = any((run / name).is_file() for name in ("job.json", "config.toml"))
    return {"run": str(run), "part": own.get(_PART, ""), "has_folder": whole}


def holders(port: int) -> list[dict[str, Any]]:
    found = []
    for listener in listeners(port):
        with contextlib.suppress(ProcessLookupError):
            pid = listener["pid"]
            own = variables(pid) if pid else {}
            more = {**describe(pid), **(_mark(own) if _RUN in own else {})} if pid else {}
            found.append({**listener, **more})
    return found
