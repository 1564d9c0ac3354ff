"""A Kubernetes manifest: an indexed Job, one pod a node, and the headless Service that gives the first pod a name."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from string import Template

from shoal.errors import UsageError
from shoal.launch.emit.job import Job, comment, cores_per_node, needs, quoted, slug, summary, threads_on
from shoal.launch.emit.nodescript import by_number, node_script

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


def k8s_text(job: Job, pods: Pods) -> str:
    check_inside(job)
    name = k8s_name(job)
    about = (
        f"{summary(job)}; every node is a pod. Start: kubectl apply -f THIS_FILE. Watch: kubectl logs -f -l app={name} "
        f"--prefix. To go on with a run that ended early: kubectl delete job {name}, set SHOAL_RESUME below, and apply "
        "it again. Needed:"
    )
    head = [comment(about), *(comment(need, "- ") for need in _needs(job, pods))]
    return "\n".join([*head, Template(_SERVICE).substitute(name=name) + "---", _job(job, pods, name)])


def k8s_name(job: Job) -> str:
    return f"shoal-{slug(job.out.name)}"


def check_inside(job: Job) -> None:
    """What a pod writes anywhere else goes with it, and no other pod can read it."""
    for path in (job.out, job.config.data.cache_dir):
        if path is not None and not Path(os.path.normpath(MOUNT / path)).is_relative_to(MOUNT):
            raise UsageError(
                f"{path} is outside the volume that the pods share",
                why=f"the volume is mounted at {MOUNT}, and relative paths are taken from there",
                fix="use relative ones: --out runs/NAME --set data.cache_dir=runs/.cache",
            )


def _needs(job: Job, pods: Pods) -> list[str]:
    volume = f"the volume claim {pods.claim}, mounted at {MOUNT}"
    alone = [f"{volume}, for the run folder"] if len(job.nodes) == 1 else []
    shared = f"{volume}, with access mode ReadWriteMany"
    return [f"the image {pods.image}, with shoal in it", *alone, *needs(job, "the first pod", shared)]


def _job(job: Job, pods: Pods, name: str) -> str:
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


def _slots(job: Job) -> int:
    return max(node.slots for node in job.nodes)


def _script(job: Job) -> str:
    shape = by_number([f"ranks={node.slots} threads={threads_on(job, node) or 1}" for node in job.nodes])
    return node_script(job, "$JOB_COMPLETION_INDEX", str(len(job.nodes)), [*shape, _WAIT_FOR_FIRST_POD])
