"""Errors of starting: a missing launcher, SSH, and torchrun's rendezvous and summary."""

from __future__ import annotations

from shoal.explain.pattern import CauseOrder, Pattern

LAUNCHING = (
    Pattern(
        "launch.variable",
        ("expected, but not set",),
        regex=r"environment variable (?P<name>\w+) expected, but not set",
        cause="the program was started without a launcher, which sets {name}: the number of the rank, or where the "
        "ranks meet",
        fix="start it with: shoal run --on local:2 SCRIPT   (or: torchrun --nproc-per-node=2 SCRIPT)",
    ),
    Pattern(
        "launch.local-rank",
        ("KeyError: 'LOCAL_RANK'", "KeyError: 'RANK'", "KeyError: 'WORLD_SIZE'", "KeyError: 'LOCAL_WORLD_SIZE'"),
        regex=r"KeyError: '(?P<name>\w+)'",
        cause="the program reads {name} from its environment, and was started without a launcher that sets it",
        fix="start it with: shoal run --on local:2 SCRIPT   (or: torchrun --nproc-per-node=2 SCRIPT)",
    ),
    Pattern(
        "launch.no-group",
        ("Default process group has not been initialized",),
        cause="the program asks for its rank or exchanges tensors before it has joined a process group",
        fix="call torch.distributed.init_process_group() first, on every rank",
    ),
    Pattern(
        "launch.group-twice",
        ("trying to initialize the default process group twice",),
        cause="init_process_group was called a second time; a library (Lightning, Accelerate, …) may have made the "
        "first call",
        fix="guard it: if not torch.distributed.is_initialized(): …",
    ),
    Pattern(
        "launch.pickle",
        ("Can't pickle local object", "cannot pickle '", "Can't get local object"),
        cause="spawned processes get their function and arguments as pickle, and one of these cannot be pickled: a "
        "function inside a function, a lambda, an open file",
        fix="move the function to the top level of the module; or start the ranks with: shoal run SCRIPT",
    ),
    Pattern(
        "launch.main-guard",
        ("An attempt has been made to start a new process before the",),
        cause="every spawned process imports the script again, and the script starts processes while it is imported",
        fix="put what starts them under: if __name__ == '__main__':",
    ),
)


SSH = (
    Pattern(
        "ssh.denied",
        ("Permission denied (publickey",),
        regex=r"(?:(?P<host>\S+@\S+): )?Permission denied \(publickey",
        cause="{host} refused the login: the user is wrong, or it knows none of your keys",
        fix="ssh-copy-id {host}; a key with a passphrase must be in the agent: ssh-add",
        check="reach.host",
    ),
    Pattern(
        "ssh.key-changed",
        ("ost key for ",),
        regex=r"[Hh]ost key for (?P<host>\S+) has changed",
        cause="the machine at {host} shows another key than last time: it was reinstalled, or it is another machine. "
        "Find out which before you trust it",
        fix="ssh-keygen -R {host}; then: ssh {host}, and compare the fingerprint it asks about",
        check="reach.host",
        covers=("ssh.key-unknown",),
    ),
    Pattern(
        "ssh.key-unknown",
        ("host key is known for", "Host key verification failed"),
        regex=r"host key is known for (?P<host>\S+)|Host key verification failed",
        cause="this machine has never connected to {host} by this name, and ssh cannot ask here whether to trust its "
        "key",
        fix="connect once by hand, compare the key and say yes: ssh {host}",
        check="reach.host",
    ),
    Pattern(
        "ssh.refused",
        ("ssh: connect to host",),
        regex=r"connect to host (?P<host>\S+) port (?P<port>\d+): Connection refused",
        cause="{host} is there, but no SSH server listens on its port {port}",
        fix="on that machine: sudo apt install openssh-server; sudo systemctl enable --now ssh",
        check="reach.host",
    ),
    Pattern(
        "ssh.timeout",
        ("ssh: connect to host",),
        regex=r"to host (?P<host>\S+) port (?P<port>\d+): (?:(?:Connection|Operation) timed out|No route to host)",
        cause="{host} does not answer: it is off or asleep, on another network, or a firewall drops the packets",
        fix="wake it and try: ping -c 3 {host}; on that machine: sudo ufw allow {port}/tcp",
        check="reach.host",
    ),
    Pattern(
        "ssh.name",
        ("Could not resolve hostname",),
        regex=r"Could not resolve hostname (?P<host>[^:]+):",
        cause="neither the ssh configuration nor the name service knows {host}",
        fix="use its address, or add it to ~/.ssh/config: Host {host} / HostName ADDRESS",
        check="reach.host",
    ),
)


_FAILED = r"failed \(exitcode: {code}\) local_rank: (?P<rank>\d+)"

TORCHRUN = (
    Pattern(
        "torchrun.no-host",
        ("RendezvousConnectionError: The connection to the C10d store has failed",),
        weight=CauseOrder.LIKELY,
        cause="no torchrun serves the rendezvous: each compares --rdzv-endpoint with its own names and addresses to "
        "see whether it is the host, and none matched; or the host is not running, or cannot be reached",
        fix="on exactly one machine, the one of the endpoint: add --rdzv-conf is_host=true; on the others --rdzv-conf "
        "is_host=false",
        covers=("store.refused", "store.dropped", "store.no-answer", "store.retrying"),
    ),
    Pattern(
        "torchrun.join-timeout",
        ("RendezvousTimeoutError",),
        cause="too few machines joined the rendezvous: --nnodes asks for more than were started in time, or with "
        "another --rdzv-id, or they do not reach the endpoint",
        fix="start the same torchrun line on every machine, with the same --rdzv-id and --nnodes, within the join "
        "timeout (--rdzv-conf join_timeout=600)",
        check="reach.store",
    ),
    Pattern(
        "torchrun.node-rank",
        ("wait timeout after",),
        regex=r"keys: \S*/torchelastic/(?:role_info|assigned_ranks)",
        cause="all torchruns joined, but two of them have the same --node-rank",
        fix="give each machine its own: --node-rank=0 on the one of --master-addr, then 1, 2, …",
    ),
    Pattern(
        "torchrun.no-script",
        ("can't open file '",),
        regex=r"can't open file '(?P<file>[^']+)'",
        cause="there is no {file} on this machine: the name is wrong, or the project was not copied here",
        fix="ls {file}; on every machine the script must be at the same place (shoal run copies it)",
    ),
    Pattern(
        "torchrun.hangup",
        ("SignalException: Process",),
        regex=r"SignalException: Process \d+ got signal: 1\b",
        cause="the terminal or the SSH connection in which torchrun ran was closed, and SIGHUP ended it",
        fix="start it so that it needs no terminal: shoal run --detach …   (or: nohup torchrun … &, or inside tmux)",
    ),
    Pattern(
        "torchrun.killed",
        ("failed (exitcode: -9)",),
        weight=CauseOrder.LIKELY,
        regex=_FAILED.format(code="-9"),
        cause="local rank {rank} was killed with SIGKILL, which leaves no message in its log: most often by the "
        "kernel, because the machine ran out of memory",
        fix="ask the kernel: sudo dmesg | grep -i 'killed process'; then use a smaller batch, or fewer ranks on it",
        check="memory.free",
    ),
    Pattern(
        "torchrun.crashed",
        ("failed (exitcode: -",),
        weight=CauseOrder.LIKELY,
        regex=_FAILED.format(code="-(?P<signal>4|7|8|11)"),
        cause="local rank {rank} crashed inside compiled code (signal {signal}; 11 a bad address, 7 shared memory "
        "that ran out, 4 an instruction this CPU lacks): a broken or mixed installation, an extension, or full "
        "/dev/shm",
        fix="see where: python -X faulthandler SCRIPT; check: df -h /dev/shm; then reinstall torch and what was built "
        "against it",
    ),
    Pattern(
        "torchrun.child-failed",
        ("failed (exitcode: ",),
        weight=CauseOrder.REPORT,
        regex=_FAILED.format(code=r"(?P<code>\d+|-(?!(?:4|7|8|9|11)\))\d+)"),
        cause="torchrun's summary: local rank {rank} was the first to fail here, with exit code {code}; the others "
        "were ended for it",
        fix="look above for that rank's own error, or in its log: torchrun --log-dir logs --redirects 3 …",
    ),
)
