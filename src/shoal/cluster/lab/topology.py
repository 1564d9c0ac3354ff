"""From a lab's description to the exact commands that make it, change it and take it down. Pure: nothing runs here.

The switch is a bridge in a network namespace of the lab itself, so nothing of the lab's network is in the host's and
two labs may use the same addresses. It is also the first process of a pid namespace in which all nodes live: when it
ends, however that happens, the kernel ends every process of every node and takes down their interfaces.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.lab.cgroup import (
    Groups,
    freeze,
    joining,
    limit_cpu,
    make_lab_groups,
    make_node_groups,
    remove_groups,
)
from shoal.cluster.lab.shaping import bundling, shape
from shoal.cluster.lab.spec import INTERFACE, SWITCH, SWITCH_ADDRESS, LabNode, LabSpec, Link
from shoal.cluster.lab.steps import Await, Kill, PidOf, Run, Step, Word, Write

_BRIDGE = "sw0"
_ALL = ("--net", "--uts", "--mount", "--pid")
_PARENT = (sys.executable, "-I", "-S", str(Path(__file__).with_name("parent.py")))
_DELAY_LINE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("delay_line.py")))


@dataclass(frozen=True)
class Site:
    """Where a lab is built, and what the kernel there can do."""

    name: str
    folder: Path
    rootless: bool
    netem: bool
    groups: Groups

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

    def net(self, node: str, command: str) -> Run:
        """One command about a node's interfaces, in words that never need quoting."""
        return Run((*self.inside(node, "--net"), *command.split()))


def up(spec: LabSpec, site: Site) -> list[Step]:
    steps = [Run(("mkdir", "-p", str(site.folder))), Write(site.folder / "hosts", hosts(spec)), *switch(site)]
    steps += make_lab_groups(site.groups, site.name)
    for node in spec.nodes:
        steps += [*make_node_groups(site.groups, site.name, node.name), *start_node(node, site)]
    return steps


def switch(site: Site) -> list[Step]:
    user = ("--user", "--map-root-user") if site.rootless else ()
    return [
        Run(
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
        Await(site.pid(SWITCH).file, site.log(SWITCH)),
        site.net(SWITCH, "ip link set lo up"),
        site.net(SWITCH, f"ip link add {_BRIDGE} type bridge"),
        site.net(SWITCH, f"ip link set {_BRIDGE} addrgenmode none up"),
        site.net(SWITCH, f"ip addr add {SWITCH_ADDRESS}/24 dev {_BRIDGE}"),
    ]


def start_node(node: LabNode, site: Site) -> list[Step]:
    """Its first process and its cable. Without IPv6 addresses (addrgenmode none) a cut knows one family of them."""
    unshare = ("setsid", "--fork", "unshare", *_ALL, "--fork", *_first(node.name, site))
    begin = ("env", *site.environment(node.name), *site.inside(SWITCH, "--pid"), *unshare)
    return [
        *(cpu(node, site) if node.cpu is not None else []),
        Run(_joined(begin, node.name, site), log=site.log(node.name)),
        Await(site.pid(node.name).file, site.log(node.name)),
        Run((*site.inside(SWITCH, "--net"), *_veth(node), site.pid(node.name))),
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


def link(node: LabNode, site: Site, was: Link | None = None) -> list[Step]:
    """Each end shapes what it sends."""
    steps: list[Step] = []
    for place, device, netem in ((node.name, INTERFACE, False), (SWITCH, node.name, site.netem)):
        steps += [site.net(place, command) for command in shape(device, node.link, netem)]
        steps += [site.net(place, command) for command in bundling(device, node.link, was or Link())]
    return steps + ([] if site.netem else _delay(node, site, (was or Link()).delay_s))


def _delay(node: LabNode, site: Site, was_s: float) -> list[Step]:
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
            Run(("env", *site.environment(line), *inside), log=site.log(line)),
            Await(site.pid(line).file, site.log(line)),
        ]
    return steps


def line_name(node: LabNode) -> str:
    """By which a node's delay line is found again."""
    return f"{node.name}-delay"


def _line_ends(node: LabNode) -> tuple[str, str]:
    return f"{node.name}-b", f"{node.name}-w"


def _end_line(node: LabNode, site: Site) -> list[Step]:
    pid = site.pid(line_name(node))
    return [Kill(pid), Run(("rm", "-f", str(pid.file)))]


def cpu(node: LabNode, site: Site) -> list[Step]:
    return limit_cpu(site.groups, site.name, node.name, node.cpu)


def stop_or_go(node: LabNode, site: Site, frozen: bool) -> list[Step]:
    """The freezer stops a node between two instructions; where there is none, a signal to all in it comes close."""
    if site.groups.freezer:
        return freeze(site.groups, site.name, node.name, frozen)
    script = f"kill -{'STOP' if frozen else 'CONT'} -1 2> /dev/null || true"
    return [Run((*site.inside(node.name, "--pid", "--mount"), "sh", "-c", script))]


def restart(node: LabNode, site: Site) -> list[Step]:
    """A killed node comes back as it was. Its old number must not be taken for the new one."""
    line = _end_line(node, site) if node.link.delay_s and not site.netem else []
    return [Run(("rm", "-f", str(site.pid(node.name).file))), *line, _unplug(node, site), *start_node(node, site)]


def _unplug(node: LabNode, site: Site) -> Run:
    """The kernel buries a network namespace in its own time, and until then its dead node answers pings."""
    devices = (node.name, *([] if site.netem or not node.link.delay_s else [_line_ends(node)[0]]))
    script = "; ".join(f"ip link del {device} 2> /dev/null || true" for device in devices)
    return Run((*site.inside(SWITCH, "--net"), "sh", "-c", script))


def rules(node: LabNode, site: Site, script: str) -> list[Step]:
    return [Run((*site.inside(node.name, "--net"), "nft", script))]


def kill(node: LabNode, site: Site, silent: bool) -> list[Step]:
    """Killed processes still say goodbye (their sockets are closed for them); behind a dead cable nobody hears it."""
    end: list[Step] = [Kill(site.pid(node.name)), _unplug(node, site)]
    return end[::-1] if silent else end


def down(nodes: list[str], site: Site) -> list[Step]:
    """Thawed first: a frozen process of a version 1 group cannot even be killed."""
    thaw = [step for node in nodes for step in freeze(site.groups, site.name, node, frozen=False)]
    end = [*thaw, Kill(site.pid(SWITCH)), *remove_groups(site.groups, site.name, nodes)]
    return [*end, Run(("rm", "-rf", str(site.folder)))]


def command(node: str, site: Site, argv: list[str], folder: Path) -> tuple[Word, ...]:
    """`argv` as it runs on a node: in its control groups, its namespaces, and the folder we are in."""
    entered: tuple[Word, ...] = (*_PARENT, site.pid(node), str(folder), *argv)
    return entered if node == SWITCH else _joined(entered, node, site)


def server(node: str, site: Site, argv: list[str], log: Path) -> Run:
    """A command that stays on a node and has left us behind when this step is done."""
    entered = (*site.inside(node, *_ALL), "--wdns=/", "--", "setsid", "--fork", *argv)
    return Run(_joined(entered, node, site), log)


def _joined(words: tuple[Word, ...], node: str, site: Site) -> tuple[Word, ...]:
    script = joining(site.groups, site.name, node)
    return ("sh", "-c", f'{script}exec "$@"', "sh", *words) if script else words


def _first(node: str, site: Site) -> tuple[str, ...]:
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
