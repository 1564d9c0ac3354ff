"""The settings of membership, and the times that everything in `docs/faults.md` follows from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MembershipSettings:
    """`silent_after_s`: raise it when busy machines or a bad Wi-Fi are taken for absent ones; every silent loss then
    takes that much longer to notice. `closed_within_s`: a connection that closes this soon after a heartbeat was closed
    by the other machine, not by our own waiting. `away_after_s`: a gap in our own time that means that we slept.
    `answer_s`: how long a member that is there may take to stop its ranks and answer; `edge_s` the same where its ranks
    end their step first. `turn_s`: how long each member waits for the one before it to propose. `fork_after_s`: how
    long a connection that broke may take to be made again before somebody goes on as a lineage of its own.
    `most_ranks`: every rank needs a sample of each batch. `recover_after_s`: how long members that have lost the state
    wait for a silent member that may still have it, before they go back to a checkpoint; less than the time after which
    an agent that reaches no state gives up (`launch.farewell`).
    """

    beat_s: float = 0.25
    silent_after_s: float = 2.5
    closed_within_s: float = 0.5
    away_after_s: float = 1.0
    answer_s: float = 3.0
    edge_s: float = 60.0
    turn_s: float = 0.4
    fork_after_s: float = 0.3
    recover_after_s: float = 45.0
    on_silent_tie: Literal["continue", "pause"] = "continue"
    min_nodes: int = 1
    max_nodes: int = 64
    most_ranks: int = 4096
