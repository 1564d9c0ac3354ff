"""Talking to a program on a host before anything is set up there: any Python that can read our code will do."""

from __future__ import annotations

from shoal.cluster.hosts.addresses import addresses
from shoal.cluster.hosts.each import on_each
from shoal.cluster.hosts.facts import look
from shoal.cluster.hosts.files import code_bundle
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
        python, path = facts.pythons[0].executable, ensure_code(host, spec, facts, code)
        script = Script(host, spec, own_session=True)
        try:
            words = variables(python=python, PYTHONPATH=path, module=module)
            script.start(words + 'export PYTHONPATH\ncd /\nexec "$python" -P -m "$module"')
        except BaseException:
            script.close()
            raise
        return Talk(host.name, script)

    return on_each(spec.hosts, start)


def hosts_as_nodes(spec: HostsSpec) -> list[Node]:
    """With the addresses that ranks would use, found without asking any host."""
    known = addresses(spec)
    return [
        Node(host.name, known[host.name], host.interface, host.slots, None, threads=host.threads) for host in spec.hosts
    ]
