"""The help of shoal and of its commands, in groups and with examples."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.terminal import raw_stream

if TYPE_CHECKING:
    from shoal.cli.command import Command, Parameter

# The commands of each group, in the order in which the overview lists them.
GROUPS = {
    "Train": {
        "demo": "Start here: one rank against two, and a rank that is killed while the run continues.",
        "train": "Train the built-in GPT on your text, data-parallel on all machines.",
        "run": "Start your own torchrun-style script on the cluster.",
        "host": "Train with machines that join without SSH; prints the command to type on each of them.",
        "join": "Join a run that another machine hosts.",
        "emit": "Write the training for other launchers: torchrun commands, a Slurm script, a Kubernetes manifest.",
    },
    "Look at runs": {
        "ps": "List the runs on this machine, their ranks, and processes left over from earlier runs.",
        "runs": "List past and present runs with their results; delete those that are no longer needed.",
        "logs": "Print the output of all ranks of a run, in order, coloured by rank.",
        "stacks": "Print what every rank of a run is doing now, also of a rank that hangs: its Python stack.",
        "attach": "Watch a run that was started in the background.",
        "watch": "Show a run on a live page in the browser, or as a table in the terminal.",
        "stop": "Stop a run: it finishes its step and saves a checkpoint.",
        "report": "Write one self-contained HTML page about a run, or compare several.",
        "trace": "Write all ranks of a run on one time axis, for Perfetto or chrome://tracing.",
        "export": "Write the metrics or the weights of a run in a format that other programs read.",
        "verify": "Check that all replicas are equal bit for bit, and that every sample was used exactly once.",
        "sample": "Generate text with a trained model.",
    },
    "Prepare": {
        "doctor": "Check machines and network before a run; every problem comes with a fix.",
        "setup": "Prepare machines over SSH: environment, shoal and your project; safe to repeat.",
        "probe": "Measure links, gloo and machines in a minute; writes the profile that shoal plan reads.",
        "plan": "Predict step time and speed on 1, 2, 3 … machines, and which sync method helps; starts nothing.",
        "simulate": "Simulate a training over hours or months, with failures and stragglers; starts nothing.",
        "config": "Show, explain and write settings.",
        "completion": "Print the completion script for bash, zsh or fish.",
    },
    "Learn and test": {
        "learn": "Lessons that check themselves: predict, run the experiment, compare.",
        "explain": "Explain an error log of torch, gloo, torchrun, ssh or shoal: cause and fix.",
        "bench": "Measure speed by number of ranks, or by sync method.",
        "lab": "Emulate a cluster on this machine: nodes with limited links and CPUs, and faults on demand.",
        "chaos": "Inject scripted faults into a small real training and check the outcome.",
    },
}
NAMES = {name: text for names in GROUPS.values() for name, text in names.items()}

# Command lines that do what is said beside them, by command; a test checks that each of them is accepted.
EXAMPLES = {
    "": (
        ("shoal demo", "a first training, in under two minutes"),
        ("shoal train --on local:2 --data notes.txt", "your own text, on two ranks of this machine"),
        ("shoal help train", "what a command can do"),
    ),
    "demo": (("shoal demo", "four trainings on this machine"), ("shoal demo --steps 20", "shorter ones")),
    "train": (
        ("shoal train", "the small GPT of the demo, on two ranks"),
        ("shoal train --data notes.txt --steps 500", "your own text"),
        ("shoal train gpt2-124m --on hosts.toml --sync diloco", "over SSH, on a slow network"),
        ("shoal train --set train.warmup_steps=50", "any setting; see shoal config show"),
        ("shoal train --resume runs/NAME", "continue after a stop"),
    ),
    "run": (
        ("shoal run --on local:2 train.py", "your script, on two ranks"),
        ("shoal run --measure train.py --lr 0.1", "with the script's own options; measures its steps"),
        ("shoal run --resume runs/NAME", "continue a script that uses shoal.Session"),
    ),
    "host": (
        ("shoal host --machines 3", "this machine and two that join"),
        ("shoal host runs/NAME", "let a machine join a running run"),
    ),
    "join": (("shoal join 192.168.1.10:29400", "as shoal host prints it"),),
    "emit": (
        ("shoal emit torchrun grammar", "one torchrun command for each machine"),
        ("shoal emit slurm gpt2-124m > job.sbatch", "a Slurm script"),
        ("shoal emit k8s gpt2-124m --image NAME > job.yaml", "a Kubernetes job"),
    ),
    "ps": (("shoal ps", "what runs here"), ("shoal ps --on hosts.toml", "what runs on those machines")),
    "runs": (
        ("shoal runs", "all runs in ./runs, the newest first"),
        ("shoal runs gpt2 --state finished", "those with gpt2 in their name that have finished"),
        ("shoal runs --delete runs/NAME", "delete one; asks first"),
    ),
    "logs": (("shoal logs -f runs/NAME", "until the run ends"), ("shoal logs --rank 1 runs/NAME", "of one rank")),
    "stacks": (("shoal stacks runs/NAME", "of all ranks"), ("shoal stacks --rank 1 runs/NAME", "of one rank")),
    "attach": (("shoal attach runs/NAME", "Ctrl-C leaves it running"),),
    "watch": (
        ("shoal watch --open runs/NAME", "a page in the browser"),
        ("shoal watch --terminal runs/NAME", "over SSH"),
    ),
    "stop": (("shoal stop runs/NAME", "after its step, with a checkpoint"), ("shoal stop --now runs/NAME", "at once")),
    "report": (
        ("shoal report runs/NAME", "writes report.html into the run folder"),
        ("shoal report runs/A runs/B", "both side by side: table, loss, speed, parts of a step"),
        ("shoal report runs/NAME --redact --pdf", "to show to others, also as a PDF"),
    ),
    "trace": (("shoal trace runs/NAME", "writes trace.json, for ui.perfetto.dev"),),
    "export": (
        ("shoal export runs/NAME --format csv -o run.csv", "for a spreadsheet or pandas"),
        ("shoal export runs/NAME --format tensorboard -o board", "then: tensorboard --logdir board"),
        ("shoal export runs/NAME --format hf -o gpt", "for transformers"),
    ),
    "verify": (("shoal verify runs/NAME", "exit code 1 if something does not agree"),),
    "sample": (
        ("shoal sample runs/NAME", "five texts"),
        ('shoal sample runs/NAME --prompt "She has" --temperature 0', "the most likely end of a sentence"),
    ),
    "doctor": (
        ("shoal doctor", "this machine, with two ranks"),
        ("shoal doctor --on hosts.toml", "the machines of a hosts file"),
        ("shoal doctor --on hosts.toml --fix-commands", "only what to type where"),
    ),
    "setup": (("shoal setup hosts.toml", "every machine of the file"),),
    "probe": (("shoal probe --on hosts.toml", "writes profile.toml for shoal plan"),),
    "plan": (
        ("shoal plan gpt2-124m --link wifi", "GPT-2 over Wi-Fi, from data sheets"),
        ("shoal plan gpt2-124m --profile profile.toml", "on machines that shoal probe measured"),
        ("shoal plan --nodes 1,2,4 --json", "for programs"),
    ),
    "simulate": (
        ("shoal simulate three-laptops.toml", "docs/simulate.md has this file"),
        ("shoal simulate scenario.toml -o simulation.png", "also as a figure"),
    ),
    "config": (
        ("shoal config show", "every setting and its default"),
        ("shoal config explain train.lr", "what a setting means and when to change it"),
        ("shoal config init gpt2-124m --out my.toml", "a file for shoal train --config my.toml"),
    ),
    "completion": (
        ('eval "$(shoal completion bash)"', "in ~/.bashrc"),
        ('eval "$(shoal completion zsh)"', "in ~/.zshrc, after compinit"),
        ("shoal completion fish > ~/.config/fish/completions/shoal.fish", "once"),
    ),
    "learn": (
        ("shoal learn", "the lessons, and how far you are"),
        ("shoal learn 2", "asks for your prediction, then measures"),
        ("shoal learn 2 --answer 5 --answer 7.5", "the same without a terminal"),
        ("shoal learn report", "one HTML page of all that you did"),
    ),
    "explain": (("shoal explain error.log", "a saved log"), ("python train.py 2>&1 | shoal explain", "as it comes")),
    "bench": (
        ("shoal bench scaling --ranks 1,2", "tokens/s with one rank and with two"),
        ("shoal bench levers --on lab:2,link=100mbit", "every sync method over a slow link"),
    ),
    "lab": (
        ("shoal lab up 3 --link 100mbit", "three nodes with slow links"),
        ("shoal train --on lab", "a training on them"),
        ("shoal lab kill node2 --silent", "as if its power was cut"),
        ("shoal lab down", "removes the lab"),
    ),
    "chaos": (("shoal chaos list", "what can be tried"), ("shoal chaos run SCENARIO", "try one of them")),
}

# The options of commands that have many, by parameter. What is in no group stands in the last one, `Options`.
OPTION_GROUPS = {
    "train": {
        "Text and model": "data tokenizer depth seq_len config set_",
        "Steps and batch": "steps global_batch micro_batch scaling lr seed",
        "Machines": "on balance drop_slower_than on_silent_tie launcher confirm clean",
        "Exchange": "sync every accumulate wire copies inside measure",
        "Compute": "threads device compile_ recompute precision pin profile_steps",
        "The run": "out resume lineage detach watch plan profile dry_run json",
    },
    "plan": {
        "Machines and links": "nodes link links machine profile calibrate latency efficiency flops mfu memory_gb "
        "ranks_per_node on",
        "Model and batch": "params grad_dtype tokens depth seq_len global_batch micro_batch scaling recompute "
        "config set_",
        "Exchange": "sync accumulate wire",
        "Result": "out json",
    },
}

_INDENT = 2
# Longer names of options have their text below them.
_MOST_NAME = 24
_NARROWEST, _WIDEST = 60, 100


def help_width() -> int:
    """Return the columns of the terminal, of `$COLUMNS`, or 80; at most what is easy to read."""
    return min(max(shutil.get_terminal_size((80, 24)).columns, _NARROWEST), _WIDEST)


def is_styled() -> bool:
    """Return whether stdout shows styles, by the rules that rich has for its own."""
    if "NO_COLOR" in os.environ or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def print_overview() -> None:
    width = help_width()
    lines = ["Usage: shoal COMMAND [OPTIONS] …", ""]
    lines += _paragraphs("Train a PyTorch model data-parallel on the computers you already have.", width)
    for title, names in GROUPS.items():
        lines += ["", _title(title), *_columns(names.items(), width)]
    options = {
        "-h, --help": "With any command: explain it.",
        "--version": "Print the version.",
        "--debug": "With any command: print the traceback of an error.",
    }
    lines += ["", _title("Options"), *_columns(options.items(), width), *_examples("", width)]
    _write(lines)


def print_command_help(command: Command, path: str) -> None:
    """Print the help of a command, or of a command within it."""
    width = help_width()
    arguments = [parameter for parameter in command.parameters if is_shown(parameter, is_argument=True)]
    options = [parameter for parameter in command.parameters if is_shown(parameter, is_argument=False)]
    children = command.commands
    words = ["COMMAND"] if children else []
    words += ["[OPTIONS]", *(usage(argument) for argument in arguments)]
    first = textwrap.fill(
        f"Usage: {path} {' '.join(words)}",
        width,
        subsequent_indent=" " * 7,
        break_on_hyphens=False,
        break_long_words=False,
    )
    lines = [first, "", *_paragraphs(command.help, width)]
    if children:
        texts = ((name, child.help.partition("\n\n")[0]) for name, child in children.items())
        lines += ["", _title("Commands"), *_columns(texts, width)]
    named = [(argument.shown_name, meaning(argument)) for argument in arguments]
    if any(text for _, text in named):
        lines += ["", _title("Arguments"), *_columns(named, width)]
    rows = {option.name: (option_name(option), meaning(option)) for option in options}
    start = _text_start(rows.values())
    for title, names in OPTION_GROUPS.get(path.partition(" ")[2], {}).items():
        lines += ["", _title(title), *_columns([rows.pop(name) for name in names.split()], width, start)]
    lines += ["", _title("Options"), *_columns([*rows.values(), ("-h, --help", "Print this help.")], width, start)]
    name, *rest = path.split()[1:]
    lines += _examples(name, width, rest[0] if rest else "")
    _write(lines)


def _write(lines: Iterable[str]) -> None:
    raw_stream(sys.stdout).write("".join(f"{line.rstrip()}\n" for line in lines))


def _title(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m" if is_styled() else text


def _paragraphs(text: str, width: int) -> list[str]:
    parts = [" ".join(part.split()) for part in text.split("\n\n")]
    wrapped = [wrap(part, width - _INDENT) for part in parts if part]
    indented = [[" " * _INDENT + line for line in lines] for lines in wrapped]
    return [line for number, lines in enumerate(indented) for line in ([""] if number else []) + lines]


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap at words; `indent` is that of all lines but the first."""
    lines = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines or [""]


def _text_start(rows: Iterable[tuple[str, str]]) -> int:
    return _INDENT + 2 + max((len(name) for name, _ in rows if len(name) <= _MOST_NAME), default=0)


def _columns(rows: Iterable[tuple[str, str]], width: int, start: int = 0) -> Iterator[str]:
    """Yield names with their texts beside them, from column `start` on; the text of a long name is below it."""
    rows = list(rows)
    start = max(start, _text_start(rows))
    for name, text in rows:
        lines = wrap(text, width - start)
        head = " " * _INDENT + name
        if len(name) > _MOST_NAME:
            yield head
            head = ""
        yield f"{head:<{start}}{lines[0]}"
        yield from (" " * start + line for line in lines[1:])


def _examples(name: str, width: int, child: str = "") -> list[str]:
    """Return the examples of a command, or those of a command within it, each with its meaning beside or below it."""
    rows = [row for row in EXAMPLES.get(name, ()) if not child or f" {name} {child}" in row[0]]
    if not rows:
        return []
    lines = ["", _title("Examples")]
    start = _INDENT + 2 + max(len(command) for command, _ in rows)
    is_beside = all(start + len(text) + 2 <= width for _, text in rows)
    for command, text in rows:
        if is_beside:
            lines.append(f"{' ' * _INDENT + command:<{start}}# {text}")
        else:
            lines += [f"{' ' * _INDENT}# {text}", f"{' ' * _INDENT}{command}"]
    return lines


def is_shown(parameter: Parameter, is_argument: bool) -> bool:
    return parameter.is_argument == is_argument and not parameter.option.is_hidden


def usage(argument: Parameter) -> str:
    name = argument.shown_name
    if argument.is_list and not name.endswith("…"):
        name += " …"
    return name if argument.is_required else f"[{name}]"


def option_name(option: Parameter) -> str:
    """Return `-f, --follow` or `--steps N`. Of several long names the first is shown, the others are older ones."""
    longs = [name for name in option.flags if name.startswith("--")]
    shorts = [name for name in option.flags if not name.startswith("--")]
    names = ", ".join([*shorts, *longs[:1]])
    return names if option.is_flag else f"{names} {value_name(option)}"


def value_name(option: Parameter) -> str:
    """Return what to write after an option: N for a whole number, X for any number, PATH, or TEXT."""
    return option.option.metavar or {int: "N", float: "X", Path: "PATH"}.get(option.kind, "TEXT")


def meaning(parameter: Parameter) -> str:
    text, default = parameter.option.help, parameter.option.shown
    if not default and not parameter.is_required and parameter.default not in (None, "", False, ()):
        value = parameter.default
        default = f"{value:g}" if isinstance(value, float) else str(value)
    if len(default) > _MOST_NAME:
        # A list without spaces could not be wrapped.
        default = ", ".join(part.strip() for part in default.split(","))
    notes = [f"default: {default}"] if default else []
    if parameter.is_required and not parameter.is_argument:
        notes.append("required")
    return f"{text} [{', '.join(notes)}]" if notes else text
