"""A machine that joins meets a host whose words are not those it knows: an error in words, whatever was said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.join.invitation import Invitation
from shoal.control.channel import accept
from shoal.errors import ControlError
from shoal.trials.joining import _arrive, _reach

CODE = "a-code-for-once"
TEXTS = {"config.toml": "", "tokenizer.json": "{}", "data.json": "{}"}


async def arrive(welcome: dict[str, Any], out: Path) -> list[dict[str, Any]]:
    """What the host hears after its welcome."""
    heard: list[dict[str, Any]] = []

    async def host(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = await accept(reader, writer, CODE)
        await channel.receive()
        await channel.send({"type": "welcome", **welcome})
        try:
            while True:
                heard.append(await channel.receive())
        except EOFError:
            channel.close()

    server = await asyncio.start_server(host, "127.0.0.1", 0)
    async with server:
        invitation = Invitation("127.0.0.1", server.sockets[0].getsockname()[1], CODE)
        channel = await _reach(invitation)
        try:
            with pytest.raises(ControlError, match=r"the host sent what this machine does not accept"):
                await _arrive(channel, invitation, out)
        finally:
            channel.close()
        await asyncio.sleep(0.05)
    return heard


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
        {"files": {"../x": 3}, "texts": TEXTS},
        {"files": {}, "texts": {**TEXTS, "data.json": json.dumps({"odd": 1})}, "node": "den", "late": False},
    ],
    ids=lambda welcome: json.dumps(welcome)[:40],
)
def test_a_welcome_of_other_words_is_an_error_in_words(welcome: dict[str, Any], tmp_path: Path) -> None:
    [*_, last] = asyncio.run(arrive(welcome, tmp_path / "run"))
    assert last["type"] == "failed", "the host is told, too"
