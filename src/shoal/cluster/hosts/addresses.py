"""Which address and interface the ranks of a host use: what the file says, or what ssh would connect to."""

from __future__ import annotations

import ipaddress
import re
import socket
import subprocess
from collections.abc import Mapping

from shoal.cluster.hosts.each import on_each, values_or_raise
from shoal.cluster.hosts.explain import ssh_missing, ssh_words
from shoal.cluster.hosts.facts import HostFacts
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.cluster.node import LOOPBACK
from shoal.control.route import source_address
from shoal.errors import HostError

_RESOLVE_S = 10.0


def addresses(spec: HostsSpec) -> dict[str, str]:
    """By the host's name. Asks the ssh configuration and the name service, and no host."""
    there = values_or_raise(on_each([host for host in spec.hosts if not is_here(host)], lambda host: _far(host, spec)))
    here = {host.name: host.address or _near(host, list(there.values())) for host in spec.hosts if is_here(host)}
    found = {host.name: {**there, **here}[host.name] for host in spec.hosts}
    refuse_twins(found, spec)
    return found


def settle(host: Host, spec: HostsSpec, address: str, facts: HostFacts) -> tuple[str, str]:
    """Address and interface, held against what the host really has. An interface that the file names beats an address
    that it does not."""
    if host.interface is not None:
        own = facts.interfaces.get(host.interface)
        if own is None:
            raise HostError(
                f"{host.name} has no interface {host.interface}",
                why=f"there are: {', '.join(facts.interfaces)}",
                fix=f"correct it in {spec.path}, or leave it out",
            )
        if host.address is None and address not in own and own:
            address = own[0]
    for name, own in facts.interfaces.items():
        if address in own:
            return address, host.interface or name
    raise HostError(
        f"{host.name} does not have the address {address}",
        why="behind a router or a jump host, ssh is told another address than the machine's own. It has: "
        + _own(facts),
        fix=f'add address = "…" to it in {spec.path}, one that the other hosts can reach',
    )


def refuse_twins(found: Mapping[str, str], spec: HostsSpec) -> None:
    owners: dict[str, str] = {}
    for name, address in found.items():
        if (other := owners.setdefault(address, name)) != name:
            raise HostError(
                f"{other} and {name} in {spec.path} are the same machine: both have the address {address}",
                why="each machine is listed once, with as many slots as it should take ranks",
                fix="remove one of them, or give each the address of its own",
            )


def host_name_of(printed: str) -> str:
    """What the ssh configuration makes of a host, as `ssh -G` prints it."""
    match = re.search(r"^hostname (\S+)$", printed, re.MULTILINE)
    return match[1] if match else ""


def _far(host: Host, spec: HostsSpec) -> str:
    return host.address or _resolve(host, spec, _configured_name(host, spec))


def _near(host: Host, others: list[str]) -> str:
    """Ours on the way to the others; alone, we need no network."""
    if not others:
        return LOOPBACK
    try:
        return source_address(others[0])
    except OSError as error:
        raise HostError(
            f"there is no way from here to {others[0]}: {error.strerror}", fix=f"ip route get {others[0]}"
        ) from None


def _configured_name(host: Host, spec: HostsSpec) -> str:
    try:
        done = subprocess.run(
            [*ssh_words(spec), "-G", "--", host.host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_RESOLVE_S,
        )
    except FileNotFoundError:
        raise ssh_missing("ssh") from None
    if done.returncode:
        raise HostError(
            "ssh does not accept its configuration", why=done.stderr.strip(), fix=f"correct it: ssh -G {host.host}"
        )
    return host_name_of(done.stdout)


def _resolve(host: Host, spec: HostsSpec, name: str) -> str:
    """IPv4: gloo on most machines is reached by it, and a name often has both."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    except OSError:
        raise HostError(
            f"no address is known for {name} ({host.name})",
            why="ranks find each other by address, and the name service here does not know this name",
            fix=f'correct the name, or add address = "…" to it in {spec.path}',
        ) from None
    useful = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    if not useful:
        raise HostError(
            f"{name} ({host.name}) means {found[0]} here, which no other machine can reach",
            why="/etc/hosts often gives a machine's own name to a loopback address",
            fix=f'add address = "…" to it in {spec.path}',
        )
    return useful[0]


def _own(facts: HostFacts) -> str:
    return ", ".join(f"{' '.join(own)} on {name}" for name, own in facts.interfaces.items() if own and name != "lo")
