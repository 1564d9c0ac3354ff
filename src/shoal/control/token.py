"""The run's token: whoever knows it belongs to the run. In the run folder, for its owner's eyes only."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from shoal.errors import ControlError

# 16 bytes that are used once, and 32 of the token.
_SEALED = re.compile(r"[0-9a-f]{96}")


def make_token(path: Path) -> str:
    """A fresh one for every launch, readable by nobody else from the first moment."""
    token = secrets.token_hex(32)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return token


def is_same(sent: str | bytes, secret: str | bytes) -> bool:
    """Compare what was sent with a secret, in a time that tells nothing about it.

    `hmac.compare_digest` raises TypeError for text that is not ASCII, and what strangers send may be any text.
    """
    return hmac.compare_digest(_as_bytes(sent), _as_bytes(secret))


def _as_bytes(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode(errors="surrogatepass")


def seal(token: str, code: str) -> str:
    """The token for one who knows a one-time code; to everybody else on the way it is noise."""
    nonce = secrets.token_bytes(16)
    return (nonce + _mix(bytes.fromhex(token), code, nonce)).hex()


def unseal(sealed: object, code: str) -> str:
    """Raises `ControlError` for what `seal` would not have written."""
    if not isinstance(sealed, str) or not _SEALED.fullmatch(sealed):
        raise ControlError("the host sent no token", why="its shoal is another")
    raw = bytes.fromhex(sealed)
    return _mix(raw[16:], code, raw[:16]).hex()


def _mix(secret: bytes, code: str, nonce: bytes) -> bytes:
    """Both are as long as one digest, and a code is used once: so this is a one-time pad."""
    pad = hmac.new(code.encode(), b"shoal token " + nonce, hashlib.sha256).digest()
    return bytes(a ^ b for a, b in zip(secret, pad, strict=True))
