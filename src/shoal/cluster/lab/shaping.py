"""One end of a cable as tc sees it: how fast it sends, how late, and how much of it is lost."""

from __future__ import annotations

from shoal.cluster.lab.spec import Link
from shoal.units import format_delay, format_rate

# A rate is what IP packets get. tc also counts each packet's 14 bytes of Ethernet header; given the plain rate, iperf3
# would show 95.6% of it at best.
_HEADERS = 1514 / 1500
# Tokens saved up while the link is idle. Less than 2 ms and a late timer on a busy machine costs bandwidth; more and
# small messages pass as if there were no limit.
_BURST_S = 2e-3
_LEAST_BURST_BYTES = 3200
_QUEUE = "50ms"
_PACKET_BYTES = 1500
_LEAST_QUEUE_PACKETS = 1000
_MOST_SEGMENTS = 65535


def shape(device: str, link: Link, netem: bool) -> list[str]:
    """`netem` on the switch's end only: on the sender's it would take packets from TCP's own accounts, which then
    overfills the queue."""
    if not netem or not (link.delay_s or link.loss):
        return [_limit(device, link, "root handle 1:")]
    delay = f" delay {format_delay(link.delay_s)}" if link.delay_s else ""
    loss = f" loss {100 * link.loss:.6g}%" if link.loss else ""
    late = f"tc qdisc replace dev {device} root handle 2: netem limit {_packets_on_the_way(link)}{delay}{loss}"
    return [late, _limit(device, link, "parent 2:1 handle 3:")] if link.rate_bps else [late]


def _limit(device: str, link: Link, place: str) -> str:
    if link.rate_bps is None:
        return f"tc qdisc replace dev {device} {place} pfifo limit {_LEAST_QUEUE_PACKETS}"
    burst = max(_LEAST_BURST_BYTES, round(link.rate_bps / 8 * _BURST_S))
    rate = format_rate(link.rate_bps * _HEADERS)
    return f"tc qdisc replace dev {device} {place} tbf rate {rate} burst {burst} latency {_QUEUE}"


def _packets_on_the_way(link: Link) -> int:
    """What netem must be able to hold: everything sent during the delay, and as much again for bursts."""
    on_the_way = (link.rate_bps or 10e9) / 8 * link.delay_s / _PACKET_BYTES
    return max(_LEAST_QUEUE_PACKETS, round(2 * on_the_way))


def bundling(device: str, link: Link, was: Link) -> list[str]:
    """With loss, single packets: the kernel hands up to 64 kB through a veth as one, and would lose them as one."""
    if bool(link.loss) == bool(was.loss):
        return []
    return [f"ip link set {device} gso_max_segs {1 if link.loss else _MOST_SEGMENTS}"]
