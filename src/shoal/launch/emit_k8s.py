"""Writes a Kubernetes manifest: an indexed Job whose pods are the nodes of a run, and the Service that names them.

The pods run `shoal.runs.pod`. Whatever is lost, Kubernetes puts a pod in its place, and that pod rejoins.
"""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from shoal.cluster.node import Node
from shoal.cluster.pods.spec import FOLDER, FOLDER_MARK, GRACE_S, HOSTS, PORT, RUN_FAILED, PodsSpec
from shoal.config.defaults import DEFAULT_CLAIM, LEAST_POD_GIB, MOUNT
from shoal.cost.batch_plan import micro_batch, rank_weights
from shoal.errors import ConfigError, UsageError
from shoal.launch.emit import EmitJob, comment_lines, quoted, slug, threads_on, worker_words

GPUS = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
# Of memory: exchanges between the ranks of a pod go through /dev/shm.
_SHM_GIB = 1
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
  # A lost pod is replaced, and rejoins the others, which continue. Each may be lost this often; drains do not count.
  backoffLimitPerIndex: 100
  maxFailedIndexes: 0
  # Not before the lost one has ended: both would be the same node of the run.
  podReplacementPolicy: Failed
  # The first pod ends when the run is done.
  successPolicy:
    rules:
    - succeededIndexes: "0"
  podFailurePolicy:
    rules:
    # Drained, evicted or preempted: no failure.
    - action: Ignore
      onPodConditions:
      - type: DisruptionTarget
        status: "True"
    # The run itself has failed, or was stopped.
    - action: FailJob
      onExitCodes:
        containerName: trainer
        operator: In
        values: [$failed]
  # The Job and the logs of its pods; the run folder stays.
  ttlSecondsAfterFinished: 86400
  template:
    metadata:
      labels:
        app: $name
    spec:
      # With the Job's index this names the pods: $name-0.$name is the first.
      subdomain: $name
      restartPolicy: Never
      # Time to leave, or to finish a step and save it: SIGTERM announces the end of the pod to the others.
      terminationGracePeriodSeconds: $grace
      # Without it, the processes of a rank that was killed would never be removed.
      shareProcessNamespace: true
      # The pods need nothing from Kubernetes itself.
      automountServiceAccountToken: false
      enableServiceLinks: false
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
        command: $command
        args:
$args
        env:
        - name: $hosts_name
          value: $hosts
        - name: SHOAL_JOB
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['batch.kubernetes.io/controller-uid']
        # What the pods of this Job know of each other.
        - name: $folder_name
          value: $folder
        ports:
        - name: pods
          containerPort: $port
        resources:
          requests:
            cpu: "$cores"
            memory: $memory
          # The ranks count the cores of the limit; without one, those of the whole machine, which other pods use too.
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
      # A container's own /dev/shm has 64 MB; this one is a part of the pod's memory.
      - name: shm
        emptyDir:
          medium: Memory
          sizeLimit: $shm
"""


@dataclass(frozen=True)
class Pods:
    image: str  # has shoal installed
    claim: str = DEFAULT_CLAIM  # a volume claim that all pods can write to
    memory: str | None = None  # of each pod; None: what its ranks need
    gpus: str | None = None  # `nvidia` or `amd`; None: no GPUs


@dataclass(frozen=True)
class PodRun:
    """One run for the pods of a Job. Paths are as the pods see them."""

    about: str
    command: str  # of shoal: `train` or `run`
    words: Sequence[str]  # its words, without the cluster and the folder
    nodes: Sequence[Node]
    out: Path
    python: str
    cores: int  # of each pod
    memory: str
    needed: Sequence[str] = ()  # besides what every Job needs

    @property
    def slots(self) -> int:
        return self.nodes[0].slots


def training_pods(job: EmitJob) -> PodRun:
    """Return the run that trains a preset."""
    config = job.config
    text = [f"the text {config.data.path}, on the volume or in the image"] if config.data.path is not None else []
    threads = ["--threads", str(config.run.threads)] if config.run.threads else []
    if config.data.cache_dir is not None:
        _refuse_outside(config.data.cache_dir)
    words = [*worker_words(job), *threads]
    return PodRun(
        job.summary, "train", words, job.nodes, job.out, job.python, cores_of(job.nodes, job), _pod_memory(job), text
    )


def script_pods(words: Sequence[str], nodes: Sequence[Node], settings: Sequence[str], out: Path, python: str) -> PodRun:
    """Return the run of a user's script; `settings` are those of its session."""
    about = f"{script_name(words)}: {sum(node.slots for node in nodes)} ranks"
    needed = [f"{words[words[0] == '-m']}, on the volume (paths are taken from {MOUNT}) or in the image"]
    memory = f"{LEAST_POD_GIB}Gi"
    return PodRun(about, "run", [*settings, *words], nodes, out, python, cores_of(nodes), memory, needed)


def script_name(words: Sequence[str]) -> str:
    """Return the name of a script or, after -m, of a module."""
    return words[1].rpartition(".")[2] if words[0] == "-m" else Path(words[0]).stem


def cores_of(nodes: Sequence[Node], job: EmitJob | None = None) -> int:
    """Return the cores of each pod: those of the largest node."""
    threads = [(node.rank_threads if job is None else threads_on(job, node)) or 1 for node in nodes]
    return max(node.slots * count for node, count in zip(nodes, threads, strict=True))


def k8s_name(out: Path) -> str:
    return f"shoal-{slug(out.name)}"


def k8s_text(run: PodRun, pods: Pods) -> str:
    if len({node.slots for node in run.nodes}) > 1:
        raise ConfigError(
            "the nodes have different numbers of ranks",
            why="all pods of a Job are alike",
            fix="write for example: --on lab:3,slots=2",
        )
    _refuse_outside(run.out)
    name, out = k8s_name(run.out), os.path.normpath(run.out)
    about = (
        f"{run.about}; every node is a pod. Start: kubectl apply -f THIS_FILE. Watch: kubectl logs -f -l app={name} "
        f"--prefix --max-log-requests={len(run.nodes)}. A pod that is lost or drained leaves the others training, and "
        "the one that takes its place rejoins. "
        f"Stop, and save: kubectl delete job {name} --cascade=foreground. The same file applied again resumes the run. "
        "Needed:"
    )
    needed = [
        f"Kubernetes 1.31 or newer, and the image {pods.image}, with shoal in it; shoal's Dockerfile makes it: "
        f"docker build -t {pods.image} .",
        f"the volume claim {pods.claim}, mounted at {MOUNT}, for the run folder"
        + (", with access mode ReadWriteMany" if len(run.nodes) > 1 else ""),
        "every TCP port open between the pods: gloo listens on those that the kernel picks",
        *run.needed,
    ]
    memory = pods.memory or run.memory
    gpus = {GPUS[pods.gpus]: run.slots} if pods.gpus else {}
    command = [run.python, "-P", "-m", "shoal.runs.pod"]
    args = [out, str(PodsSpec(len(run.nodes), run.slots)), run.command, *run.words]
    manifest = Template(_JOB).substitute(
        name=name,
        nodes=len(run.nodes),
        image=quoted(pods.image),
        mount=MOUNT,
        command=quoted(command),
        args=textwrap.indent("\n".join(f"- {quoted(_literal(word))}" for word in args), " " * 8),
        hosts_name=HOSTS,
        hosts=quoted(" ".join(f"{name}-{index}.{name}" for index in range(len(run.nodes)))),
        folder_name=FOLDER,
        folder=quoted(_literal(f"{MOUNT / Path(out).parent}/.{Path(out).name}{FOLDER_MARK}") + "$(SHOAL_JOB)"),
        failed=RUN_FAILED,
        grace=GRACE_S,
        port=PORT,
        cores=run.cores,
        memory=quoted(memory),
        limits=quoted({"cpu": str(run.cores), "memory": memory, **gpus}),
        claim=quoted(pods.claim),
        shm=f"{_SHM_GIB}Gi",
    )
    return "\n".join([*comment_lines(about, needed), Template(_SERVICE).substitute(name=name) + "---", manifest])


def _literal(word: str) -> str:
    """Return a word as Kubernetes reads it: it replaces $(NAME), and makes $$ one dollar sign."""
    return word.replace("$", "$$")


def _refuse_outside(path: Path) -> None:
    # Files elsewhere are lost with the pod, and no other pod can read them.
    if not Path(os.path.normpath(MOUNT / path)).is_relative_to(MOUNT):
        raise UsageError(
            f"{path} is outside the volume that the pods share",
            why=f"the volume is mounted at {MOUNT}, and relative paths are taken from there",
            fix="use relative ones: --out runs/NAME --set data.cache_dir=runs/.cache",
        )


def _pod_memory(job: EmitJob) -> str:
    """Return the memory for the ranks of a pod by the estimate of `shoal plan`, with its reserve, in whole GiB, and
    /dev/shm."""
    # Imported here: only a pod needs it.
    from shoal.cost import memory as memory_model
    from shoal.cost.strategy import strategy_of_config
    from shoal.cost.workload import workload_of

    config = job.config
    size = micro_batch(config.train, rank_weights(config.run, job.ranks))
    rank_bytes = memory_model.needed(workload_of(config), strategy_of_config(config.sync), size, job.ranks).total
    slots = max(node.slots for node in job.nodes)
    gib = math.ceil(slots * rank_bytes / memory_model.USABLE / 2**30) + _SHM_GIB
    return f"{max(LEAST_POD_GIB, gib)}Gi"
