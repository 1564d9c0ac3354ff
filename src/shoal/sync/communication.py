"""Turns torch's errors about a lost connection into `PeerLost`, at the places where torch raises them.

gloo has no exception types: it raises a plain RuntimeError. Only this module looks at the text of such an error. All
waits for other ranks run inside `communication()`; the rest of shoal catches `PeerLost`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shoal.errors import PeerLost

# What torch's C++ half writes before the text of an exception that crosses it: in a callback of a future, the class of
# a Python exception. DDP's backward raises such errors.
_WRAPPERS = r"(?:Got the following error when running the callback: |\w+: )*"
_WRAPPED_TYPE = re.compile(rf"{_WRAPPERS}(?:PeerLost|DistStoreError|DistNetworkError): ")
# gloo begins every error with the source line that raised it. An error of a user's code may have the same words, such
# as "Connection reset by peer" in a data loader, but not in this form.
_GLOO_ERROR = re.compile(rf"{_WRAPPERS}(?:Gloo connectFullMesh failed|\[\S+\.(?:cc|h):\d+\] )")
# The last is raised by all other collectives of a group when one of them reaches its timeout.
_TIMEOUT_TEXTS = ("Timed out waiting", "pair closure")
_LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Connect timeout",
    "connectFullMesh",
    "Socket closed",
    *_TIMEOUT_TEXTS,
)


@contextmanager
def communication() -> Iterator[None]:
    """Raise `PeerLost` instead of an error of torch which means that a peer is gone. Other errors pass unchanged.

    The block may contain a user's code, such as a model's backward between the collectives of DDP.
    """
    try:
        yield
    except RuntimeError as error:
        loss = lost_peer(error)
        if loss is None:
            raise
        raise loss from error


def lost_peer(error: BaseException) -> PeerLost | None:
    """Return the loss that an error of torch means, if any."""
    return PeerLost(_first_line(error)) if isinstance(error, RuntimeError) and _is_lost_peer(error) else None


def is_timeout(loss: PeerLost) -> bool:
    """Whether a peer did not answer in time, so that it may still be there."""
    return any(text in str(loss) for text in _TIMEOUT_TEXTS)


def _is_lost_peer(error: RuntimeError) -> bool:
    if isinstance(error, dist.DistStoreError | dist.DistNetworkError):
        return True
    text = str(error)
    if _WRAPPED_TYPE.match(text):
        return True
    is_of_backend = isinstance(error, dist.DistBackendError) or _GLOO_ERROR.match(text) is not None
    return is_of_backend and any(lost in text for lost in _LOST_PEER_TEXTS)


def _first_line(error: RuntimeError) -> str:
    return re.sub(f"^{_WRAPPERS}", "", str(error).strip().split("\n")[0]) or type(error).__name__
