"""Parse `--on`.

local:4                      four ranks as processes on this machine
local:3,device=cuda/cpu/cpu  each with a device of its own; device=cuda is for all
lab:3,link=1gbit,cpu=1/1/0.5 three emulated nodes, made for the run and removed with it
lab:2,slots=2                two ranks on each node
lab                          the lab that is up already; with a name: lab:NAME
hosts.toml                   machines over SSH: a cluster file, or an MPI or DeepSpeed hostfile
join:3                       this machine and two that join it by themselves, see shoal host
slurm                        the nodes of the Slurm job that this process is in
slurm:2,partition=main       two nodes of Slurm, which are asked for where this process is in no job
pods:3                       the pods of the Kubernetes Job that this process is in, see shoal emit k8s
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.cluster.hosts.spec import HostsSpec, is_file, read_hosts
from shoal.cluster.lab import ShoalLab, parse_lab, per_node
from shoal.cluster.pods.spec import PodsSpec, parse_pods
from shoal.cluster.slurm.spec import SlurmSpec, parse_slurm
from shoal.config.load import AnyConfig
from shoal.config.presets import did_you_mean
from shoal.config.schema import DEVICES, EngineConfig
from shoal.errors import ConfigError, UsageError
from shoal.units import pluralize
from shoal_lab.spec import LabSpec, NodeSpec, format_delay, format_memory, format_rate

_LOCAL = re.compile(r"local(?::(-?\d{1,9}))?(?:,(?P<settings>.*))?")
_STANDING = re.compile(r"lab(?::([a-z][a-z0-9-]*))?")
_JOIN = re.compile(r"join:(?P<machines>\d{1,9})(?:,address=(?P<address>[^,]+))?(?:,port=(?P<port>\d{1,5}))?")
_HOSTS_FILES = (".toml", ".hosts", ".txt")


@dataclass(frozen=True)
class LocalSpec:
    """Ranks as processes on this machine."""

    ranks: int
    devices: tuple[str, ...] = ()  # one for each rank; none: what `train.device` says


@dataclass(frozen=True)
class ExistingLab:
    """A lab that was made with `shoal lab up`, and that stays when the run ends."""

    name: str | None


@dataclass(frozen=True)
class JoinSpec:
    """This machine and others that join it, with one rank each."""

    machines: int
    address: str | None = None  # this machine's, by which the others reach it; None: it is found
    port: int = 0


On = LocalSpec | LabSpec | ExistingLab | HostsSpec | JoinSpec | SlurmSpec | PodsSpec


def parse_on(text: str) -> On:
    text = text.strip()
    if match := _LOCAL.fullmatch(text):
        ranks = int(match[1] or 1)
        if ranks < 1:
            raise UsageError(
                f"--on {text}: a world needs at least one rank", fix="write for example: --on local:2 for two ranks"
            )
        return LocalSpec(ranks, _parse_local_devices(text, match["settings"], ranks))
    if match := _STANDING.fullmatch(text):
        return ExistingLab(match[1])
    if text.startswith("lab:"):
        return parse_lab(text)
    if text.startswith("join:"):
        return parse_join(text)
    if re.match(r"slurm(?![\w./-])", text):
        return parse_slurm(text)
    if text.startswith("pods:"):
        return parse_pods(text)
    if "/" in text or text.endswith(_HOSTS_FILES) or is_file(Path(text)):
        return read_hosts(Path(text))
    raise UsageError(
        f"--on {text!r} names no cluster",
        why="ranks run on this machine (local:N), on the nodes of a lab (lab:N) or of Slurm (slurm:N), or on the "
        "machines of a hosts file",
        fix="write for example: --on local:2, --on lab:3,link=1gbit or --on hosts.toml",
    )


def _parse_local_devices(text: str, settings: str | None, ranks: int) -> tuple[str, ...]:
    if settings is None:
        return ()
    key, _, value = settings.partition("=")
    if key != "device":
        raise UsageError(
            f"--on {text}: cannot use {settings!r}",
            why=did_you_mean(key, ("device",)) or "ranks on this machine have one setting, their device",
            fix="write for example: --on local:2,device=cuda/cpu",
        )
    words = per_node("device=", value, ranks, "ranks")
    if wrong := [word for word in words if word not in DEVICES]:
        raise UsageError(
            f"--on {text}: {wrong[0]!r} is not a device",
            why=did_you_mean(wrong[0], DEVICES) or f"a device is {', '.join(DEVICES)}",
            fix="write for example: --on local:2,device=cuda, or device=cuda/cpu for each rank its own",
        )
    return tuple(words)


def parse_join(text: str) -> JoinSpec:
    match = _JOIN.fullmatch(text)
    if match is None or int(match["machines"]) < 2:
        raise UsageError(
            f"--on {text!r} names no cluster",
            why="join:N is this machine and N - 1 others that join it, so N is at least 2",
            fix="write for example: --on join:2, or --on join:2,address=192.168.1.5",
        )
    return JoinSpec(int(match["machines"]), match["address"], int(match["port"] or 0))


def absolute_on(on: str) -> str:
    """Return `on` such that it names the same cluster from every folder."""
    match parse_on(on):
        case HostsSpec(path=path):
            return str(path.absolute())
        case SlurmSpec() as slurm:
            return slurm.absolute()
        case _:
            return on


def weights_of(on: On) -> str | None:
    """Return one weight a rank, where a hosts file gives its machines different ones."""
    if not isinstance(on, HostsSpec) or len({host.weight for host in on.hosts}) == 1:
        return None
    return "/".join(f"{host.weight:g}" for host in on.hosts for _ in range(host.slots))


def devices_of(on: On) -> tuple[str | None, ...]:
    """Return one device a rank, None where the cluster leaves it open; nothing where it names no device at all."""
    devices: tuple[str | None, ...] = ()
    if isinstance(on, LocalSpec):
        devices = on.devices
    if isinstance(on, HostsSpec):
        devices = tuple(host.device for host in on.hosts for _ in range(host.slots))
    return devices if any(devices) else ()


def place_ranks(config: AnyConfig) -> AnyConfig:
    """Write into the settings what the cluster says of its ranks: their weights and devices, and its absolute path.

    Refuse a device that two places name differently: `--on`, `run.devices` and `train.device`.
    """
    on = parse_on(config.run.on)
    placement = {
        "on": absolute_on(config.run.on),
        "weights": config.run.weights or weights_of(on),
        "devices": _choose_devices(config, on),
    }
    return config.model_copy(update={"run": config.run.model_copy(update=placement)})


def _choose_devices(config: EngineConfig, on: On) -> str | None:
    common, named = config.train.device, devices_of(on)
    asked = config.run.devices.split("/") if config.run.devices else []
    if asked and len(asked) != (ranks := rank_count(on)):
        raise ConfigError(
            f"run.devices={config.run.devices} has {pluralize(len(asked), 'device')} for {pluralize(ranks, 'rank')}",
            why=f"each rank of --on {config.run.on} needs one",
            fix=f"write for example: --set run.devices={'/'.join(['auto'] * ranks)}",
        )
    if asked and any(device not in (None, asked[rank]) for rank, device in enumerate(named)):
        raise ConfigError(
            f"--on {config.run.on} and run.devices={config.run.devices} name different devices",
            why=f"--on gives the ranks {'/'.join(device or 'any' for device in named)}",
            fix="leave one of them out",
        )
    devices = asked or [device or common for device in named]
    others = [device for device in devices if device != common]
    if others and common != "auto":
        where = f"run.devices={config.run.devices}" if asked else f"--on {config.run.on}"
        raise ConfigError(
            f"train.device={common} (--device) and {where} name different devices",
            why=f"{where} gives a rank {others[0]}",
            fix=f"leave train.device out, or name no other device than {common} there",
        )
    return "/".join(devices) or None


def rank_count(on: On) -> int:
    """Count ranks: as many as there are slots on the nodes of a lab or of a hosts file."""
    match on:
        case LocalSpec():
            return on.ranks
        case ExistingLab():
            return sum(node.slots for node in ShoalLab.open(on.name).state.spec.nodes)
        case LabSpec():
            return sum(node.slots for node in on.nodes)
        case HostsSpec():
            return sum(host.slots for host in on.hosts)
        case JoinSpec():
            return on.machines
        case SlurmSpec():
            return on.rank_count()
        case PodsSpec():
            return on.pods * on.slots


def on_first_ranks(config: AnyConfig, on: str) -> AnyConfig:
    """Return the settings for `on`, a smaller part of the cluster: weights and devices are those of its ranks."""
    ranks = rank_count(parse_on(on))

    def cut(values: str | None) -> str | None:
        return "/".join(values.split("/")[:ranks]) if values else None

    placement = {"on": on, "weights": cut(config.run.weights), "devices": cut(config.run.devices)}
    return config.model_copy(update={"run": config.run.model_copy(update=placement)})


def first_nodes(on: On, count: int, folder: Path) -> str | None:
    """Return the first machines of a cluster as an `--on` of their own: more of them are measured against these.

    A file that this needs is written into `folder`. None for `join`, whose machines are not known beforehand.
    """
    match on:
        case LocalSpec():
            return "local:1" + (f",device={on.devices[0]}" if on.devices else "")
        case ExistingLab():
            return _smaller_lab(ShoalLab.open(on.name).state.spec.nodes[:count])
        case HostsSpec():
            name = "first-host.toml" if count == 1 else f"first-{count}-hosts.toml"
            return str(_write_first_hosts(on, count, folder / name))
        case JoinSpec():
            return None
        case SlurmSpec():
            return on.first(count).absolute()
        case PodsSpec():
            return str(replace(on, pods=count))
        case _:
            return _smaller_lab(on.nodes[:count])


def _smaller_lab(nodes: Sequence[NodeSpec]) -> str:
    """Keep the nodes' links, limits and slots. The link of a single node does not matter: nothing is sent over it.

    Nodes of a lab that was changed while it was up may have delays and losses of their own; a smaller lab gives all
    of them the largest.
    """

    def same_or_each(values: Sequence[str]) -> str:
        return values[0] if len(set(values)) == 1 else "/".join(values)

    settings = {}
    if any(node.cpu is not None for node in nodes):
        settings["cpu"] = same_or_each(["none" if node.cpu is None else f"{node.cpu:g}" for node in nodes])
    if any(node.memory_bytes is not None for node in nodes):
        sizes = [node.memory_bytes for node in nodes]
        settings["memory"] = same_or_each(["none" if size is None else format_memory(size) for size in sizes])
    if any(node.slots > 1 for node in nodes):
        settings["slots"] = same_or_each([str(node.slots) for node in nodes])
    if len(nodes) > 1:
        rates = [node.link.rate_bps for node in nodes]
        settings["link"] = same_or_each(["none" if rate is None else format_rate(rate) for rate in rates])
        if delay_s := max(node.link.delay_s for node in nodes):
            settings["delay"] = format_delay(delay_s)
        if loss := max(node.link.loss for node in nodes):
            settings["loss"] = f"{100 * loss:f}%"
    return f"lab:{len(nodes)}" + "".join(f",{key}={value}" for key, value in settings.items())


def _write_first_hosts(hosts: HostsSpec, count: int, path: Path) -> Path:
    lines = [f"ssh_config = {json.dumps(str(hosts.ssh_config))}"] if hosts.ssh_config else []
    for host in hosts.hosts[:count]:
        # Strings and numbers of JSON are those of TOML.
        settings = host.model_dump(exclude_defaults=True, exclude_none=True)
        lines += ["[[host]]", *(f"{key} = {json.dumps(value)}" for key, value in settings.items())]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
