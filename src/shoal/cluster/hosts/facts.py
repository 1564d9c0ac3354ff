"""What is on a host: one question, one connection, whatever there is to ask."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.cluster.hosts import there
from shoal.cluster.hosts.python import PythonFacts, Wanted, wanted_here
from shoal.cluster.hosts.spec import Host, HostsSpec
from shoal.cluster.hosts.ssh import ANSWER_S, Result, run_script, shell_path, variables
from shoal.errors import HostError

_KNOWN_MINORS = range(8, 20)


class HostFacts(BaseModel):
    """`pythons` are those that shoal may use, in the order in which it would; `others` only help to say what is there.
    `folder` is shoal's own, expanded. `project_files` is filled when the project there is not the one asked about."""

    model_config = ConfigDict(frozen=True)

    pythons: tuple[PythonFacts, ...]
    others: tuple[str, ...]
    folder: str
    free_bytes: int
    cores: int
    arch: str
    os: str
    host_name: str
    interfaces: dict[str, list[str]]
    link_mbps: dict[str, int]
    has_nvidia: bool
    has_code: bool
    files: tuple[str, ...]
    project_digest: str
    project_files: dict[str, str]

    @property
    def own_python(self) -> str:
        """Where the interpreter is that `shoal setup` makes."""
        return f"{self.folder}/env/bin/python"


@dataclass(frozen=True)
class Question:
    """What to look for there: code and project by digest, files by name and size."""

    code: str = "-"
    project: str = ""
    project_digest: str = ""
    files: dict[str, int] = field(default_factory=dict)


_NOTHING = Question()


def look(
    host: Host,
    spec: HostsSpec,
    question: Question = _NOTHING,
    wanted: Wanted | None = None,
    any_python: bool = False,
) -> HostFacts:
    """Facts about a host. `any_python` also considers those an environment could be made with."""
    wanted = wanted or wanted_here()
    names = [("named", host.python)] if host.python else []
    names.append(("own", f"{host.folder}/env/bin/python"))
    if any_python and not host.python:
        names += [("found", f"python{wanted.minor}"), ("found", "python3")]
    done = run_script(host, spec, look_script(host, names, question, wanted), deadline_s=ANSWER_S)
    return read_answer(host, spec, done)


def look_script(host: Host, names: list[tuple[str, str]], question: Question, wanted: Wanted) -> str:
    request = {"folder": host.folder, "packages": list(wanted.packages), **vars(question)}
    known = " ".join(["python3", *(f"python3.{minor}" for minor in _KNOWN_MINORS)])
    return (
        variables(program=program("look"), request=json.dumps(request))
        # Not at home: a json.py that lies there would be taken for the library's.
        + "cd /\n"
        + "ask() {\n"
        + '  path=$(command -v "$2") || return\n'
        + '  "$path" -E -c "$program" "$request" "$1" </dev/null || printf "broken %s\\n" "$path"\n'
        + "}\n"
        + "".join(f"ask {origin} {shell_path(name)}\n" for origin, name in names)
        + f'for name in {known}; do path=$(command -v "$name") && printf "other %s\\n" "$path"; done\n'
        + "exit 0"
    )


def need_same_kind(host: Host, facts: HostFacts, os: str, arch: str) -> None:
    """gloo speaks another way on each system, and the last bits of a sum differ between processors."""
    if (facts.os, facts.arch) != (os, arch):
        raise HostError(
            f"{host.name} is another kind of machine: {facts.os} on {facts.arch}, and here is {os} on {arch}",
            why="ranks on different systems or processors cannot form one world with the same results",
            fix="take it out of the hosts file",
        )


def program(name: str) -> str:
    """The text of a program that runs on a host."""
    return (Path(there.__file__).parent / f"{name}.py").read_text(encoding="utf-8")


def read_answer(host: Host, spec: HostsSpec, done: Result) -> HostFacts:
    lines = done.stdout.decode(errors="replace").splitlines()
    others = tuple(line.removeprefix("other ") for line in lines if line.startswith("other "))
    broken = [line.removeprefix("broken ") for line in lines if line.startswith("broken ")]
    try:
        answers = [json.loads(line) for line in lines if line.startswith("{")]
        if answers:
            pythons = [answer.pop("python") for answer in answers]
            return HostFacts(pythons=_distinct(pythons), others=others, **answers[0])
    except (ValueError, KeyError, ValidationError) as error:
        raise HostError(f"{host.name} answered something else than asked: {error}", fix="try again") from None
    raise no_python(host, spec, others, broken, done.stderr)


def no_python(host: Host, spec: HostsSpec, others: tuple[str, ...], broken: list[str], stderr: str) -> HostError:
    if broken:
        return HostError(
            f"{broken[0]} on {host.name} does not work",
            why=stderr.strip().rpartition("\n")[2],
            fix=f"name another python in {spec.path}",
        )
    there_is = f"there are: {', '.join(others)}" if others else "there is no python3 at all"
    if host.python:
        return HostError(
            f"there is no {host.python} on {host.name}", why=there_is, fix=f"correct its python in {spec.path}"
        )
    return HostError(f"shoal has no environment on {host.name}", why=there_is, fix=f"shoal setup {spec.path}")


def _distinct(pythons: list[dict[str, object]]) -> tuple[PythonFacts, ...]:
    found = {facts.executable: facts for facts in reversed([PythonFacts.model_validate(each) for each in pythons])}
    return tuple(reversed(found.values()))
