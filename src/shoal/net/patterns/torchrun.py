"""What torchrun prints: its rendezvous, and its summary of who failed."""

from __future__ import annotations

from shoal.net.pattern import Pattern, Weight

_FAILED = r"failed \(exitcode: {code}\) local_rank: (?P<rank>\d+)"

TORCHRUN = (
    Pattern(
        "torchrun.no-host",
        Weight.LIKELY,
        ("RendezvousConnectionError: The connection to the C10d store has failed",),
        cause="nobody serves the rendezvous: each torchrun compares --rdzv-endpoint with its own names and addresses "
        "to see whether it is the host, and none thought so; or the host is not running, or not to be reached",
        fix="on exactly one machine, the one of the endpoint: add --rdzv-conf is_host=true; on the others --rdzv-conf "
        "is_host=false",
        covers=("store.refused", "store.dropped", "store.no-answer", "store.retrying"),
    ),
    Pattern(
        "torchrun.join-timeout",
        Weight.CAUSE,
        ("RendezvousTimeoutError",),
        cause="too few machines came to the rendezvous: --nnodes asks for more than were started in time, or with "
        "another --rdzv-id, or they do not reach the endpoint",
        fix="start the same torchrun line on every machine, with the same --rdzv-id and --nnodes, within the join "
        "timeout (--rdzv-conf join_timeout=600)",
        check="reach.store",
    ),
    Pattern(
        "torchrun.node-rank",
        Weight.CAUSE,
        ("wait timeout after",),
        regex=r"keys: \S*/torchelastic/(?:role_info|assigned_ranks)",
        cause="as many torchruns came as were asked for, but not with distinct numbers: two have the same --node-rank",
        fix="give each machine its own: --node-rank=0 on the one of --master-addr, then 1, 2, …",
    ),
    Pattern(
        "torchrun.no-script",
        Weight.CAUSE,
        ("can't open file '",),
        regex=r"can't open file '(?P<file>[^']+)'",
        cause="there is no {file} on this machine: the name is wrong, or the project was not copied here",
        fix="ls {file}; on every machine the script must be at the same place (shoal run copies it)",
    ),
    Pattern(
        "torchrun.hangup",
        Weight.CAUSE,
        ("SignalException: Process",),
        regex=r"SignalException: Process \d+ got signal: 1\b",
        cause="the terminal or the SSH connection in which torchrun ran was closed, and the signal for that (SIGHUP) "
        "ended it",
        fix="start it so that it needs no terminal: shoal run --detach …   (or: nohup torchrun … &, or inside tmux)",
    ),
    Pattern(
        "torchrun.killed",
        Weight.LIKELY,
        ("failed (exitcode: -9)",),
        regex=_FAILED.format(code="-9"),
        cause="local rank {rank} was killed with SIGKILL, which leaves no word in its log: most often the kernel did, "
        "because the machine ran out of memory",
        fix="ask the kernel: sudo dmesg | grep -i 'killed process'; then use a smaller batch, or fewer ranks on it",
        check="memory.free",
    ),
    Pattern(
        "torchrun.crashed",
        Weight.LIKELY,
        ("failed (exitcode: -",),
        regex=_FAILED.format(code="-(?P<signal>4|7|8|11)"),
        cause="local rank {rank} crashed inside compiled code (signal {signal}; 11 a bad address, 7 shared memory "
        "that ran out, 4 an instruction this CPU lacks): a broken or mixed installation, an extension, or full "
        "/dev/shm",
        fix="see where: python -X faulthandler SCRIPT; check: df -h /dev/shm; then reinstall torch and what was built "
        "against it",
    ),
    Pattern(
        "torchrun.child-failed",
        Weight.REPORT,
        ("failed (exitcode: ",),
        regex=_FAILED.format(code=r"(?P<code>\d+|-(?!(?:4|7|8|9|11)\))\d+)"),
        cause="torchrun's summary: local rank {rank} was the first to fail here, with exit code {code}; the others "
        "were ended for it",
        fix="look above for that rank's own last words, or in its log: torchrun --log-dir logs --redirects 3 …",
    ),
)
