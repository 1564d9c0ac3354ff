"""What this machine's name means here, and how long it takes to learn the names of its peers' addresses."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from shoal.net.scout.reading import read

# For all look-ups together, which run side by side: a name server that is gone keeps each of them for 5 s and more.
DEADLINE_S = 3.5


def observe(request: dict[str, Any]) -> dict[str, Any]:
    own = socket.gethostname()
    addresses = [address for address in (request.get("address"), *request.get("peers", [])) if address]
    questions: dict[str, Callable[[], Any]] = {f"name of {address}": _asker(address) for address in addresses}
    answers = ask_all({"own": lambda: meaning_of(own), **questions}, DEADLINE_S)
    return {
        "host_name": own,
        "means": answers["own"].get("answer", []),
        "took_s": answers["own"]["took_s"],
        "published": published(answers["own"].get("answer", [])),
        "reverse": {address: answers[f"name of {address}"] for address in addresses},
        "in_hosts_file": hosts_file_addresses(read("/etc/hosts"), own),
        "sources": host_sources(read("/etc/nsswitch.conf")),
    }


def ask_all(questions: dict[str, Callable[[], Any]], deadline_s: float) -> dict[str, dict[str, Any]]:
    """Each in a thread, since no look-up can be told to hurry. `took_s` is None for one that is still waiting."""
    found: dict[str, dict[str, Any]] = {name: {"took_s": None} for name in questions}

    def ask(name: str) -> None:
        began = time.monotonic()
        answer = questions[name]()
        found[name] = {"took_s": time.monotonic() - began, "answer": answer}

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in questions]
    for thread in threads:
        thread.start()
    until = time.monotonic() + deadline_s
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    return dict(found)


def meaning_of(name: str) -> list[str]:
    """In the order in which gloo would get them."""
    try:
        entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def published(addresses: list[str]) -> str | None:
    """What gloo tells its peers when no interface is named: the first address that is one of this machine's."""
    return next((address for address in addresses if _is_own(address)), None)


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


def _asker(address: str) -> Callable[[], str]:
    return lambda: name_of(address)


def name_of(address: str) -> str:
    """As torch asks when a rank connects to its store: its sockets are for both families, so an IPv4 address is looked
    for in the other one's dress, which a plain line in /etc/hosts does not answer (tried)."""
    dressed = address if ":" in address else f"::ffff:{address}"
    try:
        return socket.getnameinfo((dressed, 0), socket.NI_NUMERICSERV)[0]
    except OSError:
        return address


def hosts_file_addresses(text: str, name: str) -> list[str]:
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [words[0] for words in lines if name in words[1:]]


def host_sources(text: str) -> list[str]:
    """Who is asked for host names, in that order; what to do when one of them fails is left out."""
    line = next((line for line in text.splitlines() if line.startswith("hosts:")), "")
    return [word for word in line.partition("#")[0].split()[1:] if not word.startswith("[") and not word.endswith("]")]
