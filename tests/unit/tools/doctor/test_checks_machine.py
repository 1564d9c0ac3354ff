"""Doctor's findings about machines, names and processes, from collected facts. Nothing is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.cli.doctor import place_of
from shoal.config.load import build_config
from shoal.tools.doctor.checks import judge
from shoal.tools.doctor.collect.machine import describe_cores
from shoal.tools.doctor.facts import ClusterFacts, Facts, Finding, Severity
from tests.support.doctor_facts import (
    complaints,
    cores,
    disk,
    machine,
    names,
    nodes,
    only,
    process,
    processes,
    remarks,
    scene,
)
from tests.support.topology_trees import machine_topology


def test_healthy_machines_have_no_complaints() -> None:
    assert complaints(scene()) == []
    assert complaints(scene(count=1, on="local:2")) == []


def test_missing_facts_give_no_complaints() -> None:
    nothing: Facts = {"machine": {}, "names": {}, "processes": {}}
    blind = scene(nothing, {**nothing, "failed": {"machine": "OSError: closed"}})
    assert complaints(blind) == []
    finding = only(remarks(blind, "collector.failed"))
    assert (finding.node, finding.evidence) == ("node2", "the collector could not see machine: OSError: closed")
    assert complaints(ClusterFacts(nodes(2), {})) == []


# Sameness


@pytest.mark.parametrize(
    ("id_", "other", "words"),
    [
        ("sameness.os", {"system": "Darwin"}, "system Darwin on node2, Linux on node1, node3"),
        ("sameness.arch", {"arch": "aarch64"}, "architecture aarch64 on node2, x86_64 on node1, node3"),
        ("sameness.cpu", {"avx2": False}, "AVX2 no on node2, yes on node1, node3"),
        ("sameness.python", {"python": "3.12.1"}, "Python 3.12 on node2, 3.11 on node1, node3"),
        ("sameness.torch", {"torch": "2.9.0"}, "torch 2.9.0 on node2, 2.13.0 on node1, node3"),
        ("sameness.shoal", {"shoal": "0.0.9"}, "shoal 0.0.9 on node2, 0.1.0 on node1, node3"),
    ],
)
def test_the_node_that_differs_is_named(id_: str, other: dict[str, object], words: str) -> None:
    finding = only(complaints(scene({}, {"machine": machine(**other)})))
    assert (finding.id, finding.severity, finding.node, finding.evidence) == (id_, Severity.ERROR, "node2", words)
    assert finding.meaning
    can_be_set_up = id_ in ("sameness.python", "sameness.torch", "sameness.shoal")
    assert finding.fix == ("shoal setup hosts.toml" if can_be_set_up else "")
    assert finding.retest == "shoal doctor --on hosts.toml"


def test_builds_and_patch_levels_may_differ() -> None:
    assert complaints(scene({"machine": machine(torch="2.13.0+cu130", python="3.11.9", avx2=None)})) == []


def test_of_two_nodes_the_first_is_the_reference() -> None:
    assert only(complaints(scene({"machine": machine(torch="2.9.0")}, count=2))).node == "node2"


def test_another_processor_is_only_a_remark() -> None:
    finding = only(remarks(scene({}, {}, {"machine": machine(cpu="Old CPU")}), "sameness.cpu"))
    assert (finding.node, finding.evidence) == ("node3", "processor Old CPU on node3, Some CPU on node1, node2")


def test_a_node_without_torch_is_named() -> None:
    without = {"machine": machine(torch=None)}
    finding = only(complaints(scene({}, without)))
    assert (finding.id, finding.node) == ("sameness.torch", "node2")
    assert finding.fix.startswith("shoal setup hosts.toml")
    alone = only(complaints(scene(without, count=1, on="local:2")))
    assert alone.fix == "/env/bin/python -m pip install torch"


def clock(offset_s: float, uncertainty_s: float = 0.001) -> dict[str, dict[str, float]]:
    return {"clock": {"offset_s": offset_s, "uncertainty_s": uncertainty_s}}


@pytest.mark.parametrize(
    ("offsets", "wrong"),
    [
        ((0.0, 40.0, 0.0), {"node2": "40 s ahead of the others"}),
        ((0.0, 40.0), {"node2": "40 s ahead of the others"}),
        ((-3600.0, 0.1), {"node1": "1 h 00 min behind the others"}),
        ((-0.8, 0.8), {"node1": "800 ms behind the others"}),
        ((0.9, 0.0, -0.05), {}),
        # The clock of the asking machine is wrong; it is not a node.
        ((40.0, 40.1, 40.2), {}),
    ],
)
def test_a_wrong_clock_is_named_with_its_offset(offsets: tuple[float, ...], wrong: dict[str, str]) -> None:
    findings = complaints(scene(*(clock(offset) for offset in offsets), count=len(offsets)))
    assert {finding.node for finding in findings} == wrong.keys()
    for finding in findings:
        assert (finding.id, finding.severity) == ("clock.offset", Severity.WARNING)
        assert f"its clock is {wrong[finding.node]}" in finding.evidence
        assert finding.fix == "sudo timedatectl set-ntp true"


def test_a_clock_read_with_large_uncertainty_is_not_blamed() -> None:
    assert complaints(scene(clock(0.0), clock(3.0, uncertainty_s=2.5), count=2)) == []


# Names


@pytest.mark.parametrize(
    ("meaning", "words"),
    [
        ({"means": ["127.0.1.1"], "published": "127.0.1.1"}, "node2 means 127.0.1.1"),
        ({"means": ["::1"], "published": "::1"}, "node2 means ::1"),
        ({"means": [], "published": None}, "nothing at all, and gloo then takes 127.0.0.1"),
        ({"means": ["192.0.2.9"], "published": None}, "192.0.2.9, which is not its own"),
        ({"means": [], "published": None, "took_s": None}, "still waiting"),
    ],
)
def test_a_host_name_that_means_loopback_is_named(meaning: dict[str, object], words: str) -> None:
    spoilt = {"names": names(2, **meaning)}
    finding = only(complaints(scene({}, spoilt)))
    assert (finding.id, finding.node, finding.severity) == ("names.loopback", "node2", Severity.WARNING)
    assert words in finding.evidence
    assert "10.77.0.2 node2" in finding.fix
    assert complaints(scene(spoilt, count=1)) == [], "on a single node it is the right address"


def test_slow_reverse_lookups_are_named() -> None:
    reverse = {"10.77.0.1": {"took_s": 0.2}, "10.77.0.2": {"took_s": 1.5}, "10.77.0.3": {"took_s": None}}
    finding = only(complaints(scene({"names": names(1, reverse=reverse)})))
    assert (finding.id, finding.node, finding.severity) == ("names.reverse", "node1", Severity.WARNING)
    assert "10.77.0.2 took 1.5 s, 10.77.0.3 took too long" in finding.evidence
    lines = "'10.77.0.2 node2' '::ffff:10.77.0.2 node2' '10.77.0.3 node3' '::ffff:10.77.0.3 node3'"
    assert finding.fix == f"printf '%s\\n' '' {lines} | sudo tee -a /etc/hosts"


def test_myhostname_is_a_remark_where_it_decides() -> None:
    asked = {"sources": ["files", "myhostname", "dns"]}
    assert remarks(scene({"names": names(1, **asked)}), "names.myhostname") == []
    finding = only(remarks(scene({"names": names(1, in_hosts_file=[], **asked)}), "names.myhostname"))
    assert "node1 means 10.77.0.1" in finding.evidence


# Leftovers


def held(**holder: object) -> dict[str, object]:
    return {
        "processes": processes(port={"number": 29500, "holders": [{"address": "127.0.0.1", "user": "me", **holder}]})
    }


def test_a_taken_port_is_named_with_its_process() -> None:
    finding = only(complaints(replace(scene(held(**process(71))), port=29500)))
    assert (finding.id, finding.severity, finding.node) == ("port.taken", Severity.ERROR, "node1")
    assert finding.evidence == "port 29500 is taken: by process 71 (python train.py), 1 min 05 s old, of me"
    assert "not shoal's" in finding.meaning
    assert finding.fix == ""
    assert finding.retest == "ss -ltnp 'sport = :29500'; shoal doctor --on hosts.toml --port 29500"
    assert "that this user may not look at" in only(complaints(scene(held(pid=None)))).evidence
    elsewhere = scene({}, held(**process(71)))
    assert complaints(elsewhere) == []
    assert only(remarks(elsewhere, "port.taken")).node == "node2"


@pytest.mark.parametrize(("has_folder", "fix"), [(True, "shoal stop '/r/a run'"), (False, "kill 71")])
def test_a_port_taken_by_a_shoal_run_is_named_with_the_run(has_folder: bool, fix: str) -> None:
    holder = process(71, run="/r/a run", part="rank-0", has_folder=has_folder)
    finding = only(complaints(scene(held(**holder))))
    assert "of shoal's run /r/a run" in finding.evidence
    assert finding.fix == fix


def marked(pid: int, part: str, orphan: bool, **other: object) -> dict[str, object]:
    return {**process(pid), "run": "/r/one", "part": part, "has_folder": True, "orphan": orphan, **other}


@pytest.mark.parametrize(
    ("marked_processes", "is_left"),
    [
        ([marked(5, "rank-0", orphan=True)], True),
        ([marked(4, "agent", orphan=True), marked(5, "rank-0", orphan=False)], True),
        ([marked(3, "supervisor", orphan=True), marked(4, "agent", orphan=False)], False),
        ([marked(3, "messenger", orphan=False), marked(4, "agent", orphan=True)], False),
        ([marked(4, "agent", orphan=False), marked(5, "rank-0", orphan=False)], False),
        ([marked(5, "rank-0", orphan=False)], False),
    ],
)
def test_a_run_without_a_supervisor_is_a_leftover(marked_processes: list[dict[str, object]], is_left: bool) -> None:
    seen = scene({"processes": processes(marked=marked_processes)})
    if is_left:
        finding = only(complaints(seen))
        assert (finding.id, finding.severity, finding.node) == ("leftover.worker", Severity.WARNING, "node1")
        assert "shoal's run /r/one has no supervisor" in finding.evidence
        assert finding.fix == "shoal stop /r/one"
    else:
        assert complaints(seen) == []
        assert only(remarks(seen, "speed.run")).node == "node1"


def test_without_the_shoal_command_the_fix_names_the_processes() -> None:
    leftovers = [marked(5, "rank-0", orphan=True), marked(6, "rank-1", orphan=True, stopped=True)]
    without = processes(marked=leftovers, has_command=False)
    assert only(complaints(scene({"processes": without}))).fix == "kill -KILL 5 6"


def test_orphans_of_other_jobs_are_named_by_job() -> None:
    job = {"rank": "1", "world_size": "2", "master_addr": "10.77.0.9"}
    other = {**job, "master_addr": "10.77.0.8"}
    strays = [process(9, **job), process(7, **other), process(8, **job)]
    first, second = complaints(scene({}, {"processes": processes(strays=strays)}))
    assert (first.id, first.severity, first.node) == ("leftover.worker", Severity.WARNING, "node2")
    assert (first.fix, second.fix) == ("kill 7", "kill 8 9")
    assert "process 8 (python train.py), 1 min 05 s old" in second.evidence
    assert "not shoal's" in second.meaning


@pytest.mark.parametrize(
    ("limits", "over_ssh", "fix"),
    [
        ({"soft": 256, "hard": None}, False, "ulimit -n 4096"),
        (
            {"soft": 256, "hard": 8192},
            True,
            "echo 'me soft nofile 4096' | sudo tee /etc/security/limits.d/90-shoal.conf",
        ),
        ({"soft": 256, "hard": 512}, False, "echo 'me - nofile 4096' | sudo tee /etc/security/limits.d/90-shoal.conf"),
    ],
)
def test_a_low_limit_of_open_files_is_named(limits: dict[str, int | None], over_ssh: bool, fix: str) -> None:
    finding = only(complaints(scene({"processes": processes(files=limits, over_ssh=over_ssh)})))
    assert (finding.id, finding.severity, finding.fix) == ("limits.files", Severity.WARNING, fix)
    assert "may open 256 files" in finding.evidence


# Room


@pytest.mark.parametrize(
    ("other", "id_", "severity", "words"),
    [
        ({"free": 50e6}, "disk.free", Severity.ERROR, "50 MB free in /tmp"),
        ({"free": 1e9}, "disk.free", Severity.WARNING, "1 GB free in /tmp"),
        ({"files_free": 3}, "disk.free", Severity.ERROR, "room for 3 more files in /tmp"),
        ({"read_only": True, "free": 0}, "disk.readonly", Severity.ERROR, "nothing can be written to /tmp"),
    ],
)
def test_a_full_or_read_only_disk_is_named(other: dict[str, object], id_: str, severity: Severity, words: str) -> None:
    finding = only(complaints(scene({}, {"machine": machine(disks=[disk(), disk(**other)])})))
    assert (finding.id, finding.severity, finding.node, finding.fix) == (id_, severity, "node2", "")
    assert finding.evidence.startswith(words)


def test_a_small_disk_for_temporary_files_is_enough() -> None:
    small = disk(free=600e6, files_free=None, **{"for": ["temporary files"]})
    assert complaints(scene({"machine": machine(disks=[small])})) == []


@pytest.mark.parametrize(("free", "severity"), [(200e6, Severity.ERROR), (800e6, Severity.WARNING)])
def test_little_free_memory_is_named(free: float, severity: Severity) -> None:
    memory = {"total": 8e9, "available": free, "swap_used": 3e9}
    finding = only(complaints(scene({"machine": machine(memory=memory)})))
    assert (finding.id, finding.severity) == ("memory.free", severity)
    assert "of 8 GB memory are free, 3 GB of swap in use" in finding.evidence


# Speed


def rates(**other: object) -> dict[str, object]:
    usual = {"driver": "acpi-cpufreq", "governor": "schedutil", "most_khz": 4_000_000, "base_khz": None}
    return {"frequency": {**usual, "allowed_khz": 4_000_000, "at_work_khz": 3_500_000, **other}}


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"governor": "powersave"},
        {"governor": "powersave", "driver": "intel_pstate", "base_khz": 1_900_000, "at_work_khz": 1_950_000},
    ],
)
def test_a_processor_at_normal_frequency_has_no_complaints(other: dict[str, object]) -> None:
    assert complaints(scene({"machine": machine(**rates(**other))})) == []


_ALL = "/sys/devices/system/cpu/cpu*/cpufreq"


@pytest.mark.parametrize(
    ("other", "id_", "fix"),
    [
        ({"governor": "powersave"}, "speed.governor", f"echo performance | sudo tee {_ALL}/scaling_governor"),
        ({"governor": "powersave", "driver": "intel_pstate"}, "speed.frequency", ""),
        ({"allowed_khz": 800_000}, "speed.frequency", f"echo 4000000 | sudo tee {_ALL}/scaling_max_freq"),
    ],
)
def test_a_limited_processor_frequency_is_named(other: dict[str, object], id_: str, fix: str) -> None:
    slow = rates(at_work_khz=800_000, **other)
    finding = only(complaints(scene({}, {"machine": machine(**slow)})))
    assert (finding.id, finding.severity, finding.node, finding.fix) == (id_, Severity.WARNING, "node2", fix)
    assert "runs at 800 MHz where it could do 4 GHz" in finding.evidence


def test_throttling_is_a_complaint_only_while_it_lasts() -> None:
    hot = scene({"machine": machine(throttled={"since_boot": 12, "just_now": 2})})
    assert only(complaints(hot)).id == "speed.throttled"
    was_hot = scene({"machine": machine(throttled={"since_boot": 12, "just_now": 0})})
    assert complaints(was_hot) == []
    assert "12 times" in only(remarks(was_hot, "speed.throttled")).evidence


def test_running_on_battery_is_named() -> None:
    finding = only(complaints(scene({"machine": machine(power={"on_battery": True, "percent": 41})})))
    assert (finding.id, finding.evidence) == ("speed.battery", "it runs on battery, 41% left")
    assert complaints(scene({"machine": machine(power={"on_battery": False, "percent": 41})})) == []


def test_the_lid_setting_is_only_a_remark() -> None:
    seen = scene({"machine": machine(lid={"on_battery": "suspend", "on_mains": "ignore"})})
    assert complaints(seen) == []
    finding = only(remarks(seen, "speed.lid"))
    assert finding.evidence == "closing the lid makes it suspend (on battery)"
    assert "HandleLidSwitch=ignore" in finding.fix
    assert remarks(scene({"machine": machine(lid={"on_battery": "lock", "on_mains": "ignore"})}), "speed.lid") == []


def test_other_load_is_only_a_remark() -> None:
    busy = scene({"machine": machine(load={"one_minute": 9.0})})
    assert complaints(busy) == []
    assert "9.0 processes at a time wanted one of its 4 cores" in only(remarks(busy, "speed.load")).evidence


def test_the_cores_that_a_run_will_use_are_remarked(tmp_path: Path) -> None:
    def remark(name: str, check: str) -> Finding:
        seen = describe_cores(machine_topology(name, tmp_path / name))
        cluster = scene({"machine": machine(cores=seen)}, count=1)
        # As in a hosts file: the launcher does not know the cores.
        cluster = replace(cluster, nodes=[replace(node, cores=None) for node in cluster.nodes])
        return only(remarks(cluster, check))

    for name, evidence, threads in (
        ("desktop", "Some CPU: 8 cores with 16 hardware threads, ", 8),
        ("hybrid_laptop", "Some CPU: 14 cores with 20 hardware threads (6 fast, 8 slow), ", 6),
        ("two_sockets", "Some CPU: 16 cores with 32 hardware threads, ", 16),
        ("container_v1", "Some CPU: 8 cores, ", 2),
    ):
        cores = remark(name, "speed.cores")
        assert cores.evidence.startswith(evidence)
        assert cores.meaning == f"a run has 1 rank here, with {threads} threads each"

    seen = describe_cores(machine_topology("container_v2", tmp_path / "quota"))
    limited = scene({"machine": machine(cores=seen)}, count=1)
    limited = replace(limited, nodes=[replace(node, cores=None) for node in limited.nodes])
    assert remarks(limited, "speed.threads") == []
    quota = remark("container_v2", "speed.quota")
    assert "the time of 2.5 of its 8 cores: " in quota.evidence
    assert quota.evidence.endswith("/sys/fs/cgroup/cpu.max")
    assert quota.meaning.startswith("a run uses 2 cores here")
    hybrid = remark("hybrid_laptop", "speed.hybrid")
    assert hybrid.evidence == "6 of its 14 cores are fast; the slowest has about 37% of their speed"
    assert "fast cores only" in hybrid.meaning
    assert hybrid.meaning.endswith("--threads 14")
    numa = remark("two_sockets", "speed.numa")
    assert "2 NUMA nodes" in numa.evidence
    assert "try 2 ranks there" in numa.meaning


def test_equal_cores_without_a_quota_need_no_remark(tmp_path: Path) -> None:
    for name in ("desktop", "cloud_vm", "bare_vm"):
        healthy = scene({"machine": machine(cores=describe_cores(machine_topology(name, tmp_path / name)))})
        for check in ("speed.quota", "speed.hybrid", "speed.numa"):
            assert remarks(healthy, check) == []


def test_slow_cores_in_use_are_remarked(tmp_path: Path) -> None:
    seen = describe_cores(machine_topology("hybrid_laptop", tmp_path))
    crowded = scene({"machine": machine(cores=seen)}, count=1)
    crowded = replace(crowded, nodes=[replace(node, cores=None, slots=7) for node in crowded.nodes])
    assert "uses slow cores too" in only(remarks(crowded, "speed.hybrid")).meaning


# Where to run a command


@pytest.mark.parametrize(
    ("id_", "fix", "place"),
    [
        ("names.loopback", "sudo sh -c '…'", "on node2"),
        ("leftover.worker", "shoal stop runs/old", "on node2"),
        ("sameness.torch", "shoal setup hosts.toml", "on this machine"),
        ("reach.host", "ssh-copy-id node2", "on this machine"),
    ],
)
def test_a_fix_states_on_which_machine_to_run_it(id_: str, fix: str, place: str) -> None:
    assert place_of(Finding(id_, Severity.ERROR, "node2", "seen", "meaning", fix)) == place


# Threads


@pytest.mark.parametrize(
    ("slots", "threads", "facts", "severity", "evidence"),
    [
        # By default each rank gets its share of the cores, and a hosts file may ask for all hardware threads.
        (2, None, {}, None, ""),
        (2, 4, {}, None, ""),
        (2, 8, {}, Severity.WARNING, "2 ranks with 16 threads in all share 8 processors"),
        (1, None, {"omp_num_threads": "16"}, Severity.INFO, "1 rank with 16 threads in all share 8 processors"),
        # The number that the hosts file has wins over the variable.
        (1, 4, {"omp_num_threads": "16"}, None, ""),
        (1, None, {"omp_num_threads": "many"}, None, ""),
        (
            2,
            2,
            {"cores": cores(usable=2, quota=2.5, quota_file="cpu.max")},
            Severity.WARNING,
            "4 threads in all share 2",
        ),
        (9, None, {}, Severity.INFO, "9 ranks with 9 threads in all share 8 processors"),
    ],
)
def test_threads_are_compared_with_the_processors(
    slots: int, threads: int | None, facts: Facts, severity: Severity | None, evidence: str
) -> None:
    seen = scene({"machine": machine(**facts)}, count=1)
    seen = replace(seen, nodes=[replace(seen.nodes[0], slots=slots, threads=threads)])
    findings = [finding for finding in judge(seen) if finding.id == "speed.threads"]
    assert [finding.severity for finding in findings] == ([severity] if severity else [])
    assert all(evidence in finding.evidence for finding in findings)
    assert all(("--threads" in finding.meaning) == (severity is Severity.WARNING) for finding in findings)


def test_emulated_nodes_share_the_processors_of_one_machine() -> None:
    own = machine(boot_id="a1", cores=cores(threads=2, physical=2, usable=2))
    seen = scene(*[{"machine": own}] * 3)
    seen = replace(seen, nodes=[replace(node, cores=1) for node in seen.nodes])
    finding = only(remarks(seen, "speed.threads"))
    assert (finding.node, finding.evidence) == ("node1", "3 ranks with 3 threads in all share 2 processors")


def test_ranks_of_another_run_share_them_too() -> None:
    other = [
        process(100 + rank, part=f"rank-{rank}", run="/runs/other", has_folder=True, orphan=False) for rank in range(5)
    ]
    seen = scene({"processes": processes(marked=other)}, count=1)
    finding = only(remarks(seen, "speed.threads"))
    assert finding.evidence.endswith("share 8 processors, and 5 ranks of other runs compute there now")


def test_a_training_that_does_not_fit_is_an_error_and_one_that_may_not_fit_a_warning() -> None:
    """A machine without a GPU computes on its processor, with any build of torch."""
    config = build_config("gpt2-124m")

    def judged(*free: float) -> list[Finding]:
        memories = [{"total": 16e9, "available": size, "available_with_swap": size, "swap_used": 0} for size in free]
        facts = [{"machine": machine(memory=memory)} for memory in memories]
        return complaints(replace(scene(*facts, count=len(free)), config=config))

    assert judged(16e9, 16e9) == []
    refused = only(judged(16e9, 1.5e9))
    assert (refused.id, refused.severity) == ("memory.training", Severity.ERROR)
    assert "gpt2-124m does not fit into the memory of node2: every rank keeps 1.99 GB" in refused.evidence
    tight = only(judged(16e9, 2.2e9))
    assert (tight.id, tight.severity) == ("memory.training", Severity.WARNING)
