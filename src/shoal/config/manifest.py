"""The manifest of a run: what ran where and what came of it, in one flat file that outlives its machine.

None means "not measured" throughout; a loss that was measured and is no number is written as "NaN".
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ManifestRecord(BaseModel):
    """Unknown fields are dropped when reading, so that an older shoal reads a newer manifest."""

    model_config = ConfigDict(ser_json_inf_nan="strings", extra="ignore", protected_namespaces=())


class NodeRecord(ManifestRecord):
    """One machine; `threads` is what each of its ranks computes with."""

    name: str
    cpu: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    arch: str | None = None
    os: str | None = None
    device: str | None = None
    threads: int | None = None
    ranks: int
    interface: str | None = None
    link_mbps: float | None = None


class ChoiceRecord(ManifestRecord):
    """What `sync.mode=auto` chose after `step`, by the times that were measured until then, and what it expected of a
    step from then on. `agrees` with what was `planned`, where anything was."""

    step: int
    sync: str
    wire: str
    every: int
    why: str
    planned: str | None = None
    agrees: bool | None = None
    expected_step_s: float | None = None
    measured_step_s: float | None = None
    measured_exposed_s: float | None = None
    measured_own_s: float | None = None
    measured_allreduce_s: float | None = None


class SyncRecord(ManifestRecord):
    """The choices that trade communication against work, as they were at the end. `accumulation` is micro-batches a
    rank does per step, `every` the steps from one exchange to the next, `asked` the configured `sync.mode`."""

    accumulation: int | None
    bucket_mb: float | None
    overlap: bool
    wire: str
    every: int = 1
    asked: str = "ddp"
    choice: ChoiceRecord | None = None


class PredictionRecord(ManifestRecord):
    """What was expected of a step before the run: seconds by phase, which add up to `step_s`; `comm_s` is how long the
    exchange would take by itself. `is_measured`: the profile knows this very model, and not only others like it."""

    step_s: float
    compute_s: float
    exposed_s: float
    wait_s: float
    optimizer_s: float
    other_s: float
    comm_s: float
    tokens_per_s: float
    profile: str
    profile_created: str
    is_measured: bool


class RecoveryRecord(ManifestRecord):
    """One change of who took part: `generation` went on after `step` with these ranks, `seconds` after the first of
    them had stopped its next step was done. `stands` is false where its lineage was given up later."""

    generation: str
    lineage: str
    stands: bool
    step: int
    members: list[int]
    seconds: float | None
    text: str


class Manifest(ManifestRecord):
    """Times are from the second half of the run: medians. `phases` are the median step divided among its phases, so
    that they add up to it. All-reduce times are None where they were not measured, as with stock DDP. Bytes are
    per step and rank. Where the world changed, they are of the steps that `world_size` ranks did together; `members`
    are the ids of those who took part at last.
    """

    shoal_manifest: int = 1
    created: str | None
    status: Literal["finished", "interrupted", "failed", "unfinished"]

    on: str = ""
    """Where it ran, as `--on` names it."""
    lab: str | None = None
    """The emulated cluster it ran in, if it did."""
    commands: list[str] = []
    """What was typed for each launch, without secrets; none where another launcher started the ranks."""
    duration_s: float | None = None
    """From start to end, in all launches together, on the rank that was there longest."""
    preset: str
    seed: int
    launcher: str
    backend: str | None
    """What carried the gradients: gloo, nccl, or shared memory between ranks of one machine."""
    process_group: str | None = None
    """torch.distributed's own backend, which carries everything else."""
    world_size: int
    nodes: list[NodeRecord]
    versions: dict[str, str]

    model_params: int | None
    data_source: str
    data_digest: str | None = None
    steps: int
    steps_planned: int
    global_batch: int
    micro_batch: int | None
    scaling: str
    sync: str
    wire: str
    measure: str
    inside: str = "gloo"
    levers: SyncRecord

    final_loss: float | None
    val_loss: float | None

    step_s_measured: float | None
    step_s_predicted: float | None = None
    prediction: PredictionRecord | None = None
    prediction_notes: str | None = None
    phases: dict[str, float]
    allreduce_mean_ms: float | None
    allreduce_p50_ms: float | None
    allreduce_p95_ms: float | None
    wire_bytes_per_step: float | None
    theoretical_bytes_per_step: float | None
    peak_memory_bytes: float | None = None

    tokens_per_sec: dict[int, float]
    tokens_per_sec_1proc: float | None
    tokens_per_sec_2proc: float | None

    members: list[int] = []
    generations: int = 1
    lineage: str | None = None
    recoveries: list[RecoveryRecord] = []
    membership_notes: list[str] = []
    redone_steps: int = 0
    abandoned_steps: int = 0

    byte_equivalent: bool | None = None
    max_abs_diff: float | None = None

    choice_notes: str | None = None
    lesson_notes: str
