"""Faults of the network, made on purpose in a real lab: doctor names each, and its command cures it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shoal.cluster.lab import lab as lab_lab
from shoal.cluster.lab.lab import Lab
from shoal.cluster.lab.spec import LabLink
from shoal.tools.doctor.checks.reach import open_command
from tests.integration.cluster.test_hosts_ssh import Site
from tests.integration.cluster.test_lab_nodes import said, wait_for
from tests.support.doctor import Verdict, assert_healthy, assert_sick, doctor, follow, run_here, run_on, verdict
from tests.support.labs import shoal, standing_lab
from tests.support.needs import need_tool

Inject = Callable[[Lab], None]


@dataclass(frozen=True)
class Fault:
    """`expected` are the findings, by check and node. `cured`: their commands cure it, at once or in `settles_s`."""

    inject: Inject
    expected: tuple[tuple[str, str], ...]
    cured: bool = True
    settles_s: float = 0.0


def sh(node: str, *commands: str) -> Inject:
    def inject(lab: Lab) -> None:
        said(lab, node, "sh", "-ec", "; ".join(commands))

    return inject


def cut(one: str, other: str, one_way: bool) -> Inject:
    return lambda lab: lab.perform(lab_lab.cut_off(one, other, one_way))


def firewalls(*nodes: str) -> Inject:
    def inject(lab: Lab) -> None:
        for node in nodes:
            lab.perform(lab_lab.set_firewall(node, ()))

    return inject


def slow(node: str, rate_bps: float) -> Inject:
    def change(before: LabLink) -> LabLink:
        return before.model_copy(update={"rate_bps": rate_bps})

    return lambda lab: lab.perform(lab_lab.set_link(node, change))


def together(*injections: Inject) -> Inject:
    def inject(lab: Lab) -> None:
        for each in injections:
            each(lab)

    return inject


def rule(hook: str, words: str) -> str:
    chain = f"add chain inet home {hook} {{ type filter hook {hook} priority 0; }}"
    return f"nft 'add table inet home; {chain}; add rule inet home {hook} {words}'"


DOCKER0 = ("ip link add docker0 type bridge", "ip addr add 172.17.0.1/16 dev docker0", "ip link set docker0 up")
# /etc/hosts is one file for all nodes; this one gets its own.
OWN_NAMES = (
    "sed s/^10.77.0.2/172.17.0.1/ /etc/hosts > /run/names",
    "mount -t tmpfs names /mnt",
    "cp /run/names /mnt",
    "rm /run/names",
    "mount --bind /mnt/names /etc/hosts",
)

FAULTS = {
    "the lower address hears nothing from a higher one": Fault(
        cut("node2", "node1", one_way=True), (("reach.pair", "node1"),)
    ),
    "the higher address hears nothing, not even answers": Fault(
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
    "a tenth of the speed": Fault(slow("node2", 100e6), (("link.slow", "node2"),), cured=False),
    "a name that means docker0": Fault(sh("node2", *DOCKER0, *OWN_NAMES), (("interface.internal", "node2"),)),
    "one address twice": Fault(
        sh("node3", "ip addr add 10.77.0.2/24 dev eth0"), (("reach.duplicate-address", "node3"),)
    ),
    # The kernel asks three times whether the wrong card is still there before it looks for another one.
    "somebody else's address": Fault(
        sh("node3", "ip addr flush dev eth0", "ip addr add 10.77.0.2/24 dev eth0"),
        (("reach.duplicate-address", "node3"), ("interface.address", "node3")),
        settles_s=20.0,
    ),
    "another address first": Fault(
        sh("node2", "ip addr flush dev eth0", *(f"ip addr add {net}.0.2/24 dev eth0" for net in ("10.11", "10.77"))),
        (("interface.first", "node2"),),
    ),
    "an interface switched off": Fault(sh("node2", "ip link set dev eth0 down"), (("interface.down", "node2"),)),
    "a cable pulled": Fault(sh("switch", "ip link set dev node2 down"), (("interface.down", "node2"),), cured=False),
}
QUICK = ("a smaller MTU on one side",)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with standing_lab(3) as found:
        yield found


def examined(lab: Lab, fault: Fault, folder: Path, *words: str) -> None:
    fault.inject(lab)
    found = doctor(lab, *words)
    assert_sick(found, *fault.expected)
    assert fault.cured == any(finding["fix"] for finding in found.alarms)
    if fault.cured:
        follow(lab, found, folder)
        again, until = doctor(lab, *words), time.monotonic() + fault.settles_s
        while again.alarms and time.monotonic() < until:
            again = doctor(lab, *words)
        assert_healthy(again)


@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_named_and_its_command_cures_it(lab: Lab, name: str, tmp_path: Path) -> None:
    examined(lab, FAULTS[name], tmp_path, "--no-proof")


REST = sorted(FAULTS.keys() - set(QUICK))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if number % 3 else pytest.mark.long)
        for number, name in enumerate(REST)
    ],
)
def test_every_fault_is_named_and_its_command_cures_it(lab: Lab, name: str, tmp_path: Path) -> None:
    examined(lab, FAULTS[name], tmp_path)


@pytest.mark.long
def test_a_firewall_on_the_highest_address_is_no_fault(lab: Lab) -> None:
    """gloo and our agents dial from there; and what a container engine brings along leads nobody astray."""
    together(firewalls("node3"), sh("node2", *DOCKER0))(lab)
    found = doctor(lab)
    assert_healthy(found)
    assert found.said["proved"]
    assert "node1 → node3" in found.one("reach.other-way", "node3")["evidence"]
    assert found.one("reach.other-way", "node3")["fix"] == ""


@pytest.mark.long
def test_a_slow_link_is_told_from_its_peers_beside_a_firewall(lab: Lab) -> None:
    """The firewall hides what node3 sends to node1, so that all it is seen to send goes over node2's slow link."""
    together(slow("node2", 100e6), firewalls("node1"))(lab)
    assert_sick(doctor(lab, "--no-proof"), ("reach.pair", "node1"), ("link.slow", "node2"))


@pytest.mark.long
@pytest.mark.parametrize("link", ["1gbit", "none", "10mbit"])
def test_a_healthy_lab(link: str) -> None:
    with standing_lab(3, link=link) as lab:
        assert_healthy(doctor(lab))


@pytest.mark.long
def test_the_command_for_those_who_may_not_look_finds_every_chain(lab: Lab, tmp_path: Path) -> None:
    """Without root the collector sees no rules; the command is run with it, and looks by itself."""
    policy = "add chain ip filter INPUT { type filter hook input priority 0; policy drop; }"
    together(firewalls("node1"), sh("node1", f"nft 'add table ip filter; {policy}'"))(lab)
    assert_sick(doctor(lab, "--no-proof"), ("reach.pair", "node1"))
    command = open_command({"tools": ["nft"], "chains": None}, "in", ["10.77.0.2", "10.77.0.3"])
    run_on(lab, "node1", command, tmp_path)
    assert_healthy(doctor(lab, "--no-proof"))


# Nodes that are not there


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lab_lab.set_frozen("node2", frozen=True), "node2 is frozen"),
        (lab_lab.kill_node("node2", silent=False), "is not running"),
    ],
)
def test_a_node_that_is_away(lab: Lab, change: lab_lab.Change, words: str) -> None:
    lab.perform(change)
    found = doctor(lab)
    assert_sick(found, ("reach.host", "node2"))
    assert words in found.one("reach.host", "node2")["evidence"]
    run_here(found.one("reach.host", "node2")["fix"])
    assert_healthy(doctor(lab, "--no-proof"))


@pytest.mark.long
def test_a_node_that_freezes_meanwhile(lab: Lab) -> None:
    """Its collector has been started and never answers, nor does it end when it is told to."""
    words = shoal("doctor", "--on", f"lab:{lab.name}", "--json")
    began = time.monotonic()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        wait_for(lambda: any("doctor.collect" in command for _, command in lab.processes("node2")))
        lab.perform(lab_lab.set_frozen("node2", frozen=True))
        try:
            printed, errors = running.communicate(timeout=60)
            took_s = time.monotonic() - began
        finally:
            lab.perform(lab_lab.set_frozen("node2", frozen=False))
    found = verdict(subprocess.CompletedProcess(words, running.returncode, printed, errors))
    assert_sick(found, ("reach.host", "node2"))
    assert "gave no answer" in found.one("reach.host", "node2")["evidence"]
    assert took_s < 25, "its deadlines, and what a start takes"
    wait_for(lambda: lab.processes("node2") == [])


# Machines over SSH


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    need_tool("ssh")
    need_tool("sshd")
    with standing_lab(2, sshd=True) as lab:
        yield Site(lab, tmp_path)


def over_ssh(site: Site, *hosts: str, words: tuple[str, ...] = ("--no-proof",), config: Path | None = None) -> Verdict:
    file = site.hosts_file(*hosts, config=config)
    return verdict(site.run(*shoal("doctor", "--on", str(file), "--json", *words), timeout_s=100))


@pytest.mark.long
def test_healthy_machines_over_ssh(site: Site) -> None:
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
def test_a_wrong_word_in_a_hosts_file(site: Site, settings: str, check: str, words: str) -> None:
    sh("node2", *DOCKER0, "ip addr add fd77::2/64 dev eth0 nodad")(site.lab)
    found = over_ssh(site, site.host("node1"), f"{site.host('node2')}\n{settings}")
    assert (check, "node2") in found.named
    assert words in found.one(check, "node2")["meaning"]
    assert all(finding["node"] == "node2" for finding in found.alarms)


@pytest.mark.long
def test_addresses_of_the_other_family(site: Site) -> None:
    """Everything is tried over IPv6 as well, packets of full size too."""
    for number in (1, 2):
        sh(f"node{number}", f"ip addr add fd77::{number}/64 dev eth0 nodad")(site.lab)
    hosts = [site.host(f"node{number}", address=f"fd77::{number}") for number in (1, 2)]
    assert_healthy(over_ssh(site, *hosts))
    sh("node2", "ip link set dev eth0 mtu 1400")(site.lab)
    assert_sick(over_ssh(site, *hosts), ("mtu.mismatch", "node2"))


@pytest.mark.long
def test_a_detour_beside_a_cable(site: Site) -> None:
    first, second = (int((site.lab.folder / f"node{number}.pid").read_text()) for number in (1, 2))
    subprocess.run(
        [*f"ip link add tailscale0 netns {first} type veth peer name tailscale0 netns {second}".split()], check=True
    )
    for number in (1, 2):
        sh(f"node{number}", f"ip addr add 100.64.0.{number}/24 dev tailscale0", "ip link set tailscale0 up")(site.lab)
    hosts = [site.host(f"node{number}", address=f"100.64.0.{number}") for number in (1, 2)]
    found = over_ssh(site, *hosts)
    assert_sick(found, ("interface.wrong", "node1"), ("interface.wrong", "node2"))
    assert 'write address = "10.77.0.1" for node1 and "10.77.0.2" for node2' in found.alarms[0]["meaning"]


@pytest.mark.long
def test_the_first_node_shut_to_those_who_would_meet_there(site: Site, tmp_path: Path) -> None:
    """gloo dials from node2 to node1; a script's ranks meet at the node that the file names first."""
    site.lab.perform(lab_lab.set_firewall("node2", ("22",)))
    hosts = [site.host(f"node{number}") for number in (2, 1)]
    found = over_ssh(site, *hosts)
    assert_sick(found, ("reach.store", "node2"))
    follow(site.lab, found, tmp_path)
    assert_healthy(over_ssh(site, *hosts))


@pytest.mark.long
def test_a_host_without_a_server(site: Site) -> None:
    config = site.config("Host node2\n  Port 2299\n")
    found = over_ssh(site, site.host("node1"), site.host("node2"), config=config)
    assert_sick(found, ("reach.host", "node2"))
    assert "no SSH server answers" in found.one("reach.host", "node2")["evidence"]


@pytest.mark.long
def test_a_host_that_sleeps(site: Site) -> None:
    hosts = site.host("node1"), site.host("node2")
    site.lab.perform(lab_lab.set_frozen("node2", frozen=True))
    began = time.monotonic()
    try:
        found = over_ssh(site, *hosts)
    finally:
        site.lab.perform(lab_lab.set_frozen("node2", frozen=False))
    assert_sick(found, ("reach.host", "node2"))
    assert time.monotonic() - began < 30, "the stated seconds, and what a start takes"
