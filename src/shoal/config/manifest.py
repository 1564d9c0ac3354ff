"""The manifest of a run: what ran where and its results, in one flat file that outlives its machine.

None means "not measured"; a loss that was measured and is not a number is written as "NaN".
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ManifestRecord(BaseModel):
    """Unknown fields are dropped when reading, so that an older shoal reads a newer manifest."""

    model_config = ConfigDict(ser_json_inf_nan="strings", extra="ignore", protected_namespaces=())


class NodeRecord(ManifestRecord):
    name: str
    cpu: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    arch: str | None = None
    os: str | None = None
    device: str | None = None
    threads: int | None = None  # of each rank
    ranks: int
    interface: str | None = None
    link_mbps: float | None = None


class ChoiceRecord(ManifestRecord):
    """What `sync.mode=auto` chose after `step`, by the times measured until then."""

    step: int
    sync: str
    wire: str
    every: int
    why: str
    planned: str | None = None
    agrees: bool | None = None  # with what was planned
    expected_step_s: float | None = None  # from then on
    measured_step_s: float | None = None
    measured_exposed_s: float | None = None
    measured_own_s: float | None = None
    measured_allreduce_s: float | None = None


class SyncRecord(ManifestRecord):
    """The sync strategy at the end of the run."""

    accumulation: int | None  # micro-batches of a rank per step
    bucket_mb: float | None
    overlap: bool
    wire: str
    every: int = 1  # steps from one exchange to the next
    asked: str = "ddp"  # the configured `sync.mode`
    choice: ChoiceRecord | None = None


class PredictionRecord(ManifestRecord):
    """The predicted step: seconds by phase, which add up to `step_s`."""

    step_s: float
    compute_s: float
    exposed_s: float
    wait_s: float
    optimizer_s: float
    other_s: float
    comm_s: float  # of the exchange by itself
    tokens_per_s: float | None  # None for a user's script, whose speed is in samples
    profile: str
    profile_created: str
    is_measured: bool  # this model was measured, not only others like it
    # The fields below are for a user's script.
    samples_per_s: float | None = None
    measured_in: str | None = None  # the run on one rank that has its compute time
    grad_bytes: int | None = None  # of that run: the prediction holds for a model of this size only


class CollectiveRecord(ManifestRecord):
    """One kind of collective that a measured script calls from Python: medians of a step and rank."""

    calls: float
    bytes: float
    waited_s: float


class RecoveryRecord(ManifestRecord):
    """One change of the members: `generation` continued after `step` with these ranks."""

    generation: str
    lineage: str
    stands: bool  # false where its lineage was abandoned later
    step: int
    members: list[int]
    seconds: float | None  # from the first rank's stop until the next step was done
    text: str


class Manifest(ManifestRecord):
    """Times are medians over the second half of the run. Bytes are per step and rank. Where the number of ranks
    changed, figures are of the steps that `world_size` ranks did together."""

    shoal_manifest: int = 1
    created: str | None
    status: Literal["finished", "interrupted", "failed", "unfinished"]

    on: str = ""  # where it ran, as `--on` names it
    lab: str | None = None  # the emulated cluster it ran in
    commands: list[str] = []  # of each launch, without secrets; none where another launcher started the ranks
    duration_s: float | None = None  # of all launches together, on the rank that took part longest
    trains: Literal["gpt", "script"] = "gpt"  # shoal's own GPT, or the model of a user's script
    preset: str  # of the GPT; or the name of the script
    seed: int
    launcher: str
    backend: str | None  # what carried the gradients: gloo, nccl, or shared memory between ranks of one machine
    process_group: str | None = None  # torch.distributed's backend, which carries everything else
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
    strategy: SyncRecord

    final_loss: float | None  # of the GPT per token, of a script per sample or per what it counts
    val_loss: float | None
    logged: dict[str, float] = {}  # last values of `session.log`

    step_s_measured: float | None
    step_s_predicted: float | None = None
    prediction: PredictionRecord | None = None
    prediction_notes: str | None = None
    phases: dict[str, float]  # the median step divided among its phases, which add up to it
    allreduce_mean_ms: float | None  # None where not measured, as with stock DDP
    allreduce_p50_ms: float | None
    allreduce_p95_ms: float | None
    collectives: dict[str, CollectiveRecord] = {}  # by kind; none were seen where it is empty
    wire_bytes_per_step: float | None
    theoretical_bytes_per_step: float | None
    peak_memory_bytes: float | None = None

    unit: Literal["tokens", "samples"] = "tokens"  # of the speed
    samples_per_sec: dict[int, float] = {}  # by number of ranks
    tokens_per_sec: dict[int, float]  # empty where a step counts samples only
    tokens_per_sec_1proc: float | None
    tokens_per_sec_2proc: float | None

    members: list[int] = []  # ids of the ranks at the end
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

    @property
    def replicas(self) -> int:
        """Return how many ranks had a replica at the end."""
        return len(self.members) or self.world_size

    @property
    def speed(self) -> float | None:
        """Return the speed of the measured steps, in `unit` per second."""
        speeds = self.tokens_per_sec if self.unit == "tokens" else self.samples_per_sec
        return speeds.get(self.world_size)
