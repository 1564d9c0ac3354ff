"""Who may train together, by which token they know each other, and by which interface they meet."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.control.channel import PROTOCOL, make_token
from shoal.control.handshake import Hello, describe_cpu_difference, find_mismatch, make_hello
from shoal.errors import ControlError, UsageError
from shoal.host.facts import interface_for, interface_of

LOOPBACK = "127.0.0.1"
NOBODYS = "192.0.2.7"
ATTIC = Hello(
    member=0,
    node="attic",
    mark="m" * 32,
    config="c" * 64,
    data="d" * 64,
    protocol=1,
    shoal="0.1.0",
    torch="2.13.0",
    python="3.11",
    system="Linux",
    arch="x86_64",
    avx2=True,
    cpu="a quick one",
)
CELLAR = replace(ATTIC, member=1, node="cellar", mark="n" * 32)


def test_equal_machines_train_together() -> None:
    assert find_mismatch(ATTIC, CELLAR) is None
    assert describe_cpu_difference(ATTIC, CELLAR) == ""


@pytest.mark.parametrize(
    ("field", "value", "mine", "other"),
    [
        ("protocol", 2, "control protocol 1", "2"),
        ("shoal", "0.2.0", "shoal 0.1.0", "0.2.0"),
        ("torch", "2.9.1", "torch 2.13.0", "2.9.1"),
        ("python", "3.13", "Python 3.11", "3.13"),
        ("system", "Darwin", "operating system Linux", "Darwin"),
        ("arch", "aarch64", "architecture x86_64", "aarch64"),
        ("avx2", False, "AVX2 yes", "no"),
        ("config", "e" * 64, "configuration cccccccccccc", "eeeeeeeeeeee"),
        ("data", "e" * 64, "encoded text dddddddddddd", "eeeeeeeeeeee"),
    ],
)
def test_what_differs_is_named_on_both_sides(field: str, value: Any, mine: str, other: str) -> None:
    """From either side, so that it does not matter which machine's message a person reads."""
    stranger = replace(CELLAR, **{field: value})
    for ours, theirs in ((ATTIC, stranger), (stranger, ATTIC)):
        error = find_mismatch(ours, theirs)
        assert error is not None
        assert error.seen.startswith(f"{ours.node} and {theirs.node} cannot train together: {mine.rpartition(' ')[0]}")
        assert f" {mine.rpartition(' ')[2]} on attic" in error.seen
        assert f" {other} on cellar" in error.seen
        assert error.why
        assert error.fix


def test_another_processor_is_only_remarked() -> None:
    slower = replace(CELLAR, cpu="a slow one")
    assert find_mismatch(ATTIC, slower) is None
    assert describe_cpu_difference(ATTIC, slower) == (
        "attic has a quick one, cellar has a slow one: they compute at different speeds"
    )


def test_a_machine_introduces_itself_and_is_understood() -> None:
    me = make_hello(1, "here", "m", "c", "d")
    assert Hello.from_dict(me.as_dict()) == me
    assert me.protocol == PROTOCOL
    assert me.torch.split(".")[0].isdigit()
    assert me.arch == os.uname().machine
    assert Hello.from_dict({**me.as_dict(), "news": "of a later version"}) == me


def test_a_hello_of_another_version_is_refused() -> None:
    said = ATTIC.as_dict()
    del said["avx2"]
    with pytest.raises(ControlError, match="a hello without 'avx2'") as caught:
        Hello.from_dict(said)
    assert "shoal setup" in caught.value.fix


def test_the_token_is_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    before = os.umask(0)
    try:
        first, second = make_token(path), make_token(path)
    finally:
        os.umask(before)
    assert path.read_text() == second
    assert len(second) == 64
    assert first != second
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_token_never_goes_through_somebody_elses_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "token").symlink_to(tmp_path / "elsewhere")
    make_token(tmp_path / "token")
    assert (tmp_path / "elsewhere").read_text() == ""


def test_the_interface_is_found_by_its_address() -> None:
    assert interface_for(LOOPBACK, None, "attic") == interface_of(LOOPBACK) == "lo"
    assert interface_for(LOOPBACK, "lo", "attic") == "lo"
    assert interface_for("127.0.0.2", "lo", "attic") == "lo", "ours, although no interface lists it"


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(UsageError, match="attic has no interface 'eth77'") as caught:
        interface_for(LOOPBACK, "eth77", "attic")
    assert "lo (127.0.0.1)" in caught.value.why
    assert "leave the interface out" in caught.value.fix


@pytest.mark.parametrize("wanted", [None, "lo"])
def test_an_address_that_is_not_ours_is_named_with_those_that_are(wanted: str | None) -> None:
    with pytest.raises(UsageError, match=f"the address {NOBODYS} is not one of attic's") as caught:
        interface_for(NOBODYS, wanted, "attic")
    assert "lo (127.0.0.1)" in caught.value.why
    assert caught.value.fix
