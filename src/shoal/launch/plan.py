"""The launch plan: which processes start on which node, with which variables. `shoal train --dry-run` prints it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.cluster.node import LOOPBACK, Node, Rendezvous
from shoal.config.schema import RunConfig
from shoal.control.orders import GoOrder, MembershipOrder, RosterEntry, StartProcess
from shoal.control.rank_env import DEFAULT_THREADS, MEASURE, SAFE_PATH, TRAINING, Placement
from shoal.errors import ConfigError

# The next step asks again for the memory that a step freed. Where torch brings mimalloc, as its ARM wheels do, that
# gives it back to the system after 10 ms, and every page is cleared and mapped again: up to a fifth of a step. On x86
# glibc does so at once with blocks of more than 32 MB, and with the end of its heap. Without huge pages: no gain of
# theirs could be repeated, and two ranks take 80 MB more with them (docs/measurements.md).
_GLIBC = {"mmap_max": 0, "trim_threshold": 1 << 40, "top_pad": 8 << 20}
KEEP_MEMORY = {
    "MIMALLOC_PURGE_DELAY": "-1",
    "GLIBC_TUNABLES": ":".join(f"glibc.malloc.{name}={value}" for name, value in _GLIBC.items()),
}

# Where a node has the run folder.
FolderOf = Callable[[Node], str]


@dataclass(frozen=True)
class Attempt:
    """How often the ranks of a script were started again so far, and how often they may be."""

    number: int = 0
    most: int = 0

    def variables(self) -> dict[str, str]:
        # torch before 2.6 asks for them when the launcher serves the store.
        return {"TORCHELASTIC_RESTART_COUNT": str(self.number), "TORCHELASTIC_MAX_RESTARTS": str(self.most)}


@dataclass(frozen=True)
class RankCommand:
    """One process to start."""

    name: str
    node: Node
    ranks: tuple[int, ...]  # one, or all ranks of the node under torchrun and spawn
    argv: tuple[str, ...]
    env: dict[str, str]
    uses_agent_store: bool = False  # the ranks meet at the agent's key-value store


def plan_ranks(
    run: RunConfig, folder: FolderOf, nodes: list[Node], rendezvous: Rendezvous, resume: bool
) -> list[RankCommand]:
    """Plan a training on all slots of all nodes. Ranks are numbered through the nodes in their order."""
    words = ("--resume",) if resume else ()
    if run.launcher == "shoal":
        return plan_module(run, TRAINING, words, folder, nodes, rendezvous)
    if len(nodes) != 1:
        raise ConfigError(
            f"--launcher {run.launcher} starts ranks on one machine, and this cluster has {len(nodes)}",
            why="torchrun and spawn must be started on every machine by hand",
            fix="leave --launcher out: shoal starts the ranks on all of them",
        )
    [node] = nodes
    env = {**_common_env(run, node), **KEEP_MEMORY, **SAFE_PATH}
    program = ["shoal.train.spawn", "--ranks", str(node.slots)]
    if run.launcher == "torchrun":
        program = ["torch.distributed.run", "--standalone", f"--nproc-per-node={node.slots}", "-m", TRAINING]
        env |= {"SHOAL_NODE": node.name, "SHOAL_LAUNCHER": "torchrun"}
    # Not `--run`: torchrun takes it for an abbreviation of its own --run-path, even behind the module's name.
    argv = (node.python, "-P", "-m", *program, "--folder", folder(node), *words)
    return [RankCommand(run.launcher, node, tuple(range(node.slots)), argv, env)]


def plan_module(
    run: RunConfig, module: str, words: Sequence[str], folder: FolderOf, nodes: list[Node], rendezvous: Rendezvous
) -> list[RankCommand]:
    """Plan one of shoal's own worker programs on every slot; its ranks meet like those of a training."""
    return [
        _own_rank(run, node, place, module, "--folder", folder(node), *words)
        for node, place in _placements(nodes, rendezvous)
    ]


def plan_guest(run: RunConfig, folder: str, node: Node, first: int) -> list[RankCommand]:
    """Plan the ranks of a node that joins a running training, numbered from `first`.

    Each generation gives them their rank and world size; until then they are the last ranks there could be.
    """
    rendezvous = Rendezvous(node.address, 0)
    places = [_placement(first + slot, first + node.slots, slot, 0, node, rendezvous) for slot in range(node.slots)]
    return [_own_rank(run, node, place, TRAINING, "--folder", folder) for place in places]


def plan_script(
    run: RunConfig,
    words: Sequence[str],
    nodes: list[Node],
    rendezvous: Rendezvous,
    python: str = "",
    user_env: Mapping[str, str] | None = None,
    session_env: Mapping[str, str] | None = None,
    measure: bool = False,
    attempt: Attempt = Attempt(),  # noqa: B008 - frozen
) -> list[RankCommand]:
    """Plan a user's script on every slot, with the variables it would get from torchrun.

    `words` are Python's arguments. `python` runs them; empty means each node's own. Variables that the user has set in
    `user_env` keep their values. With `measure` a program of shoal runs the script and records its steps.

    Python searches modules in the script's own folder first. PYTHONSAFEPATH is not set: it would take that folder away,
    also for every script that this one starts.

    The ranks meet at torch's own store, which the agent of the first node serves at the rendezvous address only. Rank 0
    itself would serve it on every address of its machine.
    """
    variables = {
        "GROUP_WORLD_SIZE": str(len(nodes)),
        # Lightning takes it as the sign of a launcher such as torchrun. Without it, it believes its own arguments
        # and waits for ranks that are never started, or inside a Slurm job takes its rank from there.
        "TORCHELASTIC_RUN_ID": f"shoal-{rendezvous.port}",
        **attempt.variables(),
        **(session_env or {}),
    }
    measuring = ("-P", "-m", MEASURE) if measure else ()
    commands = []
    for node, place in _placements(nodes, rendezvous):
        first = node.project.moved(words[0]) if node.project and not words[0].startswith("-") else words[0]
        argv = (python or node.python, *measuring, first, *words[1:])
        commands.append(_script_rank(run, node, place, argv, user_env or {}, variables))
    return commands


def plan_script_guest(
    run: RunConfig,
    words: Sequence[str],
    node: Node,
    first: int,
    rendezvous: Rendezvous,
    user_env: Mapping[str, str],
    session_env: Mapping[str, str],
) -> list[RankCommand]:
    """Plan the ranks of a node that joins the session of a running script, numbered from `first`; see `plan_guest`."""
    return [
        _script_rank(
            run,
            node,
            _placement(first + slot, first + node.slots, slot, 0, node, rendezvous),
            (node.python, *words),
            user_env,
            {"GROUP_WORLD_SIZE": "1", **Attempt().variables(), **session_env},
        )
        for slot in range(node.slots)
    ]


def _script_rank(
    run: RunConfig,
    node: Node,
    place: Placement,
    argv: tuple[str, ...],
    user_env: Mapping[str, str],
    variables: Mapping[str, str],
) -> RankCommand:
    env = {
        **_common_env(run, node),
        **_default_threads(run, node),
        **{name: setting.chosen for name, setting in script_settings(run, node, user_env).items()},
        **replace(place, store_is_served=True).to_env(),
        # torchrun's variables that shoal's own ranks do not read. There is one role, which has every rank.
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        **variables,
    }
    if node.cpu_only:
        # Without it Accelerate joins the group on such a machine, and then trains alone on every rank (seen).
        env["ACCELERATE_USE_CPU"] = "true"
    return RankCommand(f"rank-{place.rank}", node, (place.rank,), argv, env)


@dataclass(frozen=True)
class VariableChoice:
    """A variable that shoal sets and the user may have set."""

    by_shoal: str
    by_user: str | None
    chosen: str


def script_settings(run: RunConfig, node: Node, user_env: Mapping[str, str]) -> dict[str, VariableChoice]:
    """Choose the variables of a script's ranks. As under torchrun the user's value wins, with two exceptions.

    An option of this command line or of the hosts file wins over the user's variable. The name of an interface is valid
    on one machine only: other machines and emulated nodes each have their own.
    """
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **_common_env(run, node)}
    fixed = {"OMP_NUM_THREADS"} if run.threads or node.threads else set()
    if node.address != LOOPBACK:
        fixed |= {name for name in defaults if name.endswith("_SOCKET_IFNAME")}
    settings = {}
    for name in defaults.keys() - {"PYTHONUNBUFFERED"}:
        by_user = user_env.get(name)
        chosen = defaults[name] if by_user is None or name in fixed else by_user
        settings[name] = VariableChoice(defaults[name], by_user, chosen)
    return settings


def settings_notes(run: RunConfig, nodes: Sequence[Node], user_env: Mapping[str, str]) -> Iterator[str]:
    """Say which of the user's variables are used and which are not, wherever shoal would choose another value."""
    by_node = [script_settings(run, node, user_env) for node in nodes]
    for name in sorted({name for settings in by_node for name in settings}):
        choices = [settings[name] for settings in by_node if name in settings]
        differing = [choice for choice in choices if choice.by_user not in (None, choice.by_shoal)]
        kept = [choice for choice in differing if choice.chosen == choice.by_user]
        if kept:
            yield f"{name}={kept[0].by_user} of your environment is used; shoal would set {kept[0].by_shoal}"
        elif differing and name == "OMP_NUM_THREADS":
            why = "--threads" if run.threads else "the hosts file"
            yield f"{name}={differing[0].by_user} of your environment is not used: {why} says {differing[0].by_shoal}"
        elif differing:
            yield (
                f"{name}={differing[0].by_user} of your environment is not used: interfaces have other names on other "
                f"machines, and shoal found {', '.join(sorted({choice.by_shoal for choice in differing}))} there"
            )


def _own_rank(run: RunConfig, node: Node, place: Placement, module: str, *words: str) -> RankCommand:
    return RankCommand(
        f"rank-{place.rank}",
        node,
        (place.rank,),
        (node.python, "-P", "-m", module, *words),
        {**_common_env(run, node), **_default_threads(run, node), **KEEP_MEMORY, **SAFE_PATH, **place.to_env()},
        uses_agent_store=True,
    )


def _placements(nodes: list[Node], rendezvous: Rendezvous) -> list[tuple[Node, Placement]]:
    slots = [(node_rank, node, slot) for node_rank, node in enumerate(nodes) for slot in range(node.slots)]
    return [
        (node, _placement(rank, len(slots), slot, node_rank, node, rendezvous))
        for rank, (node_rank, node, slot) in enumerate(slots)
    ]


def _placement(rank: int, ranks: int, slot: int, node_rank: int, node: Node, rendezvous: Rendezvous) -> Placement:
    return Placement(
        rank=rank,
        world_size=ranks,
        local_rank=slot,
        local_world_size=node.slots,
        node=node.name,
        node_rank=node_rank,
        master_addr=rendezvous.address,
        master_port=rendezvous.port,
        launcher="shoal",
        # One rank of each node; where nodes share a folder, their agents leave it to the first node.
        keeps_files=slot == 0,
        link_mbps=node.link_mbps,
    )


def imports_shoal(argv: Sequence[str]) -> bool:
    """Whether the script's own text imports shoal, so that it will begin a session before its ranks meet."""
    try:
        text = Path(argv[0]).read_bytes()
    except (OSError, IndexError):
        return False
    return re.search(rb"^\s*(import|from)\s+shoal\b", text, re.MULTILINE) is not None


def _common_env(run: RunConfig, node: Node) -> dict[str, str]:
    threads = run.threads or node.rank_threads or 1
    env = {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    if node.interface is not None:
        # NCCL reads a variable of its own; ranks with a GPU use this interface too.
        env |= {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": node.interface}
    return env


def _default_threads(run: RunConfig, node: Node) -> dict[str, str]:
    """Return the number of threads if neither the command line nor the hosts file sets it."""
    is_set = run.threads or node.threads
    return {} if is_set else {DEFAULT_THREADS: _common_env(run, node)["OMP_NUM_THREADS"]}


def make_go_order(
    roster: Sequence[RosterEntry],
    commands: Sequence[RankCommand],
    node: str,
    members: MembershipOrder | None = None,
    grace_s: float | None = None,
) -> GoOrder:
    """Return the part of the plan that one node carries out."""
    starts = tuple(
        StartProcess(command.name, command.ranks, command.argv, command.env, command.uses_agent_store)
        for command in commands
        if command.node.name == node
    )
    return GoOrder(tuple(roster), starts, members, grace_s=grace_s)
