"""Writes the same training for other launchers: what all of them need, and commands for torchrun."""

from __future__ import annotations

import json
import re
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.cluster.node import Node
from shoal.config.load import build_config, parse_set
from shoal.config.presets import PRESETS
from shoal.config.schema import Config
from shoal.control.rank_env import SAFE_PATH
from shoal.cost.batch_plan import micro_batch, rank_weights
from shoal.errors import ConfigError
from shoal.units import pluralize

# It has only the schema's defaults, so every configuration can be reached from it.
_PLAIN_PRESET = "grammar"
_COMMENT_WIDTH = 118


@dataclass(frozen=True)
class EmitJob:
    """One training for another launcher. Paths are as the machines of the job see them."""

    config: Config
    nodes: tuple[Node, ...]
    out: Path  # the run folder
    python: str  # the interpreter that has shoal

    @property
    def ranks(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def summary(self) -> str:
        return f"{self.config.run.preset}: {pluralize(self.ranks, 'rank')} on {pluralize(len(self.nodes), 'node')}"

    @property
    def needs_gpus(self) -> bool:
        return any(self.config.device_of(rank) == "cuda" for rank in range(self.ranks))

    @property
    def cache_dir(self) -> Path | None:
        """Rank 0 encodes the text and sends its path to the others, so several nodes need a cache they can all read."""
        if self.config.data.cache_dir is not None or len(self.nodes) == 1:
            return self.config.data.cache_dir
        return self.out.parent / ".cache"


def make_job(config: Config, nodes: Iterable[Node], out: Path, python: str) -> EmitJob:
    """Return a job, or refuse at once what every rank would refuse after a wait in the scheduler's queue."""
    job = EmitJob(config, tuple(nodes), out, python)
    try:
        micro_batch(config.train, rank_weights(config.run, job.ranks))
    except ConfigError as error:
        fix = "change it: --set train.global_batch=N, --set train.micro_batch=N, or --on with fewer ranks"
        raise ConfigError(error.seen, why=error.why, fix=fix) from None
    return job


def worker_words(job: EmitJob) -> list[str]:
    """Return preset and settings, from which `shoal.train.worker` builds this configuration without its placement."""
    wanted = _flat_settings(job.config)
    if job.cache_dir is not None:
        wanted["data.cache_dir"] = str(job.cache_dir)
    preset = job.config.run.preset
    base = _flat_settings(build_config(preset)) if preset in PRESETS else None
    run = job.config.run
    own = {"run.weights": run.weights, "run.balance": run.balance, "run.devices": run.devices}
    wanted |= {key: value for key, value in own.items() if value}
    if base is None or not base.keys() <= wanted.keys():
        # A file may use any name for its preset, and no --set removes what a preset sets: begin at the defaults.
        base, wanted["run.preset"], preset = _flat_settings(build_config(_PLAIN_PRESET)), preset, _PLAIN_PRESET
    changed = [_assignment(key, value) for key, value in wanted.items() if base.get(key) != value]
    return [preset, *(word for assignment in changed for word in ("--set", assignment))]


def _flat_settings(config: Config) -> dict[str, Any]:
    sections = config.model_dump(mode="json", exclude={"run"})
    values = ((f"{section}.{key}", value) for section, keys in sections.items() for key, value in keys.items())
    return {key: value for key, value in values if value is not None}


def _assignment(key: str, value: Any) -> str:
    """Return `key=value`, with a bare word where that is read back as the same word, otherwise with TOML."""
    section, _, name = key.partition(".")
    bare = f"{key}={value}"
    if isinstance(value, str) and value.isprintable() and parse_set(bare) == {section: {name: value}}:
        return bare
    return f"{key}={quoted(value)}"


def quoted(value: Any) -> str:
    """Return JSON, which is also TOML and YAML, except for DEL, which both want escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def threads_on(job: EmitJob, node: Node) -> int | None:
    """Return the threads of each rank on a node; None where its cores are not known yet."""
    return job.config.run.threads or node.rank_threads


def _requirements(job: EmitJob, first: str, shared: str) -> list[str]:
    """List what the job needs. `first` is where rank 0 runs, `shared` the folder that all nodes can write to."""
    needed = [f"the same shoal and torch on every node, in {job.python}"]
    if len(job.nodes) > 1:
        needed += [
            f"{shared}: {first} makes the run folder and the encoded text there, and the others read them. Without "
            "it their ranks end with 'is not a run folder'",
            "every TCP port open between the nodes: gloo listens on those that the kernel picks",
        ]
    if job.config.data.path is not None:
        needed.append(f"the text {job.config.data.path} on {first}, at this path")
    return needed


def _comment(text: str, bullet: str = "") -> str:
    """Return shell or YAML comment lines. Newlines are removed, so that no file name can leave the comment, and letters
    that YAML forbids."""
    return textwrap.fill(
        "".join(letter for letter in " ".join(text.split()) if letter.isprintable()),
        _COMMENT_WIDTH,
        initial_indent=f"# {bullet}",
        subsequent_indent="# " + " " * len(bullet),
        break_long_words=False,
        break_on_hyphens=False,
    )


def comment_lines(about: str, needed: Iterable[str]) -> list[str]:
    return [_comment(about), *(_comment(item, "- ") for item in needed)]


def slug(name: str) -> str:
    """Return a job name that Slurm, and DNS behind a Kubernetes service, allow."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "run"


# Not `ip route get`: on the first node it prints "lo" for the node's own address, containers seldom have it, and on
# Debian it is not on the PATH of ordinary users. shoal is installed anyway.
_FIND_INTERFACE = (
    "import sys; from shoal.host.facts import interface_to; "
    'print(interface_to(sys.argv[1]) or sys.exit("no route to " + sys.argv[1]))'
)


# Plain torchrun: one command per node, to be typed there.


@dataclass(frozen=True)
class NodeCommand:
    node: str
    address: str
    command: str


def torchrun_commands(job: EmitJob, port: int) -> list[NodeCommand]:
    """Return one command per node, with a static rendezvous.

    The c10d rendezvous looks for its own address under names that mean something else in a namespace or on a Debian
    host, and ignores the order of the nodes. torchrun numbers ranks through nodes with different slots by itself.
    """
    return [
        NodeCommand(node.name, node.address, _torchrun_command(job, port, node_rank, node))
        for node_rank, node in enumerate(job.nodes)
    ]


def torchrun_text(job: EmitJob, port: int) -> str:
    first = job.nodes[0].name
    needed = [
        *_requirements(job, first, "this folder, on a file system that all nodes share, at the same path"),
        f"port {port} free on {first} (who has it: ss -ltnp 'sport = :{port}'), or choose another with --port",
    ]
    lines = [
        _comment(f"{job.summary}, started by torchrun."),
        _comment("Type each command on its node, all in the same folder; they wait 15 minutes for each other. Needed:"),
        *(_comment(item, "- ") for item in needed),
    ]
    for command in torchrun_commands(job, port):
        lines += ["", _comment(f"{command.node} ({command.address})"), command.command]
    return "\n".join(lines) + "\n"


def _torchrun_command(job: EmitJob, port: int, node_rank: int, node: Node) -> str:
    first, threads = job.nodes[0].address, threads_on(job, node)
    if node.interface:
        name = shlex.quote(node.interface)
        interface = f"GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
    else:
        find = shlex.join([job.python, "-P", "-c", _FIND_INTERFACE, first])
        interface = f'interface=$({find}) && GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface"'
    env = {
        **SAFE_PATH,
        "SHOAL_NODE": node.name,
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        **({} if node.link_mbps is None else {"SHOAL_LINK_MBPS": str(node.link_mbps)}),
        # Of the ranks that share a run folder one keeps its checkpoints and ledger: the first of the first node.
        **({} if node_rank == 0 else {"SHOAL_KEEPS_FILES": "0"}),
    }
    flags = {
        "nnodes": len(job.nodes),
        "node-rank": node_rank,
        "nproc-per-node": node.slots,
        "master-addr": first,
        "master-port": port,
    }
    argv = [job.python, "-P", "-m", "torch.distributed.run", *(f"--{flag}={value}" for flag, value in flags.items())]
    argv += ["-m", "shoal.train.worker", *worker_words(job), "--out", str(job.out)]
    if threads is not None:
        # By default the worker counts the machine's cores; a node may be only a part of the machine.
        argv += ["--set", f"run.threads={threads}"]
    variables = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return " ".join([interface, *variables, shlex.join(argv)])
