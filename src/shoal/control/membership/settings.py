"""Every timeout of the control plane: agents, membership, leases and the ranks' connections.

All values are in seconds. `MembershipSettings` travels with a run's orders, so all agents of a run use the same values;
a test may scale it. The constants below it are the same in every run. What shoal promises with these values is stated
in `docs/faults.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.config.defaults import MAX_NODES, MIN_NODES, SILENT_AFTER_S


@dataclass(frozen=True)
class MembershipSettings:
    # Interval of heartbeats. Longer: less traffic, but `silent_after_s` must stay a multiple of it.
    heartbeat_s: float = 0.25
    # A peer that sent nothing for this long is suspected. Raise it when busy machines or a bad Wi-Fi are suspected
    # wrongly; every silent loss then takes that much longer to notice.
    silent_after_s: float = SILENT_AFTER_S
    # The same until the first group of a launch has formed: importing torch keeps a slow machine busy, and there is no
    # training yet that would wait. Longer: a cable pulled during the start is noticed later.
    starting_silent_after_s: float = 20.0
    # A connection that closes this soon after a message was closed by the other node. Longer: a connection that timed
    # out may be taken for a process that ended.
    closed_within_s: float = 0.5
    # A gap this long between two ticks means that this node slept. Shorter: a busy machine is taken for a woken one.
    slept_after_s: float = 1.0
    # How long a live member may take to stop its ranks and answer a proposer. Longer: a hung rank delays recovery.
    stop_timeout_s: float = 3.0
    # The same where ranks first finish their step. Shorter than a step: joins interrupt the step.
    step_end_timeout_s: float = 60.0
    # How long each member waits for the member before it to propose. Shorter: proposers compete and retry.
    proposer_backoff_s: float = 0.4
    # How long a broken connection may take to be made again before a side forks. Shorter: more forks after a glitch.
    fork_after_s: float = 0.3
    # How long members that have lost the state wait for a silent member that may still have it, before they go back to
    # a checkpoint. Must be less than `STATELESS_LIMIT_S`, after which an agent that reaches no state gives up.
    recover_after_s: float = 45.0
    # What both halves of an exact tie do when neither hears the other.
    on_silent_tie: Literal["continue", "pause"] = "continue"
    # Fewer nodes pause; more are not admitted.
    min_nodes: int = MIN_NODES
    max_nodes: int = MAX_NODES
    # Every rank needs a sample of each batch.
    max_ranks: int = 4096


# Membership.
# How often a paused proposer retries although nothing seems to have changed. Longer: a pause may end later.
PAUSE_RETRY_S = 1.0
# How long a rank may commit after its agent confirmed the generation; the agent renews four times as often. Longer: a
# fenced rank may commit for longer, so forks can lose more steps.
LEASE_S = 1.0
# A node that announced a suspend and still runs after this long was not suspended: it joins again.
SUSPEND_LIMIT_S = 30.0
# How long an agent without the training's state waits for an agent that has it, before it gives up.
STATELESS_LIMIT_S = 60.0
# The same while its ranks are starting and then load a checkpoint: importing torch on a slow machine takes minutes.
STARTING_LIMIT_S = 600.0
# How long an agent that could not pass the last barrier may train on after others finished: it may end by itself, as a
# lineage of its own. Shorter: its last steps are lost.
OUTLIVE_FINISHED_S = 15.0

# Connections between agents.
# How long the token handshake may take. Longer: an unauthenticated connection costs memory for longer.
HANDSHAKE_TIMEOUT_S = 5.0
# Pause between attempts to dial an agent whose connection guard pushed this one out.
DIAL_RETRY_S = 0.2
# A peer that read less than `channel.MIN_BYTES_PER_S` for this long is disconnected. Longer: its messages pile up.
SEND_STALLED_AFTER_S = 20.0
# When the kernel probes an idle connection, how often, and after how many unanswered probes it closes the connection.
# Longer: a pulled cable, which closes nothing, is noticed later.
KEEPALIVE_IDLE_S = 5
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3
# How long all agents of a launch may take to connect. Longer: a firewall is reported later.
MEET_TIMEOUT_S = 20.0
# How long a peer may take to send its hello after the handshake.
HELLO_TIMEOUT_S = 5.0
# Pause before an agent dials a missing peer again. Longer: a returned node is noticed later.
RECONNECT_S = 0.2
# The same after a refusal: the peer will refuse again for a while.
REFUSED_RECONNECT_S = 2.0
# How long one attempt to reconnect may take.
CONNECT_TIMEOUT_S = 2.0
# In a run that ends when a node is lost: the interval of heartbeats, and the silence after which a node is lost. Long
# enough for a busy Wi-Fi, short enough that a run does not wait minutes for a node that has left.
FIXED_HEARTBEAT_S = 1.0
FIXED_SILENT_AFTER_S = 20.0
# How long the agent's invite socket may take to answer a command on its own machine.
INVITE_TIMEOUT_S = 10.0

# Ranks.
# A rank whose training has not left a generation this long after an exchange of it timed out is stuck. Shorter: a rank
# that waited in that exchange, on a busy machine, is taken for the one that it waited for.
STUCK_AFTER_S = 2.0
# How long a rank may take to write its stacks when its agent asks, and when a user does.
STACKS_S, STACKS_WAIT_S = 0.5, 5.0
# Interval of the agent's main loop. Longer: exits of ranks are noticed later.
AGENT_POLL_S = 0.05
# How often the agent checks that its run folder still exists.
FOLDER_CHECK_S = 1.0
# A rank that lost its peer gets this long to log the error before it is killed.
FAILURE_GRACE_S = 3.0
# How long a template that is ready may take to fork a rank, before ranks are started without it. Shorter: a busy
# machine imports torch again for every rank.
TEMPLATE_REPLY_S = 10.0
# Delay before a killed rank is restarted: for the first, second and every further attempt.
RESTART_BACKOFF_S = (0.2, 1.0, 3.0)
# After this long without a kill the count of attempts starts again: a training of weeks may lose a rank every day.
RESTART_FORGIVEN_S = 600.0
# The longest that a key-value request waits; the rank then asks again, so that its other threads get their turn.
KV_WAIT_S = 0.2
# How long the process that serves a script's store may take to end.
SCRIPT_STORE_EXIT_S = 3.0
# When the ranks of a script that joined no process group are reported, and how often their sockets are read until then.
UNJOINED_AFTER_S = 60.0
UNJOINED_CHECK_S = 5.0
# How long a suspend is delayed, so that the resignation reaches the other nodes; logind allows 5 s.
SUSPEND_DELAY_S = 0.3
