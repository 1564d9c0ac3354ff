"""Why a host cannot be used, from what ssh said about it. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable

from shoal.cluster.hosts.spec import Host, HostsSpec, machine_of
from shoal.errors import HostError

CONNECT_TIMEOUT_S = 10
SSH_FAILED = 255
_LOST = re.compile(r"not responding|Broken pipe|closed by remote host|Connection (?:reset|to \S+ closed)|timed out")
_CHANGED_KEY = re.compile(r"Offending \S+ key in (\S+?):\d+")
_KEY_OF = re.compile(r"[Hh]ost key for (\S+) has changed|host key is known for (\S+) and")
_CONFIG = re.compile(
    r"Bad configuration option|terminating, \d+ bad configuration|Can't open user config file|Bad owner"
)
_BUSY = re.compile(r"kex_exchange_identification|Connection (?:closed|reset) by")


def explain(host: Host, spec: HostsSpec, returncode: int, stderr: str) -> HostError:
    """Of an ssh that ended before a script could begin."""
    for pattern, say in _REASONS:
        if re.search(pattern, stderr):
            return say(host, spec, stderr)
    if returncode != SSH_FAILED:
        return _no_shell(host, spec, returncode, stderr)
    return HostError(
        f"cannot reach {host.name} over ssh",
        why=_tail(stderr) or "ssh did not say why",
        fix=f"{by_hand(host, spec)} -v",
    )


def ssh_words(spec: HostsSpec) -> list[str]:
    return ["ssh", *(("-F", str(spec.ssh_config)) if spec.ssh_config else ())]


def by_hand(host: Host, spec: HostsSpec, *options: str) -> str:
    """What a user types to see for themselves."""
    return shlex.join([*ssh_words(spec), *options, host.host])


def ssh_missing(program: str) -> HostError:
    return HostError(
        f"{program} is not installed here", why="shoal reaches other machines with it", fix="apt install openssh-client"
    )


def silent(host: Host, spec: HostsSpec, what: str, stderr: str) -> HostError:
    return HostError(
        f"{host.name} {what}",
        why=_tail(stderr) or "it is overloaded, asleep, or a program of its login shell waits for input",
        fix=f"see how long this takes: time {by_hand(host, spec)} true",
    )


def gone(host: Host, returncode: int, stderr: str) -> HostError:
    """Of a script that had begun. ssh ends with 255 both when the link was lost and when the program was killed."""
    if returncode != SSH_FAILED or not _LOST.search(stderr):
        return HostError(
            f"what was running on {host.name} ended without an answer",
            why=_tail(stderr) or "somebody killed it, or its machine ran out of memory",
            fix="run the same command again",
        )
    return HostError(
        f"the connection to {host.name} was lost",
        why=_tail(stderr) or "it went off the network, fell asleep or was shut down",
        fix="run the same command again when it is back: what was done there is kept",
    )


def _unknown_name(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"no machine is known by the name {_asked(stderr) or machine_of(host.host)}",
        why="neither the ssh configuration nor the name service knows it",
        fix=f"correct it in {spec.path}, write its address, or add it to ~/.ssh/config",
    )


def _refused(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"{host.name} is there, but no SSH server answers",
        why=_tail(stderr),
        fix="on that machine: sudo apt install openssh-server",
    )


def _no_route(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"there is no way to {host.name} on the network",
        why=_tail(stderr),
        fix=f"is it on, and on the same network? ping -c 3 {shlex.quote(machine_of(host.host))}",
    )


def _timed_out(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"{host.name} did not answer within {CONNECT_TIMEOUT_S} s",
        why="it is off or asleep, or a firewall swallows what is sent to it: " + _tail(stderr),
        fix=f"wake it, then try: {by_hand(host, spec)} true",
    )


def _denied(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"{host.name} does not let us in",
        why=f"{_tail(stderr)}: the user is wrong, or none of our keys is known there (a key with a passphrase must be "
        "in the agent: ssh-add)",
        fix=f"ssh-copy-id {shlex.join(ssh_words(spec)[1:])} {shlex.quote(host.host)}".replace("  ", " "),
    )


def _changed_key(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    file = match[1] if (match := _CHANGED_KEY.search(stderr)) else "~/.ssh/known_hosts"
    name = _key_name(host, stderr)
    return HostError(
        f"the host key of {host.name} has changed",
        why="it was installed anew, or another machine has its address; ask whose it is before you trust it",
        fix=f"ssh-keygen -f {shlex.quote(file)} -R {shlex.quote(name)}, then: {by_hand(host, spec)}",
    )


def _unknown_key(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    # Where the configuration forbids unknown keys, ssh would not even ask.
    asking = ("-o", "StrictHostKeyChecking=ask") if "requested strict checking" in stderr else ()
    return HostError(
        f"the host key of {host.name} is not known here",
        why="we were never connected to it by this name, so nothing tells it from another machine",
        fix=f"connect once, compare the key and say yes: {by_hand(host, spec, *asking)}",
    )


def _bad_config(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        "ssh does not accept its configuration", why=_tail(stderr), fix=f"correct it: {by_hand(host, spec)} -v"
    )


def _hung_up(host: Host, spec: HostsSpec, stderr: str) -> HostError:
    return HostError(
        f"{host.name} answered and hung up",
        why=f"{_tail(stderr)}: too many connections at once, or its SSH server refuses this machine",
        fix=f"see what it says: {by_hand(host, spec)} -v",
    )


def _no_shell(host: Host, spec: HostsSpec, returncode: int, stderr: str) -> HostError:
    return HostError(
        f"{host.name} let us in, but there is no shell to run a script with",
        why=_tail(stderr) or f"`sh -s` ended with {returncode} before it read anything",
        fix=f"this must print hello: {by_hand(host, spec)} sh -c 'echo hello'",
    )


_REASONS: tuple[tuple[str | re.Pattern[str], Callable[[Host, HostsSpec, str], HostError]], ...] = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", _changed_key),
    ("Could not resolve hostname", _unknown_name),
    ("[Hh]ost key verification failed", _unknown_key),
    ("Permission denied|Too many authentication failures", _denied),
    (_CONFIG, _bad_config),
    ("timed out", _timed_out),
    ("Connection refused", _refused),
    ("No route to host|[Nn]etwork is unreachable", _no_route),
    (_BUSY, _hung_up),
)


def _key_name(host: Host, stderr: str) -> str:
    """By which ssh keeps the key: what the configuration makes of the host, in brackets with an odd port."""
    match = _KEY_OF.search(stderr)
    return (match[1] or match[2]) if match else machine_of(host.host)


def _asked(stderr: str) -> str:
    match = re.search(r"resolve hostname (\S+):", stderr)
    return match[1] if match else ""


def _tail(stderr: str) -> str:
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else ""
