"""Write the pages of docs/ that are made from tables of the program: `python scripts/docs_pages.py`.

docs/commands.md comes from the commands' own help, docs/troubleshooting.md from the patterns of `shoal explain` and the
checks of `shoal doctor`. They are in the repository, so that a git forge shows them, too; a test compares them with the
tables.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from shoal.cli.command import Command  # noqa: E402
from shoal.cli.help import EXAMPLES, GROUPS, OPTION_GROUPS, is_shown, meaning, option_name, usage, wrap  # noqa: E402
from shoal.cli.main import load_command  # noqa: E402
from shoal.explain.pattern import Pattern, fill_in  # noqa: E402
from shoal.explain.patterns import PATTERNS  # noqa: E402
from shoal.tools.doctor.checks import CHECK_MEANINGS  # noqa: E402

# Commands that are described on a page with another name.
_PAGES = {
    "demo": "get-started.md",
    "host": "hosts.md#machines-that-join",
    "join": "hosts.md#machines-that-join",
    "setup": "hosts.md#what-shoal-setup-does",
    "export": "formats.md",
    "config": "settings.md",
    "trace": "stragglers.md",
    "verify": "faults.md",
    "bench": "train.md#how-speed-grows-with-machines",
}

COMMANDS_HEAD = """# All commands and options

This page is made from the program's own help: `shoal COMMAND --help` prints the same. Every command accepts `--debug`,
which prints the traceback of an error, and those that print a result have `--json`. Exit codes: 0 yes, 1 the answer is
no, 2 wrong usage or input, 3 the run failed, 130 interrupted.
"""

TROUBLESHOOTING_HEAD = """# Troubleshooting by symptom

Two commands find most causes, and this page is made from their tables:

```
shoal explain LOG                  # an error log of any launcher, or the folder of a run: cause and fix
shoal doctor --on hosts.toml       # machines and network, before a run; every finding with its fix
```

Each entry below begins with words of the error, as torch, gloo, torchrun, ssh or shoal print them: search for yours.
Words in capitals stand for what your log has there. *Likely* fits few causes; a *consequence* or a *report* is not the
cause, so look for another line first. How `explain` orders what it finds is in [explain.md](explain.md); how the checks
work, in [doctor.md](doctor.md).
"""

# Symptoms in the order of the page: title, what to do first, and the beginnings of the ids that belong there. An id
# belongs to the symptom with the longest beginning; one without any is listed in the last.
SYMPTOMS: Sequence[tuple[str, str, str]] = (
    (
        "The ranks do not meet: connection refused, timeouts, a firewall",
        "The start hangs, or ends with a timeout after minutes. On one machine alone it works. Most often a firewall "
        "drops packets in one direction, or a machine's name leads to a wrong address. Begin with `shoal doctor --on "
        "hosts.toml`, which tries every pair of machines both ways and prints the line that opens the firewall "
        "([the network between machines](hosts.md#the-network-between-them)).",
        "gloo. store. torchrun.no-host torchrun.join-timeout torchrun.node-rank shoal.not-formed shoal.cannot-meet "
        "shoal.code shoal.port-taken reach. proof. names. interface. port. leftover. mtu. clock.",
    ),
    (
        "A machine cannot be reached by SSH",
        "Try `ssh HOST true` by hand: it must end without a question "
        "([keys in three lines](hosts.md#keys-in-three-lines)).",
        "ssh. reach.host",
    ),
    (
        "The program does not start",
        "A variable, a module, a file or a version is missing on one of the machines. `shoal run` sets the variables "
        "and copies the project; `shoal setup hosts.toml` brings all machines to the same packages.",
        "launch. torchrun. python. sameness. collector. shoal.different",
    ),
    (
        "The run hangs, or a rank is lost in the middle",
        "`shoal stacks RUN` prints what every rank is doing now, and `shoal logs RUN` what each printed. What a "
        "training does when a machine leaves is in [faults.md](faults.md).",
        "gloo.timeout gloo.barrier gloo.peer store.gone store.key-timeout store.rank-missing torchrun.killed "
        "torchrun.crashed torchrun.child-failed torchrun.hangup cuda.watchdog shoal.",
    ),
    (
        "Ranks differ: shapes, collectives, models",
        "Every rank must call the same collectives in the same order, with tensors of the same shape. Run once with "
        "`TORCH_DISTRIBUTED_DEBUG=DETAIL`.",
        "gloo.size gloo.gather gloo.dtype gloo.future gloo.collective ddp.",
    ),
    (
        "Out of memory, a full disk, a limit of the system",
        "A process that the kernel kills leaves no message of its own. `shoal doctor --preset NAME` compares the "
        "memory of every machine with what the training needs; a model that fits on none can be divided "
        "([sharded.md](sharded.md)).",
        "memory. disk. system. data. limits. shoal.memory train.short-library",
    ),
    (
        "A GPU is not used, or fails",
        "`nvidia-smi` must list it, and torch must be a build for it ([GPUs in doctor.md](doctor.md#gpus)).",
        "cuda. gpu. nccl. memory.shm",
    ),
    (
        "The loss is NaN, or a checkpoint does not load",
        "A training that diverges does so on one rank, too: lower the learning rate first.",
        "train. shoal.diverged",
    ),
    (
        "N machines are slower than one",
        "No error is printed. The run and its report say how long each rank computes, waits and exchanges "
        "([stragglers.md](stragglers.md)); `shoal plan` says beforehand whether more machines can gain anything "
        "([plan.md](plan.md)), and [sync.md](sync.md) what helps on a slow network. `shoal doctor` looks for these:",
        "speed. link. wifi. interface.slow interface.wrong",
    ),
    ("Everything else", "", ""),
)


def paragraph(text: str, first: str = "", rest: str = "") -> str:
    return "\n".join(wrap(first + text, 118, rest))


_MARKUP = re.compile(r"([*<[]|(?<![^\W_])_|_(?![^\W_]))")


def escape(text: str) -> str:
    """Return plain text with a backslash before what Markdown would read as markup; code between backquotes stays.

    An underscore between two letters is none.
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _MARKUP.sub(r"\\\1", part) for part in parts)


def code(text: str) -> str:
    return f"`` {text.strip()} ``" if "`" in text else f"`{text.strip()}`"


def commands_page() -> str:
    parts = [COMMANDS_HEAD]
    for title, names in GROUPS.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            parts += _command_parts(load_command(name), name)
    return "\n".join(parts)


def _command_parts(command: Command, path: str) -> Iterable[str]:
    name = path.partition(" ")[0]
    is_child = path != name
    shown = [one for one in command.parameters if is_shown(one, True) or is_shown(one, False)]
    arguments = [one for one in shown if one.is_argument]
    words = ["COMMAND"] if command.commands else []
    yield f"\n{'####' if is_child else '###'} shoal {path}\n"
    yield "\n\n".join(paragraph(escape(" ".join(part.split()))) for part in command.help.split("\n\n"))
    page = _PAGES.get(name, f"{name}.md")
    if not is_child and (ROOT / "docs" / page.partition("#")[0]).exists():
        yield f"\nMore in [{page.partition('#')[0]}]({page})."
    yield f"\n```\nshoal {' '.join([path, *words, '[OPTIONS]', *map(usage, arguments)])}\n```"
    examples = [row for row in EXAMPLES.get(name, ()) if not is_child or f" {path} " in f"{row[0]} "]
    if examples:
        yield "\n```"
        yield from (f"{line}  # {text}" for line, text in examples)
        yield "```"
    if arguments := [one for one in arguments if meaning(one)]:
        yield ""
        yield from (paragraph(escape(meaning(one)), f"- {code(one.shown_name)}: ", "  ") for one in arguments)
    options = {one.name: one for one in shown if not one.is_argument}
    grouped = {title: names.split() for title, names in OPTION_GROUPS.get(path, {}).items()}
    in_groups = {name for names in grouped.values() for name in names}
    grouped["Other options" if grouped else "Options"] = [name for name in options if name not in in_groups]
    for title, names in grouped.items():
        if names:
            yield f"\n**{title}**\n"
        for option in (options[one] for one in names):
            yield paragraph(escape(meaning(option)), f"- {code(option_name(option))}: ", "  ")
    for child_name, child in command.commands.items():
        yield from _command_parts(child, f"{path} {child_name}")


def symptom_of(an_id: str) -> str:
    """Return the title of the symptom that an explanation or a check belongs to."""
    known = [(beginning, title) for title, _, beginnings in SYMPTOMS for beginning in beginnings.split()]
    matches = [(len(beginning), title) for beginning, title in known if an_id.startswith(beginning)]
    return max(matches)[1] if matches else SYMPTOMS[-1][0]


def troubleshooting_page(patterns: Sequence[Pattern] = PATTERNS, checks: Mapping[str, str] = CHECK_MEANINGS) -> str:
    parts = [TROUBLESHOOTING_HEAD]
    for title, first, _ in SYMPTOMS:
        entries = [_pattern_entry(one) for one in patterns if symptom_of(one.id) == title]
        looked_for = [
            paragraph(escape(text), f"- `{one}`: ", "  ") for one, text in checks.items() if symptom_of(one) == title
        ]
        if entries or looked_for:
            parts.append(f"\n## {title}\n")
            parts += [paragraph(first)] if first else []
            parts += ["\n**What the log says**\n", *entries] if entries else []
            parts += ["\n**What `shoal doctor` makes sure of**\n", *looked_for] if looked_for else []
    return "\n".join(parts) + "\n"


def _pattern_entry(pattern: Pattern) -> str:
    signs = " or ".join(map(code, pattern.signs[:4]))
    certainty = "" if pattern.weight.name == "CAUSE" else f" ({pattern.weight.name.lower()})"
    cause, fix = (escape(fill_in(text, {})) for text in (pattern.cause, pattern.fix))
    advice = f"{cause}. *Fix:* {fix}." if cause else "the lines below it give the cause and the next command."
    check = f" Found before a run by `{pattern.check}`." if pattern.check else ""
    return paragraph(f"{signs}{certainty}: {advice} ({code(pattern.id)}){check}", "- ", "  ")


PAGES = {"commands.md": commands_page, "troubleshooting.md": troubleshooting_page}


def main() -> None:
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
