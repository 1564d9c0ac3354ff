"""Which options the command line has, and which of them contradict each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import typer

from shoal.errors import ShoalError, UsageError


def is_given(context: typer.Context, name: str) -> bool:
    """Whether the parameter of this name stands on the command line; a default does not count."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def flag_of(name: str) -> str:
    """The flag of a parameter: `--step-s` of `step_s`, `--set` of `set_`."""
    return "--" + name.rstrip("_").replace("_", "-")


def given_settings(context: typer.Context, settings: dict[str, str]) -> dict[str, str]:
    """The flags that the command line has, by the setting each stands for; `settings` are by parameter."""
    return {key: flag_of(name) for name, key in settings.items() if is_given(context, name)}


def refuse_given(context: typer.Context, names: Iterable[str], beside: str, why: str, fix: str) -> None:
    """Refuse the first of these parameters that the command line has, since it would have no effect."""
    for name in names:
        if is_given(context, name):
            raise UsageError(f"{flag_of(name)} has no effect {beside}", why=why, fix=fix)


@contextlib.contextmanager
def advising_flags(flags: Mapping[str, str]) -> Iterator[None]:
    """Errors advise the flag instead of `--set` for a setting that the command line gives with its flag.

    With both the setting would be given twice, and refused. `flags` are those that are given, by setting.
    """
    try:
        yield
    except ShoalError as error:
        for key, flag in flags.items():
            error.fix = error.fix.replace(f"--set {key}=", f"{flag} ")
        raise
