"""`shoal`: find the verb, run it, and print errors in one place.

Verbs are imported when they are used: `shoal --help` lists them from the table below and imports none.
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
from shoal.run_folder import no_access_error
from shoal.terminal import protect_terminal, styled_output

VERBS = {
    "demo": "Start here: train on one rank, then on two; measure, verify and explain both.",
    "train": "Train a model data-parallel: every rank computes on its own samples, and gradients are averaged.",
    "run": "Start your own torchrun-style script on the cluster.",
    "ps": "List the runs on this machine, their ranks, and processes left over from earlier runs.",
    "logs": "Print the output of all ranks of a run, in order, coloured by rank.",
    "attach": "Watch a run that was started in the background.",
    "stop": "Stop a run: it finishes its step and saves a checkpoint.",
    "host": "Train with machines that join without SSH; prints the command to type on each of them.",
    "join": "Join a run that another machine hosts.",
    "emit": "Write the training for other launchers: torchrun commands, a Slurm script, a Kubernetes manifest.",
    "doctor": "Check machines and network before a run; every problem comes with a fix.",
    "probe": "Measure links, gloo and machines in a minute; writes the profile that shoal plan reads.",
    "plan": "Predict step time and speed on 1, 2, 3 … machines, and which sync method helps; starts nothing.",
    "explain": "Explain an error log of torch, gloo, torchrun, ssh or shoal: cause and fix.",
    "verify": "Check that all replicas are equal bit for bit, and that every sample was used exactly once.",
    "report": "Write one self-contained HTML page about a run.",
    "trace": "Write all ranks of a run on one time axis, for Perfetto or chrome://tracing.",
    "sample": "Generate text with a trained model.",
    "lab": "Emulate a cluster on this machine: nodes with limited links and CPUs, and faults on demand.",
    "chaos": "Inject scripted faults into a small real training and check the outcome.",
    "setup": "Prepare machines over SSH: environment, shoal and your project; safe to repeat.",
    "bench": "Measure speed by number of ranks, or by sync method.",
}

# The module of a verb has the verb's name, except for these.
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
    "trace": "report",
}


def load_verb(verb: str) -> Any:
    """Import the module of a verb and return its command: for `lab` a group of commands, for `ps` a single one."""
    module = importlib.import_module(f"shoal.cli.{_MODULE_OF.get(verb, verb)}")
    command = typer.main.get_command(module.app)
    return getattr(command, "commands", {}).get(verb, command)


class Verbs(TyperGroup):
    """The group of all verbs, which imports the module of a verb only when it is called."""

    _is_listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            raise UsageError(f"there is no verb {cmd_name!r}", why=did_you_mean(cmd_name, VERBS), fix="shoal --help")
        if self._is_listing:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        return _with_styled_help(load_verb(cmd_name))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._is_listing = True
        with styled_output():
            super().format_help(ctx, formatter)


def _with_styled_help(command: Any) -> Any:
    """Allow styles in help texts: typer prints them with its own console, which the terminal protection would strip."""
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
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    debug: bool = typer.Option(False, "--debug", help="With any verb: print the traceback of an error."),
) -> None:
    """Train a PyTorch model data-parallel on the computers you already have."""
    if version:
        from shoal import __version__

        typer.echo(f"shoal {__version__}")
        raise typer.Exit


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
    except SystemExit as error:
        # Typer and rich notice a closed pipe first and exit with 1, which here would mean "check failed".
        code = _handle_closed_pipe() if isinstance(error.__context__, BrokenPipeError) else error.code
    sys.exit(code)


def run(arguments: list[str], debug: bool) -> int:
    """Run a command line and return its exit code. Errors are printed on stderr."""
    try:
        code = app(args=arguments, prog_name="shoal", standalone_mode=False)
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, typer.Abort):
        return Interrupted.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _print_error(error)
    return code if isinstance(code, int) else 0


def take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Accept `--debug` anywhere before `--`: users add it at the end, after an error."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    rest = arguments[len(own) :]
    return [argument for argument in own if argument != "--debug"] + rest, "--debug" in own


def _print_error(error: Exception) -> int:
    if isinstance(error, ShoalError):
        sys.stderr.write(error.render())
        return error.exit_code
    if hasattr(error, "format_message"):
        # Typer's own complaint about the command line; without a message it has printed the help instead.
        context = getattr(error, "ctx", None)
        if message := error.format_message():
            fix = f"{context.command_path if context else 'shoal'} --help"
            sys.stderr.write(UsageError(message, fix=fix).render())
        return UsageError.exit_code
    if isinstance(error, PermissionError) and error.errno == errno.EACCES and isinstance(error.filename, str):
        return _print_error(no_access_error(Path(error.filename)))
    bug = ShoalError(
        f"shoal failed unexpectedly: {type(error).__name__}: {error}",
        why="this is a bug in shoal, or this machine differs from what shoal expects",
        fix="run the same command with --debug and report what it prints",
    )
    return _print_error(bug)


def _handle_closed_pipe() -> int:
    """Return the exit code that a shell reports for a program whose reader (head, less) closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


if __name__ == "__main__":
    main()
