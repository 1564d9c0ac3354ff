"""`shoal`: finds the verb, runs it, and prints what went wrong in one place.

Verbs are imported when they are used: `shoal --help` lists them from the table below and loads none.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from shoal.errors import Interrupted, ShoalError

VERBS = {
    "demo": "The main job: one rank, then two, trained, measured, verified and explained.",
    "train": "Train a model data-parallel; the gradients are exchanged in every step.",
    "verify": "Do all replicas agree, bit for bit? Was every sample used exactly once?",
    "report": "One self-contained HTML page about a run.",
    "sample": "Let a trained model write a few sentences.",
    "bench": "Measured tables and plots, such as how speed grows with ranks.",
}


class Verbs(TyperGroup):
    """Knows every verb by name and one line; the module behind it is loaded when it is called."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        if self._listing:
            return TyperCommand(cmd_name, help=VERBS[cmd_name])
        module = importlib.import_module(f"shoal.cli.{cmd_name}")
        return typer.main.get_command(module.app)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        super().format_help(ctx, formatter)


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
    arguments, debug = take_debug(sys.argv[1:])
    try:
        code = app(args=arguments, prog_name="shoal", standalone_mode=False)
    except ShoalError as error:
        if debug:
            raise
        sys.stderr.write(error.render())
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = Interrupted.exit_code
    except BrokenPipeError:
        # The reader of a pipe (head, less) has seen enough.
        sys.stderr.close()
        code = 0
    except Exception as error:
        code = _foreign(error, debug)
    sys.exit(code if isinstance(code, int) else 0)


def take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """`--debug` is welcome anywhere on the line; people add it at the end, after something went wrong."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    rest = arguments[len(ours) :]
    return [argument for argument in ours if argument != "--debug"] + rest, "--debug" in ours


def _foreign(error: Exception, debug: bool) -> int:
    """Typer's own complaints about the command line, or a bug of ours."""
    if hasattr(error, "format_message"):
        sys.stderr.write(ShoalError(error.format_message(), fix=_help_line(error)).render())
        return int(getattr(error, "exit_code", 2))
    if debug:
        raise error
    bug = ShoalError(
        f"shoal failed unexpectedly: {type(error).__name__}: {error}",
        why="this is a bug in shoal, or something about this machine that it did not foresee",
        fix="run the same command with --debug and report what it prints",
    )
    sys.stderr.write(bug.render())
    return bug.exit_code


def _help_line(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    return f"{context.command_path if context else 'shoal'} --help"


if __name__ == "__main__":
    main()
