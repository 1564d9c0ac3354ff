"""The command line of `shoal watch` and of `--watch`."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path

import pytest
from rich.text import Text

from shoal.cli.main import run
from shoal.cli.watch import _progress, is_loopback, keep_token, listen, page_url
from shoal.errors import UsageError
from tests.support.run_samples import all_events, make_run


def test_options_that_do_not_go_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(make_run(tmp_path / "run", all_events(2, 5)).path)
    refused = {
        ("watch", folder, "--terminal", "--json"): "--json does not go with --terminal",
        ("watch", folder, "--terminal", "--port", "80"): "--port does not go with --terminal",
        ("watch", folder, "--terminal", "--token-file", "t"): "--token-file does not go with --terminal",
        ("watch", folder, "--host", "192.0.2.1"): "cannot be served at 192.0.2.1",
        ("watch", str(tmp_path)): "is not a run folder",
        ("train", "--watch", "--detach", "--out", str(tmp_path / "new")): "--watch does not go with --detach",
        ("train", "--watch", "--dry-run"): "--watch does not go with --dry-run",
        ("run", "--watch", "--detach", "--out", str(tmp_path / "new"), __file__): "--watch does not go with --detach",
    }
    for arguments, message in refused.items():
        assert run(list(arguments), debug=False) == 2, arguments
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_the_terminal_shows_the_essentials_once_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = [event for event in all_events(2, 50) if event["event"] != "end"]
    for event in events:
        if event["event"] == "start":
            event["steps"] = 200
    folder = make_run(tmp_path / "run", events)
    with folder.events(1).open("ab") as file:
        file.write(b"damaged\n")
    assert run(["watch", str(folder.path), "--terminal"], debug=False) == 0
    shown = capsys.readouterr().out
    assert "step 50 of 200 (25%)" in shown
    assert "running" in shown
    assert "1 line of the run folder could not be read" in shown
    parts = re.findall(r"(\d+)% +(\d+)% +(\d+)%", shown)
    assert [sum(map(int, shares)) for shares in parts] == [100, 100]


def test_the_address_has_the_token_and_names_where_it_listens() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert page_url("127.0.0.1", listener, "T") == f"http://127.0.0.1:{port}/?token=T"
        assert page_url("::1", listener, "T").startswith("http://[::1]:")
        assert "::" not in page_url("::", listener, "T")
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3
    assert [is_loopback(host) for host in ("::", "10.0.0.1", "name")] == [False] * 3


def test_a_token_file_keeps_the_token(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = keep_token(path)
    assert len(token) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert keep_token(path) == token


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("short\n", 0o600, "holds no token"),
        ("", 0o600, "holds no token"),
        ("a b&c=d e f g h i j k l m n\n", 0o600, "holds no token"),
        ("x" * 2_000, 0o600, "holds no token"),
        ("ä" * 40, 0o600, "holds no token"),
        ("x" * 32, 0o644, "can be read by other users"),
    ],
)
def test_an_unfit_token_file_is_refused_and_kept(tmp_path: Path, content: str, mode: int, message: str) -> None:
    path = tmp_path / "token"
    path.write_text(content, encoding="utf-8")
    path.chmod(mode)
    with pytest.raises(UsageError, match=message):
        keep_token(path)
    assert path.read_text(encoding="utf-8") == content


def test_a_token_file_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: no such file or directory"):
        keep_token(tmp_path / "missing" / "token")


@pytest.mark.parametrize(("width", "cells"), [(120, 30), (60, 16)])
def test_the_bar_leaves_room_for_the_time_left(width: int, cells: int) -> None:
    line = Text.from_markup(_progress({"step": 1659, "steps": 4000, "left_s": 89.0}, width)).plain
    assert line.count("━") == cells
    assert len(line) <= width
    assert line.endswith("step 1,659 of 4,000 (41%)  1 min 29 s left")


@pytest.mark.parametrize(
    ("number", "why", "fix"),
    [
        (errno.EACCES, "only root may listen at ports below 1024", "--port 8080"),
        (errno.EADDRINUSE, "another program has the port", "leave --port out"),
        (errno.EADDRNOTAVAIL, "the address is not one of this machine", "leave --host out"),
    ],
)
def test_a_port_that_cannot_be_had_is_explained(
    number: int, why: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(UsageError, match=os.strerror(number).lower()) as refused:
        listen("127.0.0.1", 80)
    assert refused.value.why == why
    assert fix in refused.value.fix
