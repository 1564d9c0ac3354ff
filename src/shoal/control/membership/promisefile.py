"""Promises on disk: one small file, replaced as a whole. The only I/O of this package."""

from __future__ import annotations

import shlex
from pathlib import Path

from pydantic import ValidationError

from shoal.control.membership.promises import Record
from shoal.errors import ControlError
from shoal.runfolder import write_durably


class PromiseFile:
    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> Record:
        """A new record where there is none. A broken one is never guessed at: a vote could be cast twice."""
        try:
            return Record.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return Record()
        except (OSError, ValidationError) as error:
            raise ControlError(
                f"cannot read which votes this machine has cast: {self._path}",
                why=getattr(error, "strerror", None) or "the file was changed or damaged",
                fix=f"remove it and let the machine join again as a new one: rm {shlex.quote(str(self._path))}",
            ) from None

    def save(self, record: Record) -> None:
        """The file, then its name: after a power cut there is the old record or the new one."""
        temporary = self._path.with_name(f".{self._path.name}.new")
        write_durably(self._path, record.model_dump_json().encode(), temporary, 0o600)
