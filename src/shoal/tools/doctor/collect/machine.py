"""Collect facts of this machine: versions, processor, memory, disks, what slows it down, and its processes."""

from __future__ import annotations

import configparser
import contextlib
import os
import platform
import resource
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import shoal
from shoal.host.facts import boot_id, cpu_name, has_avx2, installed_version
from shoal.host.memory import available_bytes, total_bytes
from shoal.host.proc import (
    describe_process,
    environment_of,
    find_listeners,
    is_orphan,
    list_pids,
    owner_of,
    read_meminfo,
    read_number,
    read_text,
    user_name,
)
from shoal.host.topology import SYS, Topology, is_on_battery, power_supplies, this_topology

_CPUS = Path("/sys/devices/system/cpu")


def observe(request: dict[str, Any]) -> dict[str, Any]:
    throttles_before = throttle_count()
    slowdowns: dict[str, Any] = {"frequency": frequency(), "power": power(), "lid": lid(), "load": load()}
    throttles = throttle_count()
    if throttles_before is not None and throttles is not None:
        slowdowns["throttled"] = {"since_boot": throttles, "just_now": throttles - throttles_before}
    return {
        "system": platform.system(),
        "arch": platform.machine(),
        "cpu": cpu_name(),
        "avx2": has_avx2(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": installed_version("torch"),
        "shoal": shoal.__version__,
        # Root needs no sudo, and in a container it often has none.
        "is_root": hasattr(os, "geteuid") and os.geteuid() == 0,
        "cores": describe_cores(this_topology()),
        "boot_id": boot_id(),
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
        "memory": memory(),
        "disks": disks(),
        **{topic: facts for topic, facts in slowdowns.items() if facts},
    }


def describe_cores(topology: Topology) -> dict[str, Any]:
    """Return the hardware `threads`, their `physical` cores, a control group's `quota` in cores and the file that sets
    it, and how many cores are `usable` within it.

    Where cores differ, also their `speeds` and how many `fast` and `slow` ones there are.
    """
    quota, speeds = topology.quota, topology.core_speeds
    fast = speeds.count(speeds[0]) if speeds else 0
    return {
        "threads": sum(len(core.cpus) for core in topology.cores) or os.cpu_count(),
        "physical": len(topology.cores),
        "usable": topology.usable,
        "quota": quota and quota.cores,
        "quota_file": quota and quota.file,
        "numa_nodes": topology.numa_nodes,
        **({"speeds": speeds, "fast": fast, "slow": len(speeds) - fast} if speeds else {}),
    }


TEMPORARY = "temporary files"


def memory() -> dict[str, int]:
    """Return bytes, within the limit of the machine or of a container; empty where there is no /proc."""
    fields = read_meminfo()
    if "MemAvailable" not in fields:
        return {}
    return {
        "total": total_bytes(),
        "available": available_bytes(),
        "available_with_swap": available_bytes(with_swap=True),
        "swap_used": fields.get("SwapTotal", 0) - fields.get("SwapFree", 0),
    }


def disks() -> list[dict[str, Any]]:
    """Return the disks to which a run writes, one entry per disk."""
    here = Path.cwd()
    places = {
        # Not `tempfile.gettempdir`, which silently takes another folder when this one is full.
        TEMPORARY: Path(os.environ.get("TMPDIR") or "/tmp"),  # noqa: S108 - looked at, not written
        # Runs are in the working folder or, on a machine that only received shoal's code, beside that.
        "runs": here if here != Path("/") else Path(shoal.__file__).parent,
        "encoded text": Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"),
    }
    by_device: dict[int, dict[str, Any]] = {}
    for purpose, place in places.items():
        folder = _nearest_existing(place)
        try:
            state, device = os.statvfs(folder), folder.stat().st_dev
        except OSError:
            continue
        disk = by_device.setdefault(device, {"path": str(folder), "for": [], "free": state.f_bavail * state.f_frsize})
        disk["for"].append(purpose)
        # Some file systems do not count files and report zero of zero.
        disk["files_free"] = state.f_favail if state.f_files else None
        disk["read_only"] = bool(state.f_flag & os.ST_RDONLY)
    return list(by_device.values())


def _nearest_existing(place: Path) -> Path:
    """Return the folder or its nearest existing parent, skipping those that may not be read."""
    for folder in (place, *place.parents):
        with contextlib.suppress(OSError):
            if folder.exists():
                return folder
    return Path("/")


_SPIN_S = 0.25


def frequency() -> dict[str, Any]:
    """Return the frequency of one core under load: idle cores are slow. Empty on virtual machines."""
    cpu = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    folder = _CPUS / f"cpu{cpu}/cpufreq"
    highest_khz = read_number(folder / "cpuinfo_max_freq")
    if not highest_khz:
        return {}
    return {
        "driver": read_text(folder / "scaling_driver"),
        "governor": read_text(folder / "scaling_governor"),
        "most_khz": highest_khz,
        "base_khz": read_number(folder / "base_frequency"),
        "allowed_khz": read_number(folder / "scaling_max_freq") or highest_khz,
        "at_work_khz": _measure_busy_khz(cpu, folder / "scaling_cur_freq"),
    }


def _measure_busy_khz(cpu: int, file: Path) -> int:
    readings_khz = [0]

    def spin() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {cpu})
        until = time.monotonic() + _SPIN_S
        while time.monotonic() < until:
            sum(range(10_000))
            readings_khz.append(read_number(file) or 0)

    # In its own thread: affinity is per thread, so that of this one stays as it was.
    worker = threading.Thread(target=spin)
    worker.start()
    worker.join()
    return max(readings_khz)


def throttle_count() -> int | None:
    """Return how often heat throttled a core since boot. Only Intel counts this."""
    counts = [read_number(path) for path in _CPUS.glob("cpu[0-9]*/thermal_throttle/*_throttle_count")]
    return sum(count or 0 for count in counts) if counts else None


def power(sys_root: Path = SYS) -> dict[str, Any]:
    batteries = [path for path in power_supplies(sys_root) if read_text(path / "type") == "Battery"]
    if not batteries:
        return {}
    percent = [value for path in batteries if (value := read_number(path / "capacity")) is not None]
    return {"on_battery": is_on_battery(sys_root), "percent": min(percent, default=None)}


_LIDS = Path("/proc/acpi/button/lid")
# In the order in which systemd reads them: later ones win.
_LOGIND_FOLDERS = ("/usr/lib/systemd", "/run/systemd", "/etc/systemd")


def lid() -> dict[str, str]:
    """Return what closing the lid does; empty for a machine without a lid or without logind."""
    if not _list_folder(_LIDS) or not Path("/run/systemd/seats").exists():
        return {}
    # The main file of the highest folder, then all drop-in files by name; a later folder hides one of the same name.
    main_files = [path for folder in reversed(_LOGIND_FOLDERS) if (path := Path(folder) / "logind.conf").is_file()]
    drop_ins: dict[str, Path] = {}
    for folder in _LOGIND_FOLDERS:
        drop_ins |= {path.name: path for path in Path(folder).glob("logind.conf.d/*.conf")}
    files = main_files[:1] + [drop_ins[name] for name in sorted(drop_ins)]
    return lid_actions([path.read_text(encoding="utf-8", errors="replace") for path in files])


def lid_actions(texts: list[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for text in texts:
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        with contextlib.suppress(configparser.Error):
            parser.read_string(text)
            settings |= dict(parser["Login"]) if parser.has_section("Login") else {}
    on_battery = settings.get("handlelidswitch") or "suspend"
    return {"on_battery": on_battery, "on_mains": settings.get("handlelidswitchexternalpower") or on_battery}


def load() -> dict[str, float]:
    try:
        return {"one_minute": os.getloadavg()[0]}
    except OSError:
        return {}


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


_RUN_VARIABLE, _PART_VARIABLE = "SHOAL_RUN", "SHOAL_PART"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def observe_processes(request: dict[str, Any]) -> dict[str, Any]:
    limits = dict(zip(("soft", "hard"), resource.getrlimit(resource.RLIMIT_NOFILE), strict=True))
    facts: dict[str, Any] = {
        "files": {name: None if limit == resource.RLIM_INFINITY else limit for name, limit in limits.items()},
        "user": user_name(os.geteuid()),
        "has_command": shutil.which("shoal") is not None,
        "over_ssh": "SSH_CONNECTION" in os.environ,
        **workers(),
    }
    port = int(request.get("port") or 0)
    return {**facts, "port": {"number": port, "holders": holders(port)}} if port else facts


def workers() -> dict[str, list[dict[str, Any]]]:
    """Return `marked` processes, which name a run of shoal, and `strays`, orphaned ranks of other programs."""
    marked, strays = [], []
    for pid in list_pids():
        # The process may end meanwhile.
        with contextlib.suppress(ProcessLookupError):
            env = environment_of(pid)
            if _has_other_values(env, (_RUN_VARIABLE,)) and _is_credible(pid, env):
                marked.append({**describe_process(pid), **_run_facts(env), "orphan": is_orphan(pid)})
            elif _has_other_values(env, _RANK_VARIABLES) and is_orphan(pid):
                strays.append({**describe_process(pid), **{name.lower(): env[name] for name in _RANK_VARIABLES}})
    return {"marked": marked, "strays": strays}


def _has_other_values(env: Mapping[str, str], names: tuple[str, ...]) -> bool:
    """Ignore variables equal to those of this process: in the container of a job, every process has them."""
    return all(name in env for name in names) and any(env[name] != os.environ.get(name) for name in names)


def _is_credible(pid: int, env: Mapping[str, str]) -> bool:
    """Believe only processes of this user or of the run folder's owner: any process can name any run."""
    try:
        owner = owner_of(pid)
        return owner is not None and (owner == os.geteuid() or owner == Path(env[_RUN_VARIABLE]).stat().st_uid)
    except OSError:
        return False


def _run_facts(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the run of a process; with `has_folder` it can still be stopped by its name."""
    run = Path(env[_RUN_VARIABLE])
    has_folder = any((run / name).is_file() for name in ("job.json", "config.toml"))
    return {"run": str(run), "part": env.get(_PART_VARIABLE, ""), "has_folder": has_folder}


def holders(port: int) -> list[dict[str, Any]]:
    processes = []
    for listener in find_listeners(port):
        with contextlib.suppress(ProcessLookupError):
            pid = listener["pid"]
            env = environment_of(pid) if pid else {}
            more = {**describe_process(pid), **(_run_facts(env) if _RUN_VARIABLE in env else {})} if pid else {}
            processes.append({**listener, **more})
    return processes
