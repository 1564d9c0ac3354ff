"""Runs on other machines: the same questions, asked there over SSH."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from shoal.cluster.cargo import Cargo
from shoal.cluster.hosts.cluster import HostsCluster
from shoal.cluster.hosts.each import on_each, values_or_raise
from shoal.cluster.hosts.ready import ReadyHost
from shoal.cluster.hosts.spec import Host, HostsSpec
from shoal.cluster.hosts.ssh import run_script
from shoal.errors import HostError, ShoalError
from shoal.runfolder import RunFolder

_ANSWER_S = 120.0


def ask_each(spec: HostsSpec, words_for: Callable[[HostsCluster], Sequence[str]]) -> dict[str, Any | ShoalError]:
    """What `shoal … --json` says on each host, by its name. One that is off keeps no other from being asked."""

    def ask(host: Host) -> Any:
        alone = HostsCluster.prepare(spec.model_copy(update={"hosts": (host,)}), Cargo(), lambda text: None)
        return _ask(alone.ready[host.name], spec, words_for(alone))

    return on_each(spec.hosts, ask)


def runs_on(spec: HostsSpec) -> dict[str, list[dict[str, Any]] | ShoalError]:
    said = ask_each(spec, lambda cluster: ("ps",))
    return {name: each if isinstance(each, ShoalError) else each["runs"] for name, each in said.items()}


def stop_on(spec: HostsSpec, run: RunFolder, now: bool) -> dict[str, str]:
    """What became of the run on each host. Raises, after all were asked, when one of them could not be."""

    def words(cluster: HostsCluster) -> Sequence[str]:
        return ("stop", "--here", cluster.folder(cluster.nodes[0], run.path), *(("--now",) if now else ()))

    return {name: said.get("outcome", "not_running") for name, said in values_or_raise(ask_each(spec, words)).items()}


def _ask(ready: ReadyHost, spec: HostsSpec, words: Sequence[str]) -> Any:
    program = shlex.join([ready.python, "-P", "-m", "shoal", *words, "--json"])
    script = f"cd /\nPYTHONPATH={shlex.quote(ready.pythonpath)}\nexport PYTHONPATH\nexec {program}"
    done = run_script(ready.host, spec, script, deadline_s=_ANSWER_S)
    if "is not a run folder" in done.stderr:
        return {}
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise HostError(
            f"{ready.host.name} did not answer {shlex.join(['shoal', *words])}", why=done.stderr.strip()[-500:]
        ) from None
