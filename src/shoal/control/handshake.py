"""The hello that agents exchange after the token handshake, and the check whether two nodes may train together."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import shoal
from shoal.control.channel import PROTOCOL, SAME_VERSIONS
from shoal.errors import ControlError
from shoal.host.facts import cpu_name, has_avx2, installed_release
from shoal.run_folder import is_plain_name

# The limit of every number. Member ids grow with every node that joins, since none is used twice.
_NUMBERS = {"member": 2**31, "protocol": 2**16, "port": 2**16, "life": 2**31}
_MAX_TEXT = 256
# Fields that must be equal: their name in a message, and what to do when they differ.
_MUST_AGREE = (
    ("protocol", "control protocol", SAME_VERSIONS),
    ("shoal", "shoal", SAME_VERSIONS),
    ("torch", "torch", SAME_VERSIONS),
    ("python", "Python", SAME_VERSIONS),
    ("system", "operating system", "gloo cannot mix them: train on machines with the same one"),
    ("arch", "architecture", "their arithmetic differs in the last bit: train on machines of one kind"),
    ("avx2", "AVX2", "their arithmetic differs in the last bit: leave out the machines without it"),
    ("config", "configuration", "start the run anew, so that every machine gets the same one"),
    ("data", "encoded text", "clear the cache on the machine that differs, or prepare it again: shoal setup HOSTS"),
)


@dataclass(frozen=True)
class Hello:
    member: int
    node: str
    mark: str  # random text that the member wrote into its run folder: a peer that reads it there shares the folder
    config: str
    data: str
    protocol: int
    shoal: str
    torch: str
    python: str
    system: str
    arch: str
    avx2: bool | None
    cpu: str
    address: str = ""  # where its agent listens, with `port`
    port: int = 0
    life: int = 0  # how often its agent was restarted

    @classmethod
    def from_dict(cls, document: Any) -> Hello:
        """Validate a received hello: its values are shown, compared and used as ids.

        Unknown fields are ignored, so that a later version is told what differs.
        """
        if not isinstance(document, dict):
            raise _invalid("a hello that is none")
        if missing := [name for name in cls.__dataclass_fields__ if name not in document]:
            raise _invalid(f"a hello without {missing[0]!r}")
        fields = {name: document[name] for name in cls.__dataclass_fields__}
        for name, value in fields.items():
            if not _is_valid(name, value):
                text = repr(value)
                raise _invalid(f"a hello whose {name} is {text if len(text) <= 40 else f'{text[:40]}…'}")
        return cls(**fields)


def _is_valid(name: str, value: object) -> bool:
    if name in _NUMBERS:
        return type(value) is int and 0 <= value < _NUMBERS[name]
    if name == "node":
        # It becomes part of file names.
        return is_plain_name(value)
    if name == "avx2":
        return value is None or isinstance(value, bool)
    return isinstance(value, str) and len(value) <= _MAX_TEXT and value.isprintable()


def _invalid(seen: str) -> ControlError:
    return ControlError(seen, why="the other side has another version of shoal", fix=SAME_VERSIONS)


def make_hello(member: int, node: str, mark: str, config: str, data: str, life: int = 0) -> Hello:
    """Return the hello of this machine."""
    return Hello(
        member=member,
        node=node,
        mark=mark,
        config=config,
        data=data,
        protocol=PROTOCOL,
        shoal=shoal.__version__,
        torch=installed_release("torch"),
        python=".".join(platform.python_version_tuple()[:2]),
        system=platform.system(),
        arch=platform.machine(),
        avx2=has_avx2(),
        cpu=cpu_name(),
        life=life,
    )


def find_mismatch(own: Hello, peer: Hello) -> ControlError | None:
    """Return why these two nodes may not train together."""
    for field, name, fix in _MUST_AGREE:
        own_value, peer_value = getattr(own, field), getattr(peer, field)
        if own_value != peer_value:
            return ControlError(
                f"{own.node} and {peer.node} cannot train together: {name} {_format(own_value)} on {own.node}, "
                f"{_format(peer_value)} on {peer.node}",
                why="replicas would drift apart, or fail in the middle of a run",
                fix=fix,
            )
    return None


def describe_cpu_difference(own: Hello, peer: Hello) -> str:
    """Return a harmless difference that explains a difference in speed."""
    if own.cpu == peer.cpu:
        return ""
    return f"{own.node} has {own.cpu}, {peer.node} has {peer.cpu}: they compute at different speeds"


def _format(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    # The beginning of a digest identifies it.
    return text[:12] if len(text) == 64 else text
