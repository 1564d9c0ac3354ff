"""Where the lab's tools are: Debian keeps tc, nft and sshd in a folder that an ordinary user's PATH does not name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

_SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=search_path(_path(os.environ)))


def search_path(path: str) -> str:
    """The user's own folders first: whoever puts a tool of their own there wants that one."""
    return os.pathsep.join((path, *_unnamed(path)))


def with_tools(environment: Mapping[str, str]) -> dict[str, str]:
    """For a process that calls the tools by name, as the printed commands do."""
    return {**environment, "PATH": search_path(_path(environment))}


def path_line() -> str:
    """The line of a printed script without which a shell like ours would not find the tools; nothing where it would."""
    unnamed = _unnamed(_path(os.environ))
    return f'export PATH="$PATH:{os.pathsep.join(unnamed)}"\n' if unnamed else ""


def reach_tools(argv: Sequence[str]) -> list[str]:
    """`argv`, so that it finds the tools whoever runs it, and with whatever PATH."""
    line = path_line()
    return ["sh", "-c", f'{line}exec "$@"', "sh", *argv] if line else list(argv)


def _unnamed(path: str) -> list[str]:
    """By what they are: in most places one of the two is a link to the other."""
    named = {os.path.realpath(folder) for folder in path.split(os.pathsep)}
    return [folder for folder in dict.fromkeys(map(os.path.realpath, _SYSTEM_FOLDERS)) if folder not in named]


def _path(environment: Mapping[str, str]) -> str:
    return environment.get("PATH", os.defpath)
