"""What a network card says of itself: its speed now, and what it and its partner could do. Asked as ethtool asks."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from typing import Any

_SIOCETHTOOL = 0x8946
_SIOCGIWPOWER = 0x8B2D
_LINK_SETTINGS = 0x4C
_SPEED_UNKNOWN = 0xFFFFFFFF
_DUPLEX = {0: "half", 1: "full"}
# Command, speed, duplex, six more that we do not need, and the words of each mask.
_SETTINGS = struct.Struct("=II7Bb")
_SETTINGS_BYTES = 48
_MOST_WORDS = 127
# The bits that the kernel gives to link modes, up to what a card at home or in an office can do.
_MODES_MBPS = {
    10: (0, 1),
    100: (2, 3, 67),
    1000: (4, 5, 17, 41, 68),
    2500: (15, 47),
    5000: (48,),
    10_000: (12, 18, 19, 20, 42, 43, 44, 45, 46),
    25_000: (31, 32, 33),
    40_000: (23, 24, 25, 26),
    100_000: (36, 37, 38, 39),
}


def link_settings(name: str) -> dict[str, Any]:
    """Nothing where there is no card, or it does not say."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            words = -_SETTINGS.unpack_from(_settings(asking, name, 0))[-1]
            return read_settings(_settings(asking, name, words)) if 0 < words <= _MOST_WORDS else {}
    except OSError:
        return {}


def read_settings(answer: bytes) -> dict[str, Any]:
    """From the kernel's `ethtool_link_settings`, followed by the masks of what is supported, offered, and offered by
    the partner."""
    _, speed, duplex, *_, words = _SETTINGS.unpack_from(answer)
    masks = [int.from_bytes(answer[_SETTINGS_BYTES + 4 * words * each :][: 4 * words], "little") for each in range(3)]
    found = {
        "speed_mbps": speed if speed not in (0, _SPEED_UNKNOWN) else None,
        "duplex": _DUPLEX.get(duplex),
        "best_mbps": _fastest(masks[0]),
        "partner_mbps": _fastest(masks[2]),
    }
    return {name: value for name, value in found.items() if value}


def power_save(name: str) -> bool | None:
    """Whether a Wi-Fi card sleeps between packets; None where it does not say."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking, _SIOCGIWPOWER, struct.pack("16s16x", name.encode()))
    except OSError:
        return None
    return not struct.unpack_from("=iBB", answer, 16)[2]


def _settings(asking: socket.socket, name: str, words: int) -> bytes:
    """Asked with no words, the kernel says how many its masks have, as a negative number."""
    room = array.array("B", bytes(_SETTINGS_BYTES + 3 * 4 * max(words, 0)))
    _SETTINGS.pack_into(room, 0, _LINK_SETTINGS, *[0] * 8, words)
    fcntl.ioctl(asking, _SIOCETHTOOL, struct.pack("16sP", name.encode(), room.buffer_info()[0]).ljust(40, b"\0"))
    return room.tobytes()


def _fastest(mask: int) -> int | None:
    return max((mbps for mbps, bits in _MODES_MBPS.items() if any(mask >> bit & 1 for bit in bits)), default=None)
