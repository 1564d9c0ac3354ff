"""The run's token: whoever knows it belongs to the run. In the run folder, for its owner's eyes only."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def make_token(path: Path) -> str:
    """A fresh one for every launch, readable by nobody else from the first moment."""
    token = secrets.token_hex(32)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(token)
    return token
