"""What this machine is: system, processor, versions; and how much room and pace it has to give."""

from __future__ import annotations

import configparser
import contextlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import shoal
from shoal.host.proc import (
    describe,
    is_orphan,
    listeners,
    owner_of,
    pids,
    read,
    read_list,
    read_number,
    user_name,
    variables,
)

# SECTION net/collector/pace
# What slows this machine down, now or soon: clock rates, heat, a battery, a lid, other work.


_SUPPLIES = Path("/sys/class/power_supply")
_LIDS = Path("/proc/acpi/button/lid")
_SPIN_S = 0.25
# In this order, as systemd reads them: later ones win.
_LOGIND = ("/usr/lib/systemd", "/run/systemd", "/etc/systemd")


def pace_observe() -> dict[str, Any]:
    before = throttle_count()
    found = {"frequency": frequency(), "power": power(), "lid": lid(), "load": load()}
    after = throttle_count()
    if before is not None and after is not None:
        found["throttled"] = {"since_boot": after, "just_now": after - before}
    return {topic: seen for topic, seen in found.items() if seen}


def frequency() -> dict[str, Any]:
    """Of one core, after a moment of work: at rest every one is slow. Virtual machines have none to show."""
    cpu = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    folder = _CPUS / f"cpu{cpu}/cpufreq"
    most = read_number(folder / "cpuinfo_max_freq")
    if not most:
        return {}
    return {
        "driver": read(folder / "scaling_driver"),
        "governor": read(folder / "scaling_governor"),
        "most_khz": most,
        "base_khz": read_number(folder / "base_frequency"),
        "allowed_khz": read_number(folder / "scaling_max_freq") or most,
        "at_work_khz": _at_work(cpu, folder / "scaling_cur_freq"),
    }


def _at_work(cpu: int, shown: Path) -> int:
    seen = [0]

    def spin() -> None:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {cpu})
        until = time.monotonic() + _SPIN_S
        while time.monotonic() < until:
            sum(range(10_000))
            seen.append(read_number(shown) or 0)

    # Affinity is a thread's own: ours stays as it was.
    worker = threading.Thread(target=spin)
    worker.start()
    worker.join()
    return max(seen)


def throttle_count() -> int | None:
    """How often heat held a core back since the machine was started. Intel counts, others don't."""
    counts = [read_number(path) for path in _CPUS.glob("cpu[0-9]*/thermal_throttle/*_throttle_count")]
    return sum(count or 0 for count in counts) if counts else None


def power() -> dict[str, Any]:
    """Batteries of mice and keyboards say that they belong to a device."""
    supplies = [path for path in _folders(_SUPPLIES) if read(path / "scope") != "Device"]
    batteries = [path for path in supplies if read(path / "type") == "Battery"]
    mains = [path for path in supplies if read(path / "type") != "Battery" and read_number(path / "online") == 1]
    if not batteries:
        return {}
    drained = any(read(path / "status") == "Discharging" for path in batteries)
    percent = [value for path in batteries if (value := read_number(path / "capacity")) is not None]
    return {"on_battery": drained and not mains, "percent": min(percent, default=None)}


def lid() -> dict[str, str]:
    """What closing it does, on mains and on battery; nothing for a machine that has none, or nobody who listens."""
    if not _folders(_LIDS) or not Path("/run/systemd/seats").exists():
        return {}
    return lid_actions([path.read_text(encoding="utf-8", errors="replace") for path in _logind_files()])


def lid_actions(texts: list[str]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for text in texts:
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        with contextlib.suppress(configparser.Error):
            parser.read_string(text)
            settings |= dict(parser["Login"]) if parser.has_section("Login") else {}
    on_battery = settings.get("handlelidswitch") or "suspend"
    return {"on_battery": on_battery, "on_mains": settings.get("handlelidswitchexternalpower") or on_battery}


def _logind_files() -> list[Path]:
    """The main file of the highest place, then all additions by name; one of a name hides those below it."""
    mains = [path for place in reversed(_LOGIND) if (path := Path(place) / "logind.conf").is_file()]
    additions: dict[str, Path] = {}
    for place in _LOGIND:
        additions |= {path.name: path for path in Path(place).glob("logind.conf.d/*.conf")}
    return mains[:1] + [additions[name] for name in sorted(additions)]


def load() -> dict[str, float]:
    try:
        return {"one_minute": os.getloadavg()[0]}
    except OSError:
        return {}


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(place.iterdir())
    except OSError:
        return []


# SECTION net/collector/room
# How much memory and disk is left here, for whatever limits us first: the machine or a container.


_GROUP = Path("/sys/fs/cgroup")
TEMPORARY = "temporary files"


def memory() -> dict[str, int]:
    """In bytes; nothing where there is no /proc."""
    fields = dict(_fields(read("/proc/meminfo")))
    if "MemAvailable" not in fields:
        return {}
    swap = fields.get("SwapTotal", 0), fields.get("SwapFree", 0)
    available, limit = fields["MemAvailable"], _left_in_group()
    return {
        "total": fields["MemTotal"],
        "available": available if limit is None else min(available, limit),
        "swap_total": swap[0],
        "swap_used": swap[0] - swap[1],
    }


def _fields(text: str) -> list[tuple[str, int]]:
    lines = (line.split() for line in text.splitlines())
    return [(words[0].rstrip(":"), int(words[1]) * 1024) for words in lines if len(words) > 1]


def _left_in_group() -> int | None:
    """A container's own limit, as version 2 shows it at its root. What it holds of files is given up when need be."""
    limit, used = read_number(_GROUP / "memory.max"), read_number(_GROUP / "memory.current")
    if limit is None or used is None:
        return None
    lines = (line.split() for line in read(_GROUP / "memory.stat").splitlines())
    files = sum(int(words[1]) for words in lines if words[0] == "inactive_file")
    return max(0, limit - used + files)


def disks() -> list[dict[str, Any]]:
    """Where a run writes, one entry a disk."""
    found: dict[int, dict[str, Any]] = {}
    for purpose, place in _places().items():
        try:
            state, device = os.statvfs(place), place.stat().st_dev
        except OSError:
            continue
        entry = found.setdefault(device, {"path": str(place), "for": [], "free": state.f_bavail * state.f_frsize})
        entry["for"].append(purpose)
        # Some file systems count no files, and say zero for all of them.
        entry["files_free"] = state.f_favail if state.f_files else None
        entry["read_only"] = bool(state.f_flag & os.ST_RDONLY)
    return list(found.values())


def _places() -> dict[str, Path]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    found = {TEMPORARY: Path(_temporary()), "runs": _runs(), "encoded text": cache}
    return {purpose: _existing(place) for purpose, place in found.items()}


def _temporary() -> str:
    """Not `tempfile.gettempdir`, which quietly takes another folder when this one is full."""
    return os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 - looked at, not written


def _runs() -> Path:
    """In the folder that somebody works in, or, on a machine that was only sent our code, beside that."""
    here = Path.cwd()
    return here if here != Path("/") else Path(shoal.__file__).parent


def _existing(place: Path) -> Path:
    """The nearest folder above that is there; nobody needs to be let into all of them."""
    for folder in (place, *place.parents):
        with contextlib.suppress(OSError):
            if folder.exists():
                return folder
    return Path("/")


_CPUS = Path("/sys/devices/system/cpu")
_LSCPU_S = 2.0


def observe(request: dict[str, Any]) -> dict[str, Any]:
    return {
        "system": platform.system(),
        "arch": platform.machine(),
        "cpu": cpu_name(),
        "avx2": has_avx2(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": installed("torch"),
        "shoal": shoal.__version__,
        # Root needs no sudo, and in a container it often has none.
        "is_root": hasattr(os, "geteuid") and os.geteuid() == 0,
        "cores": cores(),
        "memory": memory(),
        "disks": disks(),
        **pace_observe(),
    }


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """/proc/cpuinfo names an ARM core only by number, and lscpu is not everywhere."""
    try:
        words = ["lscpu", "--json"]
        done = subprocess.run(
            words, capture_output=True, timeout=_LSCPU_S, check=True, env={**os.environ, "LC_ALL": "C"}
        )
        fields = {entry["field"]: entry["data"] for entry in json.loads(done.stdout)["lscpu"]}
        return str(fields["Model name:"])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return _of_cpuinfo("model name") or platform.processor() or platform.machine()


def has_avx2() -> bool | None:
    """None where the question makes no sense: only x86 has it."""
    flags = _of_cpuinfo("flags")
    return "avx2" in flags.split() if flags else None


def _of_cpuinfo(field: str) -> str:
    lines = read("/proc/cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def cores() -> dict[str, Any]:
    """`threads` that we may use, on how many `physical` cores; `fast` and `slow` ones where they are not alike. `quota`
    is what a container allows, in cores."""
    usable = _usable()
    fast = _fast(usable)
    found = {"threads": len(usable), "physical": _physical(usable), "quota": _quota()}
    kinds = {"fast": _physical(fast), "slow": _physical(usable - fast)}
    return {**found, **kinds} if fast and fast != usable else found


def _physical(cpus: set[int]) -> int:
    """Two hardware threads of one core share its arithmetic, so they count once."""
    return len({read(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus})


def _usable() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _fast(usable: set[int]) -> set[int]:
    """Intel has a folder for each kind, ARM a number for every core."""
    if named := read_list("/sys/devices/cpu_core/cpus"):
        return named & usable
    capacity = {cpu: read_number(_CPUS / f"cpu{cpu}/cpu_capacity") or 0 for cpu in usable}
    return {cpu for cpu in usable if capacity[cpu] == max(capacity.values())}


def _quota() -> float | None:
    limit, _, period = read("/sys/fs/cgroup/cpu.max").partition(" ")
    return int(limit) / int(period) if limit.isdigit() and period.isdigit() else None


# SECTION net/collector/processes
# Who else is here: ranks that nobody looks after any more, runs of shoal, whoever has the port, and how many files a
# process may open.


_RUN, _PART = "SHOAL_RUN", "SHOAL_PART"
_RANK = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def processes_observe(request: dict[str, Any]) -> dict[str, Any]:
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
