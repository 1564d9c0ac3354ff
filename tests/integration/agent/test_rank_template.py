"""Ranks that an agent forks from its template: real agents, real templates, ranks that wait for a peer.

Exercises agent.rank_template, agent.rank_processes, train.template.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from shoal.agent.rank_processes import RankProcesses
from shoal.agent.rank_template import ForkedRank, RankTemplate
from shoal.control.fork_request import ForkRequest, Reply, receive_request, send_reply
from shoal.control.orders import StartProcess
from shoal.control.processes import RunProcess, find_processes, is_running
from shoal.errors import RunFailed
from shoal.run_folder import RunFolder
from tests.support.agents import Agent, agents, go
from tests.support.labs import need_lab
from tests.support.programs import TINY, read_jsonl, set_flags, shoal, steps_of
from tests.support.runs import ended_afterwards
from tests.support.waiting import wait_until

WORKER = (sys.executable, "-P", "-m", "shoal.train.worker")
START_S = 60.0


def waiting_rank(folder: Path, rank: int = 1) -> StartProcess:
    """Return a rank that lives: it waits for a store that is never served."""
    env = {"RANK": str(rank), "WORLD_SIZE": "9", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env |= {"MASTER_PORT": "9", "OMP_NUM_THREADS": "1", "SHOAL_NODE": "node1"}
    return StartProcess(f"rank-{rank}", (rank,), (*WORKER, "--out", str(folder / "out")), env, store=True)


def part(run: Path, name: str) -> RunProcess:
    return wait_until(lambda: [one for one in find_processes(run) if one.part == name], START_S)[0]


def started(agent: Agent, name: str) -> int:
    return int(agent.first("started", START_S)["processes"][name])


def test_a_forked_rank_has_its_own_session_marks_log_and_exit_code(tmp_path: Path) -> None:
    failing = StartProcess("rank-0", (0,), (*WORKER, "--folder", str(tmp_path / "missing")), {}, store=True)
    with agents(tmp_path) as [agent]:
        go([agent], [waiting_rank(tmp_path)])
        pid, template = started(agent, "rank-1"), part(tmp_path, "template")
        rank = part(tmp_path, "rank-1")
        process = psutil.Process(pid)
        assert (rank.pid, rank.node) == (pid, "node1")
        assert rank.command == " ".join(waiting_rank(tmp_path).argv)
        assert process.ppid() == agent.process.pid
        assert process.create_time() > psutil.Process(template.pid).create_time()
        assert process.environ()["RANK"] == "1"
        assert "OPENBLAS_NUM_THREADS" not in process.environ()
        assert os.getsid(pid) == pid
        log = agent.run.log("node1", "rank-1")
        assert [Path(f"/proc/{pid}/fd/{fd}").readlink() for fd in (0, 1, 2)] == [Path(os.devnull), log, log]
        # It ends neither with the template nor by a signal for the template's group.
        os.kill(template.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(template.pid))
        assert is_running(pid)
        os.kill(pid, signal.SIGKILL)
        assert agent.code() == 0
        assert agent.ended() == {"rank-1": (-signal.SIGKILL, False)}
        assert find_processes(tmp_path) == []
    second = tmp_path / "second"
    with agents(second) as [agent]:
        go([agent], [failing])
        assert agent.code(START_S) == 0
        assert agent.ended() == {"rank-0": (2, False)}
        assert "missing" in agent.run.log("node1", "rank-0").read_text()
        assert agent.said("note") == []
        assert find_processes(second) == []


def test_forked_ranks_and_the_template_end_with_a_killed_agent(tmp_path: Path) -> None:
    with agents(tmp_path) as [agent]:
        go([agent], [waiting_rank(tmp_path)])
        pids = [started(agent, "rank-1"), part(tmp_path, "template").pid]
        # It cannot end by itself, because its connection to the agent is closed.
        os.kill(pids[0], signal.SIGSTOP)
        agent.process.kill()
        wait_until(lambda: not any(map(is_running, pids)))


def test_a_template_that_dies_is_replaced_by_a_plain_start(tmp_path: Path) -> None:
    with agents(tmp_path) as [agent]:
        go([agent], [waiting_rank(tmp_path)])
        # It still imports torch: the rank is not forked yet.
        os.kill(part(tmp_path, "template").pid, signal.SIGKILL)
        pid = started(agent, "rank-1")
        assert psutil.Process(pid).ppid() == agent.process.pid
        assert psutil.Process(pid).environ()["RANK"] == "1"
        (note,) = agent.said("note")
        assert note["text"].startswith("ranks are started one by one, without a template: it has ended")
        assert find_processes(tmp_path)[0].part == "rank-1"


def test_a_rank_that_is_not_forked_yet_can_be_ended(tmp_path: Path) -> None:
    with agents(tmp_path) as [agent]:
        go([agent], [waiting_rank(tmp_path)])
        part(tmp_path, "template")
        agent.tell("end")
        assert agent.code() == 0
        assert agent.ended() == {"rank-1": (-signal.SIGKILL, True)}
        assert find_processes(tmp_path) == []


# It looks at a rank as soon as it has its number.
IMPATIENT_AGENT = """
import os, sys
from pathlib import Path
from shoal.agent.rank_template import RankTemplate

folder, *argv = sys.argv[1:]
template = RankTemplate.start({}, folder, Path(folder, "template.log"), sys.exit)
rank = template.fork(tuple(argv), {"RANK": "1", "WORLD_SIZE": "9"}, Path(folder, "rank.log"), {}, None)
while not rank.pid:
    template.read_replies()
status = Path(f"/proc/{rank.pid}/status").read_text().split()
print(os.getsid(rank.pid) == rank.pid, int(status[status.index("SigIgn:") + 1], 16) >> 1 & 1)
template.end()
"""


def test_a_rank_has_its_session_and_signals_before_the_agent_has_its_number(tmp_path: Path) -> None:
    command = (sys.executable, "-c", IMPATIENT_AGENT, str(tmp_path), *waiting_rank(tmp_path).argv)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)
    assert (done.stdout, done.stderr) == ("True 0\n", "")


class Requests:
    """An agent's requests and its ranks. The test is the template, and answers with processes that sleep."""

    def __init__(self, folder: Path) -> None:
        own_end, self.template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = folder / "log"
        self.notes: list[str] = []
        self.template = RankTemplate(own_end, None, self._log, self.notes.append)
        self.plain: list[int] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def ask(self, fds: Mapping[str, int] | None = None) -> ForkedRank:
        def start_plain(fds: Mapping[str, int]) -> subprocess.Popen[bytes]:
            self.plain.append(self.sleep())
            return self.processes[-1]

        return self.template.fork(WORKER, {"PADDING": "." * 4096}, self._log, fds or {}, start_plain)

    def sleep(self) -> int:
        sleeping = (sys.executable, "-c", "import time; time.sleep(1000)")
        self.processes.append(subprocess.Popen(sleeping, start_new_session=True))
        return self.processes[-1].pid

    def receive(self) -> int:
        """Return the number of the next request."""
        received = receive_request(self.template_end)
        assert received is not None
        for fd in received[1]:
            os.close(fd)
        assert isinstance(received[0], ForkRequest)
        return received[0].number

    def answer(self, number: int) -> int:
        pid = self.sleep()
        send_reply(self.template_end, Reply(pid, number=number))
        return pid


@pytest.fixture
def requests(tmp_path: Path) -> Iterator[Requests]:
    requests = Requests(tmp_path)
    with contextlib.closing(requests.template_end):
        yield requests
        requests.template.end()
        for process in requests.processes:
            process.kill()
            process.wait()


def test_a_rank_whose_number_arrived_is_not_started_twice(requests: Requests) -> None:
    forked, other = requests.ask(), requests.ask()
    pid = requests.answer(requests.receive())
    # It ends with an unread request: the kernel reports that before it delivers the number.
    requests.template_end.close()
    assert (other.poll(), forked.poll()) == (None, None)
    assert (forked.pid, requests.plain) == (pid, [other.pid])


def test_no_rank_begins_after_the_template_was_given_up(requests: Requests) -> None:
    forked, other = requests.ask(), requests.ask()
    pid = requests.answer(requests.receive())
    requests.template.end()
    # A rank that cannot send its number ends.
    with pytest.raises(ConnectionError):
        requests.answer(requests.receive())
    assert (other.poll(), forked.poll()) == (None, None)
    assert (forked.pid, requests.plain) == (pid, [other.pid])


def test_a_cancelled_rank_is_killed_if_it_was_forked_meanwhile(requests: Requests) -> None:
    kept, kept_end = socket.socketpair()
    with kept, kept_end:
        rank, other = requests.ask(), requests.ask({"KEPT_FD": kept_end.fileno()})
        kept_end.close()
        pid = requests.answer(requests.receive())
        requests.receive()
        rank.cancel()
        other.cancel()
        assert rank.pid == pid
        wait_until(lambda: not is_running(pid))
        assert (rank.poll(), other.poll(), requests.plain) == (-signal.SIGKILL, -signal.SIGKILL, [])
        # Its connections are closed.
        kept.settimeout(START_S)
        assert kept.recv(1) == b""


def test_a_refused_rank_ends_no_other(requests: Requests) -> None:
    """On an emulated node ranks end with their template."""
    send_reply(requests.template_end, Reply())
    ranks = [requests.ask() for _ in range(4)]
    numbers = [requests.receive() for _ in ranks]
    first = requests.answer(numbers[0])
    send_reply(requests.template_end, Reply(refused="a reason", number=numbers[1]))
    # This one was killed before the template saw that it had begun.
    send_reply(requests.template_end, Reply(refused="another reason", number=numbers[0]))
    third = requests.answer(numbers[2])
    for rank in ranks:
        assert rank.poll() is None
    assert [rank.pid for rank in ranks] == [first, requests.plain[0], third, 0]
    assert (requests.template.is_open, requests.template.can_be_asked) == (True, False)
    # The template forks it soon.
    ranks[3].cancel()
    fourth = requests.answer(numbers[3])
    ranks[3].poll()
    wait_until(lambda: not is_running(fourth))
    assert all(map(is_running, (first, third)))
    (note,) = requests.notes
    assert "a reason" in note


def test_more_ranks_are_asked_for_than_a_template_that_imports_can_be_sent(requests: Requests) -> None:
    ranks = [requests.ask() for _ in range(100)]
    ranks[99].cancel()
    assert ranks[99].poll() == -signal.SIGKILL
    ranks[99].cancel()
    numbers: list[int] = []
    requests.template_end.setblocking(False)
    while len(numbers) < 99:
        assert ranks[98].poll() is None
        with contextlib.suppress(BlockingIOError):
            while True:
                numbers.append(requests.receive())
    assert numbers == list(range(1, 100))
    pid = requests.answer(99)
    assert ranks[98].poll() is None
    assert (ranks[98].pid, requests.plain, requests.notes) == (pid, [], [])


def test_a_start_that_fails_is_reported_also_in_place_of_a_fork(tmp_path: Path) -> None:
    """Then it is tried while the agent polls, and not while it starts ranks."""
    ranks = RankProcesses(RunFolder(tmp_path), "node1", time.time)
    with pytest.raises(RunFailed, match="cannot start rank-1 on node1: No such file"):
        ranks.start(StartProcess("rank-1", (1,), ("/missing/program",), {}), {}, {})


def begin_training(run: Path, on: str) -> None:
    flags = set_flags(*TINY, "train.compile=off", "train.steps=1000000")
    done = shoal("train", "--on", on, "--out", run, "--detach", *flags)
    assert done.returncode == 0, done.stderr
    wait_until(lambda: steps_of(run, 1), START_S)


def await_return(run: Path, rank: int, returns: int) -> None:
    """Wait until the rank has joined so many times, and has then done a step."""

    def has_trained() -> bool:
        events = read_jsonl(run / f"events/rank-{rank}.jsonl")
        joined = [at for at, event in enumerate(events) if event.get("how") == "joined"]
        return len(joined) == returns and any(event["event"] == "step" for event in events[joined[-1] :])

    wait_until(has_trained, START_S)


def notes(run: Path) -> list[str]:
    journals = [read_jsonl(path) for path in sorted((run / "agents").glob("*.jsonl"))]
    return [event["text"] for journal in journals for event in journal if event["event"] == "note"]


def test_a_killed_rank_of_a_training_returns_with_the_template_and_without(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ended_afterwards(run):
        begin_training(run, "local:2")
        template, agent, first = (part(run, name).pid for name in ("template", "agent", "rank-1"))
        os.kill(first, signal.SIGKILL)
        await_return(run, 1, returns=1)
        second = part(run, "rank-1").pid
        assert (second != first, psutil.Process(second).ppid(), part(run, "template").pid) == (True, agent, template)
        assert notes(run) == []
        os.kill(template, signal.SIGKILL)
        os.kill(second, signal.SIGKILL)
        await_return(run, 1, returns=2)
        assert psutil.Process(part(run, "rank-1").pid).ppid() == agent
        (note,) = notes(run)
        assert note.startswith("ranks are started one by one, without a template: it")


def namespaces(pid: int) -> list[Path]:
    return [Path(f"/proc/{pid}/ns/{kind}").readlink() for kind in ("user", "pid", "net", "uts", "mnt", "cgroup")]


def test_the_ranks_of_emulated_nodes_are_forked_inside_their_node(tmp_path: Path) -> None:
    need_lab()
    run = tmp_path / "run"
    with ended_afterwards(run):
        begin_training(run, "lab:2")
        by_part = {(one.part, one.node): one.pid for one in find_processes(run) if one.node}
        parts = [(name, f"node{number}") for number in (1, 2) for name in ("agent", f"rank-{number - 1}", "template")]
        assert sorted(by_part) == sorted(parts)
        for number in (1, 2):
            agent, rank, template = (
                by_part[name, f"node{number}"] for name in ("agent", f"rank-{number - 1}", "template")
            )
            assert namespaces(rank) == namespaces(template) == namespaces(agent)
            group = Path(f"/proc/{agent}/cgroup").read_text()
            assert [Path(f"/proc/{pid}/cgroup").read_text() for pid in (rank, template)] == [group, group]
            assert psutil.Process(rank).ppid() == template
            targets = [str(link.readlink()) for pid in (rank, template) for link in Path(f"/proc/{pid}/fd").iterdir()]
            assert not [target for target in targets if target.startswith(("net:", "mnt:", "pid:", "uts:", "user:"))]
        assert notes(run) == []
        assert namespaces(by_part["agent", "node1"]) != namespaces(by_part["agent", "node2"])
        os.kill(by_part["rank-1", "node2"], signal.SIGKILL)
        await_return(run, 1, returns=1)
        journal = read_jsonl(run / "agents/node2.jsonl")
        assert [event["code"] for event in journal if event["event"] == "ended"] == [-signal.SIGKILL]
        # Its ranks end with it, and are started without it.
        os.kill(by_part["template", "node2"], signal.SIGKILL)
        await_return(run, 1, returns=2)
        assert psutil.Process(part(run, "rank-1").pid).ppid() == by_part["agent", "node2"]
        assert [note.partition(": ")[2][:6] for note in notes(run)] == ["it has"]
        os.kill(by_part["agent", "node1"], signal.SIGKILL)
        ending = [by_part["rank-0", "node1"], by_part["template", "node1"]]
        wait_until(lambda: not any(map(is_running, ending)))
