"""Measures the links of a cluster, through the gauges on its nodes."""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import os
import platform
import re
import secrets
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
import traceback
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Literal

from shoal.cluster.cluster import NodePrograms
from shoal.cluster.node import Node
from shoal.config.profile import LinkProfile
from shoal.control.channel import is_same
from shoal.control.connection_guard import ConnectionGuard, GuardLimits, PendingConnection
from shoal.control.processes import tie_to

# SECTION net/flow_plan
# Which links are measured, with what and for how long, in the time there is. Pure.


Tool = Literal["iperf3", "shoal"]
Pair = tuple[str, str]

STREAMS = (1, 4)
# The ring lasts longer than a single flow: those of its links that start late must overlap the others.
RING_TIMES = 2
_MOST_S = 2.0
_LEAST_S = 0.3
# Starting and ending one flow.
_OVERHEAD_S = 0.15
# iperf3 counts in whole seconds.
_IPERF3_S = 1.0


@dataclass(frozen=True)
class FlowPlan:
    """`ring` are the links that a ring of all nodes uses at once; `notes` is what a reader of the figures must know."""

    tool: Tool
    seconds: float
    pairs: tuple[Pair, ...]
    ring: tuple[Pair, ...]
    notes: tuple[str, ...] = ()

    @property
    def directions(self) -> list[Pair]:
        both = (way for one, other in self.pairs for way in ((one, other), (other, one)))
        return list(dict.fromkeys(both))

    @property
    def flows(self) -> int:
        """One after another: each direction with one stream and with four, then the ring at once, for longer."""
        return len(self.directions) * len(STREAMS) + (RING_TIMES if self.ring else 0)


def plan_flows(nodes: Sequence[Node], iperf3: Mapping[str, str | None], budget_s: float) -> FlowPlan:
    """`iperf3` by node: its version, or None. Too many pairs for the time: only those of the ring."""
    ring = ring_of(nodes)
    every = _all_pairs(nodes)
    # A ring of two goes both ways over the same pair.
    of_ring = tuple(pair for pair in every if pair in ring or pair[::-1] in ring)
    pairs = every if _seconds(every, ring, budget_s) >= _LEAST_S else of_ring
    notes = []
    if pairs != every:
        notes.append(
            f"{len(every)} pairs are too many for the time: only the {len(pairs)} links of the ring were measured"
        )
    seconds = max(_LEAST_S, min(_MOST_S, _seconds(pairs, ring, budget_s)))
    tool, why = _choose(iperf3, seconds) if pairs else ("shoal", "")
    if tool == "iperf3":
        seconds = float(int(seconds))
    return FlowPlan(tool, seconds, pairs, ring, (*notes, why) if why else tuple(notes))


def ring_of(nodes: Sequence[Node]) -> tuple[Pair, ...]:
    """Each node to the next, as ranks are numbered; on one machine every rank to the next, all over its loopback."""
    if len(nodes) == 1:
        name, slots = nodes[0].name, nodes[0].slots
        return ((name, name),) * slots if slots > 1 else ()
    names = [node.name for node in nodes]
    return tuple(zip(names, [*names[1:], names[0]], strict=True))


def _all_pairs(nodes: Sequence[Node]) -> tuple[Pair, ...]:
    if len(nodes) == 1:
        return tuple(dict.fromkeys(ring_of(nodes)))
    return tuple(combinations([node.name for node in nodes], 2))


def _seconds(pairs: tuple[Pair, ...], ring: tuple[Pair, ...], budget_s: float) -> float:
    return budget_s / max(1, FlowPlan("shoal", 0, pairs, ring).flows) - _OVERHEAD_S


def _choose(iperf3: Mapping[str, str | None], seconds: float) -> tuple[Tool, str]:
    """The tool, and why it is not iperf3."""
    without = [name for name, version in iperf3.items() if version is None]
    if without:
        return "shoal", f"raw bandwidth is by shoal's own probe: iperf3 is not installed on {', '.join(without)}"
    if seconds < _IPERF3_S:
        return (
            "shoal",
            f"raw bandwidth is by shoal's own probe: iperf3 needs whole seconds, and each flow had {seconds:.1g}",
        )
    return "iperf3", ""


GAUGE = "shoal.tools.probe.links"
_ANSWER_S = 10.0
_FLOW_SLACK_S = 20.0
_TRIPS = 300
_TRIPS_S = 0.4

Say = Callable[[str], None]


class Links:
    """The gauges, each listening at a port of its own for the others."""

    def __init__(self, found: NodePrograms, plan: FlowPlan) -> None:
        self._talks = found.talks
        self._plan = plan
        self._addresses = {node.name: node.address for node in found.nodes}
        self._token = secrets.token_hex(16)
        self._sessions = itertools.count()
        self._ports = {
            name: int(talk.ask(_ANSWER_S, do="listen", address=self._addresses[name], token=self._token)["port"])
            for name, talk in self._talks.items()
        }

    def round_trip_s(self, source: str, target: str) -> float:
        words = {"count": _TRIPS, "seconds": _TRIPS_S, **self._place(target)}
        return float(self._talks[source].ask(_ANSWER_S, do="round_trip", **words)["median_s"])

    def flows_gbps(self, pairs: Sequence[Pair], streams: int, seconds: float) -> list[float]:
        """All at once; each pair's own rate, as its receiver counted it."""
        orders = [self._order(target, streams, seconds) for _, target in pairs]
        for (_, target), order in zip(pairs, orders, strict=True):
            order["port"] = self._talks[target].ask(_ANSWER_S, do="expect", **order)["port"]
        self._for_each(pairs, orders, "send", at=0)
        self._for_each(pairs, orders, "sent", at=0)
        return [1e-9 * float(said["bps"]) for said in self._for_each(pairs, orders, "received", at=1)]

    def _for_each(
        self, pairs: Sequence[Pair], orders: list[dict[str, Any]], step: str, at: int
    ) -> list[dict[str, Any]]:
        """Asked all at once, heard one after the other. `at`: the pair's source (0) or its target (1)."""
        for pair, order in zip(pairs, orders, strict=True):
            self._talks[pair[at]].send(do=step, **order)
        return [self._talks[pair[at]].hear(orders[0]["seconds"] + _FLOW_SLACK_S, step) for pair in pairs]

    def _order(self, target: str, streams: int, seconds: float) -> dict[str, Any]:
        session = str(next(self._sessions))
        how = {"tool": self._plan.tool, "streams": streams, "seconds": seconds}
        return {"session": session, **how, **self._place(target)}

    def _place(self, target: str) -> dict[str, Any]:
        return {"address": self._addresses[target], "port": self._ports[target], "token": self._token}


def measure_links(found: NodePrograms, plan: FlowPlan, say: Say) -> list[LinkProfile]:
    if not plan.pairs:
        return []
    links = Links(found, plan)
    trips = {pair: _round_trip(links, pair, say) for pair in plan.pairs}
    alone: dict[Pair, list[float]] = {}
    for number, (source, target) in enumerate(plan.directions, 1):
        say(f"raw bandwidth {source} → {target} ({number} of {len(plan.directions)}, {plan.tool})")
        alone[source, target] = [links.flows_gbps([(source, target)], streams, plan.seconds)[0] for streams in STREAMS]
    say(f"all {len(plan.ring)} links of the ring at once")
    together = dict(zip(plan.ring, links.flows_gbps(plan.ring, STREAMS[-1], RING_TIMES * plan.seconds), strict=True))
    return [
        LinkProfile(
            source=source,
            target=target,
            tool=plan.tool,
            latency_s=trips[source, target] if (source, target) in trips else trips[target, source],
            gbps=one,
            gbps_4_streams=four,
            together_gbps=together.get((source, target)),
        )
        for (source, target), (one, four) in alone.items()
    ]


def _round_trip(links: Links, pair: Pair, say: Say) -> float:
    say(f"round trip {pair[0]} ↔ {pair[1]}")
    return links.round_trip_s(*pair)


# SECTION net/gauge/dial
# How one gauge calls another: it says a token, what it wants, and for which measurement.


DIAL_S = 5.0
_LONGEST_LINE = 200


def dial(request: dict[str, Any], kind: str) -> socket.socket:
    connection = socket.create_connection((request["address"], int(request["port"])), timeout=DIAL_S)
    connection.sendall(f"{request['token']} {kind} {request.get('session', '-')}\n".encode())
    return connection


def read_call(connection: socket.socket) -> tuple[str, str, str]:
    """Token, kind and session, all of it in time. Byte by byte: what follows is measured."""
    line, deadline = b"", time.monotonic() + DIAL_S
    connection.settimeout(DIAL_S)
    while not line.endswith(b"\n") and len(line) < _LONGEST_LINE and (byte := connection.recv(1)):
        line += byte
        # Zero would mean not to wait at all, which is another error.
        connection.settimeout(max(0.001, deadline - time.monotonic()))
    connection.settimeout(DIAL_S)
    token, kind, session = line.decode("ascii").split()
    return token, kind, session


# SECTION net/gauge/rate
# The rate of a flow from what its receiver noted. Pure.


Note = tuple[float, int]
"""When, and how many bytes had come by then."""

_SKIPPED_PART = 0.2
_MOST_SKIPPED_S = 0.5
_PARTS = 10


def skip_s(seconds: float) -> float:
    """The beginning does not count: TCP still seeks the rate, and a shaped link lets its first bytes pass early."""
    return min(_MOST_SKIPPED_S, _SKIPPED_PART * seconds)


def rate_bps(streams: Sequence[Sequence[Note]], seconds: float) -> float:
    """Of all streams together, while all of them were flowing: the median of ten parts of that time, so that a moment
    in which some other program had the machine does not count."""
    if not streams or not all(streams):
        raise ValueError("a stream brought nothing")
    begin = max(notes[0][0] for notes in streams) + skip_s(seconds)
    end = min(notes[-1][0] for notes in streams)
    if end <= begin:
        raise ValueError("the streams did not last")
    part_s = (end - begin) / _PARTS
    marks = [sum(_bytes_at(notes, begin + number * part_s) for notes in streams) for number in range(_PARTS + 1)]
    return 8 * statistics.median(after - before for before, after in pairwise(marks)) / part_s


def _bytes_at(notes: Sequence[Note], moment: float) -> float:
    """Between two notes as if the bytes had come evenly."""
    after = bisect_right(notes, (moment, float("inf")))
    if after == len(notes):
        return float(notes[-1][1])
    if after == 0:
        return float(notes[0][1])
    (before_at, before), (after_at, bytes_) = notes[after - 1], notes[after]
    return before + (bytes_ - before) * (moment - before_at) / (after_at - before_at)


# SECTION net/gauge/flow
# Our own TCP probe: as many bytes as pass in a given time, counted where they arrive.


_BLOCK_BYTES = 1 << 18
_NOTE_EVERY_S = 0.005
# What brings nothing for so long is a link that died.
_STALL_S = 10.0
_RESET = struct.pack("ii", 1, 0)

_sinks: dict[str, FlowReceiver] = {}
_sources: dict[str, FlowSender] = {}


class FlowReceiver:
    """The receiving end of one flow: one list of notes a stream."""

    def __init__(self, streams: int) -> None:
        self._streams = streams
        self._notes: list[list[Note]] = []
        self._ended = threading.Semaphore(0)

    def drink(self, connection: socket.socket) -> None:
        notes: list[Note] = []
        self._notes.append(notes)
        buffer, total = bytearray(_BLOCK_BYTES), 0
        connection.settimeout(_STALL_S)
        # The sender ends by a reset, which is an error here.
        with contextlib.suppress(OSError):
            while size := connection.recv_into(buffer):
                total += size
                now = time.monotonic()
                if not notes or now - notes[-1][0] > _NOTE_EVERY_S:
                    notes.append((now, total))
        self._ended.release()

    def wait(self) -> list[list[Note]]:
        for _ in range(self._streams):
            if not self._ended.acquire(timeout=_STALL_S):
                raise TimeoutError("a stream did not end")
        return self._notes


class FlowSender:
    """The sending end: every stream in a thread of its own, because Python lets go of its lock while it sends."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._seconds = float(request["seconds"])
        self._error: OSError | None = None
        connections = [dial(request, "flow") for _ in range(int(request["streams"]))]
        self._threads = [threading.Thread(target=self._pour, args=(each,), daemon=True) for each in connections]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(self._seconds + _STALL_S)
        if self._error:
            raise self._error

    def _pour(self, connection: socket.socket) -> None:
        # Random: some tunnels compress, and would show a rate that no gradient gets.
        block, deadline = os.urandom(_BLOCK_BYTES), time.monotonic() + self._seconds
        try:
            with connection, contextlib.suppress(TimeoutError):
                # What is still unsent at the end is thrown away: on a slow link it would take seconds.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                while (left_s := deadline - time.monotonic()) > 0:
                    connection.settimeout(left_s)
                    connection.send(block)
        except OSError as error:
            self._error = error


def drink(connection: socket.socket, session: str) -> None:
    if sink := _sinks.get(session):
        sink.drink(connection)


def expect(request: dict[str, Any]) -> dict[str, Any]:
    """At the port where this gauge listens anyway."""
    _sinks[request["session"]] = FlowReceiver(int(request["streams"]))
    return {"port": request["port"]}


def send(request: dict[str, Any]) -> dict[str, Any]:
    _sources[request["session"]] = FlowSender(request)
    return {}


def sent(request: dict[str, Any]) -> dict[str, Any]:
    _sources.pop(request["session"]).wait()
    return {}


def received(request: dict[str, Any]) -> dict[str, Any]:
    notes = _sinks.pop(request["session"]).wait()
    return {"bps": rate_bps(notes, float(request["seconds"]))}


# SECTION net/gauge/iperf
# The same as `flow`, with iperf3 at both ends; the figures are again the receiver's.


_LISTENS_WITHIN_S = 3.0
_SLACK_S = 15.0
_INTERVAL_S = 0.1

_servers: dict[str, subprocess.Popen[bytes]] = {}
_clients: dict[str, subprocess.Popen[bytes]] = {}


def iperf_expect(request: dict[str, Any]) -> dict[str, Any]:
    port = _free_port(request["address"])
    words = (
        "--server",
        "--one-off",
        "--bind",
        request["address"],
        "--port",
        str(port),
        "--interval",
        str(_INTERVAL_S),
        "--json",
    )
    _servers[request["session"]] = _start(words)
    _wait_until_taken(request["address"], port)
    return {"port": port}


def iperf_send(request: dict[str, Any]) -> dict[str, Any]:
    place = ("--client", request["address"], "--port", str(request["port"]))
    amount = ("--time", str(round(request["seconds"])), "--parallel", str(request["streams"]))
    _clients[request["session"]] = _start((*place, *amount, "--json"))
    return {}


def iperf_sent(request: dict[str, Any]) -> dict[str, Any]:
    _result(_clients.pop(request["session"]), request["seconds"])
    return {}


def iperf_received(request: dict[str, Any]) -> dict[str, Any]:
    said = _result(_servers.pop(request["session"]), request["seconds"])
    return {"bps": rate_of_intervals([entry["sum"] for entry in said["intervals"]], request["seconds"])}


def rate_of_intervals(intervals: list[dict[str, Any]], seconds: float) -> float:
    """The median, without the beginning, as in `rate.rate_bps`. The last interval may be a rest of no length."""
    counted = [entry for entry in intervals if entry["start"] >= skip_s(seconds) and entry["seconds"] > _INTERVAL_S / 2]
    if not counted:
        raise ValueError("iperf3 ended too early")
    return float(8 * statistics.median(entry["bytes"] / entry["seconds"] for entry in counted))


def end_all() -> None:
    for process in (*_servers.values(), *_clients.values()):
        process.kill()
        process.wait()


def _start(words: tuple[str, ...]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        (shutil.which("iperf3") or "iperf3", *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        preexec_fn=tie_to(os.getpid()),
    )


def _result(process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    try:
        said, _ = process.communicate(timeout=seconds + _SLACK_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise
    result: dict[str, Any] = json.loads(said)
    if error := result.get("error"):
        raise RuntimeError(f"iperf3: {error}")
    return result


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_taken(address: str, port: int) -> None:
    """By trying to bind there: a connection would be taken for the one test that the server gives."""
    deadline = time.monotonic() + _LISTENS_WITHIN_S
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            # Both may be used again, so this one is no hindrance to the server, and is refused once that listens.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError:
                return
        time.sleep(0.01)
    raise TimeoutError("iperf3 does not listen")


# SECTION net/gauge/echo
# Round trips of a message that is smaller than any packet.


_MESSAGE = b"shoal..."
_WARM_UP = 10


def answer(connection: socket.socket) -> None:
    """Sends back whatever comes, until the other side leaves."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with contextlib.suppress(OSError):
        while part := connection.recv(1024):
            connection.sendall(part)


def round_trip(request: dict[str, Any]) -> dict[str, Any]:
    """The median of `count` trips, or of as many as `seconds` allow."""
    deadline = time.monotonic() + float(request["seconds"])
    trips: list[float] = []
    with dial(request, "echo") as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while len(trips) < int(request["count"]) + _WARM_UP and (time.monotonic() < deadline or not trips):
            trips.append(_once(connection))
    counted = trips[_WARM_UP:] or trips
    return {"median_s": statistics.median(counted), "count": len(counted)}


def _once(connection: socket.socket) -> float:
    began = time.perf_counter()
    connection.sendall(_MESSAGE)
    missing = len(_MESSAGE)
    while missing:
        part = connection.recv(missing)
        if not part:
            raise ConnectionError("the other side closed the connection")
        missing -= len(part)
    return time.perf_counter() - began


# SECTION net/gauge/listen
# The port at which a gauge is called. Whoever does not know the token is closed out without a word.


_BACKLOG = 64


def listen(request: dict[str, Any]) -> dict[str, Any]:
    address = request["address"]
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
    threading.Thread(target=_welcome, args=(listener, request["token"]), daemon=True).start()
    return {"port": listener.getsockname()[1]}


class TokenListener:
    """A thread for each caller, and no more callers without the token at once than the connection_guard has places for.
    Nobody is shut out for long: a measurement lasts seconds, and strangers may share an address with its callers."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._door = ConnectionGuard(lambda _: None, time.monotonic, GuardLimits(failures=1 << 30))
        self._lock = threading.Lock()

    def knock(self, connection: socket.socket, address: str) -> PendingConnection | None:
        with self._lock:
            return self._door.knock(address, lambda: _shut(connection))

    def hear(self, connection: socket.socket, knock: PendingConnection) -> tuple[str, str] | None:
        """What somebody with the token wants, or nothing."""
        try:
            said, kind, session = read_call(connection)
            return (kind, session) if is_same(said, self._token) else None
        finally:
            with self._lock:
                self._door.admit(knock)


def _welcome(listener: socket.socket, token: str) -> None:
    reception = TokenListener(token)
    while True:
        connection, address = listener.accept()
        if knock := reception.knock(connection, address[0]):
            threading.Thread(target=_serve, args=(connection, reception, knock), daemon=True).start()
        else:
            connection.close()


def _shut(connection: socket.socket) -> None:
    """Its own thread closes it: a number that is closed here might be another file's by then."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _serve(connection: socket.socket, reception: TokenListener, knock: PendingConnection) -> None:
    with connection, contextlib.suppress(OSError, ValueError):
        wanted = reception.hear(connection, knock)
        if wanted is None:
            return
        kind, session = wanted
        if kind == "echo":
            answer(connection)
        else:
            drink(connection, session)


# SECTION net/gauge/machine
# What this machine is, as far as a profile needs it.


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def facts(_: dict[str, Any]) -> dict[str, Any]:
    return {
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "arch": platform.machine(),
        "os": f"{platform.system()} {platform.release()}",
        "machine": _machine(),
        "iperf3": iperf3_version(),
        "torch": _installed("torch"),
    }


def iperf3_version() -> str | None:
    """None where it is not installed, or does not start."""
    tool = shutil.which("iperf3")
    if tool is None:
        return None
    try:
        said = subprocess.run([tool, "--version"], capture_output=True, text=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"iperf (\d[\d.]*)", said)
    return found[1] if found else None


def _machine() -> str:
    """The same for all emulated nodes of one machine; by name where the kernel gives no number."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# SECTION net/gauge/__main__
# `python -P -m shoal.tools.probe.links`: answers one JSON line with one, until its stdin ends.
#
# {"do": "facts"}                                         →  {"cpu": …, "cores": …, "iperf3": "3.12", …}
# {"do": "listen", "address": "10.77.0.2", "token": …}    →  {"port": 40123}
# {"do": "round_trip", "address": …, "port": …, …}        →  {"median_s": 0.0002, …}
#
# Bytes are sent in the background, so that several flows, in both directions, can go on at once:
# `expect` where they arrive, `send` where they come from, `sent` there to wait for the end, and `received` for the
# rate.


_TOOLS: dict[str, dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "shoal": {"expect": expect, "send": send, "sent": sent, "received": received},
    "iperf3": {"expect": iperf_expect, "send": iperf_send, "sent": iperf_sent, "received": iperf_received},
}


def _by_tool(step: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def answer(request: dict[str, Any]) -> dict[str, Any]:
        return _TOOLS[request["tool"]][step](request)

    return answer


ANSWERS = {
    "facts": facts,
    "listen": listen,
    "round_trip": round_trip,
    "expect": _by_tool("expect"),
    "send": _by_tool("send"),
    "sent": _by_tool("sent"),
    "received": _by_tool("received"),
}


def main() -> None:
    try:
        answer_all()
    finally:
        end_all()


def answer_all() -> None:
    for line in sys.stdin:
        try:
            request = json.loads(line)
            answer = ANSWERS[request["do"]](request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
