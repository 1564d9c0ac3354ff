"""`shoal`: find the command, run it, and print errors in one place.

The modules of commands are imported when they are used: `shoal --help` lists them from a table and imports none.
"""

from __future__ import annotations

import errno
import importlib
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import __version__
from shoal.cli.help import NAMES, print_command_help, print_overview
from shoal.control.processes import restore_signals
from shoal.errors import Interrupted, ShoalError, UsageError
from shoal.terminal import begin_stage, end_stage, protect_terminal, stderr_width

if TYPE_CHECKING:
    from shoal.cli.command import Command

# The module of a command has its name, except for these.
_MODULE_OF = {
    "emit": "run",
    "completion": "config",
    "ps": "runs",
    "logs": "runs",
    "attach": "runs",
    "stacks": "runs",
    "stop": "runs",
    "join": "host",
    "setup": "host",
    "explain": "doctor",
    "verify": "report",
    "sample": "report",
    "trace": "report",
    "export": "report",
}
# Other names of commands, which users of other tools type.
_SYNONYMS = {"status": "ps", "list": "ps", "history": "runs", "settings": "config"}
# What users of other tools type for an option of a command, or for a command that takes a run.
_OTHER_COMMANDS = {
    "resume": "shoal train --resume RUN",
    "continue": "shoal train --resume RUN",
    "version": "shoal --version",
    "kill": "shoal stop RUN",
    **dict.fromkeys(("delete", "rm", "remove"), "shoal runs --delete RUN"),
    "tensorboard": "shoal export RUN --format tensorboard",
}
# Commands that may be silent for a while before they print anything. They read nothing from the terminal until then.
_SLOW_COMMANDS = set(NAMES) - {"ps", "join", "sample", "completion"}
_HELP_FLAGS = ("-h", "--help")


def load_command(name: str) -> Command:
    """Import the module of a command and return it: for `lab` a group of commands, for `ps` a single one."""
    from shoal.cli.command import COMMANDS

    importlib.import_module(f"shoal.cli.{_MODULE_OF.get(name, name)}")
    return COMMANDS[name]


def find_command(words: Sequence[str]) -> Command | None:
    """Return the command that these words name: `train`, or `lab up`. None if a word is anything else."""
    command: Command | None = None
    for number, word in enumerate(words):
        if number == 0:
            name = _SYNONYMS.get(word, word)
            command = load_command(name) if name in NAMES else None
        else:
            command = command.commands.get(word) if command else None
    return command


def main() -> None:
    protect_terminal()
    # Shells let background jobs ignore SIGINT; `kill -INT` must stop a training however it was started.
    restore_signals((signal.SIGINT, signal.SIGTERM))
    arguments, debug = take_debug(sys.argv[1:])
    code: int | str | None
    try:
        code = run(arguments, debug)
        sys.stdout.flush()
    except BrokenPipeError:
        code = _handle_closed_pipe()
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        # Not even the error could be printed: the terminal was closed, and its SIGHUP comes a moment later.
        signal.raise_signal(signal.SIGHUP)
        code = 128 + signal.SIGHUP
    except SystemExit as error:
        # rich notices a closed pipe first and exits with 1, which here would mean "check failed".
        code = _handle_closed_pipe() if isinstance(error.__context__, BrokenPipeError) else error.code
    sys.exit(code)


def run(arguments: list[str], debug: bool) -> int:
    """Run a command line and return its exit code. Errors are printed on stderr."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if arguments == ["--version"]:
        sys.stdout.write(f"shoal {__version__}\n")
        return 0
    if not arguments or arguments[0] in _HELP_FLAGS:
        print_overview()
        return 0 if arguments else UsageError.exit_code
    if arguments[0] in _SLOW_COMMANDS and arguments[-1] not in _HELP_FLAGS:
        begin_stage(f"shoal {arguments[0]}: starting")
    try:
        return _call(arguments)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        return Interrupted.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _print_error(error)
    finally:
        end_stage()


def _call(arguments: list[str]) -> int:
    from shoal.cli.command import HelpAsked

    refuse_other_command(arguments)
    name = _SYNONYMS.get(arguments[0], arguments[0])
    if name not in NAMES:
        if name.startswith("-"):
            raise UsageError(f"No such option: {name}", fix="shoal --help")
        raise UsageError(f"there is no command {name!r}", why=_did_you_mean(name), fix="shoal --help")
    try:
        code = load_command(name).call(arguments[0], arguments[1:])
    except HelpAsked:
        path = leading_commands(arguments)
        command = find_command(path)
        assert command is not None  # noqa: S101 - it was called above
        end_stage()
        print_command_help(command, " ".join(["shoal", *path]))
        # A group without a command, such as `shoal lab`, is a mistake that the help answers.
        return UsageError.exit_code if len(arguments) == len(path) else 0
    return code if isinstance(code, int) else 0


def _did_you_mean(name: str) -> str:
    from shoal.config.presets import did_you_mean

    return did_you_mean(name, NAMES)


def refuse_other_command(arguments: Sequence[str]) -> None:
    """Refuse a word that is not a command here but has an equal: `resume runs/a` is `train --resume runs/a`.

    Options before the command are refused, too.
    """
    place = next((number for number, word in enumerate(arguments) if word in NAMES), 0)
    if place and arguments[0].startswith("-"):
        early, rest = arguments[:place], arguments[place:]
        raise UsageError(
            f"{arguments[0]} stands before the command",
            why=f"options belong to a command and stand after it; here to {rest[0]}",
            fix=shlex.join(["shoal", rest[0], *early, *rest[1:]]),
        )
    meant = _OTHER_COMMANDS.get(arguments[0])
    if meant is None:
        return
    if len(arguments) == 2 and not arguments[1].startswith("-"):
        meant = meant.replace("RUN", shlex.quote(arguments[1]))
    raise UsageError(f"there is no command {arguments[0]!r}", why="another command does it", fix=meant)


def take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Accept `--debug` anywhere before `--`: users add it at the end, after an error."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    rest = arguments[len(own) :]
    return [argument for argument in own if argument != "--debug"] + rest, "--debug" in own


def _print_error(error: Exception) -> int:
    if isinstance(error, ShoalError):
        sys.stderr.write(error.render(stderr_width()))
        return error.exit_code
    if isinstance(error, PermissionError) and error.errno == errno.EACCES and isinstance(error.filename, str):
        from shoal.run_folder import no_access_error

        return _print_error(no_access_error(Path(error.filename)))
    bug = ShoalError(
        f"shoal failed unexpectedly: {type(error).__name__}: {error}",
        why="this is a bug in shoal, or this machine differs from what shoal expects",
        fix="run the same command with --debug and report what it prints",
    )
    return _print_error(bug)


def leading_commands(arguments: Sequence[str]) -> list[str]:
    """Return the command, and the command within it, at the beginning of a command line."""
    words = list(arguments[:2])
    while words and find_command(words) is None:
        words.pop()
    return words


def _handle_closed_pipe() -> int:
    """Return the exit code that a shell reports for a program whose reader (head, less) closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


if __name__ == "__main__":
    main()
