"""Hello messages of machines that may train together, the run's token, and the choice of the interface."""

from __future__ import annotations

import os
import stat
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from shoal.control.channel import PROTOCOL, make_token
from shoal.control.handshake import Hello, describe_cpu_difference, find_mismatch, make_hello
from shoal.errors import ControlError, UsageError
from shoal.host.facts import interface_for, interface_of

LOOPBACK = "127.0.0.1"
UNASSIGNED = "192.0.2.7"
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


def test_equal_machines_match() -> None:
    assert find_mismatch(ATTIC, CELLAR) is None
    assert describe_cpu_difference(ATTIC, CELLAR) == ""


@pytest.mark.parametrize(
    ("field", "value", "own", "other"),
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
def test_a_difference_is_named_on_both_sides(field: str, value: Any, own: str, other: str) -> None:
    """The error is complete on either side: the user may read either machine's message."""
    changed = replace(CELLAR, **{field: value})
    for local, remote in ((ATTIC, changed), (changed, ATTIC)):
        error = find_mismatch(local, remote)
        assert error is not None
        assert error.seen.startswith(f"{local.node} and {remote.node} cannot train together: {own.rpartition(' ')[0]}")
        assert f" {own.rpartition(' ')[2]} on attic" in error.seen
        assert f" {other} on cellar" in error.seen
        assert error.why
        assert error.fix


def test_another_processor_is_noted_and_not_refused() -> None:
    slower = replace(CELLAR, cpu="a slow one")
    assert find_mismatch(ATTIC, slower) is None
    assert describe_cpu_difference(ATTIC, slower) == (
        "attic has a quick one, cellar has a slow one: they compute at different speeds"
    )


def test_a_hello_survives_serialization(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.control.handshake.cpu_name", lambda: ATTIC.cpu)  # It starts lscpu.
    me = make_hello(1, "here", "m", "c", "d")
    assert Hello.from_dict(asdict(me)) == me
    assert me.protocol == PROTOCOL
    assert me.torch.split(".")[0].isdigit()
    assert me.arch == os.uname().machine
    assert Hello.from_dict({**asdict(me), "news": "of a later version"}) == me


def test_a_hello_of_another_version_is_refused() -> None:
    document = asdict(ATTIC)
    del document["avx2"]
    with pytest.raises(ControlError, match="a hello without 'avx2'") as caught:
        Hello.from_dict(document)
    assert "shoal setup" in caught.value.fix


def test_the_token_file_is_readable_only_by_its_owner(tmp_path: Path) -> None:
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


def test_a_token_is_never_written_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").touch()
    (tmp_path / "token").symlink_to(tmp_path / "elsewhere")
    make_token(tmp_path / "token")
    assert (tmp_path / "elsewhere").read_text() == ""


def test_the_interface_is_found_by_its_address() -> None:
    assert interface_for(LOOPBACK, None, "attic") == interface_of(LOOPBACK) == "lo"
    assert interface_for(LOOPBACK, "lo", "attic") == "lo"
    assert interface_for("127.0.0.2", "lo", "attic") == "lo", "a local address, although no interface lists it"


def test_an_unknown_interface_is_named_with_the_existing_ones() -> None:
    with pytest.raises(UsageError, match="attic has no interface 'eth77'") as caught:
        interface_for(LOOPBACK, "eth77", "attic")
    assert "lo (127.0.0.1)" in caught.value.why
    assert "leave the interface out" in caught.value.fix


@pytest.mark.parametrize("wanted", [None, "lo"])
def test_an_address_of_another_machine_is_named_with_the_local_ones(wanted: str | None) -> None:
    with pytest.raises(UsageError, match=f"the address {UNASSIGNED} is not one of attic's") as caught:
        interface_for(UNASSIGNED, wanted, "attic")
    assert "lo (127.0.0.1)" in caught.value.why
    assert caught.value.fix
