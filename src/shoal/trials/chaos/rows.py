"""The table of faults: what each row is, and where those are tested that no scenario plays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`tests` hold it, beside the scenarios or in their place; `why` says what no scenario can do about it."""

    number: int
    fault: str
    tests: tuple[str, ...] = ()
    why: str = ""


ROWS = (
    Row(1, "kill -9 of any rank, at any moment", ("tests/test_membership_faults.py",)),
    Row(2, "kill -9 of the leader, or of who keeps the keys", ("tests/test_membership_faults.py",)),
    Row(3, "every process of a node killed; power cut or pulled cable", ("tests/test_membership_faults.py",)),
    Row(4, "two of three nodes die at once", ("tests/test_membership_faults.py",)),
    Row(5, "freeze for 1.5 s", ("tests/test_membership_faults.py",)),
    Row(6, "freeze for 30 s, then wake", ("tests/test_membership_faults.py",)),
    Row(7, "partition and heal: 2 against 1, 1 against 1", ("tests/test_membership_faults.py",)),
    Row(8, "one-way block", ("tests/test_doctor_faults_net.py",)),
    Row(9, "link flap of 0.5 s and of 5 s", ("tests/test_membership_faults.py",)),
    Row(10, "a slow link; a rank three times slower", ("tests/test_laggards.py",)),
    Row(11, "packet loss of 1% and 5%", ("tests/test_laggards.py",)),
    Row(12, "a restarted or new machine joins", ("tests/test_membership_faults.py",)),
    Row(13, "kill during a checkpoint", ("tests/test_checkpoint.py", "tests/test_long.py")),
    Row(14, "checkpoint truncated or zero-filled", ("tests/test_checkpoint.py",)),
    Row(15, "one flipped bit in a checkpoint", ("tests/test_checkpoint.py",)),
    Row(16, "disk full, read-only folder", ("tests/test_bad_input.py",)),
    Row(
        17,
        "a clock that is wrong or jumps",
        ("tests/test_clocks.py", "tests/test_membership_rules.py", "tests/test_doctor_faults_machine.py"),
        "a lab's nodes have one clock, unless a test gives one of them another",
    ),
    Row(18, "port taken, stale run", ("tests/test_detached.py", "tests/test_doctor_machine.py")),
    Row(19, "garbage and idle connections on every port", ("tests/test_secure_runs.py",)),
    Row(
        20,
        "wrong, missing or replayed token",
        ("tests/test_mesh_strangers.py", "tests/test_doorkeeper.py", "tests/test_agents.py", "tests/test_guests.py"),
        "the tests speak the protocol with a wrong token; a scenario only knocks",
    ),
    Row(
        21,
        "a peer with another torch, protocol, config or data set",
        ("tests/test_hello.py", "tests/test_agents.py"),
        "nodes of a lab run one installation",
    ),
    Row(22, "out of memory in one rank", ("tests/test_out_of_memory.py", "tests/test_workplace.py")),
    Row(23, "NaN or Inf loss on one rank", ("tests/test_refusal.py",)),
    Row(24, "one weight bit changed on one rank", ("tests/test_comparing.py",)),
    Row(
        25,
        "dead DNS, a host name that is 127.0.1.1, the wrong interface",
        ("tests/test_doctor_faults_net.py", "tests/test_doctor_faults_machine.py"),
        "doctor's own tests break each of them on a node",
    ),
    Row(26, "SSH drops, launcher killed, terminal closed", ("tests/test_detached.py", "tests/test_hosts_ssh.py")),
    Row(27, "SIGINT once and twice, SIGTERM", ("tests/test_failing_ranks.py", "tests/test_chaos_runs.py")),
    Row(28, "soak: a random fault every 15 s", (), "shoal chaos soak"),
)
