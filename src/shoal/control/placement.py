"""Placement: which rank a process is and where its world meets, as environment variables.

The names are torchrun's, so that any script written for torchrun finds what it expects, plus a few of our own. This is
the only place that reads or writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import UsageError

# The agent decides these two when it starts a rank: it knows who shares its folder, and holds the other end.
KEEPS_FILES = "SHOAL_KEEPS_FILES"
AGENT_FD = "SHOAL_AGENT_FD"


@dataclass(frozen=True)
class Placement:
    """One rank's place in a world.

    `agent_fd` is a connection to this node's agent, inherited from it: the store by which the ranks meet. Without one
    they meet at `master_addr`; `store_is_served` then says that somebody outside the ranks (torchrun's agent, a parent
    process) already serves a store there.
    `keeps_files`: of the ranks that share a run folder, one keeps its checkpoints and its ledger. `link_mbps` is known
    where the launcher made the link itself.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str = "local"
    node_rank: int = 0
    master_addr: str = ""
    master_port: int = 0
    agent_fd: int | None = None
    store_is_served: bool = False
    restarts: int = 0
    launcher: str = ""
    keeps_files: bool = True
    link_mbps: int | None = None

    @property
    def is_supervised(self) -> bool:
        """Whether a launcher started us, ours or torchrun's agent, and not a person or a shell."""
        return bool(self.launcher) or self.store_is_served

    def to_env(self) -> dict[str, str]:
        env = {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "SHOAL_NODE": self.node,
            "SHOAL_LAUNCHER": self.launcher,
            # Always: one that is inherited from elsewhere would have every rank wait for a store that nobody serves.
            "TORCHELASTIC_USE_AGENT_STORE": str(self.store_is_served),
            KEEPS_FILES: str(int(self.keeps_files)),
        }
        if self.link_mbps is not None:
            env["SHOAL_LINK_MBPS"] = str(self.link_mbps)
        if self.agent_fd is not None:
            env[AGENT_FD] = str(self.agent_fd)
        return env

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Placement:
        """Where the environment says we are; with no `RANK` at all, alone in a world of one."""
        if "RANK" not in env and "WORLD_SIZE" not in env:
            return cls(rank=0, world_size=1, local_rank=0, local_world_size=1)
        local_rank = _integer(env, "LOCAL_RANK", env.get("RANK"))
        placement = cls(
            rank=_integer(env, "RANK"),
            world_size=_integer(env, "WORLD_SIZE"),
            local_rank=local_rank,
            local_world_size=_integer(env, "LOCAL_WORLD_SIZE", env.get("WORLD_SIZE")),
            node=env.get("SHOAL_NODE", "local"),
            node_rank=_integer(env, "GROUP_RANK", "0"),
            master_addr=env.get("MASTER_ADDR", ""),
            master_port=_integer(env, "MASTER_PORT", "0"),
            agent_fd=_integer(env, AGENT_FD) if AGENT_FD in env else None,
            store_is_served=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=_integer(env, "TORCHELASTIC_RESTART_COUNT", "0"),
            launcher=env.get("SHOAL_LAUNCHER", ""),
            keeps_files=env.get(KEEPS_FILES, "1" if local_rank == 0 else "0") == "1",
            link_mbps=_integer(env, "SHOAL_LINK_MBPS") if "SHOAL_LINK_MBPS" in env else None,
        )
        placement._check()
        return placement

    def _check(self) -> None:
        """A world that was asked for must be able to form: never a quiet solo run."""
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"RANK={self.rank} does not fit WORLD_SIZE={self.world_size}",
                why="ranks count from 0 to WORLD_SIZE - 1",
                fix="start the script with torchrun",
            )
        if self.world_size > 1 and self.agent_fd is None and not (self.master_addr and self.master_port):
            raise UsageError(
                f"WORLD_SIZE={self.world_size}, but MASTER_ADDR or MASTER_PORT is not set",
                why="without them the ranks cannot find each other, and each would train alone",
                fix="start the script with torchrun, or set both to the address of rank 0",
            )


def _integer(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = env.get(name, default)
    try:
        return int(text or "")
    except ValueError:
        raise UsageError(
            f"the environment variable {name} is {text!r}, not a number",
            why="a launcher sets it for every rank",
            fix="start the script with torchrun, or unset RANK and WORLD_SIZE to run alone",
        ) from None
