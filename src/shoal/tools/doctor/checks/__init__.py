"""All checks, in the order of their stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shoal.cluster.node import Node
from shoal.errors import ShoalError
from shoal.tools.doctor.checks import machine, network, reach
from shoal.tools.doctor.facts import ClusterFacts, Finding, Severity

Check = Callable[[ClusterFacts], Iterator[Finding]]


def unreached(scene: ClusterFacts) -> Iterator[Finding]:
    for name, error in scene.unreached.items():
        yield Finding(
            "reach.host", Severity.ERROR, name, error.seen, error.why or "nothing can be started there", error.fix
        )


def unseen(scene: ClusterFacts) -> Iterator[Finding]:
    """A topic that the collector stumbled over must not pass for a healthy one."""
    for name, facts in scene.facts.items():
        for topic, error in facts.get("failed", {}).items():
            meaning = f"checks of {topic} were left out for this machine"
            yield Finding(
                "collector.failed", Severity.INFO, name, f"the collector could not see {topic}: {error}", meaning
            )


CHECKS: tuple[Check, ...] = (
    unreached,
    unseen,
    machine.kinds,
    machine.versions,
    machine.no_torch,
    machine.clocks,
    network.own_name,
    network.reverse,
    reach.port,
    reach.workers,
    reach.files,
    machine.memory,
    machine.disks,
    machine.cores,
    machine.frequency,
    machine.throttled,
    machine.power,
    machine.lid,
    machine.load,
    network.addresses,
    network.offers,
    network.decoys,
    network.detours,
    network.cards,
    network.power_save,
    reach.twins,
    reach.family,
    reach.pairs,
    reach.store,
    network.sizes,
    network.links,
)


def judge(scene: ClusterFacts) -> list[Finding]:
    return [finding for check in CHECKS for finding in check(scene)]


# SECTION net/check_ids
# Every check of doctor by id, and what it makes sure of. Explanations of an error name them, too.


CHECK_IDS_CHECKS = {
    "reach.host": "every machine lets us in: by SSH, as the host it was known as",
    "reach.family": "all machines are known by IPv4, or all by IPv6",
    "reach.pair": "in every pair the higher address, which dials, reaches the lower one on an ephemeral port",
    "reach.other-way": "the other direction, which gloo does not need and torchrun's store may, is open too",
    "reach.store": "every machine reaches the store's port on the first one",
    "reach.twins": "no two machines have one address",
    "proof.start": "ranks start everywhere",
    "proof.gloo": "a real all-reduce between every two machines, with a deadline of seconds",
    "proof.group": "a real all-reduce among all machines",
    "interface.address": "a machine has the address it is known by, on the interface that was named",
    "interface.wrong": "a cable is used where there is one, not Wi-Fi or a VPN beside it",
    "interface.decoy": "what a machine offers its peers is no address of docker, a bridge or a VPN",
    "interface.first": "gloo takes the first address of an interface: it is the one on the way to the peers",
    "interface.down": "the interface that has the address is up and plugged in",
    "interface.slow": "a card runs at the speed and duplex that it can",
    "link.slow": "no link is far slower than its fellows",
    "mtu.mismatch": "both ends of a link have one packet size",
    "mtu.path": "packets of full size pass between every two machines",
    "wifi.powersave": "Wi-Fi does not sleep between packets",
    "names.loopback": "a machine's own name does not resolve to a loopback address",
    "names.myhostname": "a machine's own name has a fixed meaning, and is not made up by nsswitch",
    "names.reverse": "addresses are looked up quickly in reverse; a dead name server freezes the store",
    "port.taken": "the store's port is free, or whose it is",
    "leftover.worker": "no worker of an earlier run is left, ours or anybody's",
    "limits.files": "enough file descriptors",
    "sameness.os": "the same operating system; gloo cannot mix them",
    "sameness.arch": "the same architecture; others round differently",
    "sameness.cpu": "the same instructions; without AVX2 replicas differ in their last bits",
    "sameness.python": "the same Python",
    "sameness.torch": "torch is there, and the same everywhere",
    "sameness.shoal": "the same shoal",
    "clock.offset": "the clocks agree; torchrun's rendezvous goes wrong where they do not",
    "memory.free": "enough free memory",
    "disk.free": "enough disk space",
    "disk.readonly": "the disks of a run can be written",
    "speed.cores": "what there is to compute with, and the threads a run would use",
    "speed.governor": "the processor is not told to save power",
    "speed.frequency": "it runs near its highest frequency",
    "speed.throttled": "it was not throttled for heat",
    "speed.battery": "it runs on mains",
    "speed.lid": "closing the lid does not put it to sleep",
    "speed.load": "no other program takes its cores",
    "speed.run": "no other run of shoal takes them",
    "collector.failed": "everything could be looked at",
}


# SECTION net/checks/proof
# What gloo itself said, held against what was seen before.


Members = tuple[int, ...]


def judge_proof(scene: ClusterFacts, proofs: Sequence[dict[str, Any]], error: ShoalError | None) -> list[Finding]:
    """Nothing when every pair and the whole group went well. A group that fails because a pair does is no news."""
    said: dict[Members, str] = {}
    for proof in proofs:
        if not proof["ok"]:
            said.setdefault(tuple(proof["members"]), f"gloo on {proof['node']} said: {proof['said']}")
    pairs = [_pair(scene, members, words) for members, words in said.items() if len(members) == 2]
    groups = [_group(scene, members, words) for members, words in said.items() if len(members) > 2]
    if error is not None and not said:
        return [Finding("proof.start", Severity.ERROR, "", error.seen, error.why, error.fix)]
    return pairs or groups


def _pair(scene: ClusterFacts, members: Members, said: str) -> Finding:
    dialer, listener = scene.dialling(*(_owner(scene, member) for member in members))
    passed = scene.trial(dialer.name, listener.name, "tcp")
    meaning = f"{dialer.name} dials {listener.name}, and gloo's exchange between them fails"
    if passed and passed.ok:
        meaning += f", although a plain connection passed: {passed.detail}"
    return Finding("proof.gloo", Severity.ERROR, listener.name, said, meaning)


def _group(scene: ClusterFacts, members: Members, said: str) -> Finding:
    names = ", ".join(dict.fromkeys(_owner(scene, member).name for member in members))
    return Finding("proof.group", Severity.ERROR, "", said, f"each two of {names} can exchange gradients, all cannot")


def _owner(scene: ClusterFacts, rank: int) -> Node:
    """Ranks count through the nodes in their order."""
    return [node for node in scene.nodes for _ in range(node.slots)][rank]
