"""Errors of torch's c10d store, at which ranks meet at MASTER_ADDR:MASTER_PORT."""

from __future__ import annotations

from shoal.explain.pattern import CauseOrder, Pattern

_TO_HOST = r"failed to connect/validate to host (?P<host>\S+):(?P<port>\d+) - "
_NO_ANSWER = ("store.no-answer", "store.retrying")
_UNREACHED = ("store.refused", "store.dropped", *_NO_ANSWER)

STORE = (
    Pattern(
        "store.refused",
        ("failed to connect/validate to host",),
        weight=CauseOrder.LIKELY,
        # A second attempt means that the first ended before its timeout: the connection was refused.
        regex=_TO_HOST + r"timed out \(try=[1-9].*: The client socket has timed out",
        cause="{host} is there, but nothing listens on its port {port}: rank 0 was not started, started elsewhere or "
        "with another MASTER_PORT, or has died. torch prints this as a timeout",
        fix="start rank 0 on {host}; look there for the port: ss -ltnp 'sport = :{port}'",
        check="reach.store",
        covers=_NO_ANSWER,
    ),
    Pattern(
        "store.dropped",
        ("failed to connect/validate to host",),
        weight=CauseOrder.LIKELY,
        regex=_TO_HOST + r"timed out \(try=0.*: The client socket has timed out",
        cause="nothing came back from {host} port {port}, not even a refusal: a firewall there drops the packets, or "
        "the machine is off or asleep",
        fix="on {host}: sudo ufw allow {port}/tcp   (gloo needs more than this port: sudo ufw allow from OUR_ADDRESS)",
        check="reach.store",
        covers=_NO_ANSWER,
    ),
    Pattern(
        "store.no-answer",
        ("Error: The client socket has timed out after",),
        weight=CauseOrder.LIKELY,
        regex=r"while trying to connect to \((?P<host>[^,]+), (?P<port>\d+)\)",
        cause="no process answered at {host} port {port}, where rank 0 should serve the store: it does not run, or a "
        "firewall blocks the port",
        fix="try from here: nc -zv -w 3 {host} {port}   (refused: start rank 0 there; no answer: open the firewall "
        "there)",
        check="reach.store",
        covers=("store.retrying",),
    ),
    Pattern(
        "store.retrying",
        ("failed to connect/validate to host",),
        weight=CauseOrder.HARMLESS,
        regex=_TO_HOST + r"retrying \(try=",
        cause="the store at {host} port {port} was not served yet, and this rank tries again: rank 0 starts more "
        "slowly",
        fix="nothing, if the run began; to avoid the message start rank 0 first",
    ),
    Pattern(
        "store.unreachable",
        ("The client socket has failed to connect to any network address of",),
        regex=r"(?:timed out \(|Error: ).*any network address of \((?P<host>[^,]+), (?P<port>\d+)\)"
        r".*errno: \d+ - (?P<error>[^)]+)",
        cause="this machine has no route to {host}, where rank 0 should be ({error}): the address is wrong or of "
        "another network, or that machine is off. Other addresses in these lines, such as 170.170.0.0, are a bug of "
        "torch",
        fix="see the route from this machine: ip route get {host}; set MASTER_ADDR to an address of rank 0 on a "
        "network that both are on",
        check="reach.pair",
        covers=_UNREACHED,
    ),
    Pattern(
        "store.name",
        ("cannot be retrieved (gai error",),
        weight=CauseOrder.LIKELY,
        regex=r"addresses of \((?P<host>[^,]+), \d+\) cannot be retrieved \(gai error: -?\d+ - (?P<error>[^)]+)\)",
        cause="this machine cannot resolve the name {host} ({error})",
        fix="set MASTER_ADDR to the address of rank 0 instead of its name; on that machine: ip -br addr",
        covers=_UNREACHED,
        only_with=_UNREACHED,
    ),
    Pattern(
        "store.port-taken",
        ("EADDRINUSE", "Address already in use"),
        regex=r"failed to listen .*?(?:port: |\]:)(?P<port>\d+)(?:,.* EADDRINUSE| \(errno: 98)|\[Errno 98\]"
        r"|RuntimeError: Address already in use",
        cause="port {port} of this machine is in use: by an earlier run that still goes on, another program, or a "
        "second rank 0",
        fix="see which process has it: ss -ltnp 'sport = :{port}'; end that, or choose another port (torchrun "
        "--master-port, MASTER_PORT)",
        check="port.taken",
        covers=("store.missing-clients",),
    ),
    Pattern(
        "store.port-denied",
        ("name: EACCES",),
        regex=r"port: (?P<port>\d+)",
        cause="this user may not listen on port {port}: ports below 1024 are reserved for root",
        fix="choose one above: export MASTER_PORT=29500",
    ),
    Pattern(
        "store.missing-clients",
        ("waiting for clients.",),
        regex=r"after (?P<seconds>\d+) seconds waiting for clients\. (?P<here>\d+)/(?P<all>\d+) clients joined",
        cause="only {here} of {all} ranks connected to the store within {seconds} s: the others were not started, died "
        "early, or cannot reach this machine",
        fix="look into the logs of the others; from each of their machines: nc -zv -w 3 ADDRESS_OF_RANK_0 29500",
        check="reach.store",
    ),
    Pattern(
        "store.rank-missing",
        ("wait timeout after",),
        regex=r"wait timeout after (?P<ms>\d+)ms, keys: \S*/(?:cpu|cuda)//\d+/(?P<rank>\d+)",
        cause="all ranks wait for rank {rank}, which never wrote its address: it was not started or died early, two "
        "processes have the same RANK, or WORLD_SIZE differs between them",
        fix="on every machine: env | grep -E '^(RANK|WORLD_SIZE|MASTER_)'; each RANK once, from 0 to WORLD_SIZE - 1",
        check="proof.gloo",
        covers=("gloo.connect-timeout", "gloo.timeout"),
    ),
    Pattern(
        "store.key-timeout",
        ("wait timeout after",),
        weight=CauseOrder.LIKELY,
        regex=r"wait timeout after (?P<ms>\d+)ms, keys: (?P<keys>/(?!\S*(?:torchelastic/|/(?:cpu|cuda)//)).*)",
        cause="no rank wrote {keys} into the store within {ms} ms: the rank that should is late, dead or elsewhere in "
        "the program",
        fix="look at the end of the other ranks' logs; raise the store's timeout only if that rank is just slow",
    ),
    Pattern(
        "store.gone",
        ("Bytes failed on", "recvValueWithTimeout failed on", "DistNetworkError: "),
        weight=CauseOrder.CONSEQUENCE,
        regex=r"(?:Bytes|WithTimeout) failed on|Error: (?:Connection reset by peer|Broken pipe|Failed to recv)",
        cause="the process that served the store is gone: the machine of rank 0, or the torchrun on it, failed first",
        fix="look at the end of the log on the machine of rank 0",
        covers=("torchrun.no-host", "gloo.peer-closed", "gloo.peer-reset"),
    ),
    Pattern(
        "store.reverse-dns",
        ("The hostname of the client socket cannot be retrieved",),
        weight=CauseOrder.HARMLESS,
        cause="torch looks up the names of addresses to print them, and addresses of this network have none. Nothing "
        "fails; but the store waits for each look-up, for seconds if the name server is dead, and prints wrong "
        "addresses in later lines",
        fix="nothing; for quick starts and correct addresses, on every machine, one line in /etc/hosts for each of "
        "them: ::ffff:ADDRESS NAME   (a line without ::ffff: does not help)",
        check="names.reverse",
    ),
)
