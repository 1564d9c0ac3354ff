"""The structure of the program: imports point one way, the tool half never imports torch, nothing is unpickled."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal
import shoal_lab
from shoal.cli.command import COMMANDS
from shoal.cli.help import NAMES
from shoal.cli.main import load_command

SOURCE = Path(shoal.__file__).parent
# The scripts of lessons are a learner's, as examples are: shoal imports none of them.
SCRIPTS = {path for path in (SOURCE / "tools/learn/lessons").glob("*/*.py") if path.name != "check.py"}
MODULES = sorted({*SOURCE.rglob("*.py"), *Path(shoal_lab.__file__).parent.rglob("*.py")} - SCRIPTS)

# docs/design.md, section 3: a package may import itself and the packages to its right.
CHAINS = (
    "cli/lab → cli → tools/chaos, tools/learn → tools/bench, tools/doctor, tools/probe, tools/plan → tools/watch"
    " → tools/report → tools/draw → runs → explain, records → launch → agent → cluster → data → cost → control"
    " → config → host → base",
    # The lab is a package for any software; only its own command line and the clusters use it.
    "cli/lab → cluster → shoal_lab",
    "worker programs of tools → train → engine → sync → cost → control → config → host → base",
    "worker programs of tools → train → model → data → cost → control → config → host → base",
)
BASE = {"errors", "units", "events", "event_schema", "run_folder", "step_line", "terminal", "__init__"}
# Formats of other programs that both halves write.
BASE |= {"tensorboard", "wandb_client"}
# Started with `python -m` beside or instead of the ranks; the tools that start them import none of these.
WORKER_PROGRAMS = {"shoal.tools.doctor.gloo_worker", "shoal.tools.probe.worker"}
WORKER_HALF = {"train", "engine", "sync", "model", "worker programs of tools"}


def package_of(module: str) -> str:
    """Map a module to its package: `shoal.cli.main` to cli, `__main__` to cli, other top-level modules to base."""
    if module in WORKER_PROGRAMS:
        return "worker programs of tools"
    if module.split(".")[0] == "shoal_lab":
        return "shoal_lab"
    if module == "shoal.cli.lab":
        return "cli/lab"
    parts = module.split(".")[1:]
    name = "/".join(parts[:2] if parts[:1] == ["tools"] else parts[:1]) or "__init__"
    if name in BASE:
        return "base"
    return "cli" if name == "__main__" else "base" if name == "tools" else name


def allowed() -> dict[str, set[str]]:
    rules: dict[str, set[str]] = {}
    for chain in CHAINS:
        levels = [set(level.split(", ")) for level in chain.split(" → ")]
        for position, level in enumerate(levels):
            for package in level:
                rules.setdefault(package, {package}).update(*levels[position + 1 :])
    return rules


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield every absolute import, inside functions too, except those only for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (name for branch in node.orelse for name in imports(branch))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imports(node)


def wrong_imports(module: str, source: str) -> list[str]:
    rules = allowed()
    own_imports = [name for name in imports(ast.parse(source)) if name.split(".")[0] in ("shoal", "shoal_lab")]
    package = package_of(module)
    return [
        name
        for name in own_imports
        if package_of(name) not in rules[package] and (package == "shoal_lab" or not is_version(name))
    ]


def is_version(name: str) -> bool:
    return name in ("shoal", "shoal.__version__")


def sources() -> Iterator[tuple[str, str]]:
    return ((module_name(path), path.read_text(encoding="utf-8")) for path in MODULES)


def test_imports_point_one_way() -> None:
    wrong = {module: names for module, source in sources() if (names := wrong_imports(module, source))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("shoal.cost.model_size", "from shoal.data.tokens import permute"),
        ("shoal.launch.plan", "import shoal.train.worker"),
        ("shoal.launch.plan", "def f():\n    from shoal.tools.report import page"),
        ("shoal.runs.start", "from shoal.tools.report.page import write_report"),
        ("shoal.records.summary", "from shoal.runs.follow import RunEvents"),
        ("shoal.launch.launcher", "from shoal.records.summary import summarize"),
        ("shoal.events", "from shoal.config import load"),
        ("shoal.tools.chaos.inject", "from shoal_lab.lab import Lab"),
        ("shoal.cli.chaos", "from shoal_lab.spec import LabSpec"),
        ("shoal_lab.lab", "from shoal.host import proc"),
        ("shoal_lab.errors", "from shoal import __version__"),
        ("shoal.sync.gradients", "from shoal.model.gpt import GPT"),
        ("shoal.sync.outer", "from shoal.engine.training_state import StateTree"),
        ("shoal.engine.session", "from shoal.model.gpt import GPT"),
        ("shoal.engine.batches", "def f():\n    from shoal.data import tokens"),
        ("shoal.engine.start_training", "from shoal.train.gpt_training import train_gpt"),
        ("shoal.model.gpt", "if True:\n    try:\n        import shoal.sync.world\n    except ImportError: pass"),
    ],
)
def test_a_wrong_import_is_detected(module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == 1


def test_the_engine_knows_neither_texts_nor_the_gpt() -> None:
    """It trains any model: not even a type of shoal's own GPT or of its data is used."""
    engine = [path for path in MODULES if package_of(module_name(path)) == "engine"]
    assert len(engine) > 15
    for path in engine:
        source = path.read_text(encoding="utf-8")
        nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [name for node in nodes for name in imports(ast.Module([node], []))]
        assert [name for name in names if name.startswith(("shoal.data", "shoal.model", "shoal.train"))] == [], path


def test_nothing_below_the_tools_imports_them() -> None:
    above = {name for name in allowed() if name == "cli" or "tools" in name}
    below = [(module, source) for module, source in sources() if package_of(module) not in above]
    assert len(below) > 100
    for module, source in below:
        names = [name for name in imports(ast.parse(source)) if name.startswith("shoal.tools")]
        assert names == [], module


def test_an_import_for_type_checkers_is_allowed() -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shoal.train import worker"
    assert wrong_imports("shoal.cost.model_size", source) == []


def test_every_package_is_in_the_chains() -> None:
    assert {package_of(module_name(path)) for path in MODULES} <= allowed().keys()


def python(script: str, *arguments: str) -> str:
    """Run a script in a fresh interpreter, check that it succeeds, and return its stdout."""
    result = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_public_name_resolves() -> None:
    assert all(getattr(shoal, name) is not None for name in shoal.__all__)
    with pytest.raises(AttributeError, match="no attribute 'init_distribtued'"):
        shoal.init_distribtued  # noqa: B018


def test_dir_lists_the_public_api_only() -> None:
    assert dir(shoal) == sorted(shoal.__all__)
    assert [name for name in dir(shoal) if name.startswith("_")] == ["__version__"]


NO_TORCH = """
import importlib.abc, sys
class NoTorch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is not for the tool half")
sys.meta_path.insert(0, NoTorch())
"""

HELP = (
    NO_TORCH
    + """
import contextlib, io, json
from shoal.cli.main import main
answers = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["shoal", *words, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
        main()
        answers["no exit"] = words
    answers[" ".join(words)] = output.getvalue()
answers["loaded"] = [name for name in ("numpy", "pydantic", "psutil", "rich.markdown") if name in sys.modules]
try:
    import torch
except ImportError:
    answers["blocker"] = "works"
print(json.dumps(answers))
"""
)


# What quick commands may not import, and their output: `WORDS` is a list of command lines, each run in this process.
QUICK = (
    NO_TORCH
    + """
import contextlib, io, json
from shoal.cli.main import main
sys.argv = ["shoal", *json.loads(sys.argv[1])]
output, code = io.StringIO(), None
with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
    try:
        main()
    except SystemExit as exit:
        code = exit.code
print(json.dumps([code, output.getvalue(), sorted(sys.modules)]))
"""
)


def commands_and_subcommands() -> list[list[str]]:
    commands: list[list[str]] = [[]]
    for name in NAMES:
        commands += [[name], *([name, child] for child in load_command(name).commands)]
    return commands


LOADED = """
import contextlib, io, json, sys
from shoal.cli.main import main
sys.argv = ["shoal", "--help"]
with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.suppress(SystemExit):
    main()
print(json.dumps([output.getvalue(), [name for name in sys.modules if name.startswith("shoal.cli.")]]))
"""


def test_every_command_is_in_the_table_of_names() -> None:
    """A command that is missing from the table could never be called."""
    for path in (SOURCE / "cli").glob("*.py"):
        importlib.import_module(f"shoal.cli.{path.stem}")
    assert set(COMMANDS) == set(NAMES)
    assert all(load_command(name) is COMMANDS[name] for name in NAMES)


PICKLERS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def unpickling(source: str) -> list[str]:
    """List imports of picklers, and calls that pickle internally."""
    tree = ast.parse(source)
    pickler_imports = [name for name in imports(tree) if name.split(".")[0] in PICKLERS]
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return pickler_imports + [ast.unparse(call) for call in calls if pickles(call)]


def pickles(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name.endswith(("_object", "_object_list")) or name in ("torch.load", "torch.save"):
        return True
    return any(keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False" for keyword in call.keywords)


def test_matplotlib_is_imported_in_one_module() -> None:
    users = [module for module, source in sources() for name in imports(ast.parse(source)) if "matplotlib" in name]
    assert set(users) == {"shoal.tools.draw.pictures"}


def test_no_module_pickles() -> None:
    pickling = {module: lines for module, source in sources() if (lines := unpickling(source))}
    assert pickling == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from shelve import open",
        "def f():\n    import cloudpickle as c",
        "torch.load(path, weights_only=True)",
        "dist.broadcast_object_list(things, src=0)",
        "dist.all_gather_object(out, thing)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_a_pickling_line_is_detected(source: str) -> None:
    assert len(unpickling(source)) == 1


WORK_WITHOUT_PICKLE = """
import collections, pickle, sys
from pathlib import Path
import torch
from shoal.config.load import build_config, load_config, to_toml
from shoal.data.prepare import prepare
from shoal.data.tokens import open_tokens
from shoal.data.tokenizer import load_tokenizer
from shoal.records.final_states import compare_replicas
from shoal.engine.checkpoint import Checkpoint, CheckpointFolder, Progress
from shoal.engine.training_state import StateTree

def forbid(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError(f"unpickled {arguments}")

sys.addaudithook(forbid)
folder = Path(sys.argv[1])
(folder / "text.txt").write_text("She sings to the old house.\\n" * 200)
sets = [f"data.path={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}", f"data.tokenizer={sys.argv[2]}"]
(folder / "config.toml").write_text(to_toml(build_config(sets=sets)))
config = load_config(folder / "config.toml")
for _ in range(2):
    prepared = prepare(config.data)
tokens = open_tokens(prepared.train, check=True).tokens
assert load_tokenizer(prepared.tokenizer).decode(tokens[:10]).startswith("She")
tensors = {"model.w": torch.ones(3)}
checkpoints = CheckpointFolder(folder / "checkpoints", keep=1)
saved = checkpoints.save(Checkpoint(Progress(1, 24), tensors, StateTree(tensors, [])))
assert checkpoints.load_latest().model["model.w"].tolist() == [1, 1, 1]
assert compare_replicas({0: saved / "model.safetensors", 1: saved / "model.safetensors"}).byte_equivalent
try:
    pickle.loads(pickle.dumps(collections.OrderedDict()))
except RuntimeError as error:
    print("tripped:", error)
"""


def test_process_groups_are_created_in_one_module() -> None:
    """`sync/process_groups.py` proves every pair of a group; a group created elsewhere accepts foreign connections."""
    makers = {"init_process_group", "new_group", "new_subgroups", "split_group", "ProcessGroupGloo"}
    calls = {
        module_name(path)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in makers
    }
    assert calls == {"shoal.sync.process_groups"}
