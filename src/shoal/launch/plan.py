"""The launch plan: what starts where, with which variables. Pure; `shoal train --dry-run` prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.cluster.node import LOOPBACK, Node, Rendezvous
from shoal.config.schema import RunConfig
from shoal.control.orders import GoOrder, MembershipOrder, RosterEntry, StartProcess
from shoal.control.rank_env import SAFE_PATH, Placement
from shoal.errors import ConfigError

# Memory that a step freed is what the next one asks for. Where torch brings mimalloc, as its wheels for ARM do, that
# gives it back to the system after 10 ms, and every page is cleared and mapped again: up to a fifth of a step.
KEEP_MEMORY = {"MIMALLOC_PURGE_DELAY": "-1"}

# torch before 2.6 asks for them when the launcher serves the store.
_NO_RESTARTS = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}

TRAINING = "shoal.train.worker"

# Where a node has the run folder.
FolderOf = Callable[[Node], str]


@dataclass(frozen=True)
class RankCommand:
    """One process to start. `ranks` are those it stands for: one, or all of a node's under torchrun and spawn.

    `uses_agent_store`: its agent hands it a connection, by which it meets the others."""

    name: str
    node: Node
    ranks: tuple[int, ...]
    argv: tuple[str, ...]
    env: dict[str, str]
    uses_agent_store: bool = False


def plan_ranks(
    run: RunConfig, folder: FolderOf, nodes: list[Node], meeting: Rendezvous, resume: bool
) -> list[RankCommand]:
    """The commands that make one world of all slots of all nodes; ranks count through the nodes in their order."""
    if run.launcher == "torchrun":
        return [_torchrun(run, folder, _only(nodes, run.launcher), resume)]
    if run.launcher == "spawn":
        return [_spawn(run, folder, _only(nodes, run.launcher), resume)]
    words = ("--resume",) if resume else ()
    return plan_module(run, TRAINING, words, folder, nodes, meeting)


def plan_module(
    run: RunConfig, module: str, words: Sequence[str], folder: FolderOf, nodes: list[Node], meeting: Rendezvous
) -> list[RankCommand]:
    """One of our own worker programs on every slot; its ranks meet like those of a training."""
    return [
        _own_rank(run, node, place, module, "--folder", folder(node), *words) for node, place in _places(nodes, meeting)
    ]


def plan_guest(run: RunConfig, folder: str, node: Node, first: int) -> list[RankCommand]:
    """The ranks of a machine that comes while others train, numbered from `first`. Which world they are in, they are
    told with each generation; until then they are the last of all that could be."""
    meeting = Rendezvous(node.address, 0)
    places = [_placement(first + slot, first + node.slots, slot, 0, node, meeting) for slot in range(node.slots)]
    return [_own_rank(run, node, place, TRAINING, "--folder", folder) for place in places]


def plan_script(
    run: RunConfig,
    words: Sequence[str],
    nodes: list[Node],
    meeting: Rendezvous,
    python: str = "",
    user_env: Mapping[str, str] | None = None,
) -> list[RankCommand]:
    """Anybody's script on every slot, with the variables it would get from torchrun; `words` are what Python gets.

    `python` runs it, or each node's own where that is empty. What the user has set in `user_env` stays as it is.

    Python searches modules in the script's own folder first. PYTHONSAFEPATH is not set: it would take that folder away,
    and also that of every script which this one starts.

    Its ranks meet at torch's own store, which the agent of the first node serves at the meeting's address and nowhere
    else. Left alone, rank 0 would serve it on every address of its machine.
    """
    commands = []
    for node, place in _places(nodes, meeting):
        # By its presence Lightning sees that a launcher like torchrun made the world. Without it, it believes its own
        # arguments and waits for ranks that nobody starts, or inside a Slurm job takes its rank from there.
        run_id = {"TORCHELASTIC_RUN_ID": f"shoal-{meeting.port}"}
        own = script_settings(run, node, user_env or {})
        chosen = {name: setting.chosen for name, setting in own.items()}
        roles = _role_env(place, len(nodes))
        placed = replace(place, store_is_served=True).to_env()
        env = {**_common_env(run, node), **chosen, **placed, **roles, **run_id, **_NO_RESTARTS}
        if node.cpu_only:
            # Accelerate left to itself joins the group on such a machine, and then trains alone on every rank (seen).
            env["ACCELERATE_USE_CPU"] = "true"
        first = node.project.moved(words[0]) if node.project and not words[0].startswith("-") else words[0]
        argv = (python or node.python, first, *words[1:])
        commands.append(RankCommand(f"rank-{place.rank}", node, (place.rank,), argv, env))
    return commands


def _role_env(place: Placement, nodes: int) -> dict[str, str]:
    """torchrun's variables beyond those that shoal's own ranks read. There is one role, which has every rank."""
    return {
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.world_size),
        "GROUP_WORLD_SIZE": str(nodes),
    }


@dataclass(frozen=True)
class VariableChoice:
    """A variable that shoal would set and the user may have set: `ours`, `theirs` and which of them the ranks get."""

    ours: str
    theirs: str | None
    chosen: str


def script_settings(run: RunConfig, node: Node, user_env: Mapping[str, str]) -> dict[str, VariableChoice]:
    """The user's own value wins, as under torchrun, but for an option of this command line or the hosts file.

    The name of an interface holds for one machine: on others, and on emulated nodes, each has its own.
    """
    ours = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **_common_env(run, node)}
    asked = {"OMP_NUM_THREADS"} if run.threads or node.threads else set()
    elsewhere = set() if node.address == LOOPBACK else {name for name in ours if name.endswith("_SOCKET_IFNAME")}
    settings = {}
    for name in ours.keys() - {"PYTHONUNBUFFERED"}:
        theirs = user_env.get(name)
        is_theirs = theirs is not None and name not in asked | elsewhere
        settings[name] = VariableChoice(ours[name], theirs, theirs if is_theirs and theirs is not None else ours[name])
    return settings


def settings_notes(run: RunConfig, nodes: Sequence[Node], user_env: Mapping[str, str]) -> Iterator[str]:
    """Which of the user's variables stayed, and which gave way, wherever shoal would have chosen another value."""
    for name in sorted({name for node in nodes for name in script_settings(run, node, user_env)}):
        found = [script_settings(run, node, user_env).get(name) for node in nodes]
        settings = [each for each in found if each is not None and each.theirs not in (None, each.ours)]
        kept = [each for each in settings if each.chosen == each.theirs]
        if kept:
            yield f"{name}={kept[0].theirs} of your environment is used; shoal would set {kept[0].ours}"
        elif settings and name == "OMP_NUM_THREADS":
            why = "--threads" if run.threads else "the hosts file"
            yield f"{name}={settings[0].theirs} of your environment is not used: {why} says {settings[0].ours}"
        elif settings:
            yield (
                f"{name}={settings[0].theirs} of your environment is not used: interfaces have other names on other "
                f"machines, and shoal found {', '.join(sorted({each.ours for each in settings}))} there"
            )


def _own_rank(run: RunConfig, node: Node, place: Placement, module: str, *words: str) -> RankCommand:
    return RankCommand(
        f"rank-{place.rank}",
        node,
        (place.rank,),
        (node.python, "-P", "-m", module, *words),
        {**_common_env(run, node), **KEEP_MEMORY, **SAFE_PATH, **place.to_env()},
        uses_agent_store=True,
    )


def _places(nodes: list[Node], meeting: Rendezvous) -> list[tuple[Node, Placement]]:
    slots = [(node_rank, node, slot) for node_rank, node in enumerate(nodes) for slot in range(node.slots)]
    return [
        (node, _placement(rank, len(slots), slot, node_rank, node, meeting))
        for rank, (node_rank, node, slot) in enumerate(slots)
    ]


def threads_per_rank(run: RunConfig, node: Node) -> int:
    return run.threads or node.threads or max(1, (node.cores or 1) // node.slots)


def _placement(rank: int, ranks: int, slot: int, node_rank: int, node: Node, meeting: Rendezvous) -> Placement:
    return Placement(
        rank=rank,
        world_size=ranks,
        local_rank=slot,
        local_world_size=node.slots,
        node=node.name,
        node_rank=node_rank,
        master_addr=meeting.address,
        master_port=meeting.port,
        launcher="shoal",
        # One a node; where nodes turn out to share a folder, their agents leave it to the first of them.
        keeps_files=slot == 0,
        link_mbps=node.link_mbps,
    )


def _only(nodes: list[Node], launcher: str) -> Node:
    if len(nodes) != 1:
        raise ConfigError(
            f"--launcher {launcher} starts ranks on one machine, and this cluster has {len(nodes)}",
            why="torchrun and spawn each have to be started on every machine by somebody",
            fix="leave --launcher out: shoal starts the ranks on all of them",
        )
    return nodes[0]


def _torchrun(run: RunConfig, folder: FolderOf, node: Node, resume: bool) -> RankCommand:
    worker = ("-m", TRAINING, *_arguments(folder(node), resume))
    flags = ("--standalone", f"--nproc-per-node={node.slots}")
    argv = (node.python, "-P", "-m", "torch.distributed.run", *flags, *worker)
    env = {**_common_env(run, node), **KEEP_MEMORY, **SAFE_PATH, "SHOAL_NODE": node.name, "SHOAL_LAUNCHER": "torchrun"}
    return RankCommand("torchrun", node, tuple(range(node.slots)), argv, env)


def _spawn(run: RunConfig, folder: FolderOf, node: Node, resume: bool) -> RankCommand:
    flags = ("--ranks", str(node.slots), *_arguments(folder(node), resume))
    argv = (node.python, "-P", "-m", "shoal.train.spawn", *flags)
    env = {**_common_env(run, node), **KEEP_MEMORY, **SAFE_PATH}
    return RankCommand("spawn", node, tuple(range(node.slots)), argv, env)


def _arguments(folder: str, resume: bool) -> tuple[str, ...]:
    # Not `--run`: torchrun takes it for an abbreviation of its own --run-path, even behind the module's name.
    return ("--folder", folder, *(("--resume",) if resume else ()))


def _common_env(run: RunConfig, node: Node) -> dict[str, str]:
    env = {"OMP_NUM_THREADS": str(threads_per_rank(run, node)), "PYTHONUNBUFFERED": "1"}
    if node.interface is not None:
        # NCCL reads a variable of its own; on a GPU too, ranks take this way to their peers.
        env |= {"GLOO_SOCKET_IFNAME": node.interface, "NCCL_SOCKET_IFNAME": node.interface}
    return env


def as_start(command: RankCommand) -> StartProcess:
    return StartProcess(command.name, command.ranks, command.argv, command.env, command.uses_agent_store)


def make_go(
    roster: Sequence[RosterEntry],
    commands: Sequence[RankCommand],
    node: str,
    members: MembershipOrder | None = None,
    grace_s: float | None = None,
) -> GoOrder:
    """The part of the plan that one node carries out."""
    starts = tuple(as_start(command) for command in commands if command.node.name == node)
    return GoOrder(tuple(roster), starts, members, grace_s=grace_s)
