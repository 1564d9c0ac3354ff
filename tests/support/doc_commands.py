"""The command lines that README.md and docs/*.md show: where they stand, and the words that a user would type."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.cli.command import Command, HelpAsked
from shoal.cli.main import find_command, leading_commands
from shoal.cluster.target import parse_on
from shoal.config.load import build_config
from shoal.config.presets import Overrides
from shoal.errors import UsageError
from shoal.tools.chaos.scenario import find_scenario
from tests.support.paths import ROOT

# Made from the program's own help, which other tests read.
_GENERATED = ROOT / "docs/commands.md"
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("*.md")) if page != _GENERATED)]

# What may stand before a command: a prompt, variables, another program that starts it, or the words of a hint.
_BEFORE = r"(?:\$ )?(?:(?:next|again|fix):\s+|note: [\w ,]+: )?(?:[A-Z_]+=\S+ +)*(?:sudo +|chrt -r \d+ +|exec +)*"
_COMMAND = rf"{_BEFORE}(?P<line>(?:shoal|make) \S.*|(?:\.venv/bin/)?python (?:benchmarks|examples)/.*)"
# In a block: a comment, or a description in a column of its own.
_AFTER = re.compile(r"\s+#\s.*|\s{2,}.*")
_SEPARATORS = re.compile(r"\s*(?:&&|;|\||2>&1|>)(?:\s+|$)")
# Output of a command that begins with the name of a program.
_NO_COMMAND = re.compile(r"shoal(?:: |\.| (?:is|checks|has|says|trains|starts)\b)")


@dataclass(frozen=True)
class DocCommand:
    page: str
    number: int
    line: str
    # In a sentence, where the name of a command, or the beginning of its options, stands for any use of it.
    is_inline: bool

    @property
    def place(self) -> str:
        return f"{self.page}:{self.number}: {self.line}"

    @property
    def words(self) -> list[str]:
        """Return the words; `…` stands for options that the text leaves out."""
        return [word for word in shlex.split(self.line) if word != "…"]


def doc_commands(page: Path, root: Path = ROOT) -> Iterator[DocCommand]:
    name = page.relative_to(root).as_posix()
    for number, text, is_inline in _texts(page.read_text(encoding="utf-8")):
        for part in _SEPARATORS.split(text):
            match = re.match(_COMMAND, part.strip())
            if match and not _NO_COMMAND.match(match["line"]):
                yield DocCommand(name, number, match["line"].strip(), is_inline)


def _texts(document: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the lines of blocks, continued ones joined, and the code within sentences."""
    in_block, before, language = False, "", ""
    for number, line in enumerate(document.splitlines(), start=1):
        if line.startswith("```"):
            in_block, language = not in_block, line[3:].strip()
        elif in_block and language != "python":
            joined = before + line.strip()
            before = joined.removesuffix("\\") if joined.endswith("\\") else ""
            if not before:
                # The first word may be followed by several blanks, as in `fix:   shoal …`.
                head = re.match(r"(?:\w+:\s+)?", joined)
                begin = head[0] if head else ""
                yield number, begin + _AFTER.sub("", joined[len(begin) :]), False
        elif not in_block:
            for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", line):
                yield number, code.replace("\\|", "|"), True


# What a user puts in place of a name in capitals; other names are those of files and folders.
_PLACEHOLDERS = {
    "METHOD": "zero1",
    "LEVEL": "zero1",
    "MODE": "ddp",
    "[PRESET]": "grammar",
    "KEY": "train.lr",
    "NAME": "grammar",
    "FILE": "router.toml",
}


class Undocumented(Exception):
    """A command that the documentation shows and the program would refuse."""


def typed_words(command: DocCommand) -> list[str]:
    """Return the words after `shoal`, with an example in the place of each name in capitals."""
    return [_PLACEHOLDERS.get(word, word).replace("join:N", "join:2") for word in command.words[1:]]


def is_only_named(command: DocCommand) -> bool:
    """Return whether the text names a command, or an option of it, without saying all that is typed."""
    words = typed_words(command)
    if not words or "…" in shlex.split(command.line) or words[0] == "COMMAND":
        return True
    found, path = _command_of(words)
    if not command.is_inline or found is None:
        return False
    try:
        values = found.read(path, words[len(path.split()) :])
    except UsageError as error:
        return bool(re.search(r"Missing (argument|option)|requires an argument", error.seen))
    except HelpAsked:
        return False
    is_without_script = path == "run" and not {"script", "resume"} & values.keys()
    return is_without_script or len(words) == len(path.split())


def _command_of(words: list[str]) -> tuple[Command | None, str]:
    path = leading_commands(words)
    return find_command(path), " ".join(path)


def parse(command: DocCommand) -> None:
    """Read a command line as the program does, with the values of its options; start nothing.

    The current folder has the files that the documentation names.
    """
    words = typed_words(command)
    if words[:1] in ([], ["COMMAND"], ["--help"], ["--version"]):
        return
    found, path = _command_of(words)
    if found is None:
        raise Undocumented(f"there is no command {words[0]!r}")
    rest = words[len(path.split()) :]
    if is_only_named(command):
        flags = {flag for parameter in found.parameters for flag in parameter.flags}
        if unknown := [word for word in rest if word.startswith("-") and word not in flags]:
            raise Undocumented(f"`shoal {path}` has no option {unknown[0]}")
    elif found.commands:
        raise Undocumented(f"`shoal {path}` has no command {' '.join(rest)!r}")
    else:
        with contextlib.suppress(HelpAsked):
            _check_values(path, found, found.read(path, rest))


def _check_values(name: str, found: Command, values: dict[str, Any]) -> None:
    ons = values.get("on") or []
    for on in ons if isinstance(ons, list) else [ons]:
        _ = isinstance(on, str) and parse_on(on)
    if name == "plan":
        return  # Its values have forms of their own; all of these command lines are run.
    settings: Overrides = {}
    for parameter in found.parameters:
        if parameter.option.setting and parameter.name in values and parameter.name != "on":
            section, key = parameter.option.setting.split(".")
            settings.setdefault(section, {})[key] = values[parameter.name]
    preset = values.get("preset") or "grammar"
    if name == "host" and re.match("RUN|runs/", preset):
        return
    build_config(preset, None, settings, values.get("set_") or [])
    if name == "chaos run":
        for scenario in values.get("scenarios") or []:
            _ = scenario == "all" or find_scenario(scenario)


@dataclass(frozen=True)
class Handling:
    """How a command of the documentation is tried: `quick` and `long` ones are run as they stand, with short trainings;
    the others are in `where`: the file of the test that has what they need, or the reason why no test has it."""

    kind: Literal["quick", "long", "elsewhere", "by hand"]
    where: str = ""
    # What that test has, where it is not the command with its options: it calls Python, or starts it in another way.
    words: str = ""


_INT = "tests/integration"
# The first pattern that fits the whole line decides.
_RULES: tuple[tuple[str, Handling], ...] = (
    # By another test.
    (r"\S*python benchmarks/.*", Handling("elsewhere", f"{_INT}/test_benchmarks.py", "benchmarks --quick")),
    (r"\S*python examples/myths/.*", Handling("elsewhere", f"{_INT}/examples/test_myths.py")),
    (r"make test-gpu", Handling("by hand", "needs a GPU")),
    (r"make (test|test-long|test-exhaustive)", Handling("by hand", "they are the tests themselves")),
    (r"make demo|shoal demo", Handling("elsewhere", f"{_INT}/test_wheel.py")),
    (r"make dist", Handling("elsewhere", f"{_INT}/test_wheel.py")),
    (r"shoal emit .*", Handling("quick")),
    # The script that emit prints starts both on the nodes of its job.
    (
        r"shoal (doctor|probe) .*slurm.*",
        Handling("elsewhere", f"{_INT}/cluster/test_slurm.py", "emit slurm ready probe"),
    ),
    (r"shoal .*slurm.*", Handling("elsewhere", f"{_INT}/cluster/test_slurm.py")),
    (r"shoal probe .*pods:.*", Handling("by hand", "needs pods; runs/test_pods.py has doctor, train and run there")),
    (r"shoal .*pods:.*", Handling("elsewhere", f"{_INT}/runs/test_pods.py")),
    (r"shoal learn( .*)?", Handling("elsewhere", f"{_INT}/tools/test_learn.py")),
    (r"make setup", Handling("elsewhere", f"{_INT}/test_bootstrap.py", "scripts bootstrap")),
    (r"make docs", Handling("elsewhere", f"{_INT}/test_docs_site.py")),
    (r"shoal bench scaling .*device=cuda.*", Handling("by hand", "one of its rows needs a GPU, others a hosts file")),
    (r"shoal setup .*", Handling("elsewhere", f"{_INT}/cluster/test_hosts_setup.py")),
    (r"shoal doctor .*--fix-commands", Handling("by hand", "needs machines over SSH with something to mend")),
    (r"shoal doctor .*hosts.toml.*", Handling("elsewhere", f"{_INT}/tools/test_doctor_faults_machine.py")),
    (r"shoal probe .*hosts.toml.*", Handling("by hand", "needs machines over SSH; tools/test_probe.py has a lab")),
    (r"shoal bench .*hosts.toml.*", Handling("by hand", "needs machines over SSH; tools/test_bench.py has a lab")),
    (r"shoal train .*--profile .*", Handling("elsewhere", f"{_INT}/engine/test_auto_sync.py")),
    (
        r"shoal train .*--drop-slower-than .*",
        Handling("elsewhere", f"{_INT}/agent/test_spares.py", "--drop-slower-than"),
    ),
    (
        r"shoal run --on hosts.toml -m .*",
        Handling("by hand", "the reader's module; test_measured_scripts.py has one here"),
    ),
    (r"shoal (train|run) .*(hosts|HOSTS).toml.*", Handling("elsewhere", f"{_INT}/cluster/test_hosts_training.py")),
    (
        r"shoal host --machines .*",
        Handling("by hand", "waits for machines; agent/test_joining_nodes.py has host and join"),
    ),
    (r"shoal join .*--script .*", Handling("elsewhere", f"{_INT}/agent/test_joining_nodes_training.py")),
    (r"shoal (host|join)\b.*", Handling("elsewhere", f"{_INT}/agent/test_joining_nodes.py")),
    (
        r"shoal (train|run) .*join:.*",
        Handling("elsewhere", f"{_INT}/agent/test_joining_nodes_training.py", "--on join"),
    ),
    (r"shoal export .*wandb.*", Handling("by hand", "needs wandb and the Internet")),
    (r"shoal (watch|report) .*--open", Handling("by hand", "opens the reader's browser")),
    (
        r"shoal watch .*--port .*",
        Handling("by hand", "serves other machines; unit/cli/test_watch.py reads its options"),
    ),
    (r"shoal watch .*--terminal", Handling("elsewhere", "tests/unit/cli/test_watch.py")),
    (
        r"shoal watch .*|shoal (train|run) .*--watch.*",
        Handling("elsewhere", f"{_INT}/tools/test_watch_page.py", "--watch"),
    ),
    (r"shoal stop .*", Handling("elsewhere", f"{_INT}/test_other_users.py")),
    (r"shoal stacks .*", Handling("elsewhere", f"{_INT}/runs/test_stacks.py")),
    (r"shoal (train|run) .*--detach.*", Handling("elsewhere", f"{_INT}/runs/test_detached.py")),
    (r"shoal (train --resume|attach|logs) .*", Handling("elsewhere", f"{_INT}/runs/test_detached.py")),
    (r"shoal report .*--pdf", Handling("elsewhere", f"{_INT}/test_whole_runs.py", "report shared.pdf")),
    (
        r"shoal chaos (soak .*|run .*(--times|all|FILE).*)",
        Handling("by hand", "takes minutes to hours"),
    ),
    (r"shoal chaos run .*", Handling("elsewhere", f"{_INT}/tools/test_chaos_runs.py")),
    (r"shoal run .*(-m MODULE|-m scripts\.base_train|--plan).*", Handling("by hand", "needs the reader's own project")),
    (r"shoal plan .*--calibrate.*", Handling("elsewhere", f"{_INT}/tools/test_plan_compare_process.py")),
    (r"shoal lab up .*--sshd", Handling("elsewhere", f"{_INT}/cluster/test_hosts_setup.py", "lab sshd=True")),
    (r"shoal lab up .*--memory .*", Handling("elsewhere", f"{_INT}/lab/test_memory.py", "running_lab memory")),
    (
        r"shoal lab exec switch -- ssh .*",
        Handling("by hand", "needs the default lab with SSH; cluster/test_hosts_ssh.py has one"),
    ),
    (r"shoal lab exec .*", Handling("elsewhere", f"{_INT}/lab/test_nodes.py", "lab command")),
    (r"shoal lab firewall .*", Handling("elsewhere", f"{_INT}/lab/test_faults.py", "set_firewall remove_firewall")),
    (r"shoal lab (cut|heal|kill)\b.*", Handling("elsewhere", f"{_INT}/lab/test_faults.py")),
    (r"shoal lab .*", Handling("elsewhere", f"{_INT}/lab/test_life.py")),
    (r"shoal doctor --on lab", Handling("elsewhere", f"{_INT}/tools/test_doctor_faults_network.py")),
    (r"shoal train --on lab( .*)?", Handling("elsewhere", f"{_INT}/cluster/test_lab_training.py")),
    (r"shoal train .*memory=.*", Handling("elsewhere", f"{_INT}/launch/test_memory_limit.py")),
    # Run here.
    (r"shoal (train )?--(help|version)", Handling("quick")),
    (r"shoal (plan|simulate|config|explain|runs|ps|chaos list)\b.*", Handling("quick")),
    (r"shoal (verify|report|sample|trace|export)\b.*", Handling("quick")),
    (r"shoal (train|run|probe|bench|doctor)\b.*", Handling("long")),
)


def handling(command: DocCommand) -> Handling | None:
    """Return how a command is tried; None if nothing here says so."""
    return next((how for pattern, how in _RULES if re.fullmatch(pattern, command.line)), None)


def words_that_matter(command: DocCommand) -> set[str]:
    """Return what the test must have that stands for a command: the command and its options, or the words of its rule.

    Settings are left out: they are read here, and the same wherever a training runs.
    """
    how = handling(command)
    if how is not None and how.words:
        return _split(how.words)
    _, *words = command.words
    if command.words[0] != "shoal":
        return _split(" ".join(Path(word).stem for word in words))
    found, path = _command_of(words)
    assert found is not None
    settings = {flag for one in found.parameters if one.option.setting and one.name != "on" for flag in one.flags}
    own = words[: words.index("--")] if "--" in words else words
    flags = {word for word in own if word.startswith("-")} - settings - {"--out", "--depth"}
    return _split(" ".join([path, *flags]))


def words_of_code(source: str) -> set[str]:
    """Return the words of a test's strings and names, and none of its comments and docstrings."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = [node.value for node in nodes if isinstance(node, ast.Expr)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
    texts += [node.id for node in nodes if isinstance(node, ast.Name)]
    texts += [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    texts += [node.arg for node in nodes if isinstance(node, ast.keyword)]
    return _split(" ".join(map(str, texts)))


def _split(text: str) -> set[str]:
    """Return words in one form for options, functions and keywords: `--one-way` and `one_way` are `one` and `way`."""
    return set(re.findall(r"[a-z0-9]+", text.lower()))


@functools.cache
def whole_commands() -> list[DocCommand]:
    """Return each command line of the documentation once, without those that only name a command."""
    commands = [command for page in PAGES for command in doc_commands(page)]
    whole = [command for command in commands if command.words[0] != "shoal" or not is_only_named(command)]
    return list({command.line: command for command in reversed(whole)}.values())


def write_named_files(folder: Path, run: Path) -> None:
    """Put into a folder what the command lines name: files that pages show, texts, scripts, and copies of a run."""
    for page in PAGES:
        for name, text in re.findall(r"```toml\n# (\S+\.toml)\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            (folder / name).write_text(text, encoding="utf-8")
    for copy, name in {
        "SCENARIO.toml": "three-laptops.toml",
        "HOSTS.toml": "hosts.toml",
        "FILE": "router.toml",
    }.items():
        shutil.copy(folder / name, folder / copy)
    for name in ("input.txt", "tiny.txt", "notes.txt", "my-text.txt", "YOUR-TEXT.txt", "text/one.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("The cat sat on the mat, and the dog on the log.\n" * 200, encoding="utf-8")
    # On the pages my_train.py uses shoal.Session, and the others need not.
    for name, example in {"my_train.py": "images.py", "train.py": "own_script.py", "net.py": "own_script.py"}.items():
        shutil.copy(ROOT / "examples" / example, folder / name)
    shutil.copytree(ROOT / "examples", folder / "examples")
    logs = folder / "tests/support/failures"
    shutil.copytree(ROOT / "tests/support/failures", logs)
    for name in ("train.log", "LOG"):
        shutil.copy(logs / "gloo.same-address.log", folder / name)
    for command in whole_commands():
        for word in command.words:
            if re.fullmatch(r"RUN|runs/[^/]\S*", word) and run.exists() and not (folder / word).exists():
                shutil.copytree(run, folder / word)
