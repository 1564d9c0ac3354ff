"""Writes a job script for Slurm: it checks the nodes, probes the network, and trains on them with shoal's launcher."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.node import Node
from shoal.cluster.slurm.job import SAVE_S
from shoal.cluster.slurm.spec import SlurmSpec
from shoal.cluster.target import parse_on
from shoal.errors import ConfigError
from shoal.launch.emit import EmitJob, comment_lines, slug, threads_on, worker_words

_PROBE_S = 20


@dataclass(frozen=True)
class SlurmJob:
    name: str
    about: str  # what is trained, on what
    options: Sequence[str]  # of sbatch
    verb: str  # the command of shoal that trains: `train` or `run`
    words: Sequence[str]  # its words, without the cluster and the folder
    out: Path  # the run folder
    new_folder: bool  # every submission has its own, named after its job
    python: str
    interface: str | None = None  # by whose addresses the ranks meet
    needed: Sequence[str] = ()  # besides what every job needs


def training_job(job: EmitJob, new_folder: bool) -> SlurmJob:
    """Return the job that trains a preset."""
    config = job.config
    text = [f"the text {config.data.path}, at this path on the first node"] if config.data.path is not None else []
    threads = ["--threads", str(config.run.threads)] if config.run.threads else []
    return SlurmJob(
        name=f"shoal-{slug(config.run.preset)}",
        about=job.summary,
        options=_options(config.run.on, job.nodes, [threads_on(job, node) for node in job.nodes], job.needs_gpus),
        verb="train",
        words=[*worker_words(job), *threads],
        out=job.out,
        new_folder=new_folder,
        python=job.python,
        interface=_interface(config.run.on),
        needed=text,
    )


def script_job(
    words: Sequence[str], on: str, nodes: Sequence[Node], settings: Sequence[str], out: Path | None, python: str
) -> SlurmJob:
    """Return the job that runs a user's script; `settings` are those of its session."""
    name = Path(words[1] if words[0] == "-m" else words[0]).stem
    return SlurmJob(
        name=f"shoal-{slug(name)}",
        about=f"{name}: {sum(node.slots for node in nodes)} ranks",
        options=_options(on, nodes, [node.rank_threads for node in nodes], needs_gpus=False),
        verb="run",
        words=[*settings, *words],
        out=out or Path("runs") / slug(name),
        new_folder=out is None,
        python=python,
        interface=_interface(on),
    )


def _interface(on: str) -> str | None:
    spec = parse_on(on)
    return spec.interface if isinstance(spec, SlurmSpec) else None


def _options(on: str, nodes: Sequence[Node], threads: Sequence[int | None], needs_gpus: bool) -> list[str]:
    spec = parse_on(on)
    if isinstance(spec, SlurmSpec):
        return spec.options()
    if len({node.slots for node in nodes}) > 1:
        raise ConfigError(
            f"--on {on} has nodes with different numbers of ranks",
            why="all nodes of a job of Slurm have the same number of tasks",
            fix="write for example: --on slurm:2,slots=4",
        )
    slots = nodes[0].slots
    gpus = [f"--gpus-per-node={slots}"] if needs_gpus else []
    cores = max(count or 1 for count in threads)
    return [f"--nodes={len(nodes)}", f"--ntasks-per-node={slots}", f"--cpus-per-task={cores}", *gpus, "--no-kill"]


def slurm_text(job: SlurmJob) -> str:
    """Return the script for sbatch."""
    options = [
        f"--job-name={job.name}",
        *job.options,
        "--requeue",
        f"--signal=B:INT@{SAVE_S}",
        f"--output={job.name}-%j.log",
        "--open-mode=append",
    ]
    about = (
        f"{job.about}. Submit it with the options of your site: sbatch --partition=… --account=… --time=… THIS_FILE. "
        "Options there override those above. A lost rank or node leaves the others training. A minute or two before "
        "the time is over, and after scancel, the ranks finish their step and save. When Slurm starts the job again, "
        "the run resumes; to resume it in another job: SHOAL_RESUME=RUN_FOLDER sbatch … THIS_FILE. Needed:"
    )
    needed = [
        f"{job.python}, with shoal, on every node",
        "the folder you submit from, on a file system that all nodes share, at the same path",
        "every TCP port open between the nodes: gloo listens on those that the kernel picks",
        *job.needed,
    ]
    out = shlex.quote(str(job.out)) + ("-$SLURM_JOB_ID" if job.new_folder else "")
    on = shlex.quote(f"slurm,interface={job.interface}") if job.interface else "slurm"
    # A setting stays with its --set.
    words = " ".join("\\\n    --set" if word == "--set" else shlex.quote(word) for word in job.words)
    return "\n".join(
        [
            "#!/bin/sh",
            *(f"#SBATCH {option}" for option in options),
            *comment_lines(about, needed),
            "",
            "set -eu",
            f"python={shlex.quote(job.python)}",
            'if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then',
            "    # The job ends here if something is wrong, unless SHOAL_ANYWAY=1.",
            f'    "$python" -P -m shoal doctor --on {on} || [ -n "${{SHOAL_ANYWAY:-}}" ]',
            f'    "$python" -P -m shoal probe --on {on} --budget {_PROBE_S} -o "shoal-probe-$SLURM_JOB_ID.toml" \\',
            '        || [ -n "${SHOAL_ANYWAY:-}" ]',
            "fi",
            'if [ -n "${SHOAL_RESUME:-}" ]; then',
            f'    exec "$python" -P -m shoal {job.verb} --resume "$SHOAL_RESUME"',
            "fi",
            f'exec "$python" -P -m shoal {job.verb} --on {on} --out {out} {words}',
            "",
        ]
    )
