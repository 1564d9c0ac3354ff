"""The table of all checks, and the checks of what the collectors and gloo themselves reported.

To add a check: write its function in a module of this package and add it here, with the ids of its findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from shoal.cluster.node import Node
from shoal.tools.doctor.checks import gpu, machine, network, processes, reach
from shoal.tools.doctor.facts import ClusterFacts, Finding, Severity, doctor_command

Check = Callable[[ClusterFacts], Iterator[Finding]]


def check_unreached(cluster: ClusterFacts) -> Iterator[Finding]:
    for name, error in cluster.unreached.items():
        meaning = error.why or "no process can be started there"
        yield Finding("reach.host", Severity.ERROR, name, error.seen, meaning, error.fix)


def check_collectors(cluster: ClusterFacts) -> Iterator[Finding]:
    """Report topics that a collector could not read: they must not look healthy."""
    for name, facts in cluster.facts.items():
        for topic, error in facts.get("failed", {}).items():
            evidence = f"the collector could not see {topic}: {error}"
            meaning = f"checks of {topic} were left out for this machine"
            yield Finding("collector.failed", Severity.INFO, name, evidence, meaning)


def check_proof(cluster: ClusterFacts) -> Iterator[Finding]:
    """Report all-reduces that failed. A failure of the whole group is not news where a pair already fails."""

    def node_of(rank: int) -> Node:
        return [node for node in cluster.nodes for _ in range(node.slots)][rank]

    failures: dict[tuple[int, ...], str] = {}
    for proof in cluster.proofs:
        if not proof["ok"]:
            failures.setdefault(tuple(proof["members"]), f"gloo on {proof['node']} reported: {proof['detail']}")
    if cluster.proof_error is not None and not failures:
        error = cluster.proof_error
        yield Finding("proof.start", Severity.ERROR, "", error.seen, error.why, error.fix)
    for ranks, evidence in failures.items():
        if len(ranks) == 2:
            dialer, listener = cluster.dialer_first(*(node_of(rank) for rank in ranks))
            meaning = f"{dialer.name} dials {listener.name}, and gloo's exchange between them fails"
            connection = cluster.trial(dialer.name, listener.name, "tcp")
            if connection and connection.ok:
                meaning += f", although a plain connection passed: {connection.detail}"
            yield Finding("proof.gloo", Severity.ERROR, listener.name, evidence, meaning)
        elif all(len(other) > 2 for other in failures):
            names = ", ".join(dict.fromkeys(node_of(rank).name for rank in ranks))
            meaning = f"any two of {names} can exchange gradients, but all together cannot"
            yield Finding("proof.group", Severity.ERROR, "", evidence, meaning)


# Every check in the order in which it runs, with the ids of its findings and what each id makes sure of.
CHECKS: tuple[tuple[Check, dict[str, str]], ...] = (
    (check_unreached, {"reach.host": "every machine lets this user in: by SSH, with the host key it is known by"}),
    (check_collectors, {"collector.failed": "every topic could be read on every machine"}),
    (
        machine.check_kinds,
        {
            "sameness.os": "the same operating system; gloo cannot mix them",
            "sameness.arch": "the same architecture; others round differently",
            "sameness.cpu": "the same instructions; without AVX2 replicas differ in their last bits",
        },
    ),
    (
        machine.check_versions,
        {
            "sameness.python": "the same Python",
            "sameness.torch": "torch is installed, and the same version everywhere",
            "sameness.shoal": "the same shoal",
        },
    ),
    (gpu.check_driver, {"gpu.driver": "a GPU has a driver that works, and this user may open it"}),
    (
        gpu.check_torch_build,
        {
            "gpu.torch": "torch is a build for the GPU and its driver; otherwise, which one to install",
            "sameness.build": "the same build of torch everywhere: CPU, CUDA or ROCm",
        },
    ),
    (gpu.check_visible, {"gpu.visible": "every GPU is visible to torch, and every rank has one"}),
    (
        gpu.check_cards,
        {
            "gpu.memory": "no other program fills a GPU's memory",
            "gpu.mode": "a GPU's compute mode lets ranks use it",
        },
    ),
    (gpu.check_shared_memory, {"memory.shm": "a machine with GPUs has enough /dev/shm for NCCL"}),
    (
        gpu.check_nccl,
        {
            "nccl.interface": "NCCL_SOCKET_IFNAME names an interface that is there and reaches the other machines",
            "nccl.adapter": "NCCL_IB_HCA names an InfiniBand adapter that is there",
            "nccl.debug": "NCCL_DEBUG has a level that NCCL knows",
        },
    ),
    (machine.check_clocks, {"clock.offset": "the clocks agree; torchrun's rendezvous fails where they do not"}),
    (
        network.check_own_name,
        {
            "names.loopback": "a machine's own name does not resolve to a loopback address",
            "names.myhostname": "a machine's own name has a fixed address, and is not made up by nsswitch",
        },
    ),
    (
        network.check_reverse,
        {"names.reverse": "reverse look-ups of addresses are quick; a dead name server blocks the store"},
    ),
    (processes.check_port, {"port.taken": "the store's port is free; otherwise, which process has it"}),
    (
        processes.check_workers,
        {
            "leftover.worker": "no worker of an earlier run is left, of shoal or of another program",
            "speed.run": "no other run of shoal uses the cores",
        },
    ),
    (processes.check_files, {"limits.files": "a process may open enough files"}),
    (machine.check_memory, {"memory.free": "enough free memory"}),
    (machine.check_training, {"memory.training": "the training of --preset or --config has enough memory"}),
    (
        machine.check_disks,
        {"disk.free": "enough disk space", "disk.readonly": "the disks of a run can be written"},
    ),
    (machine.check_cores, {"speed.cores": "the cores of a machine, and the threads a run would use"}),
    (machine.check_quota, {"speed.quota": "no container or slice limits it to less time than its cores have"}),
    (machine.check_kinds_of_cores, {"speed.hybrid": "all of its cores are equally fast"}),
    (machine.check_numa, {"speed.numa": "each of its NUMA nodes can have a rank of its own"}),
    (machine.check_threads, {"speed.threads": "the threads of all ranks fit the processors of their machine"}),
    (
        machine.check_frequency,
        {
            "speed.governor": "the processor is not set to save power",
            "speed.frequency": "it runs near its highest frequency",
        },
    ),
    (machine.check_throttled, {"speed.throttled": "it was not throttled for heat"}),
    (machine.check_power, {"speed.battery": "it runs on mains power"}),
    (machine.check_lid, {"speed.lid": "closing the lid does not put it to sleep"}),
    (machine.check_load, {"speed.load": "no other program uses its cores"}),
    (
        network.check_addresses,
        {
            "interface.address": "a machine has the address it is known by, on the interface that was named",
            "interface.down": "the interface that has the address is up and plugged in",
        },
    ),
    (
        network.check_published,
        {"interface.first": "the first address of an interface, which gloo publishes, is reachable from the peers"},
    ),
    (
        network.check_internal,
        {"interface.internal": "a machine does not publish an address of docker, a bridge or a VPN"},
    ),
    (
        network.check_detours,
        {"interface.wrong": "a cable is used where there is one, not Wi-Fi or a VPN beside it"},
    ),
    (network.check_cards, {"interface.slow": "a network card runs at its full speed and duplex"}),
    (network.check_power_save, {"wifi.powersave": "Wi-Fi does not sleep between packets"}),
    (reach.check_duplicates, {"reach.duplicate-address": "no two machines have the same address"}),
    (reach.check_family, {"reach.family": "all machines are known by IPv4, or all by IPv6"}),
    (
        reach.check_pairs,
        {
            "reach.pair": "in every pair the higher address, which dials, reaches the lower one on an ephemeral port",
            "reach.other-way": "the other direction, which gloo does not need but torchrun's store may, is open too",
        },
    ),
    (reach.check_store, {"reach.store": "every machine reaches the store's port on the first one"}),
    (
        network.check_mtu,
        {
            "mtu.mismatch": "both ends of a link have the same MTU",
            "mtu.path": "packets of full size pass between every two machines",
        },
    ),
    (network.check_links, {"link.slow": "no link is far slower than the others"}),
    (
        check_proof,
        {
            "proof.start": "ranks start everywhere",
            "proof.gloo": "a real all-reduce between every two machines, with a timeout of seconds",
            "proof.group": "a real all-reduce among all machines",
        },
    ),
)
CHECK_MEANINGS = {check_id: meaning for _, ids in CHECKS for check_id, meaning in ids.items()}


def judge(cluster: ClusterFacts) -> list[Finding]:
    findings = [finding for check, _ in CHECKS for finding in check(cluster)]
    again = doctor_command(cluster)
    return [replace(finding, retest=f"{finding.retest}; {again}" if finding.retest else again) for finding in findings]


def _has_several_machines(cluster: ClusterFacts) -> bool:
    return len(cluster.nodes) > 1


def _has_gpu(cluster: ClusterFacts) -> bool:
    topics = (facts.get("gpu") for facts in cluster.facts.values())
    return any(topic["pci"] or topic["nvidia"] or topic["amd"] for topic in topics if topic)


def _has_fact(topic: str, name: str) -> Callable[[ClusterFacts], bool]:
    return lambda cluster: any(facts.get(topic, {}).get(name) for facts in cluster.facts.values())


def _has_wifi(cluster: ClusterFacts) -> bool:
    networks = (facts.get("network", {}).get("interfaces", {}) for facts in cluster.facts.values())
    return any(interface.get("power_save") is not None for network in networks for interface in network.values())


# What a check needs to be about anything, by its id or the beginning of it; every other check always applies.
_NEEDS: dict[str, Callable[[ClusterFacts], bool]] = {
    "sameness.torch": lambda cluster: True,  # whether it is installed at all
    "sameness.": _has_several_machines,
    "clock.": _has_several_machines,
    "names.": _has_several_machines,
    "interface.": _has_several_machines,
    "reach.host": lambda cluster: True,
    "reach.": _has_several_machines,
    "mtu.": _has_several_machines,
    "link.": _has_several_machines,
    "gpu.": _has_gpu,
    "memory.shm": _has_gpu,
    "memory.training": lambda cluster: cluster.config is not None,
    "nccl.": _has_gpu,
    "port.taken": _has_fact("processes", "port"),
    "speed.governor": _has_fact("machine", "frequency"),
    "speed.frequency": _has_fact("machine", "frequency"),
    "speed.battery": _has_fact("machine", "power"),
    "speed.lid": _has_fact("machine", "lid"),
    "wifi.": _has_wifi,
    "proof.": lambda cluster: bool(cluster.proofs) or cluster.proof_error is not None,
    "proof.group": lambda cluster: any(len(proof["members"]) > 2 for proof in cluster.proofs),
}


def applicable_checks(cluster: ClusterFacts) -> set[str]:
    """Return the ids of the checks that have something to look at: an absent GPU is not a GPU that passed."""

    def applies(check_id: str) -> bool:
        needs = [need for beginning, need in _NEEDS.items() if check_id.startswith(beginning)]
        whole = _NEEDS.get(check_id)
        return whole(cluster) if whole else all(need(cluster) for need in needs)

    return {check_id for check_id in CHECK_MEANINGS if applies(check_id)}


def checks_not_made(cluster: ClusterFacts) -> set[str]:
    """Return the ids of the checks that apply, but for which too few machines could be reached."""

    def needs_several(check_id: str) -> bool:
        need = _NEEDS.get(check_id) or _NEEDS.get(check_id.partition(".")[0] + ".")
        return need is _has_several_machines

    applicable = applicable_checks(cluster) - {"reach.host"}
    if not cluster.facts:
        return applicable
    is_alone = len(cluster.facts) < 2 <= len(cluster.nodes)
    return {check_id for check_id in applicable if needs_several(check_id)} if is_alone else set()
