"""Lab specifications and the exact commands they produce. No process is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_lab import commands
from shoal_lab.commands import (
    ControlGroup,
    ControlGroups,
    LabSite,
    cpu_steps,
    lab_group_steps,
    memory_steps,
    parse_ports,
    render,
    ruleset,
    segment_limit,
    shape,
)
from shoal_lab.errors import LabUsageError
from shoal_lab.kernel import (
    Features,
    find_groups,
    find_tool,
    lacks,
    path_line,
    possible,
    reach_tools,
    search_path,
    substitutes,
    why_forbidden,
)
from shoal_lab.spec import (
    LabSpec,
    Link,
    format_delay,
    format_memory,
    format_rate,
    make_spec,
    parse_delay,
    parse_memory,
    parse_rate,
)
from shoal_lab.state import LabState, LabView

V1 = ControlGroups(*(ControlGroup(parent=Path("/cg") / name, version=1) for name in ("cpu", "freezer", "memory")))
V2 = ControlGroups(*[ControlGroup(parent=Path("/cg"), version=2)] * 3)


def site(rootless: bool = False, netem: bool = True, groups: ControlGroups = V1) -> LabSite:
    return LabSite("default", Path("/run/lab"), rootless, netem, groups)


def view_of(spec: LabSpec, lab_site: LabSite, **state_fields: Any) -> LabView:
    before = LabState(spec=spec, rootless=lab_site.rootless, netem=lab_site.netem, groups=lab_site.groups)
    alive = frozenset(node.name for node in spec.nodes)
    return LabView(replace(before, **state_fields), lab_site, alive)


def test_the_exact_commands_that_start_a_node() -> None:
    node = make_spec(1, link="100mbit", cpu="0.5").nodes[0]
    first, *rest = [line for line in render(commands.node_steps(node, site())).splitlines() if "unshare" not in line]
    enter = 'nsenter --target "$(cat /run/lab/{}.pid)" --net {}'.format
    assert first == "echo 10000 > /cg/cpu/shoal-default/node1/cpu.cfs_period_us"
    assert rest == [
        "echo 5000 > /cg/cpu/shoal-default/node1/cpu.cfs_quota_us",
        "until test -s /run/lab/node1.pid; do sleep 0.01; done",
        enter(
            "switch",
            'ip link add node1 type veth peer name eth0 address 02:00:0a:4d:00:01 netns "$(cat /run/lab/node1.pid)"',
        ),
        enter("switch", "ip link set node1 master sw0 addrgenmode none up"),
        enter("node1", "ip link set lo up"),
        enter("node1", "ip link set eth0 addrgenmode none up"),
        enter("node1", "ip addr add 10.77.0.1/24 dev eth0"),
        enter("node1", "tc qdisc replace dev eth0 root handle 1: tbf rate 100.933mbit burst 25000 latency 50ms"),
        enter("switch", "tc qdisc replace dev node1 root handle 1: tbf rate 100.933mbit burst 25000 latency 50ms"),
    ]


def test_the_first_process_of_a_node_joins_its_groups_and_creates_its_namespaces() -> None:
    node = make_spec(1).nodes[0]
    line = next(line for line in render(commands.node_steps(node, site())).splitlines() if "unshare" in line)
    assert "echo $$ > /cg/cpu/shoal-default/node1/cgroup.procs" in line
    assert "unshare --net --uts --mount --pid --fork" in line
    assert "mount --bind /run/lab/hosts /etc/hosts" in line


def test_without_root_every_command_enters_the_user_namespace() -> None:
    lines = render(commands.lab_steps(make_spec(2), site(rootless=True, groups=ControlGroups()))).splitlines()
    entering = [line for line in lines if "nsenter" in line]
    assert len(entering) > 10
    assert all("--user --preserve-credentials" in line for line in entering)
    assert sum("--map-root-user" in line for line in lines) == 1


def test_delay_and_loss_come_from_netem_on_the_switch_side_only() -> None:
    link = Link(rate_bps=1e9, delay_s=0.02, loss=0.01)
    assert shape("node1", link, netem=True, was=Link()) == [
        "tc qdisc replace dev node1 root handle 2: netem limit 3333 delay 20ms loss 1%",
        "tc qdisc replace dev node1 parent 2:1 handle 3: tbf rate 1.00933gbit burst 250000 latency 50ms",
    ]
    assert shape("eth0", link, netem=False, was=link)[0].startswith("tc qdisc replace dev eth0 root handle 1: tbf")


@pytest.mark.parametrize(("delay_s", "place", "handle"), [(0.0, "root", 1), (0.02, "parent 2:1", 3)])
def test_another_rate_drops_the_queue(delay_s: float, place: str, handle: int) -> None:
    fast, slow, unlimited = (Link(rate_bps=rate, delay_s=delay_s) for rate in (1e9, 20e6, None))
    pfifo, tbf = (
        f"tc qdisc replace dev node1 {place} handle {number}: {kind}"
        for number, kind in ((4, "pfifo limit 1000"), (handle, "tbf rate 20.1867mbit burst 5000 latency 50ms"))
    )
    limits = [shape("node1", link, True, was)[bool(delay_s) :] for link, was in ((slow, fast), (unlimited, fast))]
    assert limits == [[pfifo, tbf], [pfifo]]
    assert shape("node1", slow, True, was=slow)[-1] == shape("node1", slow, True, was=unlimited)[-1] == tbf
    assert len(shape("node1", slow, True, was=slow)) == len(shape("node1", slow, True, was=unlimited))


def test_packet_loss_disables_segmentation_offload() -> None:
    assert segment_limit("eth0", Link(loss=0.01), Link()) == ["ip link set eth0 gso_max_segs 1"]
    assert segment_limit("eth0", Link(), Link(loss=0.01)) == ["ip link set eth0 gso_max_segs 65535"]
    assert segment_limit("eth0", Link(), Link()) == []


def test_cpu_limits_are_written_for_both_versions_of_control_groups() -> None:
    third, twentieth, unlimited = make_spec(3, cpu="0.3/0.05/none").nodes
    place = "/cg/shoal-default"
    assert render(cpu_steps(third, site(groups=V2))) == f"echo '3000 10000' > {place}/node1/cpu.max\n"
    assert render(cpu_steps(twentieth, site(groups=V2))) == f"echo '5000 100000' > {place}/node2/cpu.max\n"
    assert render(cpu_steps(unlimited, site(groups=V2))) == f"echo 'max 10000' > {place}/node3/cpu.max\n"
    assert "echo -1 > /cg/cpu/shoal-default/node3/cpu.cfs_quota_us" in render(cpu_steps(unlimited, site(groups=V1)))
    assert f"echo '+cpu +memory' > {place}/cgroup.subtree_control" in render(lab_group_steps(site(groups=V2)))
    without_memory = replace(V2, memory=None)
    assert f"echo +cpu > {place}/cgroup.subtree_control" in render(lab_group_steps(site(groups=without_memory)))


def test_memory_limits_are_written_for_both_versions_of_control_groups_and_without_swap() -> None:
    limited, unlimited = make_spec(2, memory="2gb/none").nodes
    place = "/cg/shoal-default/node1"
    no_swap, limit = render(memory_steps(limited, site(groups=V2))).splitlines()
    assert no_swap == f"sh -c 'test ! -e {place}/memory.swap.max || echo 0 > {place}/memory.swap.max'"
    assert limit == f"echo 2000000000 > {place}/memory.max"
    assert "echo max > /cg/shoal-default/node2/memory.max" in render(memory_steps(unlimited, site(groups=V2)))
    place = "/cg/memory/shoal-default/node"
    assert render(memory_steps(limited, site())).splitlines() == [
        f"echo 0 > {place}1/memory.swappiness",
        f"echo 2000000000 > {place}1/memory.limit_in_bytes",
    ]
    assert f"echo -1 > {place}2/memory.limit_in_bytes" in render(memory_steps(unlimited, site()))
    assert memory_steps(limited, site(groups=ControlGroups())) == []
    first = render(commands.node_steps(limited, site()))
    assert first.index("memory.limit_in_bytes") < first.index("memory/shoal-default/node1/cgroup.procs")
    assert "memory.limit_in_bytes" not in render(commands.node_steps(unlimited, site()))


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("2gb", 2_000_000_000), ("512MB", 512_000_000), ("1.5gib", 3 << 29), ("none", None)]
)
def test_sizes_of_memory(text: str, size_bytes: int | None) -> None:
    assert parse_memory(text) == size_bytes
    if size_bytes is not None:
        assert parse_memory(format_memory(size_bytes)) == pytest.approx(size_bytes, rel=1e-5)


def test_a_lab_without_the_controller_cannot_limit_memory() -> None:
    view = view_of(make_spec(1), site(groups=replace(V1, memory=None)))
    with pytest.raises(LabUsageError, match="cannot limit memory"):
        view.set_memory("node1", 1 << 30)
    after, steps = view_of(make_spec(1), site()).set_memory("node1", 1 << 30)
    assert after.spec.nodes[0].memory_bytes == 1 << 30
    assert steps == memory_steps(after.spec.nodes[0], site())


def test_control_groups_are_found_in_the_mounts() -> None:
    v1 = "\n".join(f"cgroup /sys/fs/cgroup/{name} cgroup rw,{name} 0 0" for name in ("cpu,cpuacct", "freezer"))
    v2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0"
    assert find_groups(v1, 0).cpu == ControlGroup(parent=Path("/sys/fs/cgroup/cpu,cpuacct"), version=1)
    assert (
        find_groups(v2, 0).cpu == find_groups(v2, 0).freezer == ControlGroup(parent=Path("/sys/fs/cgroup"), version=2)
    )
    assert str(find_groups(v2, 1000).cpu).count("user@1000.service") == 1
    assert find_groups(v1 + "\n" + v2, 0).freezer == ControlGroup(parent=Path("/sys/fs/cgroup/freezer"), version=1)
    assert find_groups("tmpfs / tmpfs rw 0 0", 0) == ControlGroups()


def test_a_cut_drops_packets_at_the_receiver() -> None:
    view = view_of(make_spec(3), site())
    after, steps = view.cut_off("node1", "node2", one_way=True)
    lines = render(steps).splitlines()
    assert len(lines) == 1
    assert "node2.pid" in lines[0]
    assert "ip saddr { 10.77.0.1 } drop" in lines[0]
    assert after.cuts == {("node1", "node2")}
    assert len(view.cut_off("node1", None, one_way=False)[1]) == 3


def test_healing_one_pair_leaves_the_other_cut() -> None:
    view = view_of(make_spec(3), site(), cuts=frozenset({("node1", "node2"), ("node2", "node1"), ("node1", "node3")}))
    after, steps = view.heal_cuts("node1", "node2")
    assert after.cuts == {("node1", "node3")}
    assert len(steps) == 2
    assert view.heal_cuts(None, None)[0].cuts == frozenset()


def test_rules_replace_each_other_in_one_transaction() -> None:
    assert ruleset([], None, 0.0) == "add table inet shoal; delete table inet shoal"
    walled = ruleset([], ("22",), 0.01)
    assert "numgen random mod 1000000 < 10000 drop" in walled
    assert walled.index("ct state established") < walled.index("tcp dport { 22 } accept")
    assert walled.endswith("iifname eth0 drop")


def test_a_silent_kill_removes_the_link_then_thaws_then_kills() -> None:
    view = view_of(make_spec(2), site(), frozen=frozenset({"node1"}))
    after, steps = view.kill_node("node1", silent=True)
    unplug, thaw, end = render(steps).splitlines()
    assert "ip link del node1" in unplug
    assert thaw == "echo THAWED > /cg/freezer/shoal-default/node1/freezer.state"
    assert end == 'kill -KILL "$(cat /run/lab/node1.pid)"'
    assert after.frozen == frozenset()


def test_freezing_without_a_freezer_sends_a_signal_to_every_process() -> None:
    view = view_of(make_spec(1), site(groups=ControlGroups()))
    assert "kill -STOP -1" in render(view.set_frozen("node1", frozen=True)[1])


def test_tools_outside_the_users_path_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    system = Path("/usr/sbin").resolve()
    assert search_path("/own:/bin").startswith("/own:/bin:")
    assert str(system) in search_path("/bin").split(":")
    assert search_path(f"/bin:{system}:/sbin") == f"/bin:{system}:/sbin"
    own = tmp_path / "tc"
    own.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_tool("tc") == str(own), "the user's PATH comes first"
    assert path_line().startswith(f'export PATH="$PATH:{system}')
    assert reach_tools(["tc"])[-1] == "tc"
    monkeypatch.setenv("PATH", "/usr/sbin:/sbin")
    assert (path_line(), reach_tools(["tc"])) == ("", ["tc"])


def test_missing_kernel_features_are_named_and_the_others_kept() -> None:
    features = Features(rootless=True, netem=False, delay_line=False, nft=True, sshd=True, groups=ControlGroups())
    spec = make_spec(2, delay="2ms", loss="1%", cpu="0.5", memory="1gb", sshd=True)
    missing = " ".join(lacks(spec, features))
    for word in ("no delay", "CPU limits", "memory limits", "SSH servers"):
        assert word in missing
    assert "loss" not in missing
    assert substitutes(spec, features) == ("loss by nftables: this kernel has no netem",)
    reduced = possible(spec, features)
    assert reduced.nodes[0].memory_bytes is None
    assert (reduced.nodes[0].link.delay_s, reduced.nodes[0].link.loss, reduced.nodes[0].cpu, reduced.sshd) == (
        0.0,
        0.01,
        None,
        False,
    )
    assert lacks(make_spec(2), features) == substitutes(make_spec(2), features) == ()
    without_nft = replace(features, nft=False)
    assert "no loss: neither netem nor nft" in lacks(spec, without_nft)
    assert substitutes(spec, without_nft) == ()


def test_a_process_delays_packets_where_the_kernel_cannot() -> None:
    features = Features(rootless=False, netem=False, delay_line=True, nft=True, sshd=True, groups=V1)
    spec = make_spec(2, delay="2ms")
    assert possible(spec, features).nodes[0].link.delay_s == 0.002
    assert lacks(spec, features) == ()
    assert "a process" in substitutes(spec, features)[0]
    rich = replace(features, netem=True, delay_line=False)
    assert substitutes(spec, rich) == lacks(spec, rich) == ()


def test_a_delay_process_is_started_replaced_and_ended_with_the_delay() -> None:
    def steps_for(old: str, new: str) -> str:
        before, after = (make_spec(1, link="none", delay=delay).nodes[0] for delay in (old, new))
        return render(commands.link_steps(after, site(netem=False), before.link))

    starts, ends = "delay_line.py /run/lab/node1-delay.pid node1 node1-w 0.005000000", "kill -KILL"
    added = steps_for("0ms", "5ms")
    assert (starts in added, ends in added) == (True, False)
    assert "ip link set node1 nomaster arp off" in added
    replaced = steps_for("2ms", "5ms")
    assert replaced.index(ends) < replaced.index(starts)
    removed = steps_for("5ms", "0ms")
    assert (starts in removed, ends in removed) == (False, True)
    assert "ip link set node1 master sw0 arp on" in removed
    assert "delay" not in steps_for("5ms", "5ms")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"user.max_user_namespaces": "0"}, "user.max_user_namespaces"),
        ({"kernel.unprivileged_userns_clone": "0"}, "kernel.unprivileged_userns_clone"),
        ({"kernel.apparmor_restrict_unprivileged_userns": "1"}, "kernel.apparmor_restrict_unprivileged_userns"),
        ({}, "unshare: no"),
    ],
)
def test_the_setting_that_forbids_namespaces_is_named(settings: dict[str, str], named: str) -> None:
    why, fix = why_forbidden(settings, "unshare: no", root=False)
    assert named in why
    assert "root" in fix


def test_an_unknown_node_is_refused_with_the_nearest() -> None:
    with pytest.raises(LabUsageError) as raised:
        make_spec(3).node("nod2")
    assert "'node2'" in raised.value.why


@pytest.mark.parametrize("text", ["x", "0", "70000", "30-20", "22,,a"])
def test_invalid_ports_are_refused(text: str) -> None:
    with pytest.raises(LabUsageError):
        parse_ports(text)


@given(st.integers(1, 10**7))
def test_rates_and_delays_survive_formatting(number: int) -> None:
    rate_bps, delay_s = number * 1000.0, number * 1e-6
    assert parse_rate(format_rate(rate_bps)) == pytest.approx(rate_bps, rel=1e-5)
    assert parse_delay(format_delay(delay_s)) == pytest.approx(delay_s, rel=1e-5)
