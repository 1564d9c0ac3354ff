"""Network facts that the collector reads from the kernel and from tools.

Exercises tools.doctor.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cluster.node_program import LocalProgram, RemoteProgram, closing_all, module_command
from shoal.tools.doctor.collect import network, trials
from shoal.tools.doctor.run import COLLECTOR
from tests.support.cluster_facts import Facts
from tests.support.waiting import wait_until


def test_the_collector_runs_on_a_bare_python() -> None:
    bare = [sys.executable, "-S", *module_command(COLLECTOR)[1:]]
    programs = {
        "node": RemoteProgram("node", LocalProgram(bare, {"PYTHONPATH": str(Path(shoal.__file__).parent.parent)}))
    }
    with closing_all(programs):
        facts = programs["node"].ask(20.0, do="observe", peers=["127.0.0.1"], address="127.0.0.1", port=0)
        port = programs["node"].ask(5.0, do="listen", address="127.0.0.1", name="node", port=0)["port"]
        place = {"address": "127.0.0.1", "port": port}
        ((same,), (other,)) = (
            programs["node"].ask(5.0, do="dial", places=[{**place, "expect": name}], timeout_s=2.0)["tries"]
            for name in ("node", "another")
        )
        assert programs["node"].ask(5.0, do="burst", **place)["mbps"] > 0
        programs["node"].ask(5.0, do="send", port=port, tag="new", places=[{**place, "sizes": [128, 1500]}])

        def received() -> Any:
            return programs["node"].ask(5.0, do="received", port=port)["sizes"]

        # Another thread takes the datagrams.
        wait_until(lambda: received() == {"node": {"new": [128, 1500]}}, 10)
    assert facts["failed"] == {}
    assert (same["outcome"], other["outcome"]) == ("ok", "other-machine")


def test_the_reason_of_a_failed_connection_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    reply = trials.dial({"places": [{"address": "127.0.0.1", "port": port, "expect": "x"}], "timeout_s": 1.0})
    assert reply["tries"][0]["outcome"] == "refused"
    assert trials.listen({"address": "192.0.2.77", "name": "x", "port": 0})["port"] is None


def test_the_collector_describes_this_network() -> None:
    facts = network.observe({"peers": ["127.0.0.1"]})
    assert facts["routes"]["127.0.0.1"]["interface"] == "lo"
    assert facts["interfaces"]["lo"]["kind"] == "loopback"
    assert facts["firewall"].keys() == {"tools", "ufw", "firewalld", "chains"}


@pytest.mark.parametrize(
    ("name", "kernel_type", "is_wifi", "kind"),
    [
        ("eth0", "", False, "wired"),
        ("enp3s0", "", False, "wired"),
        ("eth0", "veth", False, "wired"),
        ("wlp2s0", "", True, "wifi"),
        ("docker0", "bridge", False, "docker"),
        ("br-0123456789ab", "bridge", False, "docker"),
        ("br0", "bridge", False, "bridge"),
        ("tailscale0", "tun", False, "tailscale"),
        ("wg0", "wireguard", False, "vpn"),
        ("home", "wireguard", False, "vpn"),
        ("lo", "", False, "loopback"),
    ],
)
def test_interface_kinds_are_recognized(name: str, kernel_type: str, is_wifi: bool, kind: str) -> None:
    assert network.kind_of(name, kernel_type, is_wifi) == kind


def test_names_in_the_hosts_file_are_read() -> None:
    text = "127.0.0.1 localhost\n127.0.1.1\tlaptop.home laptop # laptop2\n#10.0.0.1 laptop\n10.0.0.2 laptop"
    assert network.hosts_file_addresses(text, "laptop") == ["127.0.1.1", "10.0.0.2"]


def test_only_chains_that_may_drop_are_blocking() -> None:
    def chain(name: str, hook: str | None, policy: str = "accept", family: str = "inet") -> Facts:
        hooked = {"hook": hook, "policy": policy} if hook else {}
        return {"chain": {"family": family, "table": "t", "name": name, **hooked}}

    def rule(name: str, verdict: str) -> Facts:
        return {"rule": {"family": "inet", "table": "t", "chain": name, "expr": [{"counter": None}, {verdict: None}]}}

    ruleset = [
        {"metainfo": {}},
        chain("open", "input"),
        chain("strict", "input", policy="drop"),
        chain("picky", "input"),
        chain("asking", "output"),
        chain("far", "forward", policy="drop"),
        chain("plain", None),
        chain("arp", "input", policy="drop", family="arp"),
        rule("open", "accept"),
        rule("picky", "drop"),
        rule("asking", "jump"),
        rule("plain", "drop"),
    ]
    chains = network.blocking_chains({"nftables": ruleset})
    assert [(chain_facts["name"], chain_facts["hook"]) for chain_facts in chains] == [
        ("strict", "input"),
        ("picky", "input"),
        ("asking", "output"),
    ]
