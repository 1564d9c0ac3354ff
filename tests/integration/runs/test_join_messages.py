"""Unknown messages of a host are an error with a message on the joining machine; so are wrong join codes.

Exercises runs.join.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal.control.channel import accept
from shoal.control.invitation import Invitation
from shoal.errors import ControlError
from shoal.runs.join import _connect, _introduce
from tests.support.programs import shoal_command

CODE = "a-code-for-once"
FILES = {"0" * 64 + "-train": 3, "0" * 64 + "-val": 3}
TEXTS = {"config.toml": "", "tokenizer.json": "{}", "data.json": "{}"}


async def join_with_welcome(welcome: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """Join a host that sends this welcome; return the messages that it receives afterwards."""
    received: list[dict[str, Any]] = []

    async def host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await accept(reader, writer, CODE)
        await channel.receive()
        await channel.send({"type": "welcome", **welcome})
        try:
            while True:
                received.append(await channel.receive())
        except EOFError:
            channel.close()

    server = await asyncio.start_server(host, "127.0.0.1", 0)
    async with server:
        invitation = Invitation("127.0.0.1", server.sockets[0].getsockname()[1], CODE)
        channel = await _connect(invitation)
        try:
            with pytest.raises(ControlError, match=r"the host sent what this machine does not accept"):
                await _introduce(channel, invitation, out)
        finally:
            channel.close()
        await asyncio.sleep(0.05)
    return received


@pytest.mark.parametrize(
    "welcome",
    [
        {},
        {"files": None},
        {"files": 3, "texts": TEXTS},
        {"files": {}, "texts": {}},
        {"files": {}, "texts": [1]},
        {"files": {}, "texts": {**TEXTS, "config.toml": 7}, "node": "den"},
        {"files": {}, "texts": TEXTS, "node": "den", "late": False},
        {"files": FILES, "texts": TEXTS, "node": "den", "late": False},
        {"files": FILES, "texts": {}, "node": "den", "late": False},
        {"files": {"../x": 3}, "texts": TEXTS},
    ],
    ids=lambda welcome: json.dumps(welcome)[:40],
)
def test_a_malformed_welcome_is_a_readable_error(welcome: dict[str, Any], tmp_path: Path) -> None:
    [*_, last] = asyncio.run(join_with_welcome(welcome, tmp_path / "run"))
    assert last["type"] == "failed", "the host receives the failure, too"


# What `shoal join` prints about the code that it gets.

PLACE = "127.0.0.1:9"
VALID_CODE = "abcd-efgh-jkmn-pqrs"


def run_join(*words: str | Path, stdin: Any = subprocess.DEVNULL, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `shoal join` without a terminal. No host listens at `PLACE`: an accepted code ends with exit code 3."""
    env = {**os.environ, "PYTHONWARNINGS": "", **variables}
    return subprocess.run(
        shoal_command("join", *words), env=env, stdin=stdin, capture_output=True, text=True, timeout=60, check=False
    )


def test_an_empty_standard_input_is_an_error_that_names_the_other_ways() -> None:
    done = run_join(PLACE)
    assert done.returncode == 2
    assert "error: there is no code: standard input was empty" in done.stderr
    assert "without a terminal" in done.stderr
    assert "--code-file" in done.stderr
    assert "SHOAL_JOIN_CODE" in done.stderr


def test_a_closed_standard_input_is_the_same_error() -> None:
    command = shlex.join(map(str, shoal_command("join", PLACE)))
    done = subprocess.run(
        ["/bin/sh", "-c", f"exec {command} <&-"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "error: there is no code: standard input was empty" in done.stderr


def test_a_join_that_waits_for_the_code_prints_a_note() -> None:
    stdin, pipe = os.pipe(), subprocess.PIPE
    process = subprocess.Popen(shoal_command("join", PLACE), stdin=stdin[0], stdout=pipe, stderr=pipe, text=True)
    try:
        os.close(stdin[0])
        assert process.stderr is not None
        assert select.select([process.stderr], [], [], 30)[0], "nothing was printed"
        assert process.stderr.readline() == "note: waiting for the code on standard input\n"
        os.write(stdin[1], f"{VALID_CODE}\n".encode())
        _, err = process.communicate(timeout=60)
    finally:
        os.close(stdin[1])
        process.kill()
        process.wait(20)
    assert process.returncode == 3
    assert f"no shoal answers at {PLACE}" in err


def test_a_code_after_the_address_is_taken_with_a_warning() -> None:
    for words in ((PLACE, VALID_CODE), (PLACE, *VALID_CODE.split("-"))):
        done = run_join(*words)
        assert done.returncode == 3, done.stderr
        assert "other users of this machine can read a code given as an argument" in done.stderr
        assert f"no shoal answers at {PLACE}" in done.stderr
        assert "nothing listens at that port: shoal host has ended there, or the port was mistyped" in done.stderr
    assert "CODE" not in run_join("--help").stdout.partition("Join a run")[0]


def test_a_name_without_an_address_is_no_firewall() -> None:
    done = run_join(f"no-such-machine.invalid:41234#{VALID_CODE}")
    assert done.returncode == 3, done.stderr
    assert "error: no-such-machine.invalid has no address on this network" in done.stderr
    assert "firewall" not in done.stderr


def test_a_code_that_is_too_short_is_refused_before_the_network() -> None:
    for words in ((f"{PLACE}#{VALID_CODE[:-1]}",), (PLACE, VALID_CODE[:-1])):
        done = run_join(*words)
        assert done.returncode == 2, done.stderr
        assert "that is no code of an invitation: 15 of 16 letters" in done.stderr


@pytest.mark.parametrize(
    "ways", [("argument", "file"), ("second", "variable"), ("argument", "second"), ("file", "variable")], ids="-".join
)
def test_a_code_that_is_given_in_two_ways_is_refused(ways: tuple[str, str], tmp_path: Path) -> None:
    file = tmp_path / "code"
    file.write_text(VALID_CODE)
    file.chmod(0o600)
    words: list[str | Path] = [f"{PLACE}#{VALID_CODE}" if "argument" in ways else PLACE]
    words += [VALID_CODE] if "second" in ways else []
    words += ["--code-file", file] if "file" in ways else []
    done = run_join(*words, **({"SHOAL_JOIN_CODE": VALID_CODE} if "variable" in ways else {}))
    assert done.returncode == 2, done.stderr
    assert "error: the code is given in two ways: " in done.stderr
    assert VALID_CODE not in done.stderr


def test_a_run_folder_takes_no_code(tmp_path: Path) -> None:
    done = run_join(tmp_path, VALID_CODE)
    assert done.returncode == 2
    assert "is a run folder: rejoining a run needs no code" in done.stderr
