"""Replace hosts, addresses, users and paths in a run's texts, so that its report can be shown to others.

Each gets a stand-in, the same wherever it occurs: `node-1`, `address-1`, `user-1`, `path-1`. Names are learned from the
run folder first, because a text does not show which of its words is a host. Addresses and paths are found by form.
"""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
import shlex
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from shoal.event_schema import LOG_FIELDS
from shoal.events import Event, read_events
from shoal.records.documents import read_document
from shoal.run_folder import RunFolder, user_name

_Record = TypeVar("_Record", bound=BaseModel)

# Fields with words of shoal's own. A machine may be called like one of them.
_OWN_FIELDS = frozenset((
    "event", "status", "how", "error", "sync", "wire", "wire_made_by", "inside", "backend", "process_group",
    "launcher", "device", "measure", "scaling", "trains", "unit", "versions", "generation", "lineage", "cause",
    "created", "data_digest", "asked", "arch", "sha256", "launch", "boot_id",
))  # fmt: skip
# Names that tell nothing about a machine or a person.
_PUBLIC_NAMES = frozenset(("local", "localhost", "here", "unknown", "root", "rank", "node", "shoal"))
_PUBLIC_SITES = ("pytorch.org", "github.com", "ui.perfetto.dev", "python.org")
_PUBLIC_PATHS = ("/dev/null", "/dev/shm", "/proc/", "/sys/")  # noqa: S108 - recognized, not used
# Shorter names are words of ordinary sentences too: they are replaced only where they stand alone in a field.
_SHORTEST_NAME = 3
_STAND_IN = re.compile(r"(?:node|address|user|path)-\d+")

_PATH_CHARS = r"[^\s'\"`<>|;,:()\[\]{}*?…]"
# Of a Windows path: the name of a folder may have spaces, since a backslash ends it.
_FOLDER_CHARS = r"[^\\/'\"`<>|:;,*?\n…]"
_FILE_CHARS = r"[^\\\s'\"`<>|;,:()\[\]{}*?…]"
_FORMS = re.compile(
    rf"""
    (?P<url>\b[a-z][a-z0-9+.-]*://[^\s'"<>)\]]+)
    | (?P<login>[\w.+-]+@(?:\[[0-9a-fA-F:.]+\]|[\w-]+(?:\.[\w-]+)*))
    | (?P<path>(?:(?<![\w.~/])~[\w.-]*|(?<![\w./~<)\]]))/(?!/)(?:\\\ |{_PATH_CHARS})+)
    | (?P<windows>(?<!\w)(?:[A-Za-z]:\\+|\\{{2,4}}[\w.$-]+\\+(?=[\w$]))(?:{_FOLDER_CHARS}+\\+)*{_FILE_CHARS}*)
    | (?P<mac>(?<![\w:-])[0-9a-fA-F]{{2}}(?P<dash>[:-])(?:[0-9a-fA-F]{{2}}(?P=dash)){{4}}[0-9a-fA-F]{{2}}(?![\w:-]))
    | (?P<interface>\b(?:enx|wlx)[0-9a-f]{{12}}\b)
    | (?P<ipv4>(?<![\w.])\d{{1,3}}(?:\.\d{{1,3}}){{3}}(?![\w]|\.\d))
    | (?P<ipv6>(?<![\w:])(?:[0-9a-fA-F]{{0,4}}:){{2,7}}[0-9a-fA-F]{{0,4}}(?:%[\w.-]+)?(?![\w:]))
    | (?P<host>\b(?:[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?\.)+
        (?:localdomain|local|lan|internal|intranet|corp|com|org|net|edu|gov)\b(?!\())
    """,
    re.VERBOSE,
)


class Redactor:
    """Replaces what names machines, people and places. One redactor serves all runs of a page."""

    def __init__(self) -> None:
        self._stand_ins: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}
        self._names: dict[str, str] = {}  # kind of each learned name
        self._patterns: tuple[re.Pattern[str], re.Pattern[str]] | None = None  # of learned paths, and of other names
        self._texts: dict[str, str] = {}

    def learn(self, run: RunFolder) -> None:
        """Learn the names of a run: its nodes in the order of their ranks, users, and the paths of its commands."""
        nodes = [_first_node(path) for path in run.event_files().values()]
        nodes += [path.stem for path in run.journals()]
        for node in dict.fromkeys(filter(None, nodes)):
            self._learn("node", node)
        self._learn("node", socket.gethostname())
        self._learn("node", run.joined_host())
        self._learn_users(run)
        for path in (run.path, Path.cwd(), Path.home()):
            self._learn_path(str(path))
        job = read_document(run.job)
        commands = [*_strings(job.get("commands")), *_strings(job.get("on")), shlex.join(_strings(job.get("script")))]
        settings = read_document(run.config)
        for section, names in (("data", ("path", "cache_dir")), ("run", ("on", "out"))):
            values = settings.get(section)
            commands += [values[name] for name in names if isinstance(values, dict) and values.get(name)]
        for command in commands:
            self._learn_command(str(command))

    def _learn_users(self, run: RunFolder) -> None:
        try:
            users = [getpass.getuser(), user_name(run.path.stat().st_uid), user_name(os.geteuid())]
        except (OSError, KeyError):
            users = []
        for user in users:
            self._learn("user", user)

    def _learn_path(self, path: str) -> None:
        if path.count("/") > 1 or not path.startswith("/"):
            self._learn("path", path)
        owner = re.match(r"/(?:home|Users)/([^/]+)", path)
        if owner:
            self._learn("user", owner[1])

    def _learn_command(self, command: str) -> None:
        """Learn paths, users and machines of a command line: `--data dir/text.txt`, `alice@10.0.0.5`, a hosts file."""
        try:
            words = shlex.split(command)
        except ValueError:
            words = command.split()
        for word in words:
            for part in re.split(r"[=,]", word):
                if "@" in part:
                    user, _, host = part.partition("@")
                    self._learn("user", user)
                    self._learn("node", host.partition(":")[0])
                elif "/" in part and re.search(r"[A-Za-z]", part):
                    self._learn_path(part.removeprefix("ssh:"))
                if part.endswith(".toml"):
                    self._learn_hosts(Path(part))

    def _learn_hosts(self, file: Path) -> None:
        for kind, value in _host_names(read_document(file)):
            self._learn(kind, value)

    def _learn(self, kind: str, name: str) -> None:
        if not name or name.lower() in _PUBLIC_NAMES or _is_address(name) or _STAND_IN.fullmatch(name):
            return
        self._names.setdefault(name, kind)
        self._stand_in(kind, name)
        self._patterns = None
        self._texts.clear()

    def _stand_in(self, kind: str, name: str) -> str:
        key = (kind, name if kind == "path" else name.lower())
        if key not in self._stand_ins:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._stand_ins[key] = f"{kind}-{self._counts[kind]}"
        return self._stand_ins[key]

    def text(self, text: str) -> str:
        """Return a text with stand-ins."""
        if text in self._names:
            return self._stand_in(self._names[text], text)
        if text not in self._texts:
            if len(self._texts) > 10_000:
                self._texts.clear()
            self._texts[text] = self._forms_and_names(text)
        return self._texts[text]

    def _forms_and_names(self, text: str) -> str:
        # Learned paths first, as they may contain spaces; then what has the form of an address; then single names.
        done: list[str] = []
        for piece, is_final in self._cut_paths(text):
            done.append(piece if is_final else self._replace_names(_FORMS.sub(self._replace_form, piece)))
        return "".join(done)

    def _cut_paths(self, text: str) -> Iterator[tuple[str, bool]]:
        at = 0
        for match in self._compiled()[0].finditer(text):
            yield text[at : match.start()], False
            yield self._stand_in("path", match[0].rstrip("/.")), True
            at = match.end()
        yield text[at:], False

    def _compiled(self) -> tuple[re.Pattern[str], re.Pattern[str]]:
        if self._patterns is None:
            longest_first = sorted(self._names, key=lambda name: (-len(name), name))
            paths = [name for name in longest_first if self._names[name] == "path"]
            names = [name for name in longest_first if self._names[name] != "path" and len(name) >= _SHORTEST_NAME]
            self._patterns = (
                re.compile(rf"(?<![\w./~-])(?:{_any_of(paths)})(?:/{_PATH_CHARS}*)?(?![\w-])"),
                re.compile(rf"(?<![\w-])({_any_of(names)})(?:\.[A-Za-z0-9][A-Za-z0-9-]*)*(?![\w-])", re.IGNORECASE),
            )
        return self._patterns

    def _replace_names(self, text: str) -> str:
        kinds = {name.lower(): kind for name, kind in self._names.items()}
        return self._compiled()[1].sub(lambda match: self._stand_in(kinds[match[1].lower()], match[1]), text)

    def _replace_form(self, match: re.Match[str]) -> str:
        kind, text = str(match.lastgroup), match[0]
        if kind == "url":
            return self._replace_url(text)
        if kind == "login":
            user, _, host = text.rpartition("@")
            return f"{self._name_or_same('user', user)}@{self._name_or_same('node', host)}"
        if kind in ("path", "windows"):
            return text if text.startswith(_PUBLIC_PATHS) else self._replace_path(text)
        if kind == "interface":
            return text[:3] + self._stand_in("address", text)
        if kind == "host":
            return text if text.endswith(_PUBLIC_SITES) else self._name_or_same("node", text)
        if kind == "mac":
            return self._stand_in("address", text.replace("-", ":"))
        if _is_address(text) and not _is_public(text):
            return self._stand_in("address", text)
        return text

    def _replace_path(self, path: str) -> str:
        # A full stop ends the sentence, not the path.
        stem = path.rstrip(".")
        return self._stand_in("path", stem.rstrip("/") or stem) + path[len(stem) :]

    def _replace_url(self, url: str) -> str:
        """Keep scheme and port; `tcp://10.0.0.1:29500` is how torch names a store."""
        scheme, _, rest = url.partition("://")
        place, slash, path = rest.partition("/")
        host, port = re.fullmatch(r"(.*?)((?::\d+)?[.,;:]*)", place.rpartition("@")[2], re.DOTALL).groups()  # type: ignore[union-attr]
        if host.endswith(_PUBLIC_SITES):
            return url
        host = self._name_or_same("node", host) if host else ""
        return f"{scheme}://{host}{port}{slash}{self._name_or_same('path', path) if path else ''}"

    def _name_or_same(self, kind: str, name: str) -> str:
        if _STAND_IN.fullmatch(name) or name.lower() in _PUBLIC_NAMES:
            return name
        if _is_address(name.strip("[]")):
            return name if _is_public(name.strip("[]")) else self._stand_in("address", name.strip("[]"))
        # `alpha.lan` is the machine `alpha`, if that one is known.
        label = name.partition(".")[0]
        known = name if name in self._names or self._names.get(label) != "node" else label
        return self._stand_in(self._names.get(known, kind), known)

    def event(self, event: Event) -> Event:
        """Return an event with stand-ins. Steps, of which there are millions, hold numbers only."""
        if event.get("event") in ("step", "loss"):
            return event
        names_are_texts = event.get("event") == "log"
        return {
            self.text(name) if names_are_texts and name not in LOG_FIELDS else name: self._value(name, value)
            for name, value in event.items()
        }

    def record(self, record: _Record) -> _Record:
        """Return a manifest, or another record, with stand-ins."""
        fields = record.model_dump()
        return type(record).model_validate({name: self._value(name, value) for name, value in fields.items()})

    def _value(self, name: object, value: Any) -> Any:
        if name in _OWN_FIELDS:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self._value(key, item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._value(None, item) for item in value]
        return value


def _any_of(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, names)) or r"(?!)"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_public(address: str) -> bool:
    """Return whether every machine has this address: loopback, and `0.0.0.0`."""
    value = ipaddress.ip_address(address.partition("%")[0])
    return value.is_loopback or value.is_unspecified


def _first_node(path: Path) -> str:
    """Return the node that a rank's first `start` event names."""
    nodes = (event.get("node") for event in read_events(path) if event["event"] == "start")
    return str(next(nodes, "") or "")


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _host_names(value: Any) -> Iterator[tuple[str, str]]:
    """Yield users and names of machines from a hosts file."""
    if isinstance(value, list):
        for item in value:
            yield from _host_names(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in ("host", "name", "address", "user") and isinstance(item, str):
                user, _, host = item.rpartition("@")
                yield ("user", item) if key == "user" else ("node", host)
                yield "user", user
            else:
                yield from _host_names(item)
