"""Doctor's findings about the network, from collected facts and trials."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from shoal.errors import ControlError
from shoal.tools.doctor.checks import check_proof, judge, network, reach
from shoal.tools.doctor.checks.reach import open_command
from shoal.tools.doctor.facts import ClusterFacts, Finding, Severity, SlowLinks, Trial, slow_links
from shoal.tools.doctor.run import circles_of, sizes_between
from tests.support.cluster_facts import ADDRESSES, CHAIN, Facts, found, healthy, interface, lost, tried, with_interfaces


@pytest.mark.parametrize("addresses", [ADDRESSES, ADDRESSES[:2], ADDRESSES[:1], ["fd00::1", "fd00::2"]])
def test_a_healthy_cluster_has_no_findings(addresses: list[str]) -> None:
    assert judge(healthy(addresses)) == []


def test_an_unreachable_node_is_reported_with_its_own_error() -> None:
    scene = healthy()
    del scene.facts["node2"]
    away = ControlError("node2 gave no answer", why="it sleeps", fix="wake it")
    (finding,) = judge(replace(scene, trials=[], unreached={"node2": away}))
    assert (finding.id, finding.node, finding.evidence, finding.fix) == ("reach.host", "node2", away.seen, away.fix)


# Reach


def test_the_node_that_drops_packets_is_found_by_single_packets() -> None:
    shut = tried(healthy(), *lost("node2", "node1", "tcp", "udp"), Trial("node1", "node2", "answer", "ok"))
    (finding,) = reach.check_pairs(shut)
    assert (finding.id, finding.severity, finding.node) == ("reach.pair", Severity.ERROR, "node1")
    assert finding.fix == "sudo nft insert rule inet home input ip saddr 10.0.0.2 accept"
    assert "ip_local_port_range" in finding.meaning
    assert "GLOO_PORT_RANGE" not in finding.meaning
    assert "node2 → node1" in finding.evidence


def test_a_lost_answer_blames_the_node_that_does_not_receive_it() -> None:
    both = tried(healthy(), *lost("node2", "node1", "tcp"), *lost("node1", "node2", "tcp", "udp", "answer"))
    (finding,) = reach.check_pairs(tried(both, Trial("node2", "node1", "answer", "ok")))
    assert (finding.id, finding.node) == ("reach.pair", "node2")
    assert finding.fix.endswith("ip saddr 10.0.0.1 accept")
    assert "node2 receives nothing from node1" in finding.meaning


def test_one_finding_and_one_command_for_all_peers_of_a_node() -> None:
    shut = [trial for peer in ("node2", "node3") for trial in lost(peer, "node1", "tcp", "udp")]
    (finding,) = reach.check_pairs(tried(healthy(), *shut))
    assert finding.fix == "sudo nft insert rule inet home input ip saddr { 10.0.0.2, 10.0.0.3 } accept"


def test_a_blocked_direction_that_is_never_dialled_is_not_a_fault() -> None:
    scene = tried(healthy(), *lost("node1", "node3", "tcp", "udp"))
    assert found(reach.check_pairs, scene) == [("reach.other-way", "info", "node3")]
    assert found(reach.check_store, scene) == []


def test_the_address_decides_which_node_dials_not_the_order_of_nodes() -> None:
    scene = healthy(["10.0.0.20", "10.0.0.3"])
    assert found(reach.check_pairs, tried(scene, *lost("node1", "node2", "tcp", "udp"))) == [
        ("reach.pair", "error", "node2")
    ]
    other_way = tried(scene, *lost("node2", "node1", "tcp", "udp"))
    assert found(reach.check_pairs, other_way) == [("reach.other-way", "info", "node1")]
    assert found(reach.check_store, other_way) == [("reach.store", "warning", "node1")]


def test_the_requested_port_counts_for_the_store() -> None:
    scene = healthy(["10.0.0.20", "10.0.0.3"])
    opened = tried(scene, *lost("node2", "node1", "tcp", "udp"), Trial("node2", "node1", "store", "ok"))
    assert found(reach.check_store, opened) == []
    shut = tried(scene, Trial("node2", "node1", "store", "refused", "refused"))
    assert found(reach.check_store, shut) == [("reach.store", "warning", "node1")]


@pytest.mark.parametrize(
    ("outcome", "node", "words"),
    [("unreachable", "node1", "not on the same network"), ("no-route", "node2", "no way to node1")],
)
def test_unreachable_networks_and_missing_routes_are_not_blamed_on_firewalls(
    outcome: str, node: str, words: str
) -> None:
    (finding,) = reach.check_pairs(tried(healthy(), Trial("node2", "node1", "tcp", outcome, "said so")))
    assert (finding.id, finding.severity, finding.node, finding.fix) == ("reach.pair", Severity.ERROR, node, "")
    assert words in finding.meaning


def test_a_node_that_blocks_outgoing_packets_is_named() -> None:
    scene = healthy()
    scene.facts["node2"]["network"]["firewall"]["chains"] = [{**CHAIN, "name": "output", "hook": "output"}]
    scene = tried(scene, *lost("node2", "node1", "tcp"), Trial("node2", "node1", "udp", "forbidden", "not permitted"))
    (finding,) = reach.check_pairs(scene)
    assert (finding.node, finding.fix) == ("node2", "sudo nft insert rule inet home output ip daddr 10.0.0.1 accept")


def test_a_node_of_another_address_family_is_named() -> None:
    assert found(reach.check_family, healthy(["10.0.0.1", "fd00::2", "10.0.0.3"])) == [
        ("reach.family", "error", "node2")
    ]
    assert found(reach.check_family, healthy(["fd00::1", "10.0.0.2", "fd00::3"])) == [
        ("reach.family", "error", "node2")
    ]


@pytest.mark.parametrize(
    ("wall", "way", "command"),
    [
        ({"ufw": True}, "in", "sudo ufw allow from 10.0.0.2 && sudo ufw allow from 10.0.0.3"),
        ({"ufw": True}, "out", "sudo ufw allow out to 10.0.0.2 && sudo ufw allow out to 10.0.0.3"),
        ({"firewalld": True, "chains": None}, "in", "sudo firewall-cmd --zone=trusted --add-source=10.0.0.2 && sudo "),
        ({"chains": [CHAIN]}, "in", "sudo nft insert rule inet home input ip saddr { 10.0.0.2, 10.0.0.3 } accept"),
        ({"chains": [CHAIN]}, "out", ""),
        ({"chains": []}, "in", ""),
        ({"tools": ["iptables"]}, "in", "sudo iptables -I INPUT -s 10.0.0.2 -j ACCEPT && "),
        ({"tools": ["iptables"]}, "out", "sudo iptables -I OUTPUT -d 10.0.0.2 -j ACCEPT && "),
        ({"tools": ["nft"], "chains": None}, "in", "sudo sh -c 'for family in inet ip; do nft list chains"),
        ({}, "in", ""),
    ],
)
def test_the_command_is_for_the_installed_firewall(wall: Facts, way: str, command: str) -> None:
    printed = open_command(wall, way, ["10.0.0.2", "10.0.0.3"])
    assert printed.startswith(command)
    assert bool(printed) == bool(command)


def test_ipv6_addresses_get_ipv6_commands() -> None:
    assert (
        open_command({"chains": [CHAIN]}, "in", ["fd00::2"])
        == "sudo nft insert rule inet home input ip6 saddr fd00::2 accept"
    )
    assert open_command({"tools": ["iptables"]}, "in", ["fd00::2"]) == "sudo ip6tables -I INPUT -s fd00::2 -j ACCEPT"


# Addresses


def test_two_nodes_with_one_address_are_named_with_the_one_that_answers() -> None:
    twin = interface("10.0.0.3/24", "10.0.0.2/24")
    scene = with_interfaces("node3", eth0=twin)
    scene = tried(scene, Trial("node1", "node2", "tcp", "refused", "refused", mac=twin["mac"]))
    (finding,) = judge(scene)
    assert (finding.id, finding.node) == ("reach.duplicate-address", "node3")
    assert "to node1 it is node3 that answers" in finding.evidence
    assert finding.fix == "sudo ip addr del 10.0.0.2/24 dev eth0 && sudo ip addr replace 10.0.0.3/24 dev eth0"


def test_an_answer_from_another_machine_is_a_duplicate_address() -> None:
    (finding,) = reach.check_duplicates(
        tried(healthy(), Trial("node2", "node1", "tcp", "other-machine", "was answered by fridge"))
    )
    assert (finding.id, finding.node) == ("reach.duplicate-address", "node1")
    assert "answered by fridge" in finding.evidence


def test_an_address_that_the_node_lacks_is_named() -> None:
    (finding,) = judge(with_interfaces("node2", eth0=interface("10.0.0.7/24")))
    assert (finding.id, finding.severity, finding.node) == ("interface.address", Severity.ERROR, "node2")
    assert "10.0.0.7/24 on eth0" in finding.evidence
    assert 'write address = "10.0.0.7" for it' in finding.meaning


def test_a_loopback_address_is_named_with_the_right_one() -> None:
    scene = healthy(["10.0.0.1", "127.0.0.1"])
    scene.facts["node2"]["network"]["interfaces"]["eth0"] = interface("10.0.0.2/24")
    scene = replace(scene, nodes=[scene.nodes[0], replace(scene.nodes[1], interface=None)])
    (finding,) = judge(tried(scene, *lost("node1", "node2", "tcp", "udp")))
    assert (finding.id, finding.severity, finding.node) == ("interface.address", Severity.ERROR, "node2")
    assert 'write address = "10.0.0.2" for it' in finding.meaning


def test_a_docker_address_is_named_with_the_right_one() -> None:
    scene = healthy(["10.0.0.1", "172.17.0.1"])
    docker = interface("172.17.0.1/16", kind="docker")
    for name in ("node1", "node2"):
        scene.facts[name]["network"]["interfaces"] = {"eth0": interface(f"10.0.0.{name[-1]}/24"), "docker0": docker}
    scene = replace(scene, nodes=[scene.nodes[0], replace(scene.nodes[1], interface=None)])
    (finding,) = judge(tried(scene, *lost("node2", "node1", "tcp", "udp"), *lost("node1", "node2", "tcp", "udp")))
    assert (finding.id, finding.severity, finding.node) == ("interface.internal", Severity.ERROR, "node2")
    assert 'write address = "10.0.0.2" for it' in finding.meaning


def test_a_host_name_that_means_a_docker_network_is_named() -> None:
    scene = with_interfaces("node2", docker0=interface("172.17.0.1/16", kind="docker"))
    assert judge(scene) == [], "its existence is not a fault"
    scene.facts["node2"]["network"]["hosts_file"] = ["172.17.0.1"]
    (finding,) = judge(scene)
    assert (finding.id, finding.severity, finding.node) == ("interface.internal", Severity.WARNING, "node2")
    assert r"s/^172\.17\.0\.1[[:space:]]/10.0.0.2 /" in finding.fix


@pytest.mark.parametrize(("change", "fix"), [({"up": False}, "sudo ip link set dev eth0 up"), ({"carrier": False}, "")])
def test_an_interface_that_is_down_or_unplugged_is_named(change: Facts, fix: str) -> None:
    (finding,) = judge(with_interfaces("node2", eth0=interface("10.0.0.2/24", **change)))
    assert (finding.id, finding.node, finding.fix) == ("interface.down", "node2", fix)


def test_gloo_publishes_the_first_address_of_an_interface() -> None:
    scene = with_interfaces("node2", eth0=interface("9.0.0.2/24", "10.0.0.2/24"))
    assert next((one.name, other.name) for one, other in scene.pairs()) == ("node1", "node2"), (
        "node2 has the lower address now"
    )
    assert found(network.check_published, scene) == [], "the others may reach it there"
    (finding,) = network.check_published(tried(scene, Trial("node1", "node2", "gloo", "no-route", "no way")))
    assert (finding.id, finding.node) == ("interface.first", "node2")
    assert finding.fix == "sudo ip addr del 9.0.0.2/24 dev eth0 && sudo ip addr add 9.0.0.2/24 dev eth0"


@pytest.mark.parametrize("kind", ["vpn", "tailscale", "wifi", "bridge", "docker"])
def test_a_route_that_avoids_a_working_cable_is_named(kind: str) -> None:
    scene = with_interfaces("node2", way0=interface("100.64.0.2/10", kind=kind))
    assert found(network.check_detours, scene) == [], "no route uses it"
    for route in scene.facts["node2"]["network"]["routes"].values():
        route["interface"] = "way0"
    assert found(network.check_detours, scene) == [], "no trial used the cable"
    (cable, _) = network.unused_cables(scene)
    assert (cable.peer, cable.name, cable.address, cable.peer_address) == ("node1", "eth0", "10.0.0.2", "10.0.0.1")
    other_machine = tried(scene, Trial("node2", "node1", "cable", "other-machine"))
    assert found(network.check_detours, other_machine) == [], "another site with the same network"
    scene = tried(scene, *(Trial("node2", peer, "cable", "ok") for peer in ("node1", "node3")))
    assert found(network.check_detours, scene) == [("interface.wrong", "warning", "node2")]
    scene.facts["node2"]["network"]["interfaces"]["eth0"]["carrier"] = False
    assert found(network.check_detours, scene) == [], "there is no better interface"


# Packets


def too_big(source: str, target: str, passes: float, size: float = 1500.0, **more: float) -> Trial:
    return Trial(source, target, "full", "lost", numbers={"size": size, "passes": passes, **more})


def sized(**mtus: int) -> ClusterFacts:
    scene = healthy()
    for name, size in mtus.items():
        scene.facts[name]["network"]["interfaces"]["eth0"]["mtu"] = size
    return scene


def test_a_deviating_mtu_is_corrected_on_its_node() -> None:
    scene = tried(sized(node2=1400), too_big("node1", "node2", 1404), too_big("node3", "node2", 1404))
    (finding,) = network.check_mtu(scene)
    assert (finding.id, finding.severity, finding.node) == ("mtu.mismatch", Severity.WARNING, "node2")
    assert finding.fix == "sudo ip link set dev eth0 mtu 1500"
    assert "up to 1404 bytes arrive" in finding.evidence


def test_a_deviating_mtu_without_loss_is_only_a_remark() -> None:
    assert found(network.check_mtu, sized(node2=1400)) == [("mtu.mismatch", "info", "node2")]


def test_of_two_nodes_the_unusual_mtu_deviates() -> None:
    scene = healthy(ADDRESSES[:2])
    scene.facts["node1"]["network"]["interfaces"]["eth0"]["mtu"] = 9000
    scene = tried(scene, too_big("node1", "node2", 1500, 9000))
    (finding,) = network.check_mtu(scene)
    assert (finding.node, finding.fix) == ("node1", "sudo ip link set dev eth0 mtu 1500")


def test_large_packets_lost_between_equal_mtus_blame_the_path() -> None:
    scene = tried(healthy(), too_big("node1", "node2", 1400), too_big("node2", "node1", 1404))
    findings = list(network.check_mtu(scene))
    assert {(finding.id, finding.severity, finding.fix) for finding in findings[:2]} == {
        ("mtu.path", Severity.ERROR, "sudo ip link set dev eth0 mtu 1400")
    }
    assert [finding.node for finding in findings] == ["node1", "node2", "node3"]


def test_a_path_mtu_known_to_the_kernel_is_not_a_fault() -> None:
    assert found(network.check_mtu, tried(healthy(), too_big("node1", "node2", 1400, path_mtu=1400.0))) == []


@pytest.mark.parametrize(("low", "high"), [(128, 1500), (128, 9000), (1499, 1500), (1400, 1404), (128, 130)])
def test_the_largest_packet_size_is_found_in_few_rounds(low: int, high: int) -> None:
    for truth in {low, (low + high) // 2, high - 1}:
        bottom, top, rounds = low, high, 0
        while top - bottom > 1:
            tries = sizes_between(bottom, top)
            assert tries
            assert all(bottom < size < top for size in tries)
            bottom = max([bottom, *(size for size in tries if size <= truth)])
            top = min(size for size in (*tries, top) if size > bottom)
            rounds += 1
        assert bottom == truth
        assert rounds <= 4


# Speed


def rates(scene: ClusterFacts, **mbps: float) -> ClusterFacts:
    """Give the bursts the rates of these links."""
    bursts = [trial for trial in scene.trials if trial.kind == "burst"]
    return tried(
        scene,
        *(
            replace(burst, numbers={"mbps": min(mbps.get(burst.source, 940), mbps.get(burst.target, 940))})
            for burst in bursts
        ),
    )


def test_the_slow_link_is_that_of_the_node_slow_with_all_others() -> None:
    (finding,) = network.check_links(rates(healthy(), node2=95.0))
    assert (finding.id, finding.severity, finding.node) == ("link.slow", Severity.WARNING, "node2")
    assert "95 Mbit/s" in finding.evidence
    assert "940" in finding.evidence


def test_differences_that_a_short_burst_cannot_show_are_not_reported() -> None:
    assert found(network.check_links, rates(healthy(), node1=12_000.0, node2=3_000.0, node3=12_000.0)) == []
    assert found(network.check_links, rates(healthy(), node2=600.0)) == []
    assert found(network.check_links, rates(healthy(ADDRESSES[:2]), node2=9.0)) == [], (
        "the speed of their cards is unknown"
    )


def test_two_nodes_are_compared_with_the_speed_of_their_cards() -> None:
    scene = rates(healthy(ADDRESSES[:2]), node2=95.0)
    for name in ("node1", "node2"):
        scene.facts[name]["network"]["interfaces"]["eth0"]["speed_mbps"] = 1000
    (finding,) = network.check_links(scene)
    assert (finding.id, finding.severity, finding.node) == ("link.slow", Severity.WARNING, ""), "either may be to blame"
    assert finding.evidence.startswith("node1 and node2: 95 Mbit/s")


Pairs = Set[tuple[str, str]]


def names_of(count: int) -> list[str]:
    return [f"node{number + 1}" for number in range(count)]


def bursts(count: int, mbps: dict[str, float], shut: Pairs = frozenset()) -> list[Trial]:
    """Make the bursts of links with these rates in Mbit/s; others have 940. `node1.out` is one direction only."""

    def rate(name: str, way: str) -> float:
        return mbps.get(f"{name}.{way}", mbps.get(name, 940.0))

    return [
        Trial(one, other, "burst", "ok", numbers={"mbps": min(rate(one, "out"), rate(other, "in"))})
        for one, other in permutations(names_of(count), 2)
        if (one, other) not in shut
    ]


def into(count: int, *walled: str) -> Pairs:
    """List the directions that firewalls on these nodes block."""
    return {(one, other) for one, other in permutations(names_of(count), 2) if other in walled}


@pytest.mark.parametrize("count", [3, 4, 5])
@pytest.mark.parametrize("way", ["", ".in", ".out"])
def test_the_slow_node_is_named_whichever_node_has_a_firewall(count: int, way: str) -> None:
    for slow in names_of(count):
        assert slow_links(bursts(count, {slow + way: 95.0})).slow == {slow: 95.0}
        for walled in names_of(count):
            seen = slow_links(bursts(count, {slow + way: 95.0}, into(count, walled)))
            hidden = way == ".in" and slow == walled
            assert (seen.slow, seen.suspects) == ({} if hidden else {slow: 95.0}, {}), (slow, walled)


def test_a_fast_node_is_never_named_as_slow_whatever_is_unmeasured() -> None:
    """For every slow node and every set of blocked directions the slow one is named, suspected, or not visible."""
    ways = list(permutations(names_of(3), 2))
    undecided = 0
    for slow in names_of(3):
        for shut in (set(some) for size in range(7) for some in combinations(ways, size)):
            trials = bursts(3, {slow: 95.0}, shut)
            seen = slow_links(trials)
            assert seen.slow.keys() <= {slow}, shut
            mixed = len({trial.numbers["mbps"] for trial in trials}) > 1
            nodes = {name for trial in trials for name in (trial.source, trial.target)}
            assert (slow in seen.named) == (mixed and len(nodes) == 3), shut
            undecided += bool(seen.suspects)
    assert undecided, "some cases cannot be decided"


def test_several_slow_nodes_are_named() -> None:
    for some in combinations(names_of(5), 2):
        assert slow_links(bursts(5, dict.fromkeys(some, 95.0))).slow == dict.fromkeys(some, 95.0)
    assert slow_links(bursts(4, {"node1": 95.0, "node3": 95.0})).slow.keys() == {"node1", "node3"}
    assert slow_links(bursts(3, {"node1": 95.0, "node3": 95.0})) == SlowLinks(fast_mbps=95.0), "all pairs are alike"


def test_a_pair_that_is_slow_between_two_fast_nodes_blames_neither() -> None:
    trials = [
        replace(trial, numbers={"mbps": 95.0}) if trial.source == "node1" and trial.target == "node2" else trial
        for trial in bursts(3, {})
    ]
    assert slow_links(trials).named == set()


def test_undecided_candidates_are_named_with_the_missing_directions() -> None:
    """From 1 → 2 and 3 → 2 it follows that node1 is slow. With only 1 → 2 and 3 → 1 it may be either."""
    ways = set(permutations(names_of(3), 2))
    assert slow_links(bursts(3, {"node1": 95.0}, ways - {("node1", "node2"), ("node3", "node2")})).slow.keys() == {
        "node1"
    }
    shut = ways - {("node1", "node2"), ("node3", "node1")}
    scene = rates(healthy(), node2=95.0)
    trials = [trial for trial in scene.trials if trial.kind != "burst" or (trial.source, trial.target) not in shut]
    scene = tried(replace(scene, trials=trials), *(trial for way in sorted(shut) for trial in lost(*way, "tcp")))
    (finding,) = network.check_links(scene)
    assert (finding.id, finding.severity, finding.node) == ("link.slow", Severity.WARNING, "")
    assert finding.evidence == "node1 or node2: node1 95, node2 95 Mbit/s in a short burst, other pairs 940"
    assert "cannot be told, because there is no connection node1 → node3, " in finding.meaning
    assert "open those first" in finding.meaning


def test_every_pair_of_a_few_nodes_is_measured() -> None:
    nodes = healthy([f"10.0.0.{number}" for number in range(1, 8)]).nodes
    for count in range(2, 8):
        circles = circles_of(nodes[:count])
        assert all(len({pair[end].name for pair in circle}) == len(circle) for circle in circles for end in (0, 1))
        measured = [(one.name, other.name) for circle in circles for one, other in circle]
        assert len(measured) == len(set(measured)) == count * min(count - 1, 4)


@pytest.mark.parametrize(
    ("card", "severity", "fix"),
    [
        ({"speed_mbps": 100, "best_mbps": 1000, "partner_mbps": 1000}, "warning", "sudo ethtool -s eth0 autoneg on"),
        ({"speed_mbps": 100, "best_mbps": 1000}, "warning", "sudo ethtool -s eth0 autoneg on"),
        ({"speed_mbps": 100, "best_mbps": 1000, "partner_mbps": 100}, "warning", ""),
        ({"speed_mbps": 1000, "best_mbps": 1000, "duplex": "half"}, "warning", "sudo ethtool -s eth0 autoneg on"),
        ({"speed_mbps": 1000, "best_mbps": 2500, "partner_mbps": 1000}, "info", ""),
        ({"speed_mbps": 1000, "best_mbps": 2500}, "info", ""),
        ({"speed_mbps": 1000, "best_mbps": 1000, "duplex": "full"}, None, ""),
        ({"duplex": ""}, None, ""),
    ],
)
def test_a_card_below_its_best_speed_is_named(card: Facts, severity: str | None, fix: str) -> None:
    scene = with_interfaces("node2", eth0=interface("10.0.0.2/24", **card))
    expected = [] if severity is None else [("interface.slow", severity, "node2", fix)]
    assert [
        (finding.id, finding.severity.value, finding.node, finding.fix) for finding in network.check_cards(scene)
    ] == expected


def test_wifi_power_saving_is_named() -> None:
    scene = with_interfaces("node2", eth0=interface("10.0.0.2/24", kind="wifi", power_save=True))
    (finding,) = network.check_power_save(scene)
    assert (finding.id, finding.node, finding.fix) == ("wifi.powersave", "node2", "sudo iw dev eth0 set power_save off")


# Proof


def proof(*members: int, node: str = "node1", detail: str = "Connect timeout") -> Facts:
    return {"ok": not detail, "detail": detail, "members": list(members), "node": node}


def judge_proof(cluster: ClusterFacts, proofs: list[Facts], error: ControlError | None) -> list[Finding]:
    return list(check_proof(replace(cluster, proofs=proofs, proof_error=error)))


def test_a_pair_for_which_gloo_fails_is_reported_once_with_its_direction() -> None:
    scene = tried(healthy(), Trial("node3", "node1", "tcp", "ok", "10.0.0.1:5 was answered by node1"))
    proofs = [proof(0, 1, detail=""), proof(0, 2), proof(0, 2, node="node3"), proof(0, 1, 2)]
    (finding,) = judge_proof(scene, proofs, ControlError("a rank failed"))
    assert (finding.id, finding.node) == ("proof.gloo", "node1")
    assert finding.meaning.startswith("node3 dials node1")
    assert "10.0.0.1:5 was answered by node1" in finding.meaning


def test_ranks_are_named_by_their_node() -> None:
    scene = healthy()
    scene = replace(scene, nodes=[replace(node, slots=2) for node in scene.nodes])
    (finding,) = judge_proof(scene, [proof(1, 4)], None)
    assert "node3 dials node1" in finding.meaning


def test_a_group_that_fails_although_every_pair_works_is_reported() -> None:
    (finding,) = judge_proof(healthy(), [proof(0, 1, detail=""), proof(0, 1, 2, detail="wrong sum")], None)
    assert (finding.id, finding.node) == ("proof.group", "")
    assert "node1, node2, node3" in finding.meaning


def test_ranks_that_could_not_start_are_reported() -> None:
    assert judge_proof(healthy(), [proof(0, 1, detail="")], None) == []
    (finding,) = judge_proof(healthy(), [], ControlError("no torch", why="none", fix="shoal setup h"))
    assert (finding.id, finding.evidence, finding.fix) == ("proof.start", "no torch", "shoal setup h")
