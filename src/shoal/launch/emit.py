"""A job: one training that somebody else's launcher is to start, and what it asks of the machines."""

from __future__ import annotations

import json
import os
import re
import shlex
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from shoal.cluster.node import Node
from shoal.config.load import build_config, parse_set
from shoal.config.presets import PRESETS
from shoal.config.schema import Config
from shoal.control.rank_env import SAFE_PATH
from shoal.cost.batch_plan import micro_batch, rank_weights
from shoal.errors import ConfigError, UsageError

# Nothing but the schema's defaults, so every configuration can be reached from it.
_PLAIN_PRESET = "grammar"
_COMMENT_WIDTH = 118


@dataclass(frozen=True)
class EmitJob:
    """`out` is the run folder, `python` the interpreter with shoal in it, both as the machines of the job see them."""

    config: Config
    nodes: tuple[Node, ...]
    out: Path
    python: str

    @property
    def ranks(self) -> int:
        return sum(node.slots for node in self.nodes)

    @property
    def cache_dir(self) -> Path | None:
        """Rank 0 encodes the text and tells the others where it lies, so several nodes need it where all can read."""
        if self.config.data.cache_dir is not None or len(self.nodes) == 1:
            return self.config.data.cache_dir
        return self.out.parent / ".cache"


def make_job(config: Config, nodes: Iterable[Node], out: Path, python: str) -> EmitJob:
    """Refuses here what every rank would refuse there, after a wait in somebody's queue."""
    job = EmitJob(config, tuple(nodes), out, python)
    try:
        micro_batch(config.train, rank_weights(config.run, job.ranks))
    except ConfigError as error:
        fix = "change it: --set train.global_batch=N, --set train.micro_batch=N, or --on with fewer ranks"
        raise ConfigError(error.seen, why=error.why, fix=fix) from None
    return job


def worker_words(job: EmitJob) -> list[str]:
    """Preset and settings, from which `shoal.train.worker` builds this very configuration. Placement is not in them."""
    wanted = _settings(job.config)
    if job.cache_dir is not None:
        wanted["data.cache_dir"] = str(job.cache_dir)
    preset = job.config.run.preset
    base = _settings(build_config(preset)) if preset in PRESETS else None
    if job.config.run.weights:
        wanted["run.weights"] = job.config.run.weights
    if base is None or not base.keys() <= wanted.keys():
        # A file may call its preset what it likes, and no --set takes away what a preset sets: begin at the defaults.
        base, wanted["run.preset"], preset = _settings(build_config(_PLAIN_PRESET)), preset, _PLAIN_PRESET
    changed = [_assignment(key, value) for key, value in wanted.items() if base.get(key) != value]
    return [preset, *(word for assignment in changed for word in ("--set", assignment))]


def _settings(config: Config) -> dict[str, Any]:
    sections = config.model_dump(mode="json", exclude={"run"})
    values = ((f"{section}.{key}", value) for section, keys in sections.items() for key, value in keys.items())
    return {key: value for key, value in values if value is not None}


def _assignment(key: str, value: Any) -> str:
    """A word as it is where that reads back as the same word, otherwise as TOML."""
    section, _, name = key.partition(".")
    bare = f"{key}={value}"
    if isinstance(value, str) and value.isprintable() and parse_set(bare) == {section: {name: value}}:
        return bare
    return f"{key}={quoted(value)}"


def quoted(value: Any) -> str:
    """As JSON, which is TOML and YAML too, but for DEL, which both want escaped."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def threads_on(job: EmitJob, node: Node) -> int | None:
    """Threads of each rank there; None where nobody has counted the node's cores yet."""
    if job.config.run.threads or not node.cores:
        return job.config.run.threads
    return max(1, node.cores // node.slots)


def cores_per_node(job: EmitJob) -> int:
    """A scheduler gives every node the same, so this is what the largest needs."""
    return max(node.slots * (threads_on(job, node) or 1) for node in job.nodes)


def summary(job: EmitJob) -> str:
    return f"{job.config.run.preset}: {_count(job.ranks, 'rank')} on {_count(len(job.nodes), 'node')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def needs(job: EmitJob, first: str, shared: str) -> list[str]:
    """What must be true before this can work. `first` is where rank 0 runs, `shared` what all nodes can write to."""
    wanted = [f"the same shoal and torch on every node, in {job.python}"]
    if len(job.nodes) > 1:
        wanted += [
            f"{shared}: {first} makes the run folder and the encoded text there, and the others read them. Without "
            "it their ranks end with 'is not a run folder'",
            "every TCP port open between the nodes: gloo listens on those that the kernel picks",
        ]
    if job.config.data.path is not None:
        wanted.append(f"the text {job.config.data.path} on {first}, at this path")
    return wanted


def comment(text: str, bullet: str = "") -> str:
    """Whatever a user's file is called, no line of it leaves the comment."""
    flat = " ".join(text.split())
    first, rest = f"# {bullet}", "# " + " " * len(bullet)
    return textwrap.fill(
        flat,
        _COMMENT_WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def slug(name: str) -> str:
    """For job names: what Slurm, and DNS behind a Kubernetes service, allow."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())[:40].strip("-") or "run"


# SECTION launch/emit/nodescript
# What one node of a scheduler's job does: find its interface, count its ranks, become torchrun. Plain POSIX shell.
#
# Slurm and Kubernetes run the same lines, one process a node, and differ only in how a node learns its number
# (`NODE_RANK`) and where the first one is (`MASTER_ADDR`, `MASTER_PORT`). The run folder comes as `SHOAL_OUT`; with
# anything in `SHOAL_RESUME` the run there is gone on with.


# Not `ip route get`: on the first node it says "lo" of the node's own address, containers seldom have it, and on
# Debian it is not on the PATH of ordinary users. shoal is there anyway.
FIND_INTERFACE = (
    "import sys; from shoal.host.facts import interface_to; "
    'print(interface_to(sys.argv[1]) or sys.exit("no route to " + sys.argv[1]))'
)


def node_script(job: EmitJob, number: str, count: str, shape: list[str]) -> str:
    """`number` and `count` are how a node learns its own number and how many there are, `shape` the lines that set
    `ranks` and `threads`.
    """
    return "\n".join(
        [
            "set -eu",
            f"python={shlex.quote(job.python)}",
            "# Python must not import from the current folder, which other users may be able to write to.",
            "export PYTHONSAFEPATH=1",
            f"NODE_RANK={number}",
            *shape,
            f'interface=$("$python" -c {shlex.quote(FIND_INTERFACE)} "$MASTER_ADDR")',
            'export GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface" OMP_NUM_THREADS="$threads"',
            "# Of the ranks that share a run folder one keeps its checkpoints and ledger: the first of the first node.",
            '[ "$NODE_RANK" = 0 ] || export SHOAL_KEEPS_FILES=0',
            *_worker(job),
            'exec "$python" -m torch.distributed.run \\',
            f'    --nnodes={count} --node-rank="$NODE_RANK" --nproc-per-node="$ranks" \\',
            '    --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" -m shoal.train.worker "$@"',
        ]
    )


def _worker(job: EmitJob) -> list[str]:
    preset, *settings = worker_words(job)
    pairs = [shlex.join(settings[i : i + 2]) for i in range(0, len(settings), 2)]
    words = [shlex.quote(preset), '--out "$SHOAL_OUT"', *pairs, '--set run.threads="$threads"']
    # Asked for, never found out: on NFS a node that looked for the run folder too early would not see it for a while.
    return ["set -- \\", *(f"    {word} \\" for word in words), "    ${SHOAL_RESUME:+--resume}"]


def by_number(lines: list[str]) -> list[str]:
    """One shell line for the node of each number, or only the line when all are the same."""
    if len(set(lines)) == 1:
        return lines[:1]
    numbers = [*map(str, range(len(lines) - 1)), "*"]
    cases = (f"    {number}) {line} ;;" for number, line in zip(numbers, lines, strict=True))
    return ['case "$NODE_RANK" in', *cases, "esac"]


# SECTION launch/emit/k8s
# A Kubernetes manifest: an indexed Job, one pod a node, and the headless Service that gives the first pod a name.


MOUNT = Path("/data")
DEFAULT_CLAIM = "shoal"
DEFAULT_MEMORY = "4Gi"

_SERVICE = """\
apiVersion: v1
kind: Service
metadata:
  name: $name
  labels:
    app: $name
spec:
  clusterIP: None
  # The pods look for each other before any of them counts as ready.
  publishNotReadyAddresses: true
  selector:
    app: $name
"""
_JOB = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: $name
  labels:
    app: $name
spec:
  completionMode: Indexed
  completions: $nodes
  parallelism: $nodes
  # A rank that fails ends the others too, and a pod that came back alone would find nobody.
  backoffLimit: 0
  podFailurePolicy:
    rules:
    # Evicted or preempted while the others still wait for it: not the training's fault, make the pod again.
    - action: Ignore
      onPodConditions:
      - type: DisruptionTarget
  template:
    metadata:
      labels:
        app: $name
    spec:
      # With the Job's index this names the pods: $name-0.$name is the first.
      subdomain: $name
      restartPolicy: Never
      # Time to finish a step and save it.
      terminationGracePeriodSeconds: 90
      topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: ScheduleAnyway
        labelSelector:
          matchLabels:
            app: $name
      containers:
      - name: trainer
        image: $image
        workingDir: $mount
        command: [/bin/sh, -c]
        args:
        - |
$script
        env:
        - name: MASTER_ADDR
          value: $name-0.$name
        - name: MASTER_PORT
          value: "29500"
        - name: SHOAL_OUT
          value: $out
        # Anything here goes on with the run in that folder, from its last checkpoint.
        - name: SHOAL_RESUME
          value: ""
        - name: SHOAL_NODE
          valueFrom:
            fieldRef:
              fieldPath: spec.nodeName
        resources:
          requests:
            cpu: "$cores"
            memory: $memory
          limits: $limits
        volumeMounts:
        - name: work
          mountPath: $mount
        - name: shm
          mountPath: /dev/shm
      volumes:
      - name: work
        persistentVolumeClaim:
          claimName: $claim
      # A container's own /dev/shm has 64 MB, too little for NCCL between the ranks of a pod.
      - name: shm
        emptyDir:
          medium: Memory
          sizeLimit: 1Gi
"""
_WAIT_FOR_FIRST_POD = """\
# A pod has a name when it has an address, and its image may take minutes to come.
tries=0
until getent hosts "$MASTER_ADDR" >/dev/null; do
    tries=$((tries + 1))
    [ "$tries" -lt 600 ] || { echo "$MASTER_ADDR still has no address" >&2; exit 1; }
    sleep 1
done"""


@dataclass(frozen=True)
class Pods:
    """`image` has shoal in it, `claim` is a volume that all pods can write, `memory` is what each of them gets."""

    image: str
    claim: str = DEFAULT_CLAIM
    memory: str = DEFAULT_MEMORY


def k8s_text(job: EmitJob, pods: Pods) -> str:
    check_inside(job)
    name = k8s_name(job)
    about = (
        f"{summary(job)}; every node is a pod. Start: kubectl apply -f THIS_FILE. Watch: kubectl logs -f -l app={name} "
        f"--prefix. To go on with a run that ended early: kubectl delete job {name}, set SHOAL_RESUME below, and apply "
        "it again. Needed:"
    )
    head = [comment(about), *(comment(need, "- ") for need in _needs(job, pods))]
    return "\n".join([*head, Template(_SERVICE).substitute(name=name) + "---", _job(job, pods, name)])


def k8s_name(job: EmitJob) -> str:
    return f"shoal-{slug(job.out.name)}"


def check_inside(job: EmitJob) -> None:
    """What a pod writes anywhere else goes with it, and no other pod can read it."""
    for path in (job.out, job.config.data.cache_dir):
        if path is not None and not Path(os.path.normpath(MOUNT / path)).is_relative_to(MOUNT):
            raise UsageError(
                f"{path} is outside the volume that the pods share",
                why=f"the volume is mounted at {MOUNT}, and relative paths are taken from there",
                fix="use relative ones: --out runs/NAME --set data.cache_dir=runs/.cache",
            )


def _needs(job: EmitJob, pods: Pods) -> list[str]:
    volume = f"the volume claim {pods.claim}, mounted at {MOUNT}"
    alone = [f"{volume}, for the run folder"] if len(job.nodes) == 1 else []
    shared = f"{volume}, with access mode ReadWriteMany"
    return [f"the image {pods.image}, with shoal in it", *alone, *needs(job, "the first pod", shared)]


def _job(job: EmitJob, pods: Pods, name: str) -> str:
    gpus = {"nvidia.com/gpu": _slots(job)} if job.config.train.device == "cuda" else {}
    return Template(_JOB).substitute(
        name=name,
        nodes=len(job.nodes),
        image=quoted(pods.image),
        mount=MOUNT,
        script=textwrap.indent(_script(job), " " * 10),
        out=quoted(str(job.out)),
        cores=cores_per_node(job),
        memory=quoted(pods.memory),
        limits=quoted({"memory": pods.memory, **gpus}),
        claim=quoted(pods.claim),
    )


def _slots(job: EmitJob) -> int:
    return max(node.slots for node in job.nodes)


def _script(job: EmitJob) -> str:
    shape = by_number([f"ranks={node.slots} threads={threads_on(job, node) or 1}" for node in job.nodes])
    return node_script(job, "$JOB_COMPLETION_INDEX", str(len(job.nodes)), [*shape, _WAIT_FOR_FIRST_POD])


# SECTION launch/emit/slurm
# An sbatch script: Slurm starts one torchrun on every node.


# On the first node, whose own name may mean 127.0.1.1 there: the address it has on the way to the second.
_OWN_ADDRESS = (
    "import socket, sys; from shoal.host.facts import source_address; "
    "print(source_address(socket.gethostbyname(sys.argv[1])))"
)
_SHARED = "the folder you submit from, on a file system that all nodes share, at the same path"
_NODE_END = "END_OF_NODE_SCRIPT"


def slurm_text(job: EmitJob, new_folder: bool) -> str:
    """`new_folder`: every submission gets a run folder of its own, named after the job."""
    name = f"shoal-{slug(job.config.run.preset)}"
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH --{option}" for option in _options(job, name)),
            *_head(job),
            "",
            "set -euo pipefail",
            *_run_folder(job.out, new_folder),
            *_meeting(job),
            "",
            f"node_script=$(cat <<'{_NODE_END}'",
            node_script(job, "$SLURM_NODEID", '"$SLURM_NNODES"', _shape(job)),
            _NODE_END,
            ")",
            "# srun asks for its CPUs anew since Slurm 22.05; without this each torchrun is bound to a single one.",
            'exec srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\',
            '    --kill-on-bad-exit=1 --label sh -c "$node_script"',
            "",
        ]
    )


def _options(job: EmitJob, name: str) -> list[str]:
    options = [
        f"job-name={name}",
        f"nodes={len(job.nodes)}",
        "ntasks-per-node=1",
        f"cpus-per-task={cores_per_node(job)}",
        f"output={name}-%j.log",
        "signal=TERM@90",
    ]
    if job.config.train.device == "cuda":
        options.append(f"gpus-per-node={max(node.slots for node in job.nodes)}")
    return options


def _head(job: EmitJob) -> list[str]:
    about = [
        f"{summary(job)}. One task a node runs torchrun, which "
        "starts the node's ranks: Slurm then need not know how ranks share its CPUs and GPUs, and a rank sees all GPUs "
        "of its node, as it would anywhere else.",
        "Submit it with what your site asks for: sbatch --partition=… --account=… --time=… THIS_FILE. Options there "
        "beat those above. 90 s before the time is over the ranks finish their step and save; to go on: "
        "SHOAL_RESUME=RUN_FOLDER sbatch … THIS_FILE. Needed:",
    ]
    return [
        *(comment(text) for text in about),
        *(comment(need, "- ") for need in needs(job, "the first node", _SHARED)),
    ]


def _run_folder(out: Path, new_folder: bool) -> list[str]:
    where = shlex.quote(str(out)) + ("-$SLURM_JOB_ID" if new_folder else "")
    return ["export SHOAL_OUT=${SHOAL_RESUME:-}", f'[ -n "$SHOAL_OUT" ] || SHOAL_OUT={where}']


def _meeting(job: EmitJob) -> list[str]:
    """The first node's address; a port below those that the kernel hands out, not the one of another job there."""
    return [
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
        'mapfile -t hosts <<<"$hosts"',
        "export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))",
        "if ((${#hosts[@]} > 1)); then",
        "    # We are on the first node, where its own name may mean 127.0.1.1: take its address towards the second.",
        f'    MASTER_ADDR=$({shlex.quote(job.python)} -P -c {shlex.quote(_OWN_ADDRESS)} "${{hosts[1]}}")',
        "fi",
    ]


def _shape(job: EmitJob) -> list[str]:
    ranks = by_number([f"ranks={node.slots}" for node in job.nodes])
    if job.config.run.threads:
        threads = [f"threads={job.config.run.threads}"]
    else:
        threads = ["threads=$((SLURM_CPUS_PER_TASK / ranks))", '[ "$threads" -gt 0 ] || threads=1']
    return ["export SHOAL_NODE=$SLURMD_NODENAME", *ranks, *threads]


# SECTION launch/emit/torchrun
# Plain torchrun: one command a node, to be typed there.


_TORCHRUN_SHARED = "this folder, on a file system that all nodes share, at the same path"


@dataclass(frozen=True)
class NodeCommand:
    node: str
    address: str
    command: str


def torchrun_commands(job: EmitJob, port: int) -> list[NodeCommand]:
    """Static rendezvous: c10d looks for its own address under names that mean something else in a namespace or on a
    Debian host, and ignores the order of the nodes. Torchrun counts ranks through unequal nodes by itself.
    """
    return [
        NodeCommand(node.name, node.address, _command(job, port, node_rank, node))
        for node_rank, node in enumerate(job.nodes)
    ]


def torchrun_text(job: EmitJob, port: int) -> str:
    first = job.nodes[0]
    lines = [
        comment(f"{summary(job)}, started by torchrun."),
        comment("Type each command on its node, all in the same folder; they wait 15 minutes for each other. Needed:"),
        *(comment(need, "- ") for need in [*needs(job, first.name, _TORCHRUN_SHARED), _port_need(first, port)]),
    ]
    for each in torchrun_commands(job, port):
        lines += ["", comment(f"{each.node} ({each.address})"), each.command]
    return "\n".join(lines) + "\n"


def _port_need(first: Node, port: int) -> str:
    return f"port {port} free on {first.name} (who has it: ss -ltnp 'sport = :{port}'), or choose another with --port"


def _command(job: EmitJob, port: int, node_rank: int, node: Node) -> str:
    threads = threads_on(job, node)
    flags = {
        "nnodes": len(job.nodes),
        "node-rank": node_rank,
        "nproc-per-node": node.slots,
        "master-addr": job.nodes[0].address,
        "master-port": port,
    }
    torchrun = [
        job.python,
        "-P",
        "-m",
        "torch.distributed.run",
        *(f"--{flag}={value}" for flag, value in flags.items()),
    ]
    worker = ["-m", "shoal.train.worker", *worker_words(job), "--out", str(job.out)]
    # The worker counts the machine's cores itself unless told; a node may be only a part of the machine.
    limit = [] if threads is None else ["--set", f"run.threads={threads}"]
    return f"{_variables(job, node_rank, node)} {shlex.join([*torchrun, *worker, *limit])}"


def _variables(job: EmitJob, node_rank: int, node: Node) -> str:
    threads = threads_on(job, node)
    env = {
        **SAFE_PATH,
        "SHOAL_NODE": node.name,
        **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
        **({} if node.link_mbps is None else {"SHOAL_LINK_MBPS": str(node.link_mbps)}),
        # Of the ranks that share a run folder one keeps its checkpoints and ledger: the first of the first node.
        **({} if node_rank == 0 else {"SHOAL_KEEPS_FILES": "0"}),
    }
    words = [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    return " ".join([_interface(job, node), *words])


def _interface(job: EmitJob, node: Node) -> str:
    """The node's own, or, where nobody has looked yet, a search for it in the same command."""
    if node.interface:
        name = shlex.quote(node.interface)
        return f"GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
    find = shlex.join([job.python, "-P", "-c", FIND_INTERFACE, job.nodes[0].address])
    return f'interface=$({find}) && GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface"'
