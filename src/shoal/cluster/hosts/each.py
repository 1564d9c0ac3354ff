"""The same for every host at once: they are slow one after another, and do not wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from shoal.cluster.hosts.spec import Host
from shoal.cluster.hosts.ssh import end_all_scripts
from shoal.errors import HostError, ShoalError

T = TypeVar("T")

_AT_ONCE = 32


def on_each(hosts: Iterable[Host], work: Callable[[Host], T]) -> dict[str, T | ShoalError]:
    """By the host's name: what came of it, or the error."""

    def attempt(host: Host) -> T | ShoalError:
        try:
            return work(host)
        except ShoalError as error:
            return error

    hosts = list(hosts)
    pool = ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="host")
    try:
        return dict(zip((host.name for host in hosts), pool.map(attempt, hosts), strict=True))
    except BaseException:
        # Ctrl-C: the threads wait for their connections, and would keep us until a copy of an hour is done.
        end_all_scripts()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def values_or_raise(results: Mapping[str, T | ShoalError]) -> dict[str, T]:
    """Every value; or one error that names every host that failed."""
    values: dict[str, T] = {}
    errors: list[ShoalError] = []
    for name, result in results.items():
        if isinstance(result, ShoalError):
            errors.append(result)
        else:
            values[name] = result
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise summed(errors, len(results))
    return values


def summed(errors: list[ShoalError], of: int) -> HostError:
    each = "\n".join(error.seen + (f" ({error.why})" if error.why else "") for error in errors)
    return HostError(f"{len(errors)} of {of} hosts cannot be used", why=each, fix=errors[0].fix)
