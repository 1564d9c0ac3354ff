"""Copies what a host lacks: shoal itself, the project, single files. Each is found there again by its digest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from shoal.cluster.hosts.facts import HostFacts, Question, look, program
from shoal.cluster.hosts.files import Bundle, Piece, code_bundle, code_folder, lone_piece, project_bundle, stream
from shoal.cluster.hosts.spec import Host, HostsSpec, is_here
from shoal.cluster.hosts.ssh import run_script, variables
from shoal.errors import HostError
from shoal.units import format_si

# A dead connection is noticed long before, by ssh itself; this only ends what no longer makes sense.
COPY_S = 3600.0


def question(code: Bundle | None = None, project: Bundle | None = None, files: Mapping[str, Path] = {}) -> Question:
    return Question(
        code=code.name if code else "-",
        project=project.name if project else "",
        project_digest=project.digest if project else "",
        files={data_name(digest, local): local.stat().st_size for digest, local in files.items()},
    )


def ensure_code(host: Host, spec: HostsSpec, facts: HostFacts | None = None, code: Bundle | None = None) -> str:
    """What to put into PYTHONPATH there, to run the same shoal as here. `facts` must know about the same code."""
    if is_here(host):
        return str(code_folder())
    code = code or code_bundle()
    facts = facts or look(host, spec, question(code))
    place = f"{facts.folder}/code/{code.name}"
    return place if facts.has_code else send(host, spec, facts, place, code.pieces, {"whole": True})


def ensure_project(
    host: Host, spec: HostsSpec, folder: Path, facts: HostFacts | None = None, project: Bundle | None = None
) -> str:
    """Where the project is there, as it is here. Only files that shoal once put there are ever replaced or removed."""
    if is_here(host):
        return str(folder.resolve())
    project = project or project_bundle(folder)
    facts = facts or look(host, spec, question(project=project))
    place = f"{facts.folder}/projects/{project.name}"
    if facts.project_digest == project.digest:
        return place
    changed = [piece for piece in project.pieces if facts.project_files.get(piece.path) != piece.digest]
    gone = [path for path in facts.project_files if path not in project.listing]
    note = {"digest": project.digest, "files": project.listing}
    return send(host, spec, facts, place, changed, {"remove": gone, "note": note})


def put_file(host: Host, spec: HostsSpec, local: Path, digest: str, facts: HostFacts | None = None) -> str:
    """Where the file is there. `digest` names its content, however the caller knows it; a file that is there under that
    name with that size is not sent again."""
    if is_here(host):
        return str(local)
    facts = facts or look(host, spec, question(files={digest: local}))
    name = data_name(digest, local)
    if name not in facts.files:
        send(host, spec, facts, f"{facts.folder}/data", [lone_piece(local, name)])
    return f"{facts.folder}/data/{name}"


def data_name(digest: str, local: Path) -> str:
    return f"{digest}{local.suffix}"


def send(
    host: Host, spec: HostsSpec, facts: HostFacts, base: str, pieces: Iterable[Piece], order: Mapping[str, Any] = {}
) -> str:
    """Files to a folder there, which is returned. `order` is as `there/put.py` has it."""
    script = (
        variables(program=program("put"), python=facts.pythons[0].executable) + 'cd /\nexec "$python" -E -c "$program"'
    )
    whole = {"base": base, "whole": False, "remove": [], "note": None, **order}
    done = run_script(host, spec, script, stream(whole, pieces), deadline_s=COPY_S)
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        answer = {"error": done.stderr.strip() or f"it ended with {done.returncode}"}
    if "error" in answer:
        raise cannot_copy(host, base, answer)
    return str(answer["base"])


def cannot_copy(host: Host, base: str, answer: Mapping[str, Any]) -> HostError:
    if "needed" in answer:
        return HostError(
            f"{host.name} has no room: {base} needs {format_si(answer['needed'], 'B')}, and "
            f"{format_si(answer['free'], 'B')} are free",
            fix=f"make room on that machine: df -h {base}",
        )
    if answer.get("full"):
        return HostError(
            f"the disk of {host.name} is full", why=answer["error"], fix=f"make room on that machine: df -hi {base}"
        )
    return HostError(
        f"cannot copy to {base} on {host.name}", why=answer["error"], fix=f"look at it there: ls -ld {base}"
    )
