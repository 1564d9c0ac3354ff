"""What a pod answers, and to whom.

Exercises cluster.pods.server, cluster.pods.enter, runs.pod.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import pytest

from shoal.cluster.pods import server
from shoal.cluster.pods.enter import EnteredPod
from shoal.cluster.pods.server import PodServer, ask
from shoal.cluster.pods.spec import FOLDER, HOSTS, INDEX, PodJob
from shoal.control.channel import Channel, Message
from shoal.control.orders import (
    STOP,
    GoOrder,
    MeetOrder,
    RosterEntry,
    read_orders,
    save_orders,
    to_line,
    unseal_token,
)
from shoal.errors import ControlError, ShoalError, UnknownSender
from shoal.run_folder import RunFolder


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the port of the pods here: several tests may run at once, and the pods of a real job have addresses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    monkeypatch.setattr(server, "PORT", port)
    return port


@pytest.fixture
def job(tmp_path: Path, port: int) -> PodJob:
    return PodJob(("127.0.0.1",), 0, tmp_path / "pods")


def serve(job: PodJob, use: Callable[[PodServer], Awaitable[None]]) -> None:
    async def run() -> None:
        pod = PodServer(job, RunFolder(job.folder.parent / "run"), job.read_code())
        await pod.open()
        try:
            await use(pod)
        finally:
            await pod.close()

    asyncio.run(run())


def test_a_pod_says_whether_it_trains_to_those_that_know_the_code(job: PodJob) -> None:
    async def use(pod: PodServer) -> None:
        assert await ask("127.0.0.1", job.read_code(), do="state") == {"trains": False, "leaves": False}
        with pytest.raises(UnknownSender):
            await ask("127.0.0.1", "another code", do="state")

    serve(job, use)


@pytest.mark.parametrize("module", ["os", "shoal", "http.server", "shoal.cluster.node_facts; id"])
def test_a_pod_starts_only_modules_of_shoal(job: PodJob, module: str) -> None:
    async def use(pod: PodServer) -> None:
        answer = await ask("127.0.0.1", job.read_code(), do="run", module=module, words=[])
        if module.startswith("shoal."):
            # A name is never read by a shell.
            assert "No module named" in answer["text"]
        else:
            assert "a request that it does not know" in answer["seen"]

    serve(job, use)


def test_an_agent_is_not_started_where_the_run_folder_is_not(job: PodJob, tmp_path: Path) -> None:
    async def use(pod: PodServer) -> None:
        answer = await ask("127.0.0.1", job.read_code(), do="agent", run=str(tmp_path / "none"), attach=False)
        assert "is not in pod-0" in answer["seen"]
        assert "ReadWriteMany" in answer["fix"]
        answer = await ask("127.0.0.1", job.read_code(), do="agent", run=str(tmp_path), attach=True)
        assert "pod-0 has no agent" in answer["seen"]

    serve(job, use)


def test_a_program_gets_what_is_read_here_and_its_output_is_printed(
    job: PodJob, port: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(HOSTS, "127.0.0.1")
    monkeypatch.setenv(FOLDER, str(job.folder))
    monkeypatch.setenv(INDEX, "0")
    command = f"from shoal.cluster.pods import enter; enter.PORT = {port}; raise SystemExit(enter.main({{words}}))"

    async def enter_pod(*words: str) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", command.format(words=["0", *words])),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    async def use(pod: PodServer) -> None:
        code, out, err = await enter_pod("run", "shoal.cluster.node_facts")
        assert code == 0, err
        assert json.loads(out)["addresses"]
        code, out, err = await enter_pod("run", "shoal.no_such_module")
        assert (code, out) == (1, "")
        assert "No module named" in err
        code, _, err = await enter_pod("agent", str(tmp_path / "none"))
        assert code == 2
        assert "is not in pod-0" in err

    serve(job, use)


def test_the_token_of_a_run_is_encrypted_on_its_way(job: PodJob) -> None:
    code, token = job.read_code(), "ab" * 32
    orders = [json.dumps({"MeetOrder": {"node": "pod-0", "token": token}}).encode() + b"\n", to_line(STOP)]
    sent: list[Message] = []

    class RecordedChannel:
        async def send(self, message: Message) -> None:
            sent.append(message)

    async def feed() -> None:
        lines = asyncio.StreamReader()
        lines.feed_data(b"".join(orders))
        lines.feed_eof()
        await EnteredPod(job, 0, {"do": "agent"})._feed(cast(Channel, RecordedChannel()), lines)

    asyncio.run(feed())
    assert token not in json.dumps(sent)
    assert [unseal_token(message["line"].encode(), code) for message in sent[:2]] == orders
    assert sent[2:] == [{"line": None}]
    with pytest.raises(ControlError):
        unseal_token(orders[0], code)


def test_a_pod_that_comes_back_elsewhere_meets_the_others_at_its_new_address(
    job: PodJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path / "run")
    run.orders("pod-0").parent.mkdir(parents=True)
    places = [RosterEntry("pod-0", "10.1.0.5", 1, "a"), RosterEntry("pod-1", "10.1.0.6", 2, "b")]
    meet = MeetOrder("run", "pod-0", 0, "10.1.0.5", None, "00" * 32, "launch", 0.0, "c", "d", life=3)
    save_orders(run, meet, GoOrder(tuple(places), ()))
    names = {"pods-0": "10.1.0.9", "pods-1": "10.1.0.7"}  # both were replaced
    monkeypatch.setattr(server, "resolve", names.get)
    monkeypatch.setattr(server, "source_address", {"10.1.0.7": "10.1.0.9"}.__getitem__)
    started: list[tuple[Path, str, bool]] = []
    monkeypatch.setattr(server, "PodAgent", lambda run, node, again: started.append((run.path, node, again)))
    job = PodJob(("pods-0", "pods-1"), 0, job.folder)
    asyncio.run(PodServer(job, run, job.read_code()).start_again("pods-1"))
    assert started == [(run.path, "pod-0", True)]
    meet, go = read_orders(run, "pod-0")
    assert (meet.address, meet.life) == ("10.1.0.9", 4)
    assert [place.address for place in go.places().values()] == ["10.1.0.9", "10.1.0.7"]


def test_a_second_pod_cannot_take_the_port(job: PodJob) -> None:
    async def use(pod: PodServer) -> None:
        with pytest.raises(ShoalError, match="cannot listen at port"):
            await PodServer(job, RunFolder(job.folder.parent / "run"), job.read_code()).open()

    serve(job, use)


def test_outside_of_a_job_a_pod_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        (sys.executable, "-P", "-m", "shoal.runs.pod", "runs/x", "pods:2", "train", "grammar"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "shoal emit k8s" in done.stderr
    assert "Traceback" not in done.stderr
