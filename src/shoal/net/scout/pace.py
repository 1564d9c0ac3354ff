"""What slows this machine down, now or soon: clock rates, heat, a battery, a lid, other work."""

from __future__ import annotations

import configparser
import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from shoal.net.scout.reading import read, read_number

_CPUS = Path("/sys/devices/system/cpu")
_SUPPLIES = Path("/sys/class/power_supply")
_LIDS = Path("/proc/acpi/button/lid")
_SPIN_S = 0.25
# In this order, as systemd reads them: later ones win.
_LOGIND = ("/usr/lib/systemd", "/run/systemd", "/etc/systemd")


def observe() -> dict[str, Any]:
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
