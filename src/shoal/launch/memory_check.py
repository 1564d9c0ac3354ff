"""Compares what a rank of the GPT keeps in memory with what the machines have free, before any rank is started."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shoal.cluster.node import Node, ranks_of
from shoal.config.schema import Config
from shoal.config.sync_choice import SYNC_METHODS
from shoal.cost.batch_plan import divisors, micro_batch, rank_weights
from shoal.cost.memory import largest_micro_batch, rank_memories
from shoal.cost.strategy import SyncStrategy, strategy_of_config
from shoal.cost.workload import Workload, workload_of
from shoal.errors import ConfigError
from shoal.units import format_si

# Assumed of a machine whose memory is not known or does not count: a petabyte.
_PLENTY = 1e15
# Of a text that is not encoded yet, the tokenizer may find as few pieces as there are bytes.
_LEAST_BPE = 256


def check_memory(config: Config, nodes: Sequence[Node]) -> str:
    """Return a warning where the activations might not fit, otherwise an empty text.

    Raise `ConfigError` where weights, gradients and moments alone, whose sizes are known, are more than a machine has
    free. Only ranks that certainly compute on the processor are compared.
    """
    checked = [node for node in nodes if node.free_memory_bytes is not None and _is_on_cpu(config, nodes, node)]
    world_size = sum(node.slots for node in nodes)
    workload, strategy = workload_of(_with_least_vocabulary(config)), strategy_of_config(config.sync)
    try:
        sequences = micro_batch(config.train, rank_weights(config.run, world_size))
    except ConfigError:
        # It is refused elsewhere, or machines joined or left since the weights were given.
        return ""
    free = {node.name: (node.free_memory_bytes or 0) / node.slots for node in checked}
    available = [free.get(node.name, _PLENTY) for node in nodes for _ in range(node.slots)]
    memories = rank_memories(workload, strategy, sequences, available)
    needs = {node.name: memories[ranks_of(nodes, node)[0]].need for node in checked}
    tight = {name: size for name, size in free.items() if size < needs[name].total}
    if not tight:
        return ""
    need = max((needs[name] for name in tight), key=lambda need: need.total)
    states = {name: need.weights + need.gradients + need.moments for name, need in needs.items()}
    state = need.weights + need.gradients + need.moments
    parts = f"weights {_gb(need.weights)}, gradients {_gb(need.gradients)}, moments {_gb(need.moments)}"
    advice = "\n".join(_advise(workload, strategy, sequences, available))
    if too_small := {name: size for name, size in tight.items() if size < states[name]}:
        raise ConfigError(
            f"{config.run.preset} does not fit into the memory of {' and '.join(too_small)}",
            why=f"every rank keeps {_gb(state)} ({parts}) besides its activations; free for each rank: "
            + ", ".join(f"{_gb(size)} on {name}" for name, size in too_small.items()),
            fix=advice or "train a smaller model, or on machines with more memory",
        )
    return (
        f"memory may not suffice: a rank takes about {_gb(need.total)} ({parts}, activations {_gb(need.activations)}); "
        f"free for each rank: {', '.join(f'{_gb(size)} on {name}' for name, size in tight.items())}"
        + (f" ({advice.splitlines()[0]})" if advice else "")
    )


def _advise(workload: Workload, strategy: SyncStrategy, sequences: int, available: Sequence[float]) -> Iterator[str]:
    """Yield what would fit: a smaller micro-batch, otherwise the sync method that divides least, otherwise activation
    checkpointing with one of these."""
    world_size = len(available)
    level = SYNC_METHODS[strategy.sync].shard_level
    sharded = [method for method in SYNC_METHODS.values() if method.shard_level > level] if world_size > 1 else []
    names = (strategy.sync, *(method.name for method in sorted(sharded, key=lambda method: method.shard_level)))
    ways = [(workload, name) for name in names]
    if not workload.train.recompute:
        ways += [(workload.recomputing(), name) for name in names]
    for work, name in ways:
        other = strategy.with_(sync=name, every=1) if name != strategy.sync else strategy
        if most := min(sequences, largest_micro_batch(work, other, available)):
            fitting = max(divisors(work.sequences(world_size), most))
            need = max(memory.need.total for memory in rank_memories(work, other, fitting, available))
            flags = [f"--sync {name}"] if name != strategy.sync else []
            flags += ["--recompute"] if work is not workload else []
            flags += [f"--micro-batch {fitting}"] if fitting < sequences else []
            yield f"{' '.join(flags)} needs {_gb(need)} a rank"
            return


def _is_on_cpu(config: Config, nodes: Sequence[Node], node: Node) -> bool:
    devices = config.run.devices.split("/") if config.run.devices else []
    ranks = ranks_of(nodes, node)
    named = {devices[rank] if rank < len(devices) else config.train.device for rank in ranks}
    return all(device == "cpu" or (device == "auto" and node.cpu_only) for device in named)


def _with_least_vocabulary(config: Config) -> Config:
    """Assume the smallest vocabulary that BPE can find in the user's text: in doubt a run is not refused."""
    if config.model.vocab_size or config.data.tokenizer != "bpe" or config.data.path is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": _LEAST_BPE})})


def _gb(size: float) -> str:
    return format_si(size, "B")
