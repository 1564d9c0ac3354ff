"""Network faults injected into a real lab: doctor reports every fault, and its command fixes it.

Exercises tools.doctor.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.tools.doctor.checks.reach import open_command
from shoal_lab.lab import Lab, Node
from tests.integration.cluster.test_hosts_ssh import Site
from tests.integration.lab.test_nodes import output_of
from tests.support.doctor import (
    Verdict,
    assert_alarms,
    assert_healthy,
    parse_verdict,
    run_doctor,
    run_fixes,
    run_here,
    run_on,
)
from tests.support.labs import running_lab, shoal
from tests.support.needs import need_tool
from tests.support.waiting import wait_until

Inject = Callable[[Lab], None]


@dataclass(frozen=True)
class Fault:
    """`expected` are the findings by check and node. `fixed`: their commands fix it within `settles_s`."""

    inject: Inject
    expected: tuple[tuple[str, str], ...]
    fixed: bool = True
    settles_s: float = 0.0


def sh(node: str, *commands: str) -> Inject:
    def inject(lab: Lab) -> None:
        output_of(lab, node, "sh", "-ec", "; ".join(commands))

    return inject


def cut(one: str, other: str, one_way: bool) -> Inject:
    return lambda lab: lab.node(one).cut(other, one_way)


def firewalls(*nodes: str) -> Inject:
    def inject(lab: Lab) -> None:
        for node in nodes:
            lab.node(node).set_firewall()

    return inject


def slow(node: str, rate: str) -> Inject:
    return lambda lab: lab.node(node).set_link(rate)


def together(*injections: Inject) -> Inject:
    def inject(lab: Lab) -> None:
        for inject_one in injections:
            inject_one(lab)

    return inject


def rule(hook: str, words: str) -> str:
    chain = f"add chain inet home {hook} {{ type filter hook {hook} priority 0; }}"
    return f"nft 'add table inet home; {chain}; add rule inet home {hook} {words}'"


DOCKER0 = ("ip link add docker0 type bridge", "ip addr add 172.17.0.1/16 dev docker0", "ip link set docker0 up")
# /etc/hosts is one file for all nodes; this node gets its own.
OWN_NAMES = (
    "sed s/^10.77.0.2/172.17.0.1/ /etc/hosts > /run/names",
    "mount -t tmpfs names /mnt",
    "cp /run/names /mnt",
    "rm /run/names",
    "mount --bind /mnt/names /etc/hosts",
)

FAULTS = {
    "the lower address receives nothing from a higher one": Fault(
        cut("node2", "node1", one_way=True), (("reach.pair", "node1"),)
    ),
    "the higher address receives nothing, not even replies": Fault(
        cut("node1", "node2", one_way=True), (("reach.pair", "node2"),)
    ),
    "both ways": Fault(cut("node1", "node2", one_way=False), (("reach.pair", "node1"), ("reach.pair", "node2"))),
    "a firewall on the lowest address": Fault(firewalls("node1"), (("reach.pair", "node1"),)),
    "a firewall everywhere": Fault(
        firewalls("node1", "node2", "node3"), (("reach.pair", "node1"), ("reach.pair", "node2"))
    ),
    "a port that is refused": Fault(
        sh("node1", rule("input", "ip saddr 10.77.0.3 tcp dport 1024-65535 ct state new reject")),
        (("reach.pair", "node1"),),
    ),
    "a node that lets nothing out": Fault(
        sh("node2", rule("output", "ip daddr 10.77.0.1 drop")), (("reach.pair", "node2"),)
    ),
    "a smaller MTU on one side": Fault(sh("node2", "ip link set dev eth0 mtu 1400"), (("mtu.mismatch", "node2"),)),
    "a switch that loses big packets": Fault(
        sh("switch", "ip link set dev node2 mtu 1400"), tuple(("mtu.path", f"node{number}") for number in (1, 2, 3))
    ),
    "jumbo frames that only two can": Fault(
        together(*(sh(node, "ip link set dev eth0 mtu 9000") for node in ("node1", "node2"))),
        (("mtu.path", "node1"), ("mtu.path", "node2")),
    ),
    "a tenth of the speed": Fault(slow("node2", "100mbit"), (("link.slow", "node2"),), fixed=False),
    "a name that means docker0": Fault(sh("node2", *DOCKER0, *OWN_NAMES), (("interface.internal", "node2"),)),
    "one address twice": Fault(
        sh("node3", "ip addr add 10.77.0.2/24 dev eth0"), (("reach.duplicate-address", "node3"),)
    ),
    # The kernel probes the wrong card three times before it looks for another one.
    "the address of another node": Fault(
        sh("node3", "ip addr flush dev eth0", "ip addr add 10.77.0.2/24 dev eth0"),
        (("reach.duplicate-address", "node3"), ("interface.address", "node3")),
        settles_s=20.0,
    ),
    "another address first": Fault(
        sh("node2", "ip addr flush dev eth0", *(f"ip addr add {net}.0.2/24 dev eth0" for net in ("10.11", "10.77"))),
        (("interface.first", "node2"),),
    ),
    "an interface switched off": Fault(sh("node2", "ip link set dev eth0 down"), (("interface.down", "node2"),)),
    "a cable pulled": Fault(sh("switch", "ip link set dev node2 down"), (("interface.down", "node2"),), fixed=False),
}
QUICK = ("a smaller MTU on one side",)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with running_lab(3) as lab:
        yield lab


def check_fault(lab: Lab, fault: Fault, folder: Path, *words: str) -> None:
    fault.inject(lab)
    verdict = run_doctor(lab, *words)
    assert_alarms(verdict, *fault.expected)
    assert fault.fixed == any(finding["fix"] for finding in verdict.alarms)
    if fault.fixed:
        run_fixes(lab, verdict, folder)
        again, until = run_doctor(lab, *words), time.monotonic() + fault.settles_s
        while again.alarms and time.monotonic() < until:
            again = run_doctor(lab, *words)
        assert_healthy(again)


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_reported_and_its_command_fixes_it(lab: Lab, name: str, tmp_path: Path) -> None:
    check_fault(lab, FAULTS[name], tmp_path, "--no-proof")


REST = sorted(FAULTS.keys() - set(QUICK))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if number % 3 else pytest.mark.long)
        for number, name in enumerate(REST)
    ],
)
def test_every_fault_is_reported_and_its_command_fixes_it(lab: Lab, name: str, tmp_path: Path) -> None:
    check_fault(lab, FAULTS[name], tmp_path)


@pytest.mark.long
def test_a_firewall_on_the_highest_address_is_no_fault(lab: Lab) -> None:
    """gloo and the agents connect from there; the bridge of a container engine causes no finding."""
    together(firewalls("node3"), sh("node2", *DOCKER0))(lab)
    verdict = run_doctor(lab)
    assert_healthy(verdict)
    assert verdict.document["proved"]
    assert "node1 → node3" in verdict.one("reach.other-way", "node3")["evidence"]
    assert verdict.one("reach.other-way", "node3")["fix"] == ""


@pytest.mark.long
def test_a_slow_link_is_distinguished_from_its_peers_beside_a_firewall(lab: Lab) -> None:
    """The firewall blocks node3 to node1, so the only measured traffic of node3 uses node2's slow link."""
    together(slow("node2", "100mbit"), firewalls("node1"))(lab)
    assert_alarms(run_doctor(lab, "--no-proof"), ("reach.pair", "node1"), ("link.slow", "node2"))


@pytest.mark.long
@pytest.mark.parametrize("link", ["1gbit", "none", "10mbit"])
def test_a_healthy_lab_has_no_alarm(link: str) -> None:
    with running_lab(3, link=link) as lab:
        assert_healthy(run_doctor(lab))


@pytest.mark.long
def test_the_command_for_users_without_root_opens_every_chain(lab: Lab, tmp_path: Path) -> None:
    """Without root the collector sees no rules; the command runs as root and finds the chains itself."""
    policy = "add chain ip filter INPUT { type filter hook input priority 0; policy drop; }"
    together(firewalls("node1"), sh("node1", f"nft 'add table ip filter; {policy}'"))(lab)
    assert_alarms(run_doctor(lab, "--no-proof"), ("reach.pair", "node1"))
    command = open_command({"tools": ["nft"], "chains": None}, "in", ["10.77.0.2", "10.77.0.3"])
    run_on(lab, "node1", command, tmp_path)
    assert_healthy(run_doctor(lab, "--no-proof"))


# Nodes that do not answer


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    [(Node.freeze, "node2 is frozen"), (Node.kill, "is not running")],
)
def test_a_frozen_or_dead_node_is_reported_and_restored(lab: Lab, change: Callable[[Node], None], words: str) -> None:
    change(lab.node("node2"))
    verdict = run_doctor(lab)
    assert_alarms(verdict, ("reach.host", "node2"))
    assert words in verdict.one("reach.host", "node2")["evidence"]
    run_here(verdict.one("reach.host", "node2")["fix"])
    assert_healthy(run_doctor(lab, "--no-proof"))


@pytest.mark.long
def test_a_node_that_freezes_during_the_check_is_reported(lab: Lab) -> None:
    """Its collector has started, never replies and does not end on request."""
    words = shoal("doctor", "--on", f"lab:{lab.name}", "--json")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        wait_until(lambda: any("doctor.collect" in command for _, command in lab.processes("node2")))
        lab.node("node2").freeze()
        try:
            # The verdict comes while the node is still frozen.
            printed, errors = running.communicate(timeout=60)
        finally:
            lab.node("node2").thaw()
    verdict = parse_verdict(subprocess.CompletedProcess(words, running.returncode, printed, errors))
    assert_alarms(verdict, ("reach.host", "node2"))
    assert "gave no answer" in verdict.one("reach.host", "node2")["evidence"]
    wait_until(lambda: lab.processes("node2") == [])


# Machines over SSH


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    need_tool("ssh")
    need_tool("sshd")
    with running_lab(2, sshd=True) as lab:
        yield Site(lab, tmp_path)


def over_ssh(site: Site, *hosts: str, words: tuple[str, ...] = ("--no-proof",), config: Path | None = None) -> Verdict:
    file = site.hosts_file(*hosts, config=config)
    return parse_verdict(site.run(*shoal("doctor", "--on", str(file), "--json", *words), timeout_s=100))


@pytest.mark.long
def test_healthy_machines_over_ssh_have_no_alarm(site: Site) -> None:
    assert_healthy(over_ssh(site, site.host("node1"), site.host("node2"), words=()))


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "check", "words"),
    [
        ('address = "10.77.0.9"', "interface.address", 'write address = "10.77.0.2" for it'),
        ('address = "172.17.0.1"', "interface.internal", 'write address = "10.77.0.2" for it'),
        ('address = "10.77.0.2"\ninterface = "docker0"', "interface.address", "leave the interface out"),
        ('address = "fd77::2"', "reach.family", "gloo cannot connect IPv4 with IPv6"),
    ],
)
def test_a_wrong_setting_in_a_hosts_file_is_reported(site: Site, settings: str, check: str, words: str) -> None:
    sh("node2", *DOCKER0, "ip addr add fd77::2/64 dev eth0 nodad")(site.lab)
    verdict = over_ssh(site, site.host("node1"), f"{site.host('node2')}\n{settings}")
    assert (check, "node2") in verdict.named
    assert words in verdict.one(check, "node2")["meaning"]
    assert all(finding["node"] == "node2" for finding in verdict.alarms)


@pytest.mark.long
def test_ipv6_addresses_are_checked(site: Site) -> None:
    """All checks run over IPv6 too, including full-size packets."""
    for number in (1, 2):
        sh(f"node{number}", f"ip addr add fd77::{number}/64 dev eth0 nodad")(site.lab)
    hosts = [site.host(f"node{number}", address=f"fd77::{number}") for number in (1, 2)]
    assert_healthy(over_ssh(site, *hosts))
    sh("node2", "ip link set dev eth0 mtu 1400")(site.lab)
    assert_alarms(over_ssh(site, *hosts), ("mtu.mismatch", "node2"))


@pytest.mark.long
def test_a_vpn_beside_a_direct_link_is_reported(site: Site) -> None:
    first, second = (int((site.lab.folder / f"node{number}.pid").read_text()) for number in (1, 2))
    subprocess.run(
        [*f"ip link add tailscale0 netns {first} type veth peer name tailscale0 netns {second}".split()], check=True
    )
    for number in (1, 2):
        sh(f"node{number}", f"ip addr add 100.64.0.{number}/24 dev tailscale0", "ip link set tailscale0 up")(site.lab)
    hosts = [site.host(f"node{number}", address=f"100.64.0.{number}") for number in (1, 2)]
    verdict = over_ssh(site, *hosts)
    assert_alarms(verdict, ("interface.wrong", "node1"), ("interface.wrong", "node2"))
    assert 'write address = "10.77.0.1" for node1 and "10.77.0.2" for node2' in verdict.alarms[0]["meaning"]


@pytest.mark.long
def test_a_first_node_that_blocks_the_store_port_is_reported_and_fixed(site: Site, tmp_path: Path) -> None:
    """gloo connects from node2 to node1; a script's ranks use the store of the first node in the file."""
    site.lab.node("node2").set_firewall("22")
    hosts = [site.host(f"node{number}") for number in (2, 1)]
    verdict = over_ssh(site, *hosts)
    assert_alarms(verdict, ("reach.store", "node2"))
    run_fixes(site.lab, verdict, tmp_path)
    assert_healthy(over_ssh(site, *hosts))


@pytest.mark.long
def test_a_host_without_an_ssh_server_is_reported(site: Site) -> None:
    config = site.config("Host node2\n  Port 2299\n")
    verdict = over_ssh(site, site.host("node1"), site.host("node2"), config=config)
    assert_alarms(verdict, ("reach.host", "node2"))
    assert "no SSH server answers" in verdict.one("reach.host", "node2")["evidence"]


@pytest.mark.long
def test_a_sleeping_host_is_reported_while_it_sleeps(site: Site) -> None:
    hosts = site.host("node1"), site.host("node2")
    site.lab.node("node2").freeze()
    try:
        # It ends while the host is still frozen.
        verdict = over_ssh(site, *hosts)
    finally:
        site.lab.node("node2").thaw()
    assert_alarms(verdict, ("reach.host", "node2"))
