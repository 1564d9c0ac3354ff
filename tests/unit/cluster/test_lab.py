"""Labs as clusters: `--on lab:…`, and errors of the lab as shoal's."""

from __future__ import annotations

import pytest

from shoal.cluster.lab import ShoalLab, parse_lab, translate_errors
from shoal.errors import LabError, ShoalError, UsageError
from shoal_lab.errors import LabError as ForeignError
from shoal_lab.errors import LabUsageError
from shoal_lab.spec import Link, make_spec


@pytest.mark.parametrize(
    ("raised", "expected", "exit_code"), [(LabUsageError, UsageError, 2), (ForeignError, LabError, 3)]
)
def test_an_error_of_the_lab_becomes_one_of_shoal(
    raised: type[ForeignError], expected: type[ShoalError], exit_code: int
) -> None:
    with pytest.raises(expected) as caught, translate_errors():
        raise raised("seen", why="why", fix="shoal lab status")
    error = caught.value
    assert type(error) is expected
    assert (error.seen, error.why, error.fix, error.exit_code) == ("seen", "why", "shoal lab status", exit_code)


def test_methods_of_a_lab_raise_errors_of_shoal() -> None:
    missing = ShoalLab("not-there")
    for call in (
        lambda: ShoalLab.open("not-there"),
        lambda: missing.state,
        lambda: missing.node("node1"),
        lambda: missing.command("node1", ["true"]),
    ):
        with pytest.raises(UsageError, match="there is no lab 'not-there'") as caught:
            call()
        assert caught.value.fix == "make it: shoal lab up 3 --name not-there"


def test_the_option_on_accepts_the_options_of_lab_up() -> None:
    assert parse_lab("lab:3,link=1gbit,cpu=1/1/0.5") == make_spec(3, link="1gbit", cpu="1/1/0.5")
    assert [node.memory_bytes for node in parse_lab("lab:2,memory=2gb/none").nodes] == [2_000_000_000, None]
    assert parse_lab("lab:2,profile=wifi,delay=5ms,loss=1%,name=a,sshd") == make_spec(
        2, profile="wifi", delay="5ms", loss="1%", name="a", sshd=True
    )
    assert [node.slots for node in parse_lab("lab:3,slots=2/1/1").nodes] == [2, 1, 1]
    assert {node.slots for node in parse_lab("lab:3,slots=2").nodes} == {2}
    assert parse_lab("lab:1").nodes[0].link == Link(rate_bps=1e9)
    assert make_spec(2, link="1gbit/none").nodes[1].link.rate_bps is None


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("lab", "names no lab"),
        ("lab:x", "names no lab"),
        ("lab:0", "a lab of 0 nodes"),
        ("lab:-1", "a lab of -1 nodes"),
        ("lab:1000", "a lab of 1000 nodes"),
        ("lab:2,link=fast", "'fast' is not a link rate"),
        ("lab:2,link=100", "'100' is not a link rate"),
        ("lab:2,link=0mbit", "not a link rate"),
        ("lab:2,link=1gbps", "not a link rate"),
        ("lab:3,cpu=1/1", "2 values for 3 nodes"),
        ("lab:2,cpu=0", "not a CPU share"),
        ("lab:3,memory=1gb/2gb", "2 values for 3 nodes"),
        ("lab:2,memory=2g", "not a size of memory"),
        ("lab:2,memory=1mb", "not a size of memory"),
        ("lab:2,cpu=nan", "not a CPU share"),
        ("lab:2,slots=0", "not a number of slots"),
        ("lab:2,slots=65", "not a number of slots"),
        ("lab:2,slots=2/2/2", "3 values for 2 nodes"),
        ("lab:2,delay=2", "not a delay"),
        ("lab:2,loss=0.1", "not a packet loss"),
        ("lab:2,loss=100%", "not a packet loss"),
        ("lab:2,profile=wiffi", "no link profile"),
        ("lab:2,lnik=1gbit", "cannot use 'lnik=1gbit'"),
        ("lab:2,link=", "cannot use"),
        ("lab:2,link=1gbit,link=2gbit", "cannot use"),
        ("lab:2,name=../x", "not a name for a lab"),
    ],
)
def test_an_invalid_lab_specification_is_refused(text: str, seen: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_lab(text)
    assert seen in raised.value.seen
    assert raised.value.fix


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError) as raised:
        parse_lab("lab:2,profile=wiffi")
    assert "'wifi'" in raised.value.why
