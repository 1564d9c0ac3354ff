"""The invitation that a joining machine gets, and the code in it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import shoal
from shoal.cluster.join import free_name, install_command
from shoal.cluster.target import JoinSpec, parse_join
from shoal.control.channel import seal, unseal
from shoal.control.invitation import Invitation, make_code, parse_invitation
from shoal.errors import UsageError
from shoal.host.facts import installed_release


@pytest.mark.parametrize("address", ["192.168.1.5", "fe80::1", "laptop-b.lan"])
def test_a_printed_invitation_can_be_parsed(address: str) -> None:
    invitation = Invitation(address, 41234, make_code())
    assert parse_invitation(str(invitation)) == invitation
    assert parse_invitation(f"  {str(invitation).upper()} ").code == invitation.code
    assert parse_invitation(invitation.place) == Invitation(address, 41234)
    assert parse_invitation(invitation.place).with_code(f" {invitation.shown_code}\n") == invitation


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1",
        "10.0.0.1:",
        "10.0.0.1:41234#",
        "10.0.0.1#abcd",
        "10.0.0.1:99999#abcd",
        "10.0.0.1:0#abcd",
        "a:b#c",
    ],
)
def test_other_text_is_refused_as_an_invitation(text: str) -> None:
    with pytest.raises(UsageError, match="is no invitation"):
        parse_invitation(text)


@pytest.mark.parametrize("code", ["", "  ", "xyz", "ab cd/ef", "x" * 65, "p\u00e4ss-word"])
def test_an_invalid_code_is_refused_and_not_repeated(code: str) -> None:
    with pytest.raises(UsageError, match="that is no code") as caught:
        parse_invitation("10.0.0.1:41234").with_code(code)
    assert not code.strip() or code not in caught.value.render()


@pytest.mark.parametrize("change", [lambda code: code[:-1], lambda code: code + "x", lambda code: code[:4]])
def test_a_code_of_another_length_is_refused_with_its_length(change: Callable[[str], str]) -> None:
    code = change(make_code())
    expected = rf"that is no code of an invitation: {len(code)} .*\b16\b"
    with pytest.raises(UsageError, match=expected) as asked:
        parse_invitation("10.0.0.1:41234").with_code(code)
    with pytest.raises(UsageError, match=expected) as typed:
        parse_invitation(f"10.0.0.1:41234#{code}")
    assert code not in asked.value.render() + typed.value.render()


@pytest.mark.parametrize(
    ("wanted", "taken", "given"),
    [
        ("attic", set(), "attic"),
        ("ATTIC", {"attic"}, "ATTIC-2"),
        ("attic", {"Attic", "ATTIC-2"}, "attic-3"),
        ("attic", {"attic", "ATTIC"}, "attic-2"),
    ],
)
def test_a_free_name_differs_from_every_taken_name_by_more_than_case(wanted: str, taken: set[str], given: str) -> None:
    """On a disk that ignores case, two machines would write to one file of events."""
    assert free_name(wanted, taken) == given


def test_a_refused_invitation_does_not_repeat_its_code() -> None:
    with pytest.raises(UsageError, match="is no invitation") as caught:
        parse_invitation("10.0.0.1:99999#abcd-efgh")
    assert "abcd" not in caught.value.seen


def test_codes_have_16_letters_and_do_not_repeat() -> None:
    codes = {make_code() for _ in range(100)}
    assert len(codes) == 100
    assert {len(code) for code in codes} == {16}


def test_a_token_is_unsealed_only_with_its_code() -> None:
    token, code = "ab" * 32, make_code()
    assert unseal(seal(token, code), code) == token
    assert unseal(seal(token, code), make_code()) != token
    assert seal(token, code) != seal(token, code), "equal outputs would show that the tokens are equal"
    assert token not in seal(token, code)


def test_join_is_parsed_with_its_number_of_machines() -> None:
    assert parse_join("join:3") == JoinSpec(3)
    assert parse_join("join:2,address=10.0.0.1,port=4000") == JoinSpec(2, "10.0.0.1", 4000)
    for wrong in ("join:1", "join:", "join:x", "join:2,speed=1"):
        with pytest.raises(UsageError):
            parse_join(wrong)


def test_a_machine_without_shoal_is_shown_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # It is asked of lscpu, once in a process.
    monkeypatch.setattr("shoal.control.handshake.cpu_name", lambda: "a processor")
    words = install_command().split()
    assert words[1:4] == ["-m", "pip", "install"]
    assert words[0] == f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert words[4] == f"shoal=={shoal.__version__}"
    assert words[5] == f"torch=={installed_release('torch')}"
