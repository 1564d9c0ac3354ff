"""The line that is typed on the machine to join: where to go, and a code that works once."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from shoal.errors import UsageError

# None is taken for another one. 16 hold 79 bits: whoever records the greeting does not guess them later either.
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
_LENGTH = 16
_INVITATION = re.compile(r"\[?(?P<address>[^#\]]+?)\]?:(?P<port>\d{1,5})#(?P<code>[A-Za-z0-9-]+)")


@dataclass(frozen=True)
class Invitation:
    address: str
    port: int
    code: str

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        groups = "-".join(self.code[at : at + 4] for at in range(0, len(self.code), 4))
        return f"{address}:{self.port}#{groups}"


def make_code() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_LENGTH))


def parse_invitation(text: str) -> Invitation:
    match = _INVITATION.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise UsageError(
            f"{text!r} is no invitation",
            why="it is an address, a port and a code, as 192.168.1.5:41234#abcd-efgh-jkmn-pqrs",
            fix="copy the whole line that shoal host printed",
        )
    return Invitation(match["address"], int(match["port"]), match["code"].replace("-", "").lower())
