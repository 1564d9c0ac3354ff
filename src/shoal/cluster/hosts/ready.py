"""Hosts ready for a launch: the right Python found, the same shoal, the project and the data there.

Called at every launch, so it is quick when nothing changed: one connection to each host, all of them at once.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster.hosts.addresses import addresses, refuse_twins, settle
from shoal.cluster.hosts.each import on_each, values_or_raise
from shoal.cluster.hosts.facts import HostFacts, look, need_same_kind
from shoal.cluster.hosts.files import Bundle, code_bundle, project_bundle, say_left_out
from shoal.cluster.hosts.python import PythonFacts, Wanted, misfits, wanted_here
from shoal.cluster.hosts.ship import ensure_code, ensure_project, put_file, question
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.errors import HostError


@dataclass(frozen=True)
class ReadyHost:
    """What a launcher needs to start ranks there. Paths are the host's own; `files` are by the digest they were asked
    for with. On this very machine nothing is copied: they are the ones that are used here anyway."""

    host: Host
    here: bool
    address: str
    interface: str
    cores: int
    link_mbps: int | None
    python: str
    pythonpath: str
    project: str | None
    files: dict[str, str]
    runs: str
    facts: HostFacts


def make_ready(
    spec: HostsSpec,
    project: Path | None = None,
    files: Mapping[str, Path] = {},
    note: Callable[[str], None] = lambda text: None,
) -> list[ReadyHost]:
    """In the order of the file; raises what keeps a host from taking part, naming each of them."""
    wanted, code = wanted_here(), code_bundle()
    bundle = project_bundle(project) if project else None
    if bundle is not None and (left_out := say_left_out(bundle)):
        note(left_out)
    where = addresses(spec)

    def prepare(host: Host) -> ReadyHost:
        return _ready(host, spec, where[host.name], wanted, code, bundle, project, files)

    found = values_or_raise(on_each(spec.hosts, prepare))
    refuse_twins({name: ready.address for name, ready in found.items()}, spec)
    return list(found.values())


def usable_python(host: Host, spec: HostsSpec, facts: HostFacts, wanted: Wanted) -> PythonFacts:
    """The one that the file names, or the one that `shoal setup` made."""
    found = {python.executable: misfits(python, wanted) for python in facts.pythons}
    for python in facts.pythons:
        if not found[python.executable]:
            return python
    # The one that setup made, where there is one: it was made because the named one would not do.
    last = facts.pythons[-1]
    raise HostError(
        f"the Python of {host.name} cannot run this: {found[last.executable][0]}",
        why=f"all ranks need the same Python and the same torch; looked at {last.executable}",
        fix=f"shoal setup {spec.path}",
    )


def _ready(
    host: Host,
    spec: HostsSpec,
    address: str,
    wanted: Wanted,
    code: Bundle,
    bundle: Bundle | None,
    project: Path | None,
    files: Mapping[str, Path],
) -> ReadyHost:
    host = _with_own_python(host)
    facts = look(host, spec, question(code, bundle, files), wanted)
    need_same_kind(host, facts, platform.system(), platform.machine())
    address, interface = settle(host, spec, address, facts)
    python = usable_python(host, spec, facts, wanted)
    return ReadyHost(
        host=host,
        here=is_here(host),
        address=address,
        interface=interface,
        cores=facts.cores,
        link_mbps=facts.link_mbps.get(interface),
        python=python.executable,
        pythonpath=ensure_code(host, spec, facts, code),
        project=ensure_project(host, spec, project, facts, bundle) if project else None,
        files={digest: put_file(host, spec, local, digest, facts) for digest, local in files.items()},
        runs=f"{facts.folder}/runs",
        facts=facts,
    )


def _with_own_python(host: Host) -> Host:
    """This very machine needs no other one than ours."""
    return host.model_copy(update={"python": sys.executable}) if is_here(host) and host.python is None else host
