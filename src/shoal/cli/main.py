"""`shoal`: find the verb, run it, and print errors in one place.

Verbs are imported when they are used: `shoal --help` lists them from the table below and imports none.
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
from typing import Any

import typer
from typer.core import TyperGroup

from shoal import __version__
from shoal.cli.help import VERBS, print_command_help, print_overview
from shoal.config.presets import PRESETS, did_you_mean
from shoal.control.processes import restore_signals
from shoal.errors import Interrupted, ShoalError, UsageError
from shoal.run_folder import no_access_error
from shoal.terminal import begin_stage, end_stage, protect_terminal, stderr_width

# The module of a verb has the verb's name, except for these.
_MODULE_OF = {
    "emit": "run",
    "completion": "config",
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
    "export": "report",
}
# Other names of verbs, which users of other tools type.
_SYNONYMS = {"status": "ps", "list": "ps", "history": "runs", "settings": "config"}
# What users of other tools type for an option of a verb, or for a verb that takes a run.
_OTHER_COMMANDS = {
    "resume": "shoal train --resume RUN",
    "continue": "shoal train --resume RUN",
    "version": "shoal --version",
    "kill": "shoal stop RUN",
    **dict.fromkeys(("delete", "rm", "remove"), "shoal runs --delete RUN"),
    "tensorboard": "shoal export RUN --format tensorboard",
}
# Commands within verbs that list what there is: users type one where a verb has another.
_LISTING_COMMANDS = ("list", "status", "show", "ls", "ps")
# Verbs that may be silent for a while before they print anything. They read nothing from the terminal until then.
_SLOW_VERBS = set(VERBS) - {"ps", "join", "sample", "completion"}
# Verbs that are called in scripts and prompts, have options only, and print their answer within a fraction of a second.
_DIRECT_VERBS = {"ps"}
# Options of other launchers and trainers, and what they are here.
OTHER_WORDS = {
    **dict.fromkeys(
        ("--ranks", "--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes", "--world-size"),
        "--on local:{}",
    ),
    **dict.fromkeys(("-n", "-np", "--np", "--nprocs", "--workers", "--gpus"), "--on local:{}"),
    **dict.fromkeys(("--hosts", "--hostfile", "--host-file"), "--on {}"),
    **dict.fromkeys(("--max-steps", "--max-iters", "--iterations", "--iters"), "--steps {}"),
    **dict.fromkeys(("--batch-size", "--batch", "--batch_size"), "--global-batch {}"),
    **dict.fromkeys(("--output", "--output-dir", "--run-dir", "--log-dir"), "--out {}"),
    **dict.fromkeys(("--text", "--dataset", "--corpus", "--input"), "--data {}"),
    # An argument, which has no name on the command line.
    **dict.fromkeys(("--preset", "--model"), "preset {}"),
    "--learning-rate": "--set train.lr={}",
    "--compress": "--wire {}",
    # Only `report` has it.
    "--format": "--pdf",
}
_EPOCHS = ("--epochs", "--epoch", "--num-epochs", "--num_epochs", "--max-epochs", "--max_epochs")
_HELP_OPTIONS = ["-h", "--help"]


def load_verb(verb: str) -> Any:
    """Import the module of a verb and return its command: for `lab` a group of commands, for `ps` a single one."""
    module = importlib.import_module(f"shoal.cli.{_MODULE_OF.get(verb, verb)}")
    command = typer.main.get_command(module.app)
    return getattr(command, "commands", {}).get(verb, command)


class Verbs(TyperGroup):
    """The group of all verbs, which imports the module of a verb only when it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        verb = _SYNONYMS.get(cmd_name, cmd_name)
        if verb not in VERBS:
            raise UsageError(f"there is no verb {cmd_name!r}", why=did_you_mean(cmd_name, VERBS), fix="shoal --help")
        return _with_own_help(load_verb(verb))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        print_overview()


def find_command(words: list[str]) -> list[Any] | None:
    """Return the commands that these words name one after the other: of a verb, and of a command within it.

    None if a word is anything else, such as an option or a script, whose own `--help` may follow it.
    """
    path: list[Any] = []
    for word in words:
        if path:
            command = getattr(path[-1], "commands", {}).get(word)
        else:
            verb = _SYNONYMS.get(word, word)
            command = load_verb(verb) if verb in VERBS else None
        if command is None:
            return None
        path.append(command)
    return path


def find_direct_call(arguments: Sequence[str]) -> tuple[Any, dict[str, Any]] | None:
    """Return the function of a verb and its arguments, if only flags without values are given, and it needs no more.

    Typer would import pydantic to read them, which takes longer than the verb itself.
    """
    verb = _SYNONYMS.get(arguments[0], arguments[0]) if arguments else ""
    if verb not in _DIRECT_VERBS:
        return None
    command = load_verb(verb)
    flags = {name: parameter for parameter in command.params if parameter.is_flag for name in parameter.opts}
    if not set(arguments[1:]) <= flags.keys():
        return None
    given = {flags[word].name for word in arguments[1:]}
    return command.callback, {
        parameter.name: True if parameter.name in given else parameter.default for parameter in command.params
    }


def _with_own_help(command: Any) -> Any:
    """Print shoal's own help for the command and the commands within it; `-h` asks for it too."""

    def format_help(ctx: Any, formatter: Any) -> None:
        end_stage()
        print_command_help(command, ctx.command_path)

    command.format_help = format_help
    command.context_settings["help_option_names"] = _HELP_OPTIONS
    for child in getattr(command, "commands", {}).values():
        _with_own_help(child)
    return command


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": _HELP_OPTIONS},
)


@app.callback(invoke_without_command=True)
def shoal(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    debug: bool = typer.Option(False, "--debug", help="With any verb: print the traceback of an error."),
) -> None:
    """Train a PyTorch model data-parallel on the computers you already have."""
    if version:
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
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if arguments == ["--version"]:
        typer.echo(f"shoal {__version__}")
        return 0
    if arguments[-1:] in (["-h"], ["--help"]) and (path := find_command(arguments[:-1])) is not None:
        # Not by typer, which imports pydantic to read any option.
        print_overview() if path == [] else print_command_help(path[-1], " ".join(["shoal", *arguments[:-1]]))
        return 0
    if arguments and arguments[0] in _SLOW_VERBS:
        begin_stage(f"shoal {arguments[0]}: starting")
    try:
        refuse_other_command(arguments)
        if (direct := find_direct_call(arguments)) is not None:
            function, values = direct
            function(**values)
            return 0
        code = app(args=arguments, prog_name="shoal", standalone_mode=False)
    except BrokenPipeError:
        raise
    except (KeyboardInterrupt, typer.Abort):
        return Interrupted.exit_code
    except Exception as error:
        if debug:
            traceback.print_exc()
        return _print_error(error, arguments)
    finally:
        end_stage()
    return code if isinstance(code, int) else 0


def refuse_other_command(arguments: Sequence[str]) -> None:
    """Refuse a word that is no verb here but has an equal: `resume runs/a` is `train --resume runs/a`.

    Options before the verb are refused, too.
    """
    place = next((number for number, word in enumerate(arguments) if word in VERBS), 0)
    if place and arguments[0].startswith("-") and arguments[0] not in _HELP_OPTIONS:
        early, rest = arguments[:place], arguments[place:]
        raise UsageError(
            f"{arguments[0]} stands before the verb",
            why=f"options belong to a verb and stand after it; here to {rest[0]}",
            fix=shlex.join(["shoal", rest[0], *early, *rest[1:]]),
        )
    meant = _OTHER_COMMANDS.get(arguments[0]) if arguments else None
    if meant is None:
        return
    if len(arguments) == 2 and not arguments[1].startswith("-"):
        meant = meant.replace("RUN", shlex.quote(arguments[1]))
    raise UsageError(f"there is no verb {arguments[0]!r}", why="another command does it", fix=meant)


def take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """Accept `--debug` anywhere before `--`: users add it at the end, after an error."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    rest = arguments[len(own) :]
    return [argument for argument in own if argument != "--debug"] + rest, "--debug" in own


def _print_error(error: Exception, arguments: Sequence[str] = ()) -> int:
    if isinstance(error, ShoalError):
        sys.stderr.write(error.render(stderr_width()))
        return error.exit_code
    if hasattr(error, "format_message"):
        # Typer's own complaint about the command line; without a message it has printed the help instead.
        context = getattr(error, "ctx", None)
        if message := error.format_message():
            path = context.command_path if context else " ".join(["shoal", *_leading_commands(arguments)])
            fix, why = f"{path} --help", ""
            parameter = getattr(error, "param", None)
            # The help calls it RUN, and so do the examples.
            if parameter is not None and message.startswith("Missing argument"):
                name = (parameter.metavar or parameter.name).upper().removesuffix("…")
                message = f"Missing argument {name}"
                if name == "RUN":
                    why, fix = "RUN is the folder of a run, such as runs/NAME", "list the runs: shoal runs"
            elif parameter is not None and (problem := describe_number(parameter, arguments)):
                message = problem
            if context is not None and message.startswith("No such command"):
                name = message.split("'")[1]
                message = f"{path} has no command {name!r}"
                why = _suggest_command(name, context.command.commands)
            # Only an unknown option has possibilities; one without its value has a name, too.
            if context is not None and hasattr(error, "possibilities") and (name := getattr(error, "option_name", "")):
                message = f"No such option: {name}"
                why, fix = suggest_option(name, context.command, arguments) or (
                    _suggest_parameter(name, context.command.params),
                    fix,
                )
            # Pydantic adds how it tried: "…, unable to parse string as an integer".
            message = message.partition(", unable to parse")[0]
            return _print_error(UsageError(message, why=why, fix=fix))
        return UsageError.exit_code
    if isinstance(error, PermissionError) and error.errno == errno.EACCES and isinstance(error.filename, str):
        return _print_error(no_access_error(Path(error.filename)))
    bug = ShoalError(
        f"shoal failed unexpectedly: {type(error).__name__}: {error}",
        why="this is a bug in shoal, or this machine differs from what shoal expects",
        fix="run the same command with --debug and report what it prints",
    )
    return _print_error(bug)


def describe_number(option: Any, arguments: Sequence[str]) -> str:
    """Return what an option for a number accepts and what was typed; nothing for another option."""
    kind = {int: "a whole number", float: "a number"}.get(option.type_descriptor.annotation)
    typed = None
    for word, following in zip(arguments, [*arguments[1:], None], strict=True):
        name, equals, value = word.partition("=")
        if name in option.opts:
            typed = value if equals else following
    if kind is None or typed is None:
        return ""
    low = "" if option.min is None else f" from {option.min:,}"
    high = "" if option.max is None else f" {'to' if low else 'up to'} {option.max:,}"
    return f"{option.opts[0]} is {kind}{low}{high}; {typed!r} was given"


def _suggest_command(name: str, commands: Sequence[str]) -> str:
    meant = next((known for known in _LISTING_COMMANDS if known in commands), None)
    if name in _LISTING_COMMANDS and meant is not None:
        return f"did you mean {meant!r}?"
    return did_you_mean(name, commands)


def _suggest_parameter(name: str, params: Sequence[Any]) -> str:
    """Return the option that is meant by an unknown one, or that it is an argument, which has no name when typed."""
    wanted = name.lstrip("-").replace("-", "_")
    argument = next((one for one in params if one.param_type_name == "argument" and one.name == wanted), None)
    if argument is not None:
        return f"{(argument.metavar or argument.name).upper()} is given without a name in front"
    return did_you_mean(name, [option for one in params for option in one.opts if option.startswith("-")])


def _leading_commands(arguments: Sequence[str]) -> list[str]:
    """Return the verb and the command within it at the beginning of a command line."""
    words = list(arguments)
    while words and find_command(words) is None:
        words.pop()
    return words


def suggest_option(name: str, command: Any, arguments: Sequence[str]) -> tuple[str, str] | None:
    """Return why an option is unknown and the command line that was meant, for the words of other tools and settings.

    None where the command has nothing like it.
    """
    known = {option: parameter for parameter in command.params for option in parameter.opts}
    if name in _EPOCHS and "--steps" in known:
        return (
            "the length of a training is a number of steps; an epoch has as many as samples / global batch, and a run "
            "prints its samples when it starts",
            f"write --steps N; an option of your own script stands after it: shoal run train.py {name} …",
        )
    pattern = OTHER_WORDS.get(name, "")
    if not pattern and "--set" in known:
        # Imported here: only a wrong command line needs the settings.
        from shoal.config.load import known_keys

        wanted = name.lstrip("-").replace("-", "_")
        pattern = next((f"--set {key}={{}}" for key in known_keys() if key.partition(".")[2] == wanted), "")
    option, _, form = pattern.partition(" ")
    # The `--on` of `ps` is a file.
    if option not in known or (form.startswith("local:") and known[option].type_descriptor.annotation is Path):
        return None
    words = list(arguments)
    place = next(number for number, word in enumerate(words) if word.partition("=")[0] == name)
    _, equals, value = words[place].partition("=")
    rest = words[place + 1 :]
    if not equals and rest and not rest[0].startswith("-"):
        value, rest = rest[0], rest[1:]
    if option == "preset" and value and value not in PRESETS:
        nearest = did_you_mean(value, PRESETS) or f"the presets are {', '.join(PRESETS)}"
        return (
            f"a preset is given without a name in front, and there is no preset {value!r}; {nearest}",
            shlex.join(["shoal", *words[:place], next(iter(PRESETS)), *rest]),
        )
    if option == "--pdf":
        return (
            (f"here it is {option}", shlex.join(["shoal", *words[:place], option, *rest])) if value == "pdf" else None
        )
    meant = [*([option] if option.startswith("-") else []), form.format(value or "…")]
    return f"here it is {' '.join(meant)}", shlex.join(["shoal", *words[:place], *meant, *rest])


def _handle_closed_pipe() -> int:
    """Return the exit code that a shell reports for a program whose reader (head, less) closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


if __name__ == "__main__":
    main()
