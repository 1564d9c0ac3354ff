"""What the kernel knows of this machine's network, and answers of cards that this machine does not have."""

from __future__ import annotations

import socket
import struct

import psutil

from shoal.host import network
from shoal.host.facts import WireCounter
from shoal.host.proc import interface_counters


def test_links_addresses_and_routes_match_the_kernel() -> None:
    (lo,) = [link for link in network.links() if link["name"] == "lo"]
    assert (lo["index"], lo["up"], lo["mac"]) == (socket.if_nametoindex("lo"), True, "00:00:00:00:00:00")
    assert (lo["index"], "127.0.0.1/8", "lo") in network.addresses()
    assert network.route("127.0.0.1") == {"index": lo["index"], "source": "127.0.0.1", "local": True}


def test_interfaces_have_the_names_by_which_gloo_finds_them() -> None:
    """psutil asks the C library, as gloo does."""
    families = (socket.AF_INET, socket.AF_INET6)
    expected = {
        name: sorted(entry.address.partition("%")[0] for entry in entries if entry.family in families)
        for name, entries in psutil.net_if_addrs().items()
    }
    assert {name: sorted(own) for name, own in network.interface_addresses().items()} == expected
    assert network.link_mbps("lo") is None
    assert network.link_mbps(None) is None


def test_sent_bytes_are_counted_by_the_kernel() -> None:
    assert "lo" in dict(interface_counters())
    counter = WireCounter("lo")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(bytes(1000), ("127.0.0.1", 9))
    assert (counter.since_last() or 0) >= 1000
    assert WireCounter("no-such-card").since_last() is None
    assert WireCounter(None).since_last() is None


def test_the_link_settings_of_a_card_are_parsed() -> None:
    def make_reply(speed: int, duplex: int, *modes: int) -> bytes:
        head = struct.pack("=II7Bb", 0x4C, speed, duplex, *[0] * 6, 3).ljust(48, b"\0")
        return head + b"".join(mode.to_bytes(12, "little") for mode in modes)

    gigabit, hundred = 1 << 5, 1 << 3
    assert network.read_settings(make_reply(100, 1, gigabit | hundred | 1 << 47, hundred, gigabit)) == {
        "speed_mbps": 100,
        "duplex": "full",
        "best_mbps": 2500,
        "partner_mbps": 1000,
    }
    assert network.read_settings(make_reply(0xFFFFFFFF, 0xFF, 0, 0, 0)) == {}
    assert network.link_settings("no-such-card") == {}
    assert network.power_save("lo") is None
