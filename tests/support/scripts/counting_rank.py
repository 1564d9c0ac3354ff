"""A rank without torch: it uses a worker's protocol with its agent, and its training counts steps together.

An exchange is a key to which every rank of the generation adds; it succeeds when all have. The rank writes committed
steps to its own ledger, with a digest of their history: which generation did every step. The request to end after a
step is part of the exchange, so all ranks end after the same step.
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

# In an exchange: the number of ranks that have added, that want to end the generation, that were asked to stop.
EDGE, STOP = 1000, 1_000_000


class StoreFailed(Exception):
    pass


class Rank:
    def __init__(self, out: Path, steps: int, step_s: float) -> None:
        self.steps, self.step_s = steps, step_s
        self.keys = socket.socket(fileno=int(os.environ["SHOAL_AGENT_FD"]))
        self.line = socket.socket(fileno=int(os.environ[MEMBERSHIP_FD]))
        self.ledger = out.open("a", buffering=1)
        self.state: State | None = State(step=0)
        self.order: EnterGeneration | None = None
        self.lease_until = 0.0
        self.halt: LeaveGeneration | None = None
        self.asked_to_stop = False

    def main(self) -> int:
        signal.signal(signal.SIGINT, self.stop)
        # Exit as after an internal error.
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
        self.note(event="here")
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
        """Run one generation to its end; return an exit code when the training is over."""
        self.note(event="enter", generation=str(order.generation), holds=order.holds, ids=order.ids, rank=order.rank)
        try:
            if not self.form(order):
                return self.leave(order)
            while self.state is not None and self.state.step < self.steps:
                total = self.exchange(order, f"step-{self.state.step + 1}", edge=True)
                if total is None or self.is_halted_at_once():
                    return self.leave(order)
                self.apply(order)
                if total >= STOP:
                    return 130
                if total >= EDGE:
                    return self.leave(order)
            if self.exchange(order, "end") is None:
                return self.leave(order)
        except StoreFailed as error:
            self.send(GenerationBroken(generation=order.generation, why=str(error)))
            return self.leave(order)
        self.send(TrainingFinished())
        self.note(event="finished")
        return 0

    def form(self, order: EnterGeneration) -> bool:
        """Publish the generation's state if this rank has it, otherwise copy it. Its machine may have it already."""
        has_it = self.state is not None and order.holds and self.state.step == order.state.step
        if self.state is not None and (order.first or has_it):
            self.ask(op="set", key=f"{order.prefix}/state", value=text(self.state.model_dump_json()))
        elif not self.copy(order):
            return False
        if self.exchange(order, "formed") is None:
            return False
        self.send(GroupFormed(generation=order.generation))
        return True

    def copy(self, order: EnterGeneration) -> bool:
        self.state = None
        while (stored := self.ask(op="get", key=f"{order.prefix}/state", wait_s=0.2)["value"]) is None:
            self.listen()
            if self.is_halted_at_once():
                return False
        self.state = State.model_validate_json(untext(stored))
        self.note(event="copied", step=self.state.step)
        return True

    def exchange(self, order: EnterGeneration, name: str, edge: bool = False) -> int | None:
        """Return the sum when every rank has added, or None if this rank is halted first."""
        time.sleep(self.step_s)
        self.listen()
        if self.is_halted_at_once():
            return None
        request = EDGE * (self.halt is not None) + STOP * self.asked_to_stop if edge else 0
        key = f"{order.prefix}/{name}"
        total = int(self.ask(op="add", key=key, amount=1 + request)["total"])
        while total % EDGE < order.size:
            self.listen(wait_s=0.005)
            if self.is_halted_at_once():
                return None
            total = int(self.ask(op="add", key=key, amount=0)["total"])
        return total

    def apply(self, order: EnterGeneration) -> None:
        assert self.state is not None
        before, generation = self.state, str(order.generation)
        digest = hashlib.sha256(f"{before.digest} {generation}".encode()).hexdigest()[:16]
        self.state = State(step=before.step + 1, digest=digest, committed=before.step)
        while boot_clock() > self.lease_until:
            self.listen(wait_s=0.05)
            if self.is_halted_at_once():
                return
        if before.step:
            lineage = str(order.lineage.name)
            self.note(event="commit", step=before.step, digest=before.digest, generation=generation, lineage=lineage)
            self.send(StepCommitted(step=before.step))

    def leave(self, order: EnterGeneration) -> None:
        while self.halt is None:
            self.listen(wait_s=0.2)
        self.send(LeftGeneration(generation=order.generation, state=self.state))
        self.note(event="halted", generation=str(order.generation), step=self.state and self.state.step)
        self.order = self.halt = None

    def is_halted_at_once(self) -> bool:
        return self.halt is not None and not self.halt.at_edge

    def listen(self, wait_s: float = 0.0) -> None:
        while select.select([self.line], [], [], wait_s)[0]:
            match read_to_rank(self.receive(self.line)):
                case EnterGeneration() as order:
                    self.order, self.halt = order, None
                case LeaveGeneration() as halt if self.order is not None and halt.generation == self.order.generation:
                    self.halt = halt
                case LeaseRenewed() as lease if self.order is not None and lease.generation == self.order.generation:
                    self.lease_until = lease.at_s + LEASE_S
                case AbandonCommits() as given:
                    self.note(event="given-up", lineage=str(given.lineage), standing=str(given.standing))
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
            raise StoreFailed(answer["error"])
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
