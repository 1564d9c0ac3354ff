"""Single packets tell more than connections: which way it is shut, and up to which size it is open."""

from __future__ import annotations

import errno
import time
from collections.abc import Collection, Mapping
from typing import Protocol

from shoal.cluster.node import Node
from shoal.cluster.talk import Answer
from shoal.net.scene import Scene, Trial

# For packets on their way; those that are not there by then are looked for once more, later.
_ARRIVE_S, _ARRIVE_LATE_S = 0.1, 0.4
_SMALL_BYTES = 128
_USUAL_BYTES = 1500
_BIGGEST_BYTES = 9216
# Some links lose one now and then.
_COPIES = 3
# So many sizes at once narrow a gap of 9000 bytes down to one in four rounds; one at a time would take thirteen.
_SIZES_AT_ONCE = 16
_ROUNDS = 5

Pair = tuple[Node, Node]


class Post(Protocol):
    """Nodes that answer, and the ports at which they listen."""

    @property
    def ports(self) -> dict[str, int]: ...

    def ask(self, requests: Mapping[str, Answer], takes_s: float) -> dict[str, Answer]: ...


def try_sizes(post: Post, pairs: list[Pair], scene: Scene) -> list[Trial]:
    """A small packet, and one as big as the sender's interface allows; where only the small one arrives, the biggest
    that does."""
    full = {pair: _full_size(scene, *pair) for pair in pairs}
    told = _send(post, "new", {pair: [_SMALL_BYTES, size] * _COPIES for pair, size in full.items()})
    heard = _hear(post, "new", full)
    passes = {pair: size for pair, size in heard.items() if size}
    passes |= _narrow(post, {pair: (size, full[pair]) for pair, size in passes.items() if size < full[pair]})
    return [
        *(_small(pair, pair in passes, told.get(pair, {})) for pair in pairs),
        *(_sized(pair, full[pair], size, told.get(pair, {})) for pair, size in passes.items()),
    ]


def try_answers(post: Post, pairs: Collection[Pair]) -> list[Trial]:
    """Both sides send from where they listen, twice: a firewall that lets answers in takes the second one for one."""
    if not pairs:
        return []
    for _ in range(2):
        _send(post, "answer", {pair: [_SMALL_BYTES] for pair in pairs}, from_listener=True)
        time.sleep(_ARRIVE_S)
    heard = _hear(post, "answer", dict.fromkeys(pairs, _SMALL_BYTES))
    return [_trial("answer", pair, heard[pair] > 0) for pair in pairs]


def _full_size(scene: Scene, source: Node, target: Node) -> int:
    return min(int(scene.interface(source, target).get("mtu", _USUAL_BYTES)), _BIGGEST_BYTES)


def _narrow(post: Post, gaps: dict[Pair, tuple[int, int]]) -> dict[Pair, int]:
    """From a size that arrives and one that does not, for each pair, to the biggest that does."""
    for number in range(_ROUNDS):
        sizes = {pair: between(*gap) for pair, gap in gaps.items() if gap[1] - gap[0] > 1}
        if not sizes:
            break
        _send(post, f"size{number}", {pair: each * _COPIES for pair, each in sizes.items()})
        heard = _hear(post, f"size{number}", {pair: each[-1] for pair, each in sizes.items()})
        for pair, each in sizes.items():
            low = max(gaps[pair][0], heard[pair])
            gaps[pair] = low, min(size for size in (*each, gaps[pair][1]) if size > low)
    return {pair: low for pair, (low, _) in gaps.items()}


def between(low: int, high: int) -> list[int]:
    """Some sizes above `low` and below `high`, spread evenly."""
    step = max(1, (high - low) // (_SIZES_AT_ONCE + 1))
    return list(range(low + step, high, step))[: _SIZES_AT_ONCE + 1]


def _send(post: Post, tag: str, sizes: Mapping[Pair, list[int]], from_listener: bool = False) -> dict[Pair, Answer]:
    """What each sender's kernel had to say to it."""
    pairs = [pair for pair in sizes if pair[0].name in post.ports and pair[1].name in post.ports]
    requests: dict[str, Answer] = {}
    for source, target in pairs:
        order = {"do": "send", "port": post.ports[source.name], "tag": tag, "from_listener": from_listener}
        places = requests.setdefault(source.name, {**order, "places": []})["places"]
        places.append({"address": target.address, "port": post.ports[target.name], "sizes": sizes[source, target]})
    told = {name: iter(said["told"]) for name, said in post.ask(requests, 0.0).items()}
    return {pair: next(told[pair[0].name]) for pair in pairs if pair[0].name in told}


def _hear(post: Post, tag: str, until: Mapping[Pair, int]) -> dict[Pair, int]:
    """The biggest packet of that tag that arrived, for each pair; 0 for none. Waits only while some is missing."""
    biggest: dict[Pair, int] = {}
    for wait_s in (_ARRIVE_S, _ARRIVE_LATE_S):
        time.sleep(wait_s)
        ears = {target.name for _, target in until if target.name in post.ports}
        said = post.ask({name: {"do": "hear", "port": post.ports[name]} for name in ears}, 0.0)
        for source, target in until:
            sizes = said.get(target.name, {}).get("heard", {}).get(source.name, {}).get(tag, [])
            biggest[source, target] = max(sizes, default=0)
        if all(biggest[pair] >= size for pair, size in until.items()):
            break
    return biggest


def _small(pair: Pair, came: bool, told: Answer) -> Trial:
    """A firewall that lets nothing out tells the sender so, at least of single packets."""
    if not came and told.get("errno") in (errno.EPERM, errno.EACCES):
        return Trial(pair[0].name, pair[1].name, "udp", "forbidden", told["error"])
    return _trial("udp", pair, came)


def _trial(kind: str, pair: Pair, came: bool) -> Trial:
    return Trial(pair[0].name, pair[1].name, kind, "ok" if came else "lost")


def _sized(pair: Pair, size: int, passes: int, told: Answer) -> Trial:
    """`told`: what the sender's own kernel knows to be the most on this way, so that TCP keeps to it."""
    numbers = {"size": float(size), "passes": float(passes)}
    if "path_mtu" in told:
        numbers["told"] = float(told["path_mtu"])
    return Trial(pair[0].name, pair[1].name, "full", "ok" if passes >= size else "lost", numbers=numbers)
