"""`shoal host RUN`: a machine that was never part of a run comes into it while it trains.

The agent on this machine is its sponsor and gives it an id. Text and configuration go to it as to any machine that
joins; then it is told who takes part, and its agent asks the others to be let in.
"""

from __future__ import annotations

import asyncio
import ipaddress
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.agent.agent import read_orders
from shoal.agent.invite import ID, WHO, InviteReply, ask
from shoal.cluster.join import Confirm, JoinedLink, JoinServer
from shoal.config.load import load_config
from shoal.control.channel import seal
from shoal.control.orders import GoOrder, MeetOrder
from shoal.control.processes import AGENT, find
from shoal.errors import ControlError, ShoalError, UsageError
from shoal.events import Event, EventTail
from shoal.host.facts import can_listen
from shoal.run_folder import RunFolder
from shoal.runs.confirm import ask_at_terminal, require_terminal
from shoal.runs.supervisor import training_cargo

Note = Callable[[str], None]
# The new machine has to import torch first; afterwards the others take it in at the end of a step.
_LET_IN_WITHIN_S = 120.0
_POLL_S = 0.1


@dataclass(frozen=True)
class Inviter:
    """The agent on this machine that gives out an id, and the orders it has itself."""

    run: RunFolder
    meet: MeetOrder
    go: GoOrder

    def ask(self, question: str) -> InviteReply:
        try:
            return ask(self.run.door(self.meet.node), question)
        except OSError as error:
            raise ControlError(
                f"the agent of {self.meet.node} does not answer: {error.strerror or 'it took too long'}",
                why="it has ended, or the machine is very busy",
                fix=f"look: shoal ps; then try again: shoal host {shlex.quote(str(self.run.path))}",
            ) from None


def invite(path: Path, address: str | None, port: int, note: Note, confirm: bool = False) -> str:
    """Until the machine that joins is let in. Says what came of it. `confirm`: first the owner is asked."""
    if confirm:
        require_terminal()
    sponsor = find_sponsor(RunFolder.open(path))
    if sponsor.ask(WHO).full:
        most = load_config(sponsor.run.config).members.max_nodes
        note(f"members.max_nodes is {most}, and so many take part: a new machine waits until one leaves")
    asking = ask_at_terminal if confirm else None
    return asyncio.run(_invite(sponsor, address or sponsor.meet.address, port, note, asking))


def find_sponsor(run: RunFolder) -> Inviter:
    """An agent of the run that works here. Of several, as in a lab, the one whose address is this machine's."""
    nodes = [found.node for found in find(run.path) if found.part == AGENT]
    shown = shlex.quote(str(run.path))
    if not nodes:
        raise UsageError(
            f"nobody trains in {run.path} on this machine",
            why="a new machine is invited by one that takes part, and no agent of this run works here",
            fix=f"go on with the run: shoal train --resume {shown}; or type this on a machine that takes part",
        )
    config = load_config(run.config)
    if config.members.on_loss == "end" or config.run.launcher != "shoal":
        raise UsageError(
            f"{run.path} takes no machine in while it trains",
            why="members.on_loss is `end`, or it was launched by torchrun or spawn",
            fix="machines can come into one that is started without these settings",
        )
    known = [Inviter(run, *read_orders(run, node)) for node in sorted(nodes) if run.orders(node).exists()]
    here = [sponsor for sponsor in known if can_listen(sponsor.meet.address)]
    if not here:
        raise UsageError(
            f"no machine of {run.path} has an address of this one",
            why=f"here work agents of {', '.join(sorted(nodes))}, and they listen elsewhere or have not begun yet",
            fix="type this where one of them runs",
        )
    _refuse_one_that_nobody_reaches(here[0], config.run.on)
    return here[0]


def _refuse_one_that_nobody_reaches(sponsor: Inviter, on: str) -> None:
    if on.startswith("local") and ipaddress.ip_address(sponsor.meet.address).is_loopback:
        raise UsageError(
            f"{sponsor.run.path} can be reached from this machine only",
            why=f"it was launched with --on {on}, so its agent listens at {sponsor.meet.address}",
            fix="a run that others can reach is started with: shoal host, or shoal train --on hosts.toml",
        )


async def _invite(sponsor: Inviter, address: str, port: int, note: Note, confirm: Confirm | None) -> str:
    doorstep = JoinServer(address, port, training_cargo(sponsor.run), note, late=True, confirm=confirm)
    guest = await doorstep.receive_one(lambda: _names(sponsor.ask(WHO)), lambda: None)
    try:
        note(f"{guest} has come; the others let it in at the end of a step")
        tail = EventTail(sponsor.run.journal(sponsor.meet.node))
        tail.skip_to_end()
        try:
            answer = sponsor.ask(ID)
        except ShoalError as error:
            await guest.channel.send({"type": "refused", **error.as_dict()})
            raise
        for message in orders_for(guest, sponsor, answer):
            await guest.channel.send(message)
        return await _until_let_in(guest, tail, sponsor)
    finally:
        guest.channel.close()


def _names(answer: InviteReply) -> set[str]:
    return {place.node for place in answer.places.values()}


def orders_for(guest: JoinedLink, sponsor: Inviter, answer: InviteReply) -> tuple[dict[str, Any], dict[str, Any]]:
    """Who it is, and whom it meets: of the founders the newest that is known, since their agents may have moved."""
    meet, go, founders = sponsor.meet, sponsor.go, range(len(sponsor.go.roster))
    same = {name: getattr(meet, name) for name in ("launch", "launched_at", "config", "data")}
    roster = [asdict(answer.places.get(member, go.roster[member])) for member in founders]
    guests = {str(member): asdict(place) for member, place in answer.places.items() if member not in founders}
    members = asdict(go.members) if go.members is not None else None
    return (
        {"type": "meet", "member": answer.member, "sealed": seal(meet.token, guest.code), **same},
        {"type": "roster", "roster": roster, "guests": guests, "members": members},
    )


async def _until_let_in(guest: JoinedLink, tail: EventTail, sponsor: Inviter) -> str:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _LET_IN_WITHIN_S
    while loop.time() < deadline:
        for event in tail.poll():
            if event["event"] == "generation" and guest.name in event["members"]:
                return _takes_part(guest.name, event)
            if event["event"] == "done":
                raise UsageError(f"the run has ended before {guest.name} was let in", fix="start another one there")
        if guest.channel.is_closed():
            raise ControlError(
                f"{guest.name} left before it was let in",
                why="what was wrong is said there, where shoal join was typed",
                fix=f"then try again: shoal host {shlex.quote(str(sponsor.run.path))}",
            )
        await asyncio.sleep(_POLL_S)
    return f"{guest.name} asks to be let in, and goes on asking: what it sees is said there"


def _takes_part(name: str, event: Event) -> str:
    members = ", ".join(event["members"])
    return f"{name} takes part: {members} train on from step {event['step']} with {event['ranks']} ranks"
