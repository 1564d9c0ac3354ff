"""What `--on pods:N` means, and the job that this pod is of."""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError

_ON = re.compile(r"pods:(\d{1,4})((?:,[a-z]+=[^,]+)*)")
_FIX = "write for example: --on pods:3, or --on pods:3,slots=2,interface=eth0"
# Set by the manifest that `shoal emit k8s` prints; the index by Kubernetes.
HOSTS = "SHOAL_PODS"
FOLDER = "SHOAL_PODS_FOLDER"
INDEX = "JOB_COMPLETION_INDEX"
PORT = 29400
FOLDER_MARK = "-pods-"  # between the name of the run and the uid of the Job
# The exit code of the first pod when the run itself has failed; with any other one Kubernetes replaces a pod.
RUN_FAILED = 64
# What Kubernetes gives a pod to end.
GRACE_S = 90
_CODE_LETTERS = 64
_CODE_WITHIN_S = 10.0


@dataclass(frozen=True)
class PodsSpec:
    """The first pods of a job."""

    pods: int
    slots: int = 1
    interface: str | None = None

    def __str__(self) -> str:
        slots = f",slots={self.slots}" if self.slots > 1 else ""
        return f"pods:{self.pods}{slots}" + (f",interface={self.interface}" if self.interface else "")


def parse_pods(text: str) -> PodsSpec:
    match = _ON.fullmatch(text)
    words = match[2].split(",")[1:] if match else []
    settings = {name: value for name, _, value in (word.partition("=") for word in words)}
    has_twice = len(settings) < len(words)
    slots = settings.pop("slots", "1")
    interface = settings.pop("interface", None)
    if match is None or settings or has_twice or int(match[1]) < 1 or not re.fullmatch(r"[1-9]\d{0,2}", slots):
        raise UsageError(
            f"--on {text!r} names no pods", why="they are written pods:N[,slots=N][,interface=NAME]", fix=_FIX
        )
    return PodsSpec(int(match[1]), int(slots), interface)


def node_name(index: int) -> str:
    return f"pod-{index}"


@dataclass(frozen=True)
class PodJob:
    """The job that this pod is of."""

    hosts: tuple[str, ...]  # the name of each pod in the network; a pod that comes back has the same name
    index: int  # of this pod
    folder: Path  # on the volume that the pods share: what they know of each other

    @property
    def node(self) -> str:
        return node_name(self.index)

    def read_code(self) -> str:
        """Return the secret by which the pods know each other. The first one to come makes it."""
        path, deadline = self.folder / "code", time.monotonic() + _CODE_WITHIN_S
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with (
                suppress(FileExistsError),
                os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file,
            ):
                file.write(secrets.token_hex(_CODE_LETTERS // 2))
            while len(code := path.read_text()) < _CODE_LETTERS:
                # The pod that makes it has not written it yet.
                if time.monotonic() > deadline:
                    path.unlink(missing_ok=True)
                    raise OSError(errno.ENODATA, "the pod that made the code could not write it")
                time.sleep(0.1)
        except OSError as error:
            raise UsageError(
                f"{self.folder} cannot be used: {error.strerror}",
                why="the pods share the folder of the run, and each must be able to write there",
                fix="look at the volume claim: kubectl describe pvc; all pods need ReadWriteMany, and room",
            ) from None
        return code

    @property
    def evicted(self) -> Path:
        """The file that shows that all ranks were stopped by the end of their pods: the next pods resume the run."""
        return self.folder / "evicted"

    @property
    def end(self) -> Path:
        """The file that a finished or failed run leaves, for pods that come back late."""
        return self.folder / "ended.json"

    def agent_mark(self, index: int) -> Path:
        """The file that shows that a pod had an agent: one that comes back without it was never part of the run."""
        return self.folder / f"agent-{index}"

    def alive(self, index: int) -> Path:
        """The file whose content changes while a pod is there."""
        return self.folder / f"alive-{index}"

    def former_folders(self) -> list[Path]:
        """Return the folders of earlier Jobs for the same run: a Job's folder ends with its uid."""
        name, mark, _ = self.folder.name.rpartition(FOLDER_MARK)
        siblings = self.folder.parent.glob(f"{name}{mark}*") if mark else ()
        return [path for path in siblings if path != self.folder and path.name.rpartition(FOLDER_MARK)[0] == name]


def own_job(spec: PodsSpec | None = None) -> PodJob:
    """Return the job of this pod. UsageError where this process is in none, or in one with fewer pods than `spec`."""
    hosts, folder, index = (os.environ.get(name, "") for name in (HOSTS, FOLDER, INDEX))
    if not (hosts and folder and index.isdecimal()):
        raise UsageError(
            "--on pods is for the pods of a job that shoal emit k8s has written",
            why=f"{HOSTS}, {FOLDER} or {INDEX} is not set here",
            fix="print one: shoal emit k8s --on local:1 > job.yaml; inside it: kubectl exec POD -- shoal ps",
        )
    job = PodJob(tuple(hosts.split()), int(index), Path(folder))
    if spec is not None and spec.pods > len(job.hosts):
        raise UsageError(
            f"--on {spec} asks for {spec.pods} pods, and the job has {len(job.hosts)}",
            why="a job has as many pods as its manifest says",
            fix=f"write --on pods:{len(job.hosts)}, or print another manifest",
        )
    return job
