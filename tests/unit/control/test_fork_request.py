"""Requests to the template: encoding, descriptors, and which ranks may be forked."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from shoal.cluster.node import Rendezvous, local_node
from shoal.config.schema import RunConfig
from shoal.control.fork_request import (
    LOAD_VARIABLES,
    EnterRequest,
    ForkRequest,
    Reply,
    can_be_forked,
    differing_variables,
    receive_reply,
    receive_request,
    send_reply,
    send_request,
)
from shoal.launch.plan import plan_ranks, plan_script

RANK = (sys.executable, "-P", "-m", "shoal.train.worker", "--folder", "/runs/a b", "--resume")


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def test_a_request_arrives_with_its_descriptors(tmp_path: Path) -> None:
    here, there = pair()
    (tmp_path / "log").touch()
    with here, there, (tmp_path / "log").open("ab") as log:
        left, right = os.pipe()
        request = ForkRequest(os.getpid(), RANK, {"RANK": "1", "NAME": "a=b\n"}, ("A_FD", "B_FD"))
        send_request(here, request, (log.fileno(), left, right))
        received = receive_request(there)
        assert received is not None
        arrived, [log_fd, *_] = received
        assert isinstance(arrived, ForkRequest)
        fds = [int(arrived.env[name]) for name in ("A_FD", "B_FD")]
        try:
            assert (arrived.parent, arrived.argv, arrived.words) == (os.getpid(), RANK, RANK[4:])
            assert arrived.env == {"RANK": "1", "NAME": "a=b\n", "A_FD": str(fds[0]), "B_FD": str(fds[1])}
            os.write(fds[1], b"x")
            assert os.read(left, 1) == b"x"
            assert os.path.sameopenfile(log_fd, log.fileno())
            assert [os.get_inheritable(fd) for fd in fds] == [True, True]
        finally:
            for fd in (*fds, log_fd, left, right):
                os.close(fd)


def test_a_request_to_enter_a_node_arrives() -> None:
    here, there = pair()
    request = EnterRequest(17, ("/sys/fs/cgroup/a b/cgroup.procs",), {"SHOAL_NODE": "node2"})
    with here, there:
        send_request(here, request, (here.fileno(),))
        received = receive_request(there)
        assert received is not None
        assert received[0] == request
        os.close(*received[1])


def test_the_end_of_either_side_is_seen() -> None:
    here, there = pair()
    with there:
        here.close()
        assert receive_request(there) is None
    here, there = pair()
    with here:
        send_reply(there, Reply(17))
        there.close()
        assert receive_reply(here) == Reply(17)
        assert receive_reply(here) is None


def test_messages_of_a_peer_that_ended_with_unread_ones_arrive() -> None:
    here, there = pair()
    request = EnterRequest(17, (), {})
    with there:
        send_reply(there, Reply())
        send_request(here, request, (here.fileno(),))
        here.close()
        received = receive_request(there)
        assert received is not None
        assert received[0] == request
        os.close(*received[1])
        assert receive_request(there) is None
    here, there = pair()
    with here:
        send_request(here, request, (here.fileno(),))
        send_reply(there, Reply(17))
        there.close()
        assert receive_reply(here) == Reply(17)
        assert receive_reply(here) is None


def test_a_request_that_is_too_long_is_refused() -> None:
    here, there = pair()
    request = ForkRequest(1, RANK, {"LONG": "x" * (4 << 20)})
    with here, there, pytest.raises(OSError, match="too long"):
        send_request(here, request, (there.fileno(),))


def test_only_ranks_of_shoals_own_training_are_forked() -> None:
    nodes, rendezvous = [local_node(2)], Rendezvous("127.0.0.1", 29500)
    own = plan_ranks(RunConfig(), lambda node: "/run", nodes, rendezvous, resume=False)
    assert all(can_be_forked(command.argv, sys.executable) for command in own)
    assert not can_be_forked(own[0].argv, "/another/python")
    launched = plan_ranks(RunConfig(launcher="torchrun"), lambda node: "/run", nodes, rendezvous, resume=False)
    for command in (*launched, *plan_script(RunConfig(), ["train.py"], nodes, rendezvous)):
        assert not can_be_forked(command.argv, sys.executable)


def test_the_ranks_of_a_node_differ_in_nothing_that_a_library_reads_when_it_is_loaded() -> None:
    first, second = plan_ranks(
        RunConfig(), lambda node: "/run", [local_node(2)], Rendezvous("127.0.0.1", 29500), resume=False
    )
    template = {**first.env, **LOAD_VARIABLES}
    assert differing_variables(template, second.env) == set()
    assert differing_variables(template, {**second.env, "OMP_WAIT_POLICY": "passive"}) == {"OMP_WAIT_POLICY"}
    assert differing_variables({**template, "MKL_DYNAMIC": "1"}, second.env) == {"MKL_DYNAMIC"}
