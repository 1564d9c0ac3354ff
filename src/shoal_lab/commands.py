"""Turn the description of a lab into the exact commands that make, change and remove it. Nothing runs here.

The switch is a bridge in a network namespace of the lab's own, so nothing of the lab's network is in the host's, and
two labs may use the same addresses. Its process is also the first of a pid namespace in which all nodes live: when it
ends, however that happens, the kernel ends every process of every node and removes their interfaces.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal_lab.errors import LabUsageError
from shoal_lab.spec import INTERFACE, SWITCH, SWITCH_ADDRESS, LabSpec, Link, NodeSpec, format_delay, format_rate

_BRIDGE = "sw0"
_NAMESPACES = ("--net", "--uts", "--mount", "--pid")
_ENTER_NODE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("enter_node.py")))
_DELAY_LINE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("delay_line.py")))


# Steps are data: `--dry-run` prints what `apply` does.


@dataclass(frozen=True)
class PidOf:
    """A word that is known once the process runs: the number of the first process of a node or of the switch."""

    file: Path


Word = str | PidOf


@dataclass(frozen=True)
class RunCommand:
    words: tuple[Word, ...]
    log: Path | None = None  # output of a command that stays: it must not hold the pipes of this process open


@dataclass(frozen=True)
class WriteFile:
    path: Path
    text: str


@dataclass(frozen=True)
class WaitForFile:
    """Wait until the file has content."""

    file: Path
    log: Path  # says why the file stays empty


@dataclass(frozen=True)
class KillNamespace:
    """Kill the first process of a pid namespace: the kernel ends all others in it, and in namespaces below it."""

    pid: PidOf


@dataclass(frozen=True)
class RemoveControlGroup:
    """Retried for a while: a control group can be removed once the kernel has reaped its last process."""

    path: Path


Step = RunCommand | WriteFile | WaitForFile | KillNamespace | RemoveControlGroup


def render(steps: Iterable[Step]) -> str:
    """Return the steps as a script for `sh`."""
    return "".join(f"{render_step(step)}\n" for step in steps)


def render_step(step: Step) -> str:
    match step:
        case RunCommand(words, log):
            line = " ".join(_render_word(word) for word in words)
            return line + (f" > {_quote(log)} 2>&1 < /dev/null" if log else "")
        case WriteFile(path, text):
            lines = [shlex.quote(line) for line in text.splitlines()]
            echo = f"echo {lines[0]}" if len(lines) == 1 else f"printf '%s\\n' {' '.join(lines)}"
            return f"{echo} > {_quote(path)}"
        case WaitForFile(file, _):
            return f"until test -s {_quote(file)}; do sleep 0.01; done"
        case KillNamespace(pid):
            return f"kill -KILL {_render_word(pid)}"
        case RemoveControlGroup(path):
            return f"until rmdir {_quote(path)}; do sleep 0.1; done"


def _render_word(word: Word) -> str:
    return f'"$(cat {_quote(word.file)})"' if isinstance(word, PidOf) else shlex.quote(word)


def _quote(path: Path) -> str:
    return shlex.quote(str(path))


# Control groups limit a node's CPU (quota) and memory, and freeze it: version 1, version 2, or both side by side.

# A node at 0.3 cores stands still 70% of each period. Short periods look like a slow machine, long ones like one that
# stutters; the kernel takes no quota below 1 ms.
_PERIOD_US = 10_000
_LONG_PERIOD_US = 100_000
_SHORT_PERIOD_FROM = 0.1


@dataclass(frozen=True)
class ControlGroup:
    """A place in one hierarchy below which a lab may make groups."""

    parent: Path
    version: int

    def of_lab(self, lab: str) -> Path:
        return self.parent / f"shoal-{lab}"

    def of_node(self, lab: str, node: str) -> Path:
        return self.of_lab(lab) / node


@dataclass(frozen=True)
class ControlGroups:
    """A controller is None where this machine, or this user, has none."""

    cpu: ControlGroup | None = None
    freezer: ControlGroup | None = None
    memory: ControlGroup | None = None

    def all(self) -> list[ControlGroup]:
        """Return the distinct places: in version 2 all controllers are in one."""
        return list(dict.fromkeys(group for group in (self.cpu, self.freezer, self.memory) if group))


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
        """Return the marks of every process that holds the lab up: it is found by them when its pid file is lost."""
        return (f"SHOAL_LAB={self.folder}", f"SHOAL_NODE={node}")

    def inside(self, node: str, *namespaces: str) -> tuple[Word, ...]:
        user = ("--user", "--preserve-credentials") if self.rootless else ()
        return ("nsenter", "--target", self.pid(node), *user, *namespaces)

    def net(self, node: str, command: str) -> RunCommand:
        """Return a command about a node's interfaces, in words that need no quoting."""
        return RunCommand((*self.inside(node, "--net"), *command.split()))


def lab_group_steps(site: LabSite) -> list[Step]:
    steps: list[Step] = []
    for group in site.groups.all():
        steps.append(RunCommand(("mkdir", "-p", str(group.of_lab(site.name)))))
        if group.version == 2:
            controllers = {"+cpu": site.groups.cpu, "+memory": site.groups.memory}
            enabled = " ".join(name for name, place in controllers.items() if place == group)
            folders = (group.parent, group.of_lab(site.name)) if enabled else ()
            steps += [WriteFile(folder / "cgroup.subtree_control", enabled) for folder in folders]
    return steps


def cpu_steps(node: NodeSpec, site: LabSite) -> list[Step]:
    if site.groups.cpu is None:
        return []
    folder, cpu = site.groups.cpu.of_node(site.name, node.name), node.cpu
    period_us = _PERIOD_US if cpu is None or cpu >= _SHORT_PERIOD_FROM else _LONG_PERIOD_US
    quota_us = None if cpu is None else round(cpu * period_us)
    if site.groups.cpu.version == 2:
        return [WriteFile(folder / "cpu.max", f"{'max' if quota_us is None else quota_us} {period_us}")]
    return [
        WriteFile(folder / "cpu.cfs_period_us", str(period_us)),
        WriteFile(folder / "cpu.cfs_quota_us", str(-1 if quota_us is None else quota_us)),
    ]


def memory_steps(node: NodeSpec, site: LabSite) -> list[Step]:
    """Limit a node's memory, without swap: a process above it would be slow for minutes before it is killed."""
    if site.groups.memory is None:
        return []
    folder, limit = site.groups.memory.of_node(site.name, node.name), node.memory_bytes
    if site.groups.memory.version == 2:
        # A kernel without swap has no such file.
        swap = _quote(folder / "memory.swap.max")
        script = f"test ! -e {swap} || echo {'max' if limit is None else 0} > {swap}"
        return [
            RunCommand(("sh", "-c", script)),
            WriteFile(folder / "memory.max", "max" if limit is None else str(limit)),
        ]
    no_swap = WriteFile(folder / "memory.swappiness", "60" if limit is None else "0")
    return [no_swap, WriteFile(folder / "memory.limit_in_bytes", str(-1 if limit is None else limit))]


def freeze(node: str, site: LabSite, frozen: bool) -> list[Step]:
    if site.groups.freezer is None:
        return []
    folder = site.groups.freezer.of_node(site.name, node)
    if site.groups.freezer.version == 2:
        return [WriteFile(folder / "cgroup.freeze", str(int(frozen)))]
    return [WriteFile(folder / "freezer.state", "FROZEN" if frozen else "THAWED")]


def node_groups_on_disk(site: LabSite) -> list[str]:
    """Return the nodes for which groups exist, whatever the lab's state file says."""
    labs = [group.of_lab(site.name) for group in site.groups.all()]
    return sorted({folder.name for lab in labs if lab.is_dir() for folder in lab.iterdir() if folder.is_dir()})


# Build the switch and the nodes


def lab_steps(spec: LabSpec, site: LabSite) -> list[Step]:
    steps = [
        RunCommand(("mkdir", "-p", str(site.folder))),
        WriteFile(site.folder / "hosts", hosts_file(spec)),
        *_switch_steps(site),
        *lab_group_steps(site),
    ]
    for node in spec.nodes:
        folders = [str(group.of_node(site.name, node.name)) for group in site.groups.all()]
        steps += [RunCommand(("mkdir", "-p", *folders))] if folders else []
        steps += node_steps(node, site)
    return steps


def _switch_steps(site: LabSite) -> list[Step]:
    user = ("--user", "--map-root-user") if site.rootless else ()
    unshare = ("setsid", "--fork", "unshare", *user, *_NAMESPACES, "--fork", *_first_process(SWITCH, site))
    return [
        RunCommand(("env", *site.environment(SWITCH), *unshare), log=site.log(SWITCH)),
        WaitForFile(site.pid(SWITCH).file, site.log(SWITCH)),
        site.net(SWITCH, "ip link set lo up"),
        site.net(SWITCH, f"ip link add {_BRIDGE} type bridge"),
        site.net(SWITCH, f"ip link set {_BRIDGE} addrgenmode none up"),
        site.net(SWITCH, f"ip addr add {SWITCH_ADDRESS}/24 dev {_BRIDGE}"),
    ]


def node_steps(node: NodeSpec, site: LabSite) -> list[Step]:
    """Start a node's first process and connect its cable, a veth pair whose end in the switch has the node's name.

    It has no IPv6 addresses (addrgenmode none), so that a cut needs to know one family only. Its hardware address is
    fixed: a node that came back with another one was not reached for a minute, until its peers forgot the old one.
    """
    unshare = ("setsid", "--fork", "unshare", *_NAMESPACES, "--fork", *_first_process(node.name, site))
    start = ("env", *site.environment(node.name), *site.inside(SWITCH, "--pid"), *unshare)
    hardware = ":".join(("02", "00", *(f"{int(part):02x}" for part in node.address.split("."))))
    veth = f"ip link add {node.name} type veth peer name {INTERFACE} address {hardware} netns"
    return [
        *(cpu_steps(node, site) if node.cpu is not None else []),
        *(memory_steps(node, site) if node.memory_bytes is not None else []),
        RunCommand(_in_control_groups(start, node.name, site), log=site.log(node.name)),
        WaitForFile(site.pid(node.name).file, site.log(node.name)),
        RunCommand((*site.inside(SWITCH, "--net"), *veth.split(), site.pid(node.name))),
        site.net(SWITCH, f"ip link set {node.name} master {_BRIDGE} addrgenmode none up"),
        site.net(node.name, "ip link set lo up"),
        site.net(node.name, f"ip link set {INTERFACE} addrgenmode none up"),
        site.net(node.name, f"ip addr add {node.address}/24 dev {INTERFACE}"),
        *link_steps(node, site),
    ]


def _first_process(node: str, site: LabSite) -> tuple[str, ...]:
    """Return what the first process of a node or of the switch runs before it sleeps for good.

    In its first line /proc is still the host's, so it learns its number there. Ignoring SIGCHLD makes the kernel reap
    orphans. /sys shows the interfaces of the namespace that mounted it; some containers forbid the mount, and then only
    tools that read /sys/class/net are misled. The control groups below /sys stay visible, as on a real machine: a CPU
    limit can be told from other programs only there.
    """
    keep_groups = "mount -t sysfs sysfs /mnt && mount --rbind /sys/fs/cgroup /mnt/fs/cgroup && mount --move /mnt /sys"
    script = (
        "read -r pid rest < /proc/self/stat",
        f"hostname {node}",
        f"mount --bind {_quote(site.folder / 'hosts')} /etc/hosts",
        "mount -t proc proc /proc",
        f"{{ {keep_groups}; }} 2> /dev/null || mount -t sysfs sysfs /sys 2> /dev/null || true",
        f"echo $pid > {_quote(site.pid(node).file)}",
        "exec env --ignore-signal=CHLD sleep infinity",
    )
    return ("sh", "-ec", "; ".join(script))


def hosts_file(spec: LabSpec) -> str:
    """Return /etc/hosts of the nodes. It has each address also as IPv4-mapped: torch's store listens for both families,
    looks up the name of every peer, and complains on every rank when there is none."""
    known = [*((node.address, node.name) for node in spec.nodes), (SWITCH_ADDRESS, SWITCH)]
    lines = [f"{prefix}{address} {name}" for prefix in ("", "::ffff:") for address, name in known]
    return "\n".join(["127.0.0.1 localhost", *lines]) + "\n"


# Run programs on a node


def command_on_node(node: str, site: LabSite, argv: list[str], folder: Path) -> tuple[Word, ...]:
    """Return `argv` with the prefix that runs it on a node: in its control groups, its namespaces, and this folder."""
    entered: tuple[Word, ...] = (*_ENTER_NODE, site.pid(node), str(folder), *argv)
    return entered if node == SWITCH else _in_control_groups(entered, node, site)


def _server_step(node: str, site: LabSite, argv: list[str], log: Path) -> RunCommand:
    """Start a program that stays on a node after this step is done."""
    entered = (*site.inside(node, *_NAMESPACES), "--wdns=/", "--", "setsid", "--fork", *argv)
    return RunCommand(_in_control_groups(entered, node, site), log)


def group_files(node: str, site: LabSite) -> list[Path]:
    """Return the files that put a process into the node's control groups, when its number is written to them."""
    return [group.of_node(site.name, node) / "cgroup.procs" for group in site.groups.all()]


def _in_control_groups(words: tuple[Word, ...], node: str, site: LabSite) -> tuple[Word, ...]:
    """Run a command in a shell that first puts itself into the node's control groups."""
    script = "".join(f"echo $$ > {file} && " for file in group_files(node, site))
    return ("sh", "-c", f'{script}exec "$@"', "sh", *words) if script else words


# Change, kill, restart and remove


def freeze_steps(node: NodeSpec, site: LabSite, frozen: bool) -> list[Step]:
    """Freeze or thaw a node. The freezer stops it between two instructions; without one, a signal to all processes in
    it comes close."""
    if site.groups.freezer:
        return freeze(node.name, site, frozen)
    script = f"kill -{'STOP' if frozen else 'CONT'} -1 2> /dev/null || true"
    return [RunCommand((*site.inside(node.name, "--pid", "--mount"), "sh", "-c", script))]


def kill_steps(node: NodeSpec, site: LabSite, silent: bool) -> list[Step]:
    """Kill a node. The kernel closes the sockets of killed processes, which their peers notice; `silent` removes the
    cable first, so that they do not."""
    steps: list[Step] = [KillNamespace(site.pid(node.name)), _unplug(node, site)]
    return steps[::-1] if silent else steps


def restart_steps(node: NodeSpec, site: LabSite) -> list[Step]:
    """Start a killed node as it was. Its pid file is removed first: the old number is not the new process's."""
    return [
        RunCommand(("rm", "-f", str(site.pid(node.name).file))),
        *(_end_delay_line(node, site) if node.link.delay_s and not site.netem else []),
        _unplug(node, site),
        *node_steps(node, site),
    ]


def _unplug(node: NodeSpec, site: LabSite) -> RunCommand:
    """Remove a node's cable: the kernel removes a network namespace late, and until then the dead node answers."""
    devices = (node.name, *([] if site.netem or not node.link.delay_s else [_delay_line_ends(node)[0]]))
    script = "; ".join(f"ip link del {device} 2> /dev/null || true" for device in devices)
    return RunCommand((*site.inside(SWITCH, "--net"), "sh", "-c", script))


def removal_steps(nodes: list[str], site: LabSite) -> list[Step]:
    """Remove a lab. Nodes are thawed first: a frozen process of a version 1 control group cannot even be killed."""
    thaw = [step for node in nodes for step in freeze(node, site, frozen=False)]
    groups = [group.of_node(site.name, node) for group in site.groups.all() for node in nodes]
    groups += [group.of_lab(site.name) for group in site.groups.all()]
    remove_groups = [RemoveControlGroup(path) for path in groups]
    return [*thaw, KillNamespace(site.pid(SWITCH)), *remove_groups, RunCommand(("rm", "-rf", str(site.folder)))]


# Shape a link with tc: each end shapes what it sends.

# A rate is what IP packets get. tc also counts each packet's 14 bytes of Ethernet header; given the plain rate, iperf3
# would show 95.6% of it at best.
_HEADERS = 1514 / 1500
# Tokens saved up while the link is idle. With less than 2 ms a late timer on a busy machine costs bandwidth; with more,
# small messages pass as if there were no limit.
_BURST_S = 2e-3
_LEAST_BURST_BYTES = 3200
_QUEUE = "50ms"
_PACKET_BYTES = 1500
_LEAST_QUEUE_PACKETS = 1000
_MOST_SEGMENTS = 65535


def link_steps(node: NodeSpec, site: LabSite, was: Link | None = None) -> list[Step]:
    was = was or Link()
    steps: list[Step] = []
    for place, device, netem in ((node.name, INTERFACE, False), (SWITCH, node.name, site.netem)):
        steps += [site.net(place, command) for command in shape(device, node.link, netem, was)]
        steps += [site.net(place, command) for command in segment_limit(device, node.link, was)]
    return steps + ([] if site.netem else _delay_steps(node, site, was.delay_s))


def shape(device: str, link: Link, netem: bool, was: Link) -> list[str]:
    """Return the tc commands for one end. `netem` is for the switch's end only: on the sender's end it would take
    packets from TCP's own accounts, which then overfills the queue."""
    if not netem or not (link.delay_s or link.loss):
        return _limit(device, link, was, "root", 1)
    delay = f" delay {format_delay(link.delay_s)}" if link.delay_s else ""
    loss = f" loss {100 * link.loss:.6g}%" if link.loss else ""
    # netem must hold everything sent during the delay, and as much again for bursts.
    in_flight = (link.rate_bps or 10e9) / 8 * link.delay_s / _PACKET_BYTES
    limit = max(_LEAST_QUEUE_PACKETS, round(2 * in_flight))
    delay_line = f"tc qdisc replace dev {device} root handle 2: netem limit {limit}{delay}{loss}"
    return [delay_line, *(_limit(device, link, was, "parent 2:1", 3) if link.rate_bps or was.rate_bps else [])]


def _limit(device: str, link: Link, was: Link, place: str, handle: int) -> list[str]:
    """Return the commands that set the rate of a queue.

    A queue whose handle stays keeps its packets. One of them may have 64 kB, more than the new burst: tbf waits for it
    forever, and the link is dead. Hence the old queue is dropped when the rate changes.
    """
    # A queue cannot be replaced by one of another kind with the same handle.
    unlimited = f"tc qdisc replace dev {device} {place} handle 4: pfifo limit {_LEAST_QUEUE_PACKETS}"
    if link.rate_bps is None:
        return [unlimited]
    burst = max(_LEAST_BURST_BYTES, round(link.rate_bps / 8 * _BURST_S))
    rate = format_rate(link.rate_bps * _HEADERS)
    limited = f"tc qdisc replace dev {device} {place} handle {handle}: tbf rate {rate} burst {burst} latency {_QUEUE}"
    return [limited] if was.rate_bps in (None, link.rate_bps) else [unlimited, limited]


def segment_limit(device: str, link: Link, was: Link) -> list[str]:
    """Send single packets on a link with loss: the kernel hands up to 64 kB through a veth as one, and would lose them
    as one."""
    if bool(link.loss) == bool(was.loss):
        return []
    return [f"ip link set {device} gso_max_segs {1 if link.loss else _MOST_SEGMENTS}"]


def _delay_steps(node: NodeSpec, site: LabSite, was_s: float) -> list[Step]:
    """Start or end a process between the switch and the node's cable that delays packets, for kernels without netem.

    The node's own end stays as it is, so connections survive when a delay is added or removed.
    """
    if node.link.delay_s == was_s:
        return []
    bridge_end, line_end = _delay_line_ends(node)
    steps: list[Step] = []
    if was_s:
        steps += [
            *_end_delay_line(node, site),
            site.net(SWITCH, f"ip link del {bridge_end}"),
            site.net(SWITCH, f"ip link set {node.name} master {_BRIDGE} arp on"),
        ]
    if node.link.delay_s:
        name = _delay_line_name(node)
        program = (*_DELAY_LINE, str(site.pid(name).file), node.name, line_end, f"{node.link.delay_s:.9f}")
        # It has a pid namespace of its own, by which it is ended, and not the switch's mounts, so that it learns its
        # number on the host.
        inside = (*site.inside(SWITCH, "--net", "--pid"), "setsid", "--fork", "unshare", "--pid", "--fork", *program)
        steps += [
            # Without ARP the switch itself does not answer at the two ends, which belong to no bridge.
            site.net(SWITCH, f"ip link set {node.name} nomaster arp off"),
            site.net(SWITCH, f"ip link add {bridge_end} type veth peer name {line_end}"),
            site.net(SWITCH, f"ip link set {line_end} addrgenmode none arp off up"),
            site.net(SWITCH, f"ip link set {bridge_end} master {_BRIDGE} addrgenmode none up"),
            RunCommand(("env", *site.environment(name), *inside), log=site.log(name)),
            WaitForFile(site.pid(name).file, site.log(name)),
        ]
    return steps


def _delay_line_name(node: NodeSpec) -> str:
    return f"{node.name}-delay"


def _delay_line_ends(node: NodeSpec) -> tuple[str, str]:
    return f"{node.name}-b", f"{node.name}-w"


def _end_delay_line(node: NodeSpec, site: LabSite) -> list[Step]:
    pid = site.pid(_delay_line_name(node))
    return [KillNamespace(pid), RunCommand(("rm", "-f", str(pid.file)))]


# Filter what a node receives, with one nftables table: cuts, a firewall and, without netem, packet loss.
#
# Packets are dropped where they arrive. With a rule on the sender's side, its `send` would fail with "not permitted",
# which never happens with a pulled cable.

_TABLE = "inet shoal"
_LOSS_SCALE = 1_000_000
_PORTS = re.compile(r"\d{1,5}(-\d{1,5})?")
_LAST_PORT = 65_535


def filter_steps(node: NodeSpec, site: LabSite, script: str) -> list[Step]:
    return [RunCommand((*site.inside(node.name, "--net"), "nft", script))]


def ruleset(cut_from: Iterable[str], firewall: Sequence[str] | None, loss: float) -> str:
    """Return an nft script that replaces the whole table in one transaction; it is added first, so that deleting it
    cannot fail.

    Packets from the addresses `cut_from` are dropped; `firewall` is None, or the TCP ports that stay open.
    """
    rules = [f"numgen random mod {_LOSS_SCALE} < {round(loss * _LOSS_SCALE)} drop"] if loss else []
    if addresses := sorted(cut_from):
        rules.append(f"ip saddr {{ {', '.join(addresses)} }} drop")
    if firewall is not None:
        # A typical home firewall: answers come in, new connections only at open ports, and nothing is rejected aloud.
        rules += ["ct state established,related accept", "ip protocol icmp accept"]
        rules += [f"tcp dport {{ {', '.join(firewall)} }} accept"] if firewall else []
        rules.append("drop")
    script = [f"add table {_TABLE}", f"delete table {_TABLE}"]
    if rules:
        script += [
            f"add table {_TABLE}",
            f"add chain {_TABLE} input {{ type filter hook input priority 0; }}",
            *(f"add rule {_TABLE} input iifname {INTERFACE} {rule}" for rule in rules),
        ]
    return "; ".join(script)


def parse_ports(text: str) -> tuple[str, ...]:
    """Parse `22,29500-29600`."""
    ports = tuple(word.strip() for word in text.split(",") if word.strip())
    for word in ports:
        bounds = [int(part) for part in word.split("-")] if _PORTS.fullmatch(word) else [0]
        if bounds != sorted(bounds) or not all(1 <= port <= _LAST_PORT for port in bounds):
            raise LabUsageError(
                f"{word!r} is not a TCP port",
                why=f"ports are numbers from 1 to {_LAST_PORT}, or a range of them",
                fix="write for example: --allow 22,29500-29600",
            )
    return ports


# Run a real SSH server on each node, with keys made for this lab alone:
#
#     shoal lab exec switch -- ssh -F FOLDER/ssh/config node1


def ssh_key_steps(spec: LabSpec, site: LabSite) -> list[Step]:
    """Make one key to log in with, and one host key for all nodes."""
    folder = site.folder / "ssh"
    known_hosts = f"sed 's/^/* /' {_quote(folder / 'host.pub')} > {_quote(folder / 'known_hosts')}"
    keygen = ("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f")
    return [
        RunCommand(("mkdir", "-m", "700", str(folder))),
        *(RunCommand((*keygen, str(folder / key))) for key in ("host", "id")),
        RunCommand(("cp", str(folder / "id.pub"), str(folder / "authorized_keys"))),
        RunCommand(("sh", "-c", known_hosts)),
        WriteFile(folder / "sshd_config", _server_config(folder)),
        WriteFile(folder / "config", _client_config(spec, folder)),
    ]


def sshd_steps(node: NodeSpec, site: LabSite) -> list[Step]:
    """Start a node's SSH server. Its sessions get an empty /run, as on another machine; sshd wants a folder there,
    which the host may not have and which must not be left behind."""
    folder = site.folder / "ssh"
    pid_file, log = folder / f"{node.name}.pid", site.folder / f"{node.name}-sshd.log"
    options = f"-E {_quote(folder / f'{node.name}.log')} -o PidFile={_quote(pid_file)} -o ListenAddress={node.address}"
    script = (
        f"mount --bind {_quote(folder)} /mnt",
        "mount -t tmpfs -o mode=755 tmpfs /run",
        f"mkdir -p /run/sshd {_quote(folder)}",
        f"mount --bind /mnt {_quote(folder)}",
        "umount /mnt",
        f'exec "$(command -v sshd)" -D -f {_quote(folder)}/sshd_config {options}',
    )
    argv = ["unshare", "--mount", "sh", "-ec", "; ".join(script)]
    return [
        RunCommand(("rm", "-f", str(pid_file))),
        _server_step(node.name, site, argv, log),
        WaitForFile(pid_file, log),
    ]


def _server_config(folder: Path) -> str:
    lines = (
        f"HostKey {folder}/host",
        f"AuthorizedKeysFile {folder}/authorized_keys",
        "PermitRootLogin prohibit-password",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "UsePAM no",
        "Subsystem sftp internal-sftp",
    )
    return "\n".join(lines)


def _client_config(spec: LabSpec, folder: Path) -> str:
    lines = [f"Host {node.name} {node.address}\n  HostName {node.address}" for node in spec.nodes]
    lines += [
        "Host *",
        "  User root",
        f"  IdentityFile {folder}/id",
        "  IdentitiesOnly yes",
        f"  UserKnownHostsFile {folder}/known_hosts",
        "  GlobalKnownHostsFile none",
        "  StrictHostKeyChecking yes",
    ]
    return "\n".join(lines)
