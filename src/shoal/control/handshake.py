"""What a machine says of itself when it meets the others, and who may train together. The verdict is pure."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import shoal
from shoal.control.channel import PROTOCOL
from shoal.errors import ControlError
from shoal.host.facts import cpu_name, has_avx2, installed
from shoal.run_folder import is_plain_name

# What must be equal, in the words of a message, and what to do when it is not.
_SAME_VERSIONS = "bring all machines to the same versions: shoal setup HOSTS"
# What each number is below. A member's grows with every guest, since none is used again.
_NUMBERS = {"member": 2**31, "protocol": 2**16, "port": 2**16, "life": 2**31}
_LONGEST_WORD = 256
_MUST_AGREE = (
    ("protocol", "control protocol", _SAME_VERSIONS),
    ("shoal", "shoal", _SAME_VERSIONS),
    ("torch", "torch", _SAME_VERSIONS),
    ("python", "Python", _SAME_VERSIONS),
    ("system", "operating system", "gloo cannot mix them: train on machines with the same one"),
    ("arch", "architecture", "their arithmetic differs in the last bit: train on machines of one kind"),
    ("avx2", "AVX2", "their arithmetic differs in the last bit: leave out the machines without it"),
    ("config", "configuration", "start the run anew, so that every machine gets the same one"),
    ("data", "encoded text", "clear the cache on the machine that differs, or prepare it again: shoal setup HOSTS"),
)


@dataclass(frozen=True)
class Hello:
    """`mark` is a random word that the member wrote into its run folder: whoever finds it there shares the folder.
    It listens at `address` and `port`; `life` counts how often its agent was started again."""

    member: int
    node: str
    mark: str
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
    address: str = ""
    port: int = 0
    life: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Any) -> Hello:
        """Strict: these words are shown, compared and used as a number of a member. What else is said is passed over,
        so that a later version can be told what differs."""
        if not isinstance(said, dict):
            raise _no_hello("a hello that is none")
        if missing := [name for name in cls.__dataclass_fields__ if name not in said]:
            raise _no_hello(f"a hello without {missing[0]!r}")
        own = {name: said[name] for name in cls.__dataclass_fields__}
        for name, value in own.items():
            if not _is_sound(name, value):
                raise _no_hello(f"a hello whose {name} is {_cut(repr(value))}")
        return cls(**own)


def _is_sound(name: str, value: object) -> bool:
    if name in _NUMBERS:
        return type(value) is int and 0 <= value < _NUMBERS[name]
    if name == "node":
        # It becomes the name of files.
        return is_plain_name(value)
    if name == "avx2":
        return value is None or isinstance(value, bool)
    return isinstance(value, str) and len(value) <= _LONGEST_WORD and value.isprintable()


def _no_hello(seen: str) -> ControlError:
    return ControlError(seen, why="the other side has another version of shoal", fix=_SAME_VERSIONS)


def _cut(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


def introduce(member: int, node: str, mark: str, config: str, data: str, life: int = 0) -> Hello:
    return Hello(
        member=member,
        node=node,
        mark=mark,
        config=config,
        data=data,
        protocol=PROTOCOL,
        shoal=shoal.__version__,
        torch=installed("torch"),
        python=".".join(platform.python_version_tuple()[:2]),
        system=platform.system(),
        arch=platform.machine(),
        avx2=has_avx2(),
        cpu=cpu_name(),
        life=life,
    )


def refusal(ours: Hello, theirs: Hello) -> ControlError | None:
    """Why these two may not train together."""
    for field, words, fix in _MUST_AGREE:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return ControlError(
                f"{ours.node} and {theirs.node} cannot train together: {words} {_shown(mine)} on {ours.node}, "
                f"{_shown(other)} on {theirs.node}",
                why="replicas would drift apart, or fail in the middle of a run",
                fix=fix,
            )
    return None


def remark(ours: Hello, theirs: Hello) -> str:
    """What differs and does no harm, but explains a difference in speed."""
    if ours.cpu == theirs.cpu:
        return ""
    return f"{ours.node} has {ours.cpu}, {theirs.node} has {theirs.cpu}: they compute at different speeds"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = str(value)
    # A digest is told apart by its beginning.
    return text[:12] if len(text) == 64 else text
