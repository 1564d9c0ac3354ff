"""`shoal`: finds the verb, runs it, and prints what went wrong in one place.

Verbs are imported when they are used: `shoal --help` lists them from the table below and loads none.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from shoal.config.presets import did_you_mean
from shoal.control.processes import restore_signals
from shoal.errors import Interrupted, ShoalError, UsageError
from shoal.run_folder import no_access
from shoal.terminal import protect_terminal, styled_output

VERBS = {
    "demo": "The main job: one rank, then two, trained, measured, verified and explained.",
    "train": "Train a model data-parallel; the gradients are exchanged in every step.",
    "run": "Start anybody's torchrun-style script on the cluster.",
    "ps": "Which runs are going on here, where their ranks are, and what earlier ones left behind.",
    "logs": "What the ranks of a run printed, merged in order and coloured by rank.",
    "attach": "Watch a run that goes on without a terminal.",
    "stop": "End a run in good order: it finishes its step and saves.",
    "host": "Train with machines that join by themselves, without SSH: prints the line to type there.",
    "join": "Take part in a run that another machine hosts.",
    "emit": "The same training for other launchers: torchrun commands, a Slurm script, a Kubernetes manifest.",
    "doctor": "Check machines and network before a run; every finding with its fix.",
    "probe": "Measure links, gloo and machines within a minute; writes a profile that plans are made from.",
    "plan": "Predict step time and speed on 1, 2, 3 … machines, and which lever helps; starts nothing.",
    "explain": "Turn an error log of torch, gloo, torchrun, ssh or shoal into cause and fix.",
    "verify": "Do all replicas agree, bit for bit? Was every sample used exactly once?",
    "report": "One self-contained HTML page about a run.",
    "sample": "Let a trained model write a few sentences.",
    "lab": "An emulated cluster on this machine: nodes with links, CPU limits and faults as you like.",
    "chaos": "Scripted faults with asserted outcomes, done to a real small training.",
    "setup": "Prepare machines over SSH: environment, shoal and your project; safe to repeat.",
    "bench": "Measured tables and plots, such as how speed grows with ranks.",
}

# The module of a verb has its name, except for these.
_MODULE_OF = {
    "demo": "train",
    "emit": "run",
    "ps": "runs",
    "logs": "runs",
    "attach": "runs",
    "stop": "runs",
    "join": "host",
    "setup": "host",
    "explain": "doctor",
    "verify": "report",
    "sample": "report",
}


def load_verb(verb: str) -> Any:
    """Import the module of a verb and return its command: the group itself for `lab`, one of its commands for `ps`."""
    module = importlib.import_module(f"shoal.cli.{_MODULE_OF.get(verb, verb)}")
    command = typer.main.get_command(module.app)
    return getattr(command, "commands", {}).get(verb, command)


class Verbs(TyperGroup):
    """Knows every verb by name and one line; the module behind it is loaded when it is called."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            raise UsageError(f"there is no verb {cmd_name!r}", why=did_you_mean(cmd_name, VERBS), fix="shoal --help")
        if self._listing:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        return _with_styled_help(load_verb(cmd_name))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        with styled_output():
            super().format_help(ctx, formatter)


def _with_styled_help(command: Any) -> Any:
    """Help is our own text, and typer styles it with a console of its own."""
    plain = command.format_help

    def format_help(ctx: Any, formatter: Any) -> None:
        with styled_output():
            plain(ctx, formatter)

    command.format_help = format_help
    for child in getattr(command, "commands", {}).values():
        _with_styled_help(child)
    return command


app = typer.Typer(cls=Verbs, no_args_is_help=True, add_completion=False, rich_markup_mode="rich")


@app.callback(invoke_without_command=True)
def shoal(
    version: bool = typer.Option(False, "--version", help="Print the version and leave."),
    debug: bool = typer.Option(False, "--debug", help="With any verb: show the traceback of an error."),
) -> None:
    """Many small machines, training as one: data-parallel PyTorch on the computers you already have."""
    if version:
        from shoal import __version__

        typer.echo(f"shoal {__version__}")
        raise typer.Exit


def main() -> None:
    protect_terminal()
    # A shell has background jobs ignore SIGINT; `kill -INT` is to stop a training wherever it was started.
    restore_signals((signal.SIGINT, signal.SIGTERM))
    arguments, debug = take_debug(sys.argv[1:])
    code: int | str | None
    try:
        code = run(arguments, debug)
        sys.stdout.flush()
    except BrokenPipeError:
        code = _leave_pipe()
    except SystemExit as leaving:
        # Typer and rich meet a closed pipe before we do, and end with 1, which here would be the answer "no".
        code = _leave_pipe() if isinstance(leaving.__context__, BrokenPipeError) else leaving.code
    sys.exit(code)


def run(arguments: list[str], debug: bool) -> int:
    """The exit code; whatever went wrong has been said on stderr."""
    try:
        code = app(args=arguments, prog_name="shoal", standalone_mode=False)
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, typer.Abort):
        return Interrupted.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _say(error)
    return code if isinstance(code, int) else 0


def take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """`--debug` is welcome anywhere on the line; people add it at the end, after something went wrong."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    rest = arguments[len(ours) :]
    return [argument for argument in ours if argument != "--debug"] + rest, "--debug" in ours


def _say(error: Exception) -> int:
    if isinstance(error, ShoalError):
        sys.stderr.write(error.render())
        return error.exit_code
    if hasattr(error, "format_message"):
        return _say_usage(error, error.format_message())
    if isinstance(error, PermissionError) and error.errno == errno.EACCES and isinstance(error.filename, str):
        return _say(no_access(Path(error.filename)))
    bug = ShoalError(
        f"shoal failed unexpectedly: {type(error).__name__}: {error}",
        why="this is a bug in shoal, or something about this machine that it did not foresee",
        fix="run the same command with --debug and report what it prints",
    )
    return _say(bug)


def _say_usage(error: Exception, message: str) -> int:
    """Typer's own complaints about the command line; no message means that it has printed the help instead."""
    context = getattr(error, "ctx", None)
    if message:
        sys.stderr.write(UsageError(message, fix=f"{context.command_path if context else 'shoal'} --help").render())
    return UsageError.exit_code


def _leave_pipe() -> int:
    """The reader (head, less) has seen enough. What a shell says of any program that wrote into a closed pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


if __name__ == "__main__":
    main()
