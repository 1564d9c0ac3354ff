"""Errors of gloo, the backend by which CPU ranks exchange tensors."""

from __future__ import annotations

from shoal.explain.pattern import CauseOrder, Pattern

_SET_INTERFACE = "export GLOO_SOCKET_IFNAME=$(ip route get PEER_ADDRESS | grep -oP 'dev \\K\\S+')"
# Only the last attempt counts: with willRetry=1 the connection may still succeed.
_REFUSED = r"(?:willRetry=0,|connectFullMesh) .*Connection refused, remote="
# torch 2.0 prints instead: `gloo/transport/tcp/pair.cc:799] connect [127.0.1.1]:45963: Connection refused`.
_PAIR = r"gloo/transport/tcp/pair\.(?:cc|h):\d+\] "
_RUNNING = r"Rank (?P<{rank}>\d+) is running collective: \w+\(SequenceNumber=\d+, OpType=(?P<{what}>\w+)"
_TIMEOUTS = ("gloo.connect-timeout", "gloo.timeout")

GLOO = (
    Pattern(
        "gloo.connect-timeout",
        ("Connect timeout",),
        weight=CauseOrder.LIKELY,
        regex=rf"connectFullMesh failed .*Connect timeout|{_PAIR}Connect timeout",
        cause="two ranks could not connect: one of them waited five times the timeout for the other. In each pair the "
        "higher address connects to the lower one, on a port that changes every time, so a firewall on the machine "
        "with the lower address is the usual cause; opening the store's port alone does not help",
        fix="on the machine with the lower address: sudo ufw allow from PEER_ADDRESS   (or: sudo nft insert rule inet "
        "filter input ip saddr PEER_ADDRESS accept). GLOO_PORT_RANGE does not exist",
        check="reach.pair",
        covers=("gloo.timeout",),
    ),
    Pattern(
        "gloo.loopback",
        ("failed to connect, ", "connectFullMesh failed", "connect [", "Connect timeout ["),
        weight=CauseOrder.LIKELY,
        regex=rf"(?:{_REFUSED}|{_PAIR}(?:connect (?=.*Connection refused)|Connect timeout ))"
        r"\[(?P<remote>127\.[\d.]+|::1)\]",
        cause="a rank got the address {remote} for another rank, which is its own machine: the other machine's host "
        "name resolves to loopback (Debian and Ubuntu write 127.0.1.1 into /etc/hosts), and gloo "
        "publishes that. On one machine alone it means that the other rank had died",
        fix=f"on every machine, before the start: {_SET_INTERFACE}",
        check="names.loopback",
        covers=(*_TIMEOUTS, "gloo.connect-refused", "gloo.no-error"),
    ),
    Pattern(
        "gloo.no-error",
        ("connectFullMesh failed",),
        weight=CauseOrder.LIKELY,
        regex=r"pair\.cc:\d+\] no error",
        cause="the connection to another rank was refused (gloo of torch 2.3 to 2.6 prints `no error` for it): this "
        "rank was given an address where the other one does not listen. Most often a machine's host name resolves to "
        "loopback (127.0.1.1 in /etc/hosts), or gloo took an interface that both machines have (docker0); or the "
        "other rank has ended",
        fix=f"on every machine: getent hosts $(hostname), which must not print 127.…; then: {_SET_INTERFACE}",
        check="names.loopback",
        covers=_TIMEOUTS,
    ),
    Pattern(
        "gloo.loopback-fallback",
        ("Unable to resolve hostname to a (local) address",),
        weight=CauseOrder.HARMLESS,
        cause="this machine's host name has no address, so gloo publishes 127.0.0.1. Between ranks of one machine "
        "that is fine; ranks on other machines cannot reach it",
        fix=f"on every machine, before the start: {_SET_INTERFACE}",
        check="names.loopback",
    ),
    Pattern(
        "gloo.same-address",
        ("failed to connect, ",),
        regex=r"willRetry=0, .*local=\[(?P<local>(?!127\.|::1\])[^\]]+)\]:\d+, remote=\[(?P=local)\]",
        cause="a rank got the address {local} for another rank, which is its own address: both machines have an "
        "interface with this address (docker0, virbr0 and the like), and gloo took that one",
        fix=f"on every machine, before the start: {_SET_INTERFACE}",
        check="interface.address",
        covers=(*_TIMEOUTS, "gloo.connect-refused"),
    ),
    Pattern(
        "gloo.connect-refused",
        ("failed to connect, ", "connectFullMesh failed", "connect ["),
        weight=CauseOrder.LIKELY,
        regex=rf"(?:{_REFUSED}|{_PAIR}connect (?=.*Connection refused))\[(?P<remote>(?!127\.|::1)[^\]]+)\]",
        cause="{remote} is there, but no process listens on the port that the rank was given: the other rank has ended "
        "meanwhile, or the address is from an earlier run, in a file or a store that was used again",
        fix="look into the log of the rank on {remote}; with init_method=file://… remove the file before every run",
        covers=_TIMEOUTS,
    ),
    Pattern(
        "gloo.no-route",
        ("connect: Network is unreachable", "connect: No route to host"),
        regex=r"gloo/transport/tcp",
        cause="a rank published an address to which this machine has no route: gloo took an interface of another "
        "network there (a VPN, a bridge, a second card)",
        fix=f"on every machine, before the start: {_SET_INTERFACE}",
        check="interface.address",
        covers=_TIMEOUTS,
    ),
    Pattern(
        "gloo.rejected",
        ("No route to host, remote=",),
        weight=CauseOrder.LIKELY,
        regex=r"(?:willRetry=0,|connectFullMesh) .*No route to host, remote=\[(?P<remote>[^\]]+)\]",
        cause="{remote} rejects the connection: the firewall of Fedora and Red Hat (firewalld) answers so for every "
        "port that is not open. A machine that is off or on another network looks the same",
        fix="on {remote}: sudo firewall-cmd --permanent --zone=trusted --add-source=PEER_ADDRESS && sudo firewall-cmd "
        "--reload",
        check="reach.pair",
        covers=(*_TIMEOUTS, "gloo.connect-timeout"),
    ),
    Pattern(
        "gloo.interface",
        ("Unable to find address for: ",),
        regex=r"Unable to find address for: (?P<interface>\S+)",
        cause="GLOO_SOCKET_IFNAME names {interface}, and this machine has no interface of that name, or it has no "
        "address. gloo wants exact names; NCCL's ^name and prefixes do not work",
        fix=f"see the names with: ip -br addr; then: {_SET_INTERFACE}",
        check="interface.address",
    ),
    Pattern(
        "gloo.transport",
        ("unsupported gloo device",),
        cause="GLOO_DEVICE_TRANSPORT asks for a transport that this torch was not built with; the wheels have no TLS",
        fix="unset GLOO_DEVICE_TRANSPORT; for encryption connect the machines with WireGuard",
    ),
    Pattern(
        "gloo.timeout",
        ("Timed out waiting",),
        weight=CauseOrder.LIKELY,
        regex=r"Timed out waiting (?P<ms>\d+)ms for (?P<what>send|recv) operation",
        cause="another rank did not answer for {ms} ms, and its connection was not closed: it is frozen or asleep, "
        "its cable is out, or it is busy elsewhere, such as in another collective or a long evaluation",
        fix="look at the last lines of the other ranks' logs; run once with TORCH_DISTRIBUTED_DEBUG=DETAIL, which "
        "names the rank and the collective; raise timeout= in init_process_group only for intended pauses",
        check="proof.gloo",
    ),
    Pattern(
        "gloo.barrier",
        ("failed to pass monitoredBarrier",),
        regex=r"Ranks? (?P<ranks>[\d, ]*\d) failed to pass monitoredBarrier in (?P<ms>\d+) ms",
        cause="rank {ranks} did not reach the barrier within {ms} ms: it has died, hangs, or took another branch of "
        "the program",
        fix="look at the end of that rank's log; every rank must reach the same barriers and collectives",
        covers=("gloo.timeout",),
    ),
    Pattern(
        "gloo.size-mismatch",
        ("op.preamble.length <= op.nbytes",),
        regex=r"op\.nbytes\. (?P<received>\d+) vs (?P<expected>\d+)",
        cause="the ranks sent each other blocks of different sizes ({received} and {expected} bytes): a tensor has "
        "another shape or type on one of them, or they are in different collectives",
        fix="run once with TORCH_DISTRIBUTED_DEBUG=DETAIL, which prints both shapes; pad, or drop the last short batch",
    ),
    Pattern(
        "gloo.gather-sizes",
        ("ProcessGroupGloo::",),
        regex=r"ProcessGroupGloo::(?P<what>\w+): invalid tensor (?:size|type|layout)",
        cause="the tensors given to {what} differ in shape or type, and gloo needs all the same",
        fix="give every tensor of the list the shape of the tensor that is sent; pad shorter ones",
    ),
    Pattern(
        "gloo.dtype",
        ("RuntimeError: Invalid scalar type",),
        cause="gloo cannot exchange tensors of this type (float8, complex32, …)",
        fix="convert before the collective: tensor.to(torch.bfloat16), or send its bytes as tensor.view(torch.uint8)",
    ),
    Pattern(
        "gloo.future",
        ("Work::getFuture not implemented",),
        cause="the program asks a collective for its future, and this one has none: gloo's reduce_scatter, or a "
        "collective of a custom or plugin process group",
        fix="call work.wait() instead of work.get_future(), or use all_reduce; see which call it is in the traceback "
        "above",
    ),
    Pattern(
        "gloo.collective-mismatch",
        ("Detected mismatch between collectives on ranks",),
        regex=_RUNNING.format(rank="one", what="first")
        + ".*?but "
        + _RUNNING.format(rank="other", what="second")
        + r".*?following aspects:\s*(?P<what>.*)",
        cause="rank {one} is in {first} while rank {other} is in {second}; they differ in: {what}",
        fix="let every rank call the same collectives in the same order with the same shapes; look for an `if rank` "
        "and for loops of different lengths",
        covers=("gloo.timeout", "gloo.barrier"),
    ),
    Pattern(
        "gloo.peer-closed",
        ("Connection closed by peer [",),
        weight=CauseOrder.CONSEQUENCE,
        regex=r"Connection closed by peer \[(?P<peer>[^\]]+)\]",
        cause="the rank at {peer} ended and closed its connections; it failed first, this one is a consequence",
        fix="look at the end of the log of the rank at {peer}",
    ),
    Pattern(
        "gloo.peer-reset",
        ("Connection reset by peer", "Broken pipe"),
        weight=CauseOrder.CONSEQUENCE,
        regex=r"gloo/transport/tcp/.*(?:Read|Write|read|write)[^\[]*\[(?P<peer>[^\]]+)\]",
        cause="the rank at {peer} is suddenly gone: killed (kill -9, out of memory) or crashed; this one is a "
        "consequence",
        fix="look at the end of the log of the rank at {peer}, and there: dmesg | grep -i 'killed process'",
    ),
)
