"""Talking to a program on a host before anything is set up there: any Python that can read our code will do."""

from __future__ import annotations

from shoal.cluster.hosts.addresses import addresses
from shoal.cluster.hosts.each import on_each
from shoal.cluster.hosts.facts import HostFacts, look
from shoal.cluster.hosts.files import code_bundle
from shoal.cluster.hosts.python import misfits, wanted_here
from shoal.cluster.hosts.ship import ensure_code, question
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.cluster.hosts.ssh import Script, variables
from shoal.cluster.node import Node
from shoal.cluster.talk import Process, Talk, module_command
from shoal.errors import ShoalError


def visit(spec: HostsSpec, module: str) -> dict[str, Talk | ShoalError]:
    """A conversation with the module on every host, or why there is none; all at once."""
    code = code_bundle()

    def start(host: Host) -> Talk:
        if is_here(host):
            return Talk(host.name, Process(module_command(module)))
        facts = look(host, spec, question(code), any_python=True)
        python, path = _python(facts), ensure_code(host, spec, facts, code)
        script = Script(host, spec, own_session=True)
        try:
            # Not -P: a Python that is too old for it is to be heard of, not to fail over its command line.
            words = variables(python=python, PYTHONPATH=path, PYTHONSAFEPATH="1", module=module)
            script.start(words + 'export PYTHONPATH PYTHONSAFEPATH\ncd /\nexec "$python" -m "$module"')
        except BaseException:
            script.close()
            raise
        return Talk(host.name, script)

    return on_each(spec.hosts, start)


def _python(facts: HostFacts) -> str:
    """The one that ranks would get; where none of them will do, the first, which then says what it lacks."""
    fitting = [python for python in facts.pythons if not misfits(python, wanted_here())]
    return (fitting or list(facts.pythons))[0].executable


def hosts_as_nodes(spec: HostsSpec) -> list[Node]:
    """With the addresses that ranks would use, found without asking any host."""
    known = addresses(spec)
    return [
        Node(host.name, known[host.name], host.interface, host.slots, None, threads=host.threads) for host in spec.hosts
    ]
