"""`shoal host RUN`: lets a new machine join a run while it trains.

An agent of the run on this machine gives the new node its member id. The node gets text and configuration like any
machine that joins, then the roster; its agent asks the others to be let in.
"""

from __future__ import annotations

import asyncio
import ipaddress
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.agent.invite_server import ID, WHO, InviteReply, ask_agent
from shoal.cluster.join import Confirm, JoinedLink, JoinServer
from shoal.config.load import load_settings
from shoal.config.schema import Config
from shoal.control.channel import seal
from shoal.control.orders import GoOrder, MeetOrder, read_orders
from shoal.control.processes import AGENT, find_processes
from shoal.errors import ControlError, ShoalError, UsageError
from shoal.events import EventTail
from shoal.host.facts import can_listen
from shoal.run_folder import RunFolder
from shoal.runs.confirm import ask_at_terminal, require_terminal
from shoal.runs.supervisor import script_files, training_files

Note = Callable[[str], None]
# The new node has to import torch first; afterwards the others let it in at the end of a step.
_LET_IN_WITHIN_S = 120.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Inviter:
    """The agent on this machine that gives out the member id, and its own orders."""

    run: RunFolder
    meet: MeetOrder
    go: GoOrder

    def ask(self, question: str) -> InviteReply:
        try:
            return ask_agent(self.run.invite_socket(self.meet.node), question)
        except OSError as error:
            raise ControlError(
                f"the agent of {self.meet.node} does not answer: {error.strerror or 'it took too long'}",
                why="it has ended, or the machine is very busy",
                fix=f"look: shoal ps\nthen try again: shoal host {shlex.quote(str(self.run.path))}",
            ) from None


def invite(path: Path, address: str | None, port: int, note: Note, confirm: bool = False) -> str:
    """Wait until a machine joins and is let in; return a sentence about the result. `confirm`: ask the owner first."""
    if confirm:
        require_terminal()
    inviter = _find_inviter(RunFolder.open(path))
    if inviter.ask(WHO).full:
        most = load_settings(inviter.run.config).members.max_nodes
        note(f"members.max_nodes is {most}, and so many take part: a new machine waits until one leaves")
    return asyncio.run(
        _invite(inviter, address or inviter.meet.address, port, note, ask_at_terminal if confirm else None)
    )


def _find_inviter(run: RunFolder) -> Inviter:
    """Return an agent of the run on this machine. Of several, as in a lab, the one that listens at a local address."""
    nodes = sorted(process.node for process in find_processes(run.path) if process.part == AGENT)
    if not nodes:
        raise UsageError(
            f"no agent of {run.path} runs on this machine",
            why="a new machine is invited by one that takes part in the run",
            fix="type this on a machine that takes part\n"
            f"or go on with the run: shoal train --resume {shlex.quote(str(run.path))}",
        )
    if not run.config.is_file():
        raise UsageError(
            f"the script of {run.path} has not made a shoal.Session",
            why="machines can join a session; the ranks of any other script are fixed when it starts",
            fix="if it makes one later, try again then",
        )
    config = load_settings(run.config)
    if config.members.on_loss == "end" or config.run.launcher != "shoal":
        raise UsageError(
            f"{run.path} takes no machine in while it trains",
            why="members.on_loss is `end`, or it was launched by torchrun or spawn",
            fix="machines can join a run that is started without these settings",
        )
    inviters = [Inviter(run, *read_orders(run, node)) for node in nodes if run.orders(node).exists()]
    local = [inviter for inviter in inviters if can_listen(inviter.meet.address)]
    if not local:
        raise UsageError(
            f"no machine of {run.path} has an address of this one",
            why=f"here are the agents of {', '.join(nodes)}, and they listen elsewhere or have not begun yet",
            fix="type this where one of them runs",
        )
    address, on = local[0].meet.address, config.run.on
    if on.startswith("local") and ipaddress.ip_address(address).is_loopback:
        raise UsageError(
            f"{run.path} can be reached from this machine only",
            why=f"it was launched with --on {on}, so its agent listens at {address}",
            fix="a run that others can reach is started with: shoal host, shoal run --on join:2, or --on hosts.toml",
        )
    return local[0]


async def _invite(inviter: Inviter, address: str, port: int, note: Note, confirm: Confirm | None) -> str:
    run = inviter.run
    files = training_files(run) if isinstance(load_settings(run.config), Config) else script_files(run)
    server = JoinServer(address, port, files, note, late=True, confirm=confirm)
    guest = await server.receive_one(lambda: {place.node for place in inviter.ask(WHO).places.values()}, lambda: None)
    try:
        note(f"{guest} has joined; the others let it in at the end of a step")
        tail = EventTail(inviter.run.journal(inviter.meet.node))
        tail.skip_to_end()
        try:
            reply = inviter.ask(ID)
        except ShoalError as error:
            await guest.channel.send({"type": "refused", **error.as_dict()})
            raise
        for message in _make_orders(guest, inviter, reply):
            await guest.channel.send(message)
        return await _until_let_in(guest, tail, inviter)
    finally:
        guest.channel.close()


def _make_orders(guest: JoinedLink, inviter: Inviter, reply: InviteReply) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the guest's place and the roster, with the newest known addresses: agents may have moved."""
    meet, go = inviter.meet, inviter.go
    first_members = range(len(go.roster))
    same = {name: getattr(meet, name) for name in ("launch", "launched_at", "config", "data")}
    roster = [asdict(reply.places.get(member, go.roster[member])) for member in first_members]
    guests = {str(member): asdict(place) for member, place in reply.places.items() if member not in first_members}
    members = asdict(go.members) if go.members is not None else None
    script_port = max((int(start.env.get("MASTER_PORT", 0)) for start in go.starts), default=0)
    return (
        {"type": "meet", "member": reply.member, "sealed": seal(meet.token, guest.code), **same},
        {"type": "roster", "roster": roster, "guests": guests, "members": members, "script_port": script_port},
    )


async def _until_let_in(guest: JoinedLink, tail: EventTail, inviter: Inviter) -> str:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _LET_IN_WITHIN_S
    while loop.time() < deadline:
        for event in tail.poll():
            if event["event"] == "generation" and guest.name in event["members"]:
                members = ", ".join(event["members"])
                return (
                    f"{guest.name} takes part: {members} train on from step {event['step']} with {event['ranks']} ranks"
                )
            if event["event"] == "done":
                raise UsageError(f"the run has ended before {guest.name} was let in", fix="start another one there")
        if guest.channel.is_closed():
            raise ControlError(
                f"{guest.name} left before it was let in",
                why="its own error is shown there, where shoal join was typed",
                fix=f"then try again: shoal host {shlex.quote(str(inviter.run.path))}",
            )
        await asyncio.sleep(_POLL_S)
    return f"{guest.name} asks to be let in, and goes on asking: what it sees is shown there"
