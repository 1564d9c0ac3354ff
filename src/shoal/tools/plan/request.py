"""What `shoal plan` and `shoal simulate` are asked for, turned into what is planned.

That is the nodes, the workload, the sync strategy, and the cluster: from data sheets, a measured profile, or
measured machines over another link.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config.presets import PRESETS, Overrides, depth_overrides, did_you_mean, flag_of
from shoal.config.sync_choice import PLAN_METHODS, SYNC_METHODS, WIRE_FORMATS
from shoal.cost.data_sheets import (
    SheetOverrides,
    describe,
    describe_ring,
    find_links,
    find_machines,
    make_cluster_model,
    positive,
    ring,
    stack_of,
)
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.config.profile import Profile
    from shoal.config.schema import Config
    from shoal.cost.predict import ClusterModel
    from shoal.cost.strategy import SyncStrategy
    from shoal.cost.workload import Workload
    from shoal.tools.plan.advise import Plan, PlanOption


MOST_NODES = 16_384
MOST_ROWS = 64
_RANGE = re.compile(r"(\d{1,9})(?:\.\.(\d{1,9}))?")
_WITH_NUMBER_EXAMPLES = {"--wire": "powersgd:4", "--sync": "diloco:50"}
_WITH_NUMBER = re.compile(r"([a-z0-9]+)(?::(\d{1,9}))?")

LINK = "1gbe"
NODES = "1..8"
HOSTS = "hosts.toml"

# A model given by --params alone has GPT-2's sequence length and a batch that a few machines can share.
BARE_SEQ_LEN = 1024
BARE_BATCH = 16


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan; the fields are the options of `shoal plan`, and the keys of [plan] in a scenario file."""

    presets: list[str] | None = None  # one, or runs with --calibrate
    link: str | None = None
    profile: Path | None = None
    latency: str | None = None
    efficiency: float | None = None
    machine: str | None = None
    flops: float | None = None
    mfu: float | None = None
    memory_gb: float | None = None
    ranks_per_node: int = 1
    params: float | None = None
    grad_dtype: str = "fp32"
    tokens: float | None = None
    config: Path | None = None
    set_: list[str] | None = None
    depth: int | None = None
    seq_len: int | None = None
    global_batch: int | None = None
    micro_batch: int | None = None
    scaling: str | None = None
    recompute: bool | None = None
    accumulate: int | None = None
    wire: str | None = None
    sync: str | None = None
    on: str | None = None

    @property
    def preset(self) -> str | None:
        if self.presets and len(self.presets) > 1:
            raise UsageError(
                f"{' '.join(self.presets)} are several presets",
                why="a plan is made for one model; several runs go with --calibrate",
                fix=f"shoal plan {self.presets[0]}",
            )
        return self.presets[0] if self.presets else None


_FLAGS = {
    "global_batch": "train.global_batch",
    "micro_batch": "train.micro_batch",
    "scaling": "train.scaling",
    "seq_len": "model.seq_len",
    "recompute": "train.recompute",
}
# Options that do not apply to a model given by --params.
_NOT_BARE = ("preset", "config", "depth", "set_", "seq_len")
# Settings that a plan decides itself.
_PLANNED = (
    "train.global_batch",
    *(f"sync.{name}" for name in ("mode", "every", "accumulate", "wire", "copies")),
    "run.on",
)


def parse_nodes(text: str) -> list[int]:
    """Parse `3`, `1..8`, `1,2,4` or `1,2,4..8`."""
    if text.strip().lower() in ("inf", "infinity", "∞"):
        raise UsageError(
            f"--nodes {text}: there is no plan without an end",
            why="a ring sends at most twice the gradients, but two more messages for every node: the speed-up has a "
            "highest point where they take longer than another node computes, or no more sequences are left to divide",
            fix=f"see where that is: --nodes 1,4,16,64,256,1024,4096,{MOST_NODES}\n"
            "the limit of what a node sends: --nodes 1..8,inf",
        )
    counts: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else 0
        if not 1 <= first <= last <= MOST_NODES:
            raise UsageError(
                f"--nodes {text} is not a list of numbers of nodes",
                why=f"they count from 1 to {MOST_NODES:,}, the smaller one first",
                fix="write for example: --nodes 1..8, --nodes 4 or --nodes 1,2,4",
            )
        counts += range(first, last + 1)
    if len(counts) > MOST_ROWS:
        raise UsageError(
            f"--nodes {text} gives {len(counts)} rows",
            why=f"a plan has at most {MOST_ROWS} rows",
            fix="choose fewer: --nodes 1,2,4,8,16,32,64",
        )
    return sorted(set(counts))


def what_to_plan(request: PlanRequest, most_ranks: int) -> tuple[Workload, SyncStrategy, list[str]]:
    """Return the workload, the sync method and notes for the user."""
    requested = (
        bare(request, request.params) if request.params is not None else preset_workload(make_config(request), request)
    )
    strategy = parse_strategy(request)
    workload = fit_batch(requested, most_ranks, is_batch_stated(requested, request))
    notes = []
    if workload != requested:
        notes.append(
            f"global batch {workload.train.global_batch} instead of {requested.train.global_batch}: each of "
            f"{most_ranks} ranks needs a sequence"
        )
    return workload, strategy, notes


def refuse_conflicts(flags: dict[str, str], request: PlanRequest) -> None:
    """Refuse a setting that is given twice or has no effect on a plan. `flags` are the given flags, by setting."""
    from shoal.config.load import refuse_duplicate_settings, typed_settings

    sets = request.set_ or []
    if ":" in (request.sync or ""):
        flags = flags | {"sync.every": f"--sync {request.sync}"}
    refuse_duplicate_settings(flags, sets)
    if "run.weights" in typed_settings(None, sets):
        raise UsageError(
            "run.weights has no effect here",
            why="a plan divides the batch equally, and also shows it divided by the speed of the machines",
            fix="leave it out, or name unequal machines: --machine desktop,laptop",
        )


def make_config(request: PlanRequest) -> Config:
    """Build the settings to plan. Refuse a given setting that has no effect."""
    from shoal.config.load import build_config, refuse_without_effect, typed_settings

    overrides = depth_overrides(request.depth)
    for flag, key in _FLAGS.items():
        if getattr(request, flag) is not None:
            section, name = key.split(".")
            overrides.setdefault(section, {})[name] = getattr(request, flag)
    overrides["sync"] = _sync_overrides(request)
    sets = request.set_ or []
    config = build_config(request.preset or "grammar", request.config, overrides, sets)
    refuse_without_effect(config, typed_settings(overrides, sets))
    return config


def bare(request: PlanRequest, params: float) -> Workload:
    """Return the workload of a model given by `--params` alone; `--tokens` are per step, over all ranks."""
    from shoal.config.load import build_config
    from shoal.cost.workload import bare_workload

    if (extra := next((name for name in _NOT_BARE if getattr(request, name)), None)) is not None:
        named = request.preset if extra == "preset" else flag_of(extra)
        raise UsageError(
            f"--params does not go with {named}",
            why="it describes a model by its size only",
            fix="leave one of them out",
        )
    _refuse_two_batches(request)
    parameters = round(positive("--params", params, 1e14))
    batch = BARE_BATCH if request.global_batch is None else request.global_batch
    if request.tokens is not None:
        batch = _sequences(request.tokens, BARE_SEQ_LEN)
    changes = {
        name: getattr(request, name)
        for name in ("micro_batch", "scaling", "recompute")
        if getattr(request, name) is not None
    }
    config = build_config(flags={"train": {"global_batch": batch, "base_batch": batch, **changes}})
    return bare_workload(parameters, BARE_SEQ_LEN, config.train, gradient_type(request.grad_dtype))


def preset_workload(config: Config, request: PlanRequest) -> Workload:
    from shoal.cost.workload import workload_of

    _refuse_two_batches(request)
    if request.tokens is None:
        return workload_of(config, gradient_type(request.grad_dtype))
    sequences = _sequences(request.tokens, config.model.seq_len)
    return workload_of(config, gradient_type(request.grad_dtype)).with_batch(sequences)


def _refuse_two_batches(request: PlanRequest) -> None:
    if request.tokens is not None and request.global_batch is not None:
        raise UsageError(
            "--tokens does not go with --global-batch",
            why="both set the size of a step over all ranks",
            fix="leave one of them out",
        )


def _sequences(tokens: float, seq_len: int) -> int:
    return max(1, round(positive("--tokens", tokens, 1e12) / seq_len))


def fit_batch(workload: Workload, ranks: int, is_stated: bool) -> Workload:
    """Enlarge a preset's batch until every rank has a micro-batch. A given batch stays, and may be refused later."""
    train = workload.train
    smallest = (train.micro_batch or 1) * ranks
    if is_stated or train.scaling == "weak" or train.global_batch >= smallest:
        return workload
    return workload.with_batch(smallest)


def is_batch_stated(workload: Workload, request: PlanRequest) -> bool:
    """Return whether a flag, a setting or a file gives a batch other than the preset's."""
    if request.params is not None:
        return request.global_batch is not None or request.tokens is not None
    return request.global_batch is not None or workload.train.global_batch != _preset_batch(request)


def parse_strategy(request: PlanRequest) -> SyncStrategy:
    """Return the sync method of all settings together."""
    from shoal.config.load import build_config, refuse_without_effect, typed_settings
    from shoal.cost.strategy import strategy_of_config

    if request.params is None:
        config = make_config(request)
    else:
        overrides: Overrides = {"sync": _sync_overrides(request)}
        config = build_config(flags=overrides)
        refuse_without_effect(config, typed_settings(overrides, ()))
    return strategy_of_config(config.sync)


def _sync_overrides(request: PlanRequest) -> dict[str, Any]:
    """Return the settings of section `sync` that the flags set."""
    overrides: dict[str, Any] = {}
    if request.accumulate is not None:
        overrides["accumulate"] = round(positive("--accumulate", request.accumulate, 1e6))
    if request.wire is not None:
        name, number = _named("--wire", request.wire, tuple(WIRE_FORMATS))
        overrides["wire"] = f"{name}:{number}" if number else name
    if request.sync is not None:
        name, number = _named("--sync", request.sync, PLAN_METHODS)
        overrides |= {"mode": name, **({"every": number} if number else {})}
    return overrides


def _named(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, int]:
    match = _WITH_NUMBER.fullmatch(text.strip().lower())
    if match is None or match[1] not in known or match[2] == "0":
        raise UsageError(
            f"{flag} {text!r} is not known",
            why=did_you_mean(text.partition(":")[0], known),
            fix=f"use one of: {', '.join(known)}; with a number as in {_WITH_NUMBER_EXAMPLES[flag]}",
        )
    return match[1], int(match[2] or 0)


def gradient_type(text: str) -> Any:
    from shoal.cost.workload import GRADIENT_BYTES

    if text not in GRADIENT_BYTES:
        raise UsageError(
            f"--grad-dtype {text!r} is not known", why=did_you_mean(text, GRADIENT_BYTES), fix="use fp32 or bf16"
        )
    return text


def train_words(request: PlanRequest, made_from: Basis, plan: Plan, option: PlanOption) -> list[str]:
    """Return the command that trains as planned, with every flag of the plan that a training has too.

    A file with settings may contain settings that the plan decided. Then the command sets all of them.
    """
    from shoal.config.load import parse_set
    from shoal.cost.predict import speeds

    strategy, has_file = option.strategy, request.config is not None
    settings = [setting for setting in request.set_ or [] if _key(setting) not in _PLANNED]
    on = [str(parse_set(setting)["run"]["on"]) for setting in request.set_ or [] if _key(setting) == "run.on"]
    nodes = option.row.nodes
    words = ["train", request.preset or "grammar", "--on", *(on[-1:] or [request.on or made_from.where(nodes)])]
    for flag in ("config", "depth", "seq_len", "scaling", "micro_batch"):
        words += (
            ["--" + flag.replace("_", "-"), str(getattr(request, flag))] if getattr(request, flag) is not None else []
        )
    words += ["--recompute"] if request.recompute else []
    batch = plan.workload.accumulated(strategy.accumulation).train.global_batch
    words += ["--global-batch", str(batch)] if has_file or batch != _preset_batch(request) else []
    is_stock = strategy.first_bucket_mb is not None and (strategy.sync, strategy.wire) == ("ddp", "fp32")
    mode = "stock" if is_stock else strategy.sync
    words += ["--sync", mode] if has_file or mode != "ddp" else []
    words += ["--every", str(strategy.every)] if SYNC_METHODS[strategy.sync].is_outer else []
    words += ["--accumulate", "1"] if has_file else []
    words += ["--wire", strategy.wire_setting] if has_file or strategy.wire != "fp32" else []
    if strategy.shard_level and strategy.copies is not None:
        settings.append(f"sync.copies={strategy.copies}")
    world_size = option.row.prediction.world_size
    if strategy.balanced:
        weights = speeds(plan.workload, plan.setting.speed, world_size)
        settings.append("run.weights=" + "/".join(f"{weight:g}" for weight in weights))
    elif has_file and make_config(request).run.weights is not None:
        settings.append("run.weights=" + "/".join(["1"] * world_size))
    return words + [word for setting in settings for word in ("--set", setting)]


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _preset_batch(request: PlanRequest) -> int:
    from shoal.config.schema import TrainConfig

    own = PRESETS[request.preset or "grammar"].get("train", {})
    return int(own.get("global_batch", TrainConfig().global_batch))


@dataclass(frozen=True)
class Basis:
    """The cluster that is planned for."""

    setting: ClusterModel
    note: str
    nodes: str  # default of --nodes
    on: str  # the machines that were measured; a hosts file to write where none were
    known: int = 0  # how many nodes are known one by one; 0: all are alike
    how: str = "measured"  # or "named"
    profile: Profile | None = None

    def where(self, nodes: int) -> str:
        """Return where a training on this many nodes would run: the measured machines, if they are as many."""
        return self.on if self.profile is None or nodes == self.known else HOSTS


def make_basis(request: PlanRequest) -> Basis:
    overrides = SheetOverrides(
        *(getattr(request, name) for name in ("efficiency", "latency", "flops", "mfu", "memory_gb"))
    )
    if request.profile is None:
        links = find_links(request.link or LINK)
        machines = find_machines(request.machine, links[0])
        setting = make_cluster_model(links, machines, request.ranks_per_node, overrides)
        note = f"{describe(links, machines, setting)}; measure yours with shoal probe"
        count = max(len(machines), len(links))
        named = count if count > 1 else 0
        return Basis(setting, note, f"1..{named}" if named else NODES, HOSTS, named, "named")
    _refuse_beside_profile(request)
    return _measured(request.profile, request.link, overrides)


def _measured(path: Path, link: str | None, overrides: SheetOverrides) -> Basis:
    # Imported here: a plan without a profile would spend a tenth of its time on importing the schema.
    from shoal.config.load import read_profile
    from shoal.cost.measured import cluster_model_of, link_factors

    profile = read_profile(path)
    setting = replace(cluster_model_of(profile), ranks_per_node=_ranks_per_node(profile))
    note = f"as measured by {path} on {profile.on}, {profile.created}"
    if link is not None:
        links = find_links(link)
        network = ring(links, stack_of(()), overrides)
        setting = replace(setting, network=network)
        note += f"; but over {', '.join(sheet.name for sheet in links)} by data sheet, {describe_ring(network)}"
    elif link_factors(profile):
        note += "; fewer nodes than measured exchange over the links of the first ones"
    if profile.calibration is not None:
        note += f"; learned from {profile.calibration.runs} runs"
    last = len(profile.nodes)
    return Basis(setting, note, "1" if last == 1 else f"1..{last}", profile.on, last, profile=profile)


def on_devices(made_from: Basis, request: PlanRequest) -> Basis:
    """Plan for the devices that the settings give to the ranks of a measured cluster: GPUs where a run uses them."""
    if (profile := made_from.profile) is None:
        return made_from
    from shoal.cost.measured import cluster_model_of, gpu_backend, rank_devices

    devices = rank_devices(
        profile, (lambda _: "auto") if request.params is not None else make_config(request).device_of
    )
    if (backend := gpu_backend(profile, devices)) == "gloo":
        return made_from
    own = cluster_model_of(profile, devices)
    network = made_from.setting.network if request.link is not None else own.network
    setting = replace(made_from.setting, speed=own.speed, network=network, staging_s_per_byte=own.staging_s_per_byte)
    way = "NCCL" if backend == "nccl" else "gloo through pinned memory"
    count = f"{devices.count('cuda')} of {len(devices)} ranks on GPUs"
    return replace(made_from, setting=setting, note=f"{made_from.note}; {count}, which exchange by {way}")


def _ranks_per_node(profile: Profile) -> int:
    counts = {node.ranks for node in profile.nodes}
    if len(counts) > 1:
        raise UsageError(
            "the profile's nodes have different numbers of ranks",
            why="a plan adds nodes that have the same number of ranks",
            fix=f"predict the run itself: shoal train --on {profile.on} --plan --profile …",
        )
    return counts.pop()


def _refuse_beside_profile(request: PlanRequest) -> None:
    """Refuse flags that a profile overrides: it describes the machines."""
    extra = [name for name in ("machine", "flops", "mfu", "memory_gb") if getattr(request, name) is not None]
    extra += ["ranks_per_node"] if request.ranks_per_node != 1 else []
    extra += [name for name in ("efficiency", "latency") if getattr(request, name) is not None and request.link is None]
    if extra:
        flag = flag_of(extra[0])
        raise UsageError(
            f"{flag} does not go with --profile",
            why="the profile has the speed of these machines and their links",
            fix=f"leave {flag} out; to plan with another link: --link 10gbe",
        )
