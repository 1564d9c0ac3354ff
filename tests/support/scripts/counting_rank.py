"""A rank without torch: it speaks to its agent like a worker, and its training is to count steps together.

An exchange is a key to which every rank of the generation adds; it succeeds when all have. What it committed it writes
into its own ledger, with a digest of how it came there: which generation did each step. The request to end after a step
travels in the exchange, so all end after the same one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from shoal.control.channel import LENGTH
from shoal.control.membership.settings import LEASE_S
from shoal.control.membership.types import State
from shoal.control.rank_messages import (
    MEMBERSHIP_FD,
    AbandonCommits,
    EnterGeneration,
    GenerationBroken,
    GroupFormed,
    LeaseRenewed,
    LeaveGeneration,
    LeftGeneration,
    RankReady,
    StepCommitted,
    ToAgent,
    TrainingFinished,
    read_to_rank,
    to_frame,
)
from shoal.host.facts import boot_clock

# In an exchange: how many have added, how many want to end the generation, how many were asked to stop altogether.
LEAVE, STOP = 1000, 1_000_000


class SupervisorGone(Exception):
    pass


class Rank:
    def __init__(self, out: Path, steps: int, step_s: float) -> None:
        self.steps, self.step_s = steps, step_s
        self.keys = socket.socket(fileno=int(os.environ["SHOAL_AGENT_FD"]))
        self.line = socket.socket(fileno=int(os.environ[MEMBERSHIP_FD]))
        self.ledger = out.open("a", buffering=1)
        self.state: State | None = State(step=0)
        self.digest = ""  # of how the state came about
        self.order: EnterGeneration | None = None
        self.lease_until = 0.0
        self.leave_order: LeaveGeneration | None = None
        self.asked_to_stop = False

    def main(self) -> int:
        signal.signal(signal.SIGINT, self.stop)
        # As one does that meets a bug of its own.
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
        self.note(event="ready")
        self.send(RankReady(committed=0))
        while True:
            self.listen(wait_s=0.05)
            if self.asked_to_stop and self.order is None:
                return 130
            if self.order is not None and (code := self.take_part(self.order)) is not None:
                return code

    def stop(self, *_: object) -> None:
        self.asked_to_stop = True

    def take_part(self, order: EnterGeneration) -> int | None:
        """One generation, to its end; an exit code when the training is over."""
        self.note(
            event="enter", generation=str(order.generation), has_state=order.has_state, ids=order.ids, rank=order.rank
        )
        try:
            if not self.form(order):
                return self.leave(order)
            while self.state is not None and self.state.step < self.steps:
                total = self.exchange(order, f"step-{self.state.step + 1}", after_step=True)
                if total is None or self.must_leave_at_once():
                    return self.leave(order)
                self.apply(order)
                if total >= STOP:
                    return 130
                if total >= LEAVE:
                    return self.leave(order)
            if self.exchange(order, "end") is None:
                return self.leave(order)
        except SupervisorGone as error:
            self.send(GenerationBroken(generation=order.generation, why=str(error)))
            return self.leave(order)
        self.send(TrainingFinished())
        self.note(event="finished")
        return 0

    def form(self, order: EnterGeneration) -> bool:
        """Publish the state if this rank has it, otherwise copy it: of a machine that has it, a rank may be new."""
        has_it = self.state is not None and order.has_state and self.state.step == order.state.step
        if self.state is not None and (order.first or has_it):
            self.ask(op="set", key=f"{order.prefix}/state", value=text(f"{self.digest} {self.state.model_dump_json()}"))
        elif not self.copy(order):
            return False
        if self.exchange(order, "formed") is None:
            return False
        self.send(GroupFormed(generation=order.generation))
        return True

    def copy(self, order: EnterGeneration) -> bool:
        self.state = None
        while (value := self.ask(op="get", key=f"{order.prefix}/state", wait_s=0.2)["value"]) is None:
            self.listen()
            if self.must_leave_at_once():
                return False
        self.digest, _, state = untext(value).partition(" ")
        self.state = State.model_validate_json(state)
        self.note(event="copied", step=self.state.step)
        return True

    def exchange(self, order: EnterGeneration, name: str, after_step: bool = False) -> int | None:
        """Return the sum when all ranks have added; None when the generation ends first."""
        time.sleep(self.step_s)
        self.listen()
        if self.must_leave_at_once():
            return None
        flags = LEAVE * (self.leave_order is not None) + STOP * self.asked_to_stop if after_step else 0
        key = f"{order.prefix}/{name}"
        total = int(self.ask(op="add", key=key, amount=1 + flags)["total"])
        while total % LEAVE < order.size:
            self.listen(wait_s=0.005)
            if self.must_leave_at_once():
                return None
            total = int(self.ask(op="add", key=key, amount=0)["total"])
        return total

    def apply(self, order: EnterGeneration) -> None:
        assert self.state is not None
        before, generation = self.state, str(order.generation)
        before_digest = self.digest
        self.digest = hashlib.sha256(f"{before_digest} {generation}".encode()).hexdigest()[:16]
        self.state = State(step=before.step + 1, committed=before.step)
        while boot_clock() > self.lease_until:
            self.listen(wait_s=0.05)
            if self.must_leave_at_once():
                return
        if before.step:
            lineage = str(order.lineage.name)
            self.note(event="commit", step=before.step, digest=before_digest, generation=generation, lineage=lineage)
            self.send(StepCommitted(step=before.step))

    def leave(self, order: EnterGeneration) -> None:
        while self.leave_order is None:
            self.listen(wait_s=0.2)
        self.send(LeftGeneration(generation=order.generation, state=self.state))
        self.note(event="left", generation=str(order.generation), step=self.state and self.state.step)
        self.order = self.leave_order = None

    def must_leave_at_once(self) -> bool:
        return self.leave_order is not None and not self.leave_order.after_step

    def listen(self, wait_s: float = 0.0) -> None:
        while select.select([self.line], [], [], wait_s)[0]:
            match read_to_rank(self.receive(self.line)):
                case EnterGeneration() as order:
                    self.order, self.leave_order = order, None
                case LeaveGeneration() as leave if self.order is not None and leave.generation == self.order.generation:
                    self.leave_order = leave
                case LeaseRenewed() as lease if self.order is not None and lease.generation == self.order.generation:
                    self.lease_until = lease.at_s + LEASE_S
                case AbandonCommits() as given:
                    self.note(event="given-up", lineage=str(given.lineage), surviving=str(given.surviving))
                case _:
                    pass
            wait_s = 0.0

    def send(self, message: ToAgent) -> None:
        self.line.sendall(to_frame(message))

    def ask(self, **request: object) -> dict[str, object]:
        payload = json.dumps(request).encode()
        self.keys.sendall(len(payload).to_bytes(4, "big") + payload)
        answer: dict[str, object] = json.loads(self.receive(self.keys))
        if "error" in answer:
            raise SupervisorGone(answer["error"])
        return answer

    def receive(self, connection: socket.socket) -> bytes:
        size = connection.recv(LENGTH, socket.MSG_WAITALL)
        if not size:
            sys.exit(0)
        return connection.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL)

    def note(self, **fields: object) -> None:
        self.ledger.write(json.dumps({"time": time.time(), **fields}) + "\n")


def text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


def untext(value: object) -> str:
    return base64.b64decode(str(value)).decode()


if __name__ == "__main__":
    sys.exit(Rank(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])).main())
