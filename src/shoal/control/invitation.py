"""What is typed on a machine to join a run: an address and a code that works once.

Apart from the rest of joining, which imports far more: `shoal join` answers a wrong address at once.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace

from shoal.errors import UsageError

# No two letters look alike. 16 of them hold 79 bits: a recorded handshake does not reveal them by guessing either.
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
_LENGTH = 16
_INVITATION = re.compile(r"\[?(?P<address>[^#\]]+?)\]?:(?P<port>\d{1,5})(?:#(?P<code>[A-Za-z0-9-]+))?")
_CODE = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Invitation:
    """What is typed on a machine to join: where to connect, and a code that works once."""

    address: str
    port: int
    code: str = ""  # empty where it was not typed with the address, and is asked for

    @property
    def place(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}"

    @property
    def shown_code(self) -> str:
        return "-".join(self.code[at : at + 4] for at in range(0, len(self.code), 4))

    def __str__(self) -> str:
        return f"{self.place}#{self.shown_code}" if self.code else self.place

    def with_code(self, code: str) -> Invitation:
        return replace(self, code=parse_code(code))


def make_code() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH))


def parse_invitation(text: str) -> Invitation:
    """Parse `ADDRESS:PORT`, or `ADDRESS:PORT#CODE`."""
    match = _INVITATION.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        shown = re.sub("#.*", "#…", text, flags=re.DOTALL)  # without the code
        raise UsageError(
            f"{shown!r} is no invitation",
            why="it is an address and a port, as 192.168.1.5:41234; or the folder of a run to come back to",
            fix="copy what shoal host printed after `shoal join`",
        )
    return Invitation(match["address"], int(match["port"]), parse_code(match["code"]) if match["code"] else "")


def parse_code(text: str) -> str:
    """Remove dashes and capitals. The error message does not repeat the text, which may be nearly the code."""
    code = "".join(text.split()).replace("-", "").lower()
    if not _CODE.fullmatch(code):
        raise _no_code("", "a code has letters and digits, as abcd-efgh-jkmn-pqrs")
    if len(code) != _LENGTH:
        count = (
            f"{len(code)} of {_LENGTH} letters" if len(code) < _LENGTH else f"{len(code)} letters instead of {_LENGTH}"
        )
        raise _no_code(f": {count}", "a part of it is missing, or something else was copied with it")
    return code


def _no_code(seen: str, why: str) -> UsageError:
    return UsageError(
        f"that is no code of an invitation{seen}",
        why=why,
        fix="copy the code that shoal host printed, on a line of its own",
    )
