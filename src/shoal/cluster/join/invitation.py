"""What is typed on the machine to join: where to go, and a code that works once."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, replace

from shoal.errors import UsageError

# None is taken for another one. 16 hold 79 bits: whoever records the greeting does not guess them later either.
_LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"
_LENGTH = 16
_INVITATION = re.compile(r"\[?(?P<address>[^#\]]+?)\]?:(?P<port>\d{1,5})(?:#(?P<code>[A-Za-z0-9-]+))?")
_CODE = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Invitation:
    """`code` is empty where it was not typed with the address, and is then asked for."""

    address: str
    port: int
    code: str = ""

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
    """`ADDRESS:PORT`, or `ADDRESS:PORT#CODE`."""
    match = _INVITATION.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 1 << 16:
        raise UsageError(
            f"{_without_code(text)!r} is no invitation",
            why="it is an address and a port, as 192.168.1.5:41234; or the folder of a run to come back to",
            fix="copy what shoal host printed after `shoal join`",
        )
    return Invitation(match["address"], int(match["port"]), parse_code(match["code"]) if match["code"] else "")


def parse_code(text: str) -> str:
    """Without the dashes, in small letters. The message does not repeat what was typed: it may be nearly right."""
    code = "".join(text.split()).replace("-", "").lower()
    if not _CODE.fullmatch(code):
        raise _no_code("", "a code has letters and digits, as abcd-efgh-jkmn-pqrs")
    if len(code) != _LENGTH:
        seen = (
            f"{len(code)} of {_LENGTH} letters" if len(code) < _LENGTH else f"{len(code)} letters instead of {_LENGTH}"
        )
        raise _no_code(f": {seen}", "a part of it is missing, or something else was copied with it")
    return code


def _no_code(seen: str, why: str) -> UsageError:
    return UsageError(
        f"that is no code of an invitation{seen}",
        why=why,
        fix="copy the code that shoal host printed, on a line of its own",
    )


def _without_code(text: str) -> str:
    place, hash_sign, _ = text.partition("#")
    return f"{place}#…" if hash_sign else place
