"""From a lab's description to the exact commands that make it, change it and take it down. Pure: nothing runs here.

The switch is a bridge in a network namespace of the lab itself, so nothing of the lab's network is in the host's and
two labs may use the same addresses. It is also the first process of a pid namespace in which all nodes live: when it
ends, however that happens, the kernel ends every process of every node and takes down their interfaces.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.lab.spec import INTERFACE, SWITCH, SWITCH_ADDRESS, FrozenModel, LabLink, LabNode, LabSpec
from shoal.errors import UsageError
from shoal.units import format_delay, format_rate

# SECTION cluster/lab/steps
# The commands a lab is made of, as data: what `--dry-run` prints is what `apply` does.


@dataclass(frozen=True)
class PidOf:
    """The first process of a node, or of the switch: its number is known once it runs, and stands in this file."""

    file: Path


Word = str | PidOf


@dataclass(frozen=True)
class RunCommand:
    """One command. `log` takes the output of one that stays: it must not hold our own pipes open."""

    words: tuple[Word, ...]
    log: Path | None = None


@dataclass(frozen=True)
class WriteFile:
    path: Path
    text: str


@dataclass(frozen=True)
class WaitForFile:
    """Until the file has content; `log` says why it never got any."""

    file: Path
    log: Path


@dataclass(frozen=True)
class KillNamespace:
    """The first process of a pid namespace; the kernel ends all the others in it, and the namespaces in them."""

    pid: PidOf


@dataclass(frozen=True)
class RemoveControlGroup:
    """Tried again for a while: a control group can go once the kernel has buried its last process."""

    path: Path


Step = RunCommand | WriteFile | WaitForFile | KillNamespace | RemoveControlGroup


def render(steps: Iterable[Step]) -> str:
    """A script for `sh`."""
    return "".join(f"{render_step(step)}\n" for step in steps)


def render_step(step: Step) -> str:
    match step:
        case RunCommand(words, log):
            return _words(words) + (f" > {_quote(log)} 2>&1 < /dev/null" if log else "")
        case WriteFile(path, text):
            return f"{_printed(text)} > {_quote(path)}"
        case WaitForFile(file, _):
            return f"until test -s {_quote(file)}; do sleep 0.01; done"
        case KillNamespace(pid):
            return f"kill -KILL {_word(pid)}"
        case RemoveControlGroup(path):
            return f"until rmdir {_quote(path)}; do sleep 0.1; done"


def _words(words: Sequence[Word]) -> str:
    return " ".join(_word(word) for word in words)


def _word(word: Word) -> str:
    return f'"$(cat {_quote(word.file)})"' if isinstance(word, PidOf) else shlex.quote(word)


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


def _printed(text: str) -> str:
    lines = text.splitlines()
    if len(lines) == 1:
        return f"echo {shlex.quote(lines[0])}"
    return "printf '%s\\n' " + " ".join(shlex.quote(line) for line in lines)


# SECTION cluster/lab/shaping
# One end of a cable as tc sees it: how fast it sends, how late, and how much of it is lost.


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


def shape(device: str, link: LabLink, netem: bool) -> list[str]:
    """`netem` on the switch's end only: on the sender's it would take packets from TCP's own accounts, which then
    overfills the queue."""
    if not netem or not (link.delay_s or link.loss):
        return [_limit(device, link, "root handle 1:")]
    delay = f" delay {format_delay(link.delay_s)}" if link.delay_s else ""
    loss = f" loss {100 * link.loss:.6g}%" if link.loss else ""
    late = f"tc qdisc replace dev {device} root handle 2: netem limit {_packets_on_the_way(link)}{delay}{loss}"
    return [late, _limit(device, link, "parent 2:1 handle 3:")] if link.rate_bps else [late]


def _limit(device: str, link: LabLink, place: str) -> str:
    if link.rate_bps is None:
        return f"tc qdisc replace dev {device} {place} pfifo limit {_LEAST_QUEUE_PACKETS}"
    burst = max(_LEAST_BURST_BYTES, round(link.rate_bps / 8 * _BURST_S))
    rate = format_rate(link.rate_bps * _HEADERS)
    return f"tc qdisc replace dev {device} {place} tbf rate {rate} burst {burst} latency {_QUEUE}"


def _packets_on_the_way(link: LabLink) -> int:
    """What netem must be able to hold: everything sent during the delay, and as much again for bursts."""
    on_the_way = (link.rate_bps or 10e9) / 8 * link.delay_s / _PACKET_BYTES
    return max(_LEAST_QUEUE_PACKETS, round(2 * on_the_way))


def bundling(device: str, link: LabLink, was: LabLink) -> list[str]:
    """With loss, single packets: the kernel hands up to 64 kB through a veth as one, and would lose them as one."""
    if bool(link.loss) == bool(was.loss):
        return []
    return [f"ip link set {device} gso_max_segs {1 if link.loss else _MOST_SEGMENTS}"]


# SECTION cluster/lab/cgroup
# Control groups make a node slow (cpu quota) and stop it (freezer): version 1, version 2, or one beside the other.


# A node at 0.3 cores stands still 70% of each period. Short ones look like a slow machine, long ones like a stuttering
# one; the kernel takes no quota below 1 ms.
_PERIOD_US = 10_000
_LONG_PERIOD_US = 100_000
_SHORT_PERIOD_FROM = 0.1


class ControlGroup(FrozenModel):
    """A place in one hierarchy below which a lab may make groups."""

    parent: Path
    version: int

    def of_lab(self, lab: str) -> Path:
        return self.parent / f"shoal-{lab}"

    def of_node(self, lab: str, node: str) -> Path:
        return self.of_lab(lab) / node


class ControlGroups(FrozenModel):
    """None where this machine, or this user, has no such controller."""

    cpu: ControlGroup | None = None
    freezer: ControlGroup | None = None

    def all(self) -> list[ControlGroup]:
        """In version 2 both controllers live in one place."""
        return list(dict.fromkeys(group for group in (self.cpu, self.freezer) if group))


def read_groups() -> ControlGroups:
    """What is mounted here and lets us make groups."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8")
    found = find_groups(mounts, os.geteuid())
    return ControlGroups(
        cpu=found.cpu if _has_cpu(found.cpu) and _usable(found.cpu) else None,
        freezer=found.freezer if _usable(found.freezer) else None,
    )


def find_groups(mounts: str, uid: int) -> ControlGroups:
    """From the text of /proc/self/mounts. Version 1 is asked first: where it holds a controller, version 2 cannot."""
    v1: dict[str, ControlGroup] = {}
    v2: ControlGroup | None = None
    for fields in (line.split() for line in mounts.splitlines()):
        if len(fields) > 3 and fields[2] == "cgroup":
            v1.update({name: ControlGroup(parent=Path(fields[1]), version=1) for name in fields[3].split(",")})
        elif len(fields) > 3 and fields[2] == "cgroup2":
            v2 = ControlGroup(parent=_delegated(Path(fields[1]), uid), version=2)
    return ControlGroups(cpu=v1.get("cpu", v2), freezer=v1.get("freezer", v2))


def _delegated(mount: Path, uid: int) -> Path:
    """What systemd hands to an ordinary user to manage alone."""
    return mount if uid == 0 else mount / f"user.slice/user-{uid}.slice/user@{uid}.service"


def _usable(group: ControlGroup | None) -> bool:
    """By trying: a read-only mount, a container and a missing controller each hide behind good-looking permissions."""
    if group is None:
        return False
    probe = group.parent / f"shoal-probe-{os.getpid()}"
    try:
        probe.mkdir()
    except OSError:
        return False
    with contextlib.suppress(OSError):
        probe.rmdir()
    return True


def _has_cpu(group: ControlGroup | None) -> bool:
    """A version 2 place without the cpu controller can still freeze."""
    if group is None or group.version == 1:
        return group is not None
    try:
        return "cpu" in (group.parent / "cgroup.controllers").read_text(encoding="utf-8").split()
    except OSError:
        return False


def make_lab_groups(groups: ControlGroups, lab: str) -> list[Step]:
    steps: list[Step] = []
    for group in groups.all():
        steps.append(RunCommand(("mkdir", "-p", str(group.of_lab(lab)))))
        if group.version == 2 and group == groups.cpu:
            steps += [
                WriteFile(folder / "cgroup.subtree_control", "+cpu") for folder in (group.parent, group.of_lab(lab))
            ]
    return steps


def make_node_groups(groups: ControlGroups, lab: str, node: str) -> list[Step]:
    folders = [str(group.of_node(lab, node)) for group in groups.all()]
    return [RunCommand(("mkdir", "-p", *folders))] if folders else []


def limit_cpu(groups: ControlGroups, lab: str, node: str, cpu: float | None) -> list[Step]:
    if groups.cpu is None:
        return []
    folder = groups.cpu.of_node(lab, node)
    period_us = _PERIOD_US if cpu is None or cpu >= _SHORT_PERIOD_FROM else _LONG_PERIOD_US
    quota_us = None if cpu is None else round(cpu * period_us)
    if groups.cpu.version == 2:
        return [WriteFile(folder / "cpu.max", f"{'max' if quota_us is None else quota_us} {period_us}")]
    return [
        WriteFile(folder / "cpu.cfs_period_us", str(period_us)),
        WriteFile(folder / "cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us)),
    ]


def freeze(groups: ControlGroups, lab: str, node: str, frozen: bool) -> list[Step]:
    if groups.freezer is None:
        return []
    folder = groups.freezer.of_node(lab, node)
    if groups.freezer.version == 2:
        return [WriteFile(folder / "cgroup.freeze", str(int(frozen)))]
    return [WriteFile(folder / "freezer.state", "FROZEN" if frozen else "THAWED")]


def remove_groups(groups: ControlGroups, lab: str, nodes: list[str]) -> list[Step]:
    folders = [group.of_node(lab, node) for group in groups.all() for node in nodes]
    return [RemoveControlGroup(folder) for folder in (*folders, *(group.of_lab(lab) for group in groups.all()))]


def node_groups_on_disk(groups: ControlGroups, lab: str) -> list[str]:
    """The nodes for which groups exist, whatever the lab's own notes say."""
    folders = [folder for group in groups.all() if group.of_lab(lab).is_dir() for folder in group.of_lab(lab).iterdir()]
    return sorted({folder.name for folder in folders if folder.is_dir()})


def joining(groups: ControlGroups, lab: str, node: str) -> str:
    """A line of shell that puts the shell itself, and what it becomes, into the node's groups."""
    files = [group.of_node(lab, node) / "cgroup.procs" for group in groups.all()]
    return "".join(f"echo $$ > {file} && " for file in files)


_BRIDGE = "sw0"
_ALL = ("--net", "--uts", "--mount", "--pid")
_PARENT = (sys.executable, "-I", "-S", str(Path(__file__).with_name("enter_node.py")))
_DELAY_LINE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("delay_line.py")))


@dataclass(frozen=True)
class LabSite:
    """Where a lab is built, and what the kernel there can do."""

    name: str
    folder: Path
    rootless: bool
    netem: bool
    groups: ControlGroups

    def pid(self, node: str) -> PidOf:
        return PidOf(self.folder / f"{node}.pid")

    def log(self, node: str) -> Path:
        return self.folder / f"{node}.log"

    def environment(self, node: str) -> tuple[str, ...]:
        """In every process that holds the lab up: by this it is known again, even when its pid file is lost."""
        return (f"SHOAL_LAB={self.folder}", f"SHOAL_NODE={node}")

    def inside(self, node: str, *namespaces: str) -> tuple[Word, ...]:
        user = ("--user", "--preserve-credentials") if self.rootless else ()
        return ("nsenter", "--target", self.pid(node), *user, *namespaces)

    def net(self, node: str, command: str) -> RunCommand:
        """One command about a node's interfaces, in words that never need quoting."""
        return RunCommand((*self.inside(node, "--net"), *command.split()))


def up(spec: LabSpec, site: LabSite) -> list[Step]:
    steps = [
        RunCommand(("mkdir", "-p", str(site.folder))),
        WriteFile(site.folder / "hosts", hosts(spec)),
        *switch(site),
    ]
    steps += make_lab_groups(site.groups, site.name)
    for node in spec.nodes:
        steps += [*make_node_groups(site.groups, site.name, node.name), *start_node(node, site)]
    return steps


def switch(site: LabSite) -> list[Step]:
    user = ("--user", "--map-root-user") if site.rootless else ()
    return [
        RunCommand(
            (
                "env",
                *site.environment(SWITCH),
                "setsid",
                "--fork",
                "unshare",
                *user,
                *_ALL,
                "--fork",
                *_first(SWITCH, site),
            ),
            log=site.log(SWITCH),
        ),
        WaitForFile(site.pid(SWITCH).file, site.log(SWITCH)),
        site.net(SWITCH, "ip link set lo up"),
        site.net(SWITCH, f"ip link add {_BRIDGE} type bridge"),
        site.net(SWITCH, f"ip link set {_BRIDGE} addrgenmode none up"),
        site.net(SWITCH, f"ip addr add {SWITCH_ADDRESS}/24 dev {_BRIDGE}"),
    ]


def start_node(node: LabNode, site: LabSite) -> list[Step]:
    """Its first process and its cable. Without IPv6 addresses (addrgenmode none) a cut knows one family of them."""
    unshare = ("setsid", "--fork", "unshare", *_ALL, "--fork", *_first(node.name, site))
    begin = ("env", *site.environment(node.name), *site.inside(SWITCH, "--pid"), *unshare)
    return [
        *(cpu(node, site) if node.cpu is not None else []),
        RunCommand(_joined(begin, node.name, site), log=site.log(node.name)),
        WaitForFile(site.pid(node.name).file, site.log(node.name)),
        RunCommand((*site.inside(SWITCH, "--net"), *_veth(node), site.pid(node.name))),
        site.net(SWITCH, f"ip link set {node.name} master {_BRIDGE} addrgenmode none up"),
        site.net(node.name, "ip link set lo up"),
        site.net(node.name, f"ip link set {INTERFACE} addrgenmode none up"),
        site.net(node.name, f"ip addr add {node.address}/24 dev {INTERFACE}"),
        *link(node, site),
    ]


def _veth(node: LabNode) -> list[str]:
    """The cable: one end in the switch, named after the node, the other in the node.

    With a hardware address of its own: a node that comes back with another is not reached for a minute, until its
    peers have forgotten the old one.
    """
    hardware = ":".join(("02", "00", *(f"{int(part):02x}" for part in node.address.split("."))))
    return f"ip link add {node.name} type veth peer name {INTERFACE} address {hardware} netns".split()


def link(node: LabNode, site: LabSite, was: LabLink | None = None) -> list[Step]:
    """Each end shapes what it sends."""
    steps: list[Step] = []
    for place, device, netem in ((node.name, INTERFACE, False), (SWITCH, node.name, site.netem)):
        steps += [site.net(place, command) for command in shape(device, node.link, netem)]
        steps += [site.net(place, command) for command in bundling(device, node.link, was or LabLink())]
    return steps + ([] if site.netem else _delay(node, site, (was or LabLink()).delay_s))


def _delay(node: LabNode, site: LabSite, was_s: float) -> list[Step]:
    """A process between the switch and the node's cable, for kernels without netem. The node's own end stays as it is:
    connections survive when a delay comes or goes."""
    if node.link.delay_s == was_s:
        return []
    bridge_end, line_end = _line_ends(node)
    steps: list[Step] = []
    if was_s:
        steps += [
            *_end_line(node, site),
            site.net(SWITCH, f"ip link del {bridge_end}"),
            site.net(SWITCH, f"ip link set {node.name} master {_BRIDGE} arp on"),
        ]
    if node.link.delay_s:
        line, end = line_name(node), f"{node.link.delay_s:.9f}"
        program = (*_DELAY_LINE, str(site.pid(line).file), node.name, line_end, end)
        # In a pid namespace of its own, by which it is ended; without the switch's mounts, so that it learns its number
        # on the host.
        inside = (*site.inside(SWITCH, "--net", "--pid"), "setsid", "--fork", "unshare", "--pid", "--fork", *program)
        steps += [
            # Without ARP the switch itself does not answer at the two ends, which belong to no bridge.
            site.net(SWITCH, f"ip link set {node.name} nomaster arp off"),
            site.net(SWITCH, f"ip link add {bridge_end} type veth peer name {line_end}"),
            site.net(SWITCH, f"ip link set {line_end} addrgenmode none arp off up"),
            site.net(SWITCH, f"ip link set {bridge_end} master {_BRIDGE} addrgenmode none up"),
            RunCommand(("env", *site.environment(line), *inside), log=site.log(line)),
            WaitForFile(site.pid(line).file, site.log(line)),
        ]
    return steps


def line_name(node: LabNode) -> str:
    """By which a node's delay line is found again."""
    return f"{node.name}-delay"


def _line_ends(node: LabNode) -> tuple[str, str]:
    return f"{node.name}-b", f"{node.name}-w"


def _end_line(node: LabNode, site: LabSite) -> list[Step]:
    pid = site.pid(line_name(node))
    return [KillNamespace(pid), RunCommand(("rm", "-f", str(pid.file)))]


def cpu(node: LabNode, site: LabSite) -> list[Step]:
    return limit_cpu(site.groups, site.name, node.name, node.cpu)


def stop_or_go(node: LabNode, site: LabSite, frozen: bool) -> list[Step]:
    """The freezer stops a node between two instructions; where there is none, a signal to all in it comes close."""
    if site.groups.freezer:
        return freeze(site.groups, site.name, node.name, frozen)
    script = f"kill -{'STOP' if frozen else 'CONT'} -1 2> /dev/null || true"
    return [RunCommand((*site.inside(node.name, "--pid", "--mount"), "sh", "-c", script))]


def restart(node: LabNode, site: LabSite) -> list[Step]:
    """A killed node comes back as it was. Its old number must not be taken for the new one."""
    line = _end_line(node, site) if node.link.delay_s and not site.netem else []
    return [
        RunCommand(("rm", "-f", str(site.pid(node.name).file))),
        *line,
        _unplug(node, site),
        *start_node(node, site),
    ]


def _unplug(node: LabNode, site: LabSite) -> RunCommand:
    """The kernel buries a network namespace in its own time, and until then its dead node answers pings."""
    devices = (node.name, *([] if site.netem or not node.link.delay_s else [_line_ends(node)[0]]))
    script = "; ".join(f"ip link del {device} 2> /dev/null || true" for device in devices)
    return RunCommand((*site.inside(SWITCH, "--net"), "sh", "-c", script))


def rules(node: LabNode, site: LabSite, script: str) -> list[Step]:
    return [RunCommand((*site.inside(node.name, "--net"), "nft", script))]


def kill(node: LabNode, site: LabSite, silent: bool) -> list[Step]:
    """Killed processes still say goodbye (their sockets are closed for them); behind a dead cable nobody hears it."""
    end: list[Step] = [KillNamespace(site.pid(node.name)), _unplug(node, site)]
    return end[::-1] if silent else end


def down(nodes: list[str], site: LabSite) -> list[Step]:
    """Thawed first: a frozen process of a version 1 group cannot even be killed."""
    thaw = [step for node in nodes for step in freeze(site.groups, site.name, node, frozen=False)]
    end = [*thaw, KillNamespace(site.pid(SWITCH)), *remove_groups(site.groups, site.name, nodes)]
    return [*end, RunCommand(("rm", "-rf", str(site.folder)))]


def command(node: str, site: LabSite, argv: list[str], folder: Path) -> tuple[Word, ...]:
    """`argv` as it runs on a node: in its control groups, its namespaces, and the folder we are in."""
    entered: tuple[Word, ...] = (*_PARENT, site.pid(node), str(folder), *argv)
    return entered if node == SWITCH else _joined(entered, node, site)


def server(node: str, site: LabSite, argv: list[str], log: Path) -> RunCommand:
    """A command that stays on a node and has left us behind when this step is done."""
    entered = (*site.inside(node, *_ALL), "--wdns=/", "--", "setsid", "--fork", *argv)
    return RunCommand(_joined(entered, node, site), log)


def _joined(words: tuple[Word, ...], node: str, site: LabSite) -> tuple[Word, ...]:
    script = joining(site.groups, site.name, node)
    return ("sh", "-c", f'{script}exec "$@"', "sh", *words) if script else words


def _first(node: str, site: LabSite) -> tuple[str, ...]:
    """What the first process does before it falls asleep for good.

    /proc is still the host's in its first line, which is how it learns its number there. Ignoring SIGCHLD makes the
    kernel bury orphans without being asked. /sys shows the interfaces of the namespace that mounted it; some containers
    forbid that, and then only tools that read /sys/class/net are misled.
    """
    file, names = (shlex.quote(str(path)) for path in (site.pid(node).file, site.folder / "hosts"))
    script = (
        "read -r pid rest < /proc/self/stat",
        f"hostname {node}",
        f"mount --bind {names} /etc/hosts",
        "mount -t proc proc /proc",
        "mount -t sysfs sysfs /sys 2> /dev/null || true",
        f"echo $pid > {file}",
        "exec env --ignore-signal=CHLD sleep infinity",
    )
    return ("sh", "-ec", "; ".join(script))


def hosts(spec: LabSpec) -> str:
    """Each address also as torch's store sees it, which listens for both families: it asks for the name of every peer,
    and complains on every rank when there is none."""
    known = [*((node.address, node.name) for node in spec.nodes), (SWITCH_ADDRESS, SWITCH)]
    lines = [f"{prefix}{address} {name}" for prefix in ("", "::ffff:") for address, name in known]
    return "\n".join(["127.0.0.1 localhost", *lines]) + "\n"


# SECTION cluster/lab/filters
# What a node refuses to hear: cuts, a firewall and, where the kernel has no netem, lost packets. One nftables table.
#
# Everything is dropped where it arrives. A rule on the sender's side would tell the sender: its `send` fails with "not
# permitted", which no pulled cable ever says.


_TABLE = "inet shoal"
_LOSS_SCALE = 1_000_000
_PORTS = re.compile(r"\d{1,5}(-\d{1,5})?")
_LAST_PORT = 65_535


def ruleset(deaf_to: Iterable[str], firewall: Sequence[str] | None, loss: float) -> str:
    """A whole table in one transaction: added first so that deleting cannot fail, then made anew.

    `deaf_to` are addresses whose packets vanish; `firewall` is None, or the TCP ports that stay open.
    """
    rules = [*_loss(loss), *_cuts(sorted(deaf_to)), *_firewall(firewall)]
    script = [f"add table {_TABLE}", f"delete table {_TABLE}"]
    if rules:
        script += [
            f"add table {_TABLE}",
            f"add chain {_TABLE} input {{ type filter hook input priority 0; }}",
            *(f"add rule {_TABLE} input iifname {INTERFACE} {rule}" for rule in rules),
        ]
    return "; ".join(script)


def _loss(loss: float) -> list[str]:
    return [f"numgen random mod {_LOSS_SCALE} < {round(loss * _LOSS_SCALE)} drop"] if loss else []


def _cuts(addresses: list[str]) -> list[str]:
    return [f"ip saddr {{ {', '.join(addresses)} }} drop"] if addresses else []


def _firewall(ports: Sequence[str] | None) -> list[str]:
    """The classic home firewall: answers come in, strangers only at open ports, and nobody is told why."""
    if ports is None:
        return []
    open_ports = [f"tcp dport {{ {', '.join(ports)} }} accept"] if ports else []
    return ["ct state established,related accept", "ip protocol icmp accept", *open_ports, "drop"]


def parse_ports(text: str) -> tuple[str, ...]:
    """`22,29500-29600`."""
    ports = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in ports:
        bounds = [int(part) for part in word.split("-")] if _PORTS.fullmatch(word) else [0]
        if bounds != sorted(bounds) or not all(1 <= port <= _LAST_PORT for port in bounds):
            raise UsageError(
                f"{word!r} is no TCP port",
                why=f"ports are numbers from 1 to {_LAST_PORT}, or a range of them",
                fix="write for example: --allow 22,29500-29600",
            )
    return ports


# SECTION cluster/lab/ssh
# A real SSH server on each node, with keys made for this lab alone. Pure: the commands, not their effect.
#
# shoal lab exec switch -- ssh -F FOLDER/ssh/config node1


def ssh_folder(site: LabSite) -> Path:
    return site.folder / "ssh"


def make_keys(spec: LabSpec, site: LabSite) -> list[Step]:
    """One key to log in with, one by which all nodes prove who they are."""
    folder = ssh_folder(site)
    known = f"sed 's/^/* /' {_quoted(folder / 'host.pub')} > {_quoted(folder / 'known_hosts')}"
    return [
        RunCommand(("mkdir", "-m", "700", str(folder))),
        *(
            RunCommand(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)))
            for key in ("host", "id")
        ),
        RunCommand(("cp", str(folder / "id.pub"), str(folder / "authorized_keys"))),
        RunCommand(("sh", "-c", known)),
        WriteFile(folder / "sshd_config", server_config(folder)),
        WriteFile(folder / "config", client_config(spec, folder)),
    ]


def start_server(node: LabNode, site: LabSite) -> list[Step]:
    """Its sessions get an empty /run, as on another machine; sshd wants a folder of its own there, which the host may
    not have and which we do not leave behind."""
    folder, log = _quoted(ssh_folder(site)), _quoted(ssh_folder(site) / f"{node.name}.log")
    pid_file = ssh_folder(site) / f"{node.name}.pid"
    options = f"-o PidFile={_quoted(pid_file)} -o ListenAddress={node.address}"
    script = (
        f"mount --bind {folder} /mnt",
        "mount -t tmpfs -o mode=755 tmpfs /run",
        f"mkdir -p /run/sshd {folder}",
        f"mount --bind /mnt {folder}",
        "umount /mnt",
        f'exec "$(command -v sshd)" -D -f {folder}/sshd_config -E {log} {options}',
    )
    words = ["unshare", "--mount", "sh", "-ec", "; ".join(script)]
    said = site.folder / f"{node.name}-sshd.log"
    return [
        RunCommand(("rm", "-f", str(pid_file))),
        server(node.name, site, words, said),
        WaitForFile(pid_file, said),
    ]


def server_config(folder: Path) -> str:
    return "\n".join(
        (
            f"HostKey {folder}/host",
            f"AuthorizedKeysFile {folder}/authorized_keys",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "Subsystem sftp internal-sftp",
        )
    )


def client_config(spec: LabSpec, folder: Path) -> str:
    lines: list[str] = []
    for node in spec.nodes:
        lines += [f"Host {node.name} {node.address}", f"  HostName {node.address}"]
    common = (
        "Host *",
        "  User root",
        f"  IdentityFile {folder}/id",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {folder}/known_hosts",
        "  GlobalKnownHostsFile none",
        "  StrictHostKeyChecking yes",
    )
    return "\n".join((*lines, *common))


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
