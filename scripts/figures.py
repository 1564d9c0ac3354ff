"""Print how large the program is and how it is divided: `python scripts/figures.py`, with `--json` for a script.

tests/unit/test_ratchet.py compares these figures with tests/ratchet.json. `--write` puts lower ones into that file, and
`--raise "engine: REASON"` higher ones too, with the reason for them.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE, RATCHET = ROOT / "src", ROOT / "tests/ratchet.json"
LONG_FUNCTION = 60
LONG_CLASS = (15, 30)  # fields, methods

Function = ast.FunctionDef | ast.AsyncFunctionDef
Figures = dict[str, dict[str, int]]


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """Return the package below `shoal` that has the module; modules beside the packages are `base`, and `shoal_lab` is
    `lab`."""
    top, *parts = module.split(".")
    if top == "shoal_lab":
        return "lab"
    return parts[0] if len(parts) > 1 else "base"


def imported_modules(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield from (module for module in (name, node.module) if module in modules)


def count_fields(class_: ast.ClassDef) -> int:
    """Count the annotated fields of the class, and the attributes that its methods assign."""
    fields = {
        node.target.id for node in class_.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for method in class_.body:
        if isinstance(method, Function):
            fields |= {
                node.attr
                for node in ast.walk(method)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
                if isinstance(node.value, ast.Name) and node.value.id == "self"
            }
    return len(fields)


def is_record(class_: ast.ClassDef) -> bool:
    """Whether the class only holds fields, such as those of a saved file."""
    return not any(isinstance(node, Function) and not node.decorator_list for node in class_.body)


def measure() -> Figures:
    """Return the figures: by package where that says more, otherwise under `all`."""
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if path.name != "__init__.py"]
    trees = {module_name(path): ast.parse(path.read_text()) for path in paths}
    lines: Counter[str] = Counter()
    for path in paths:
        lines[package_of(module_name(path))] += sum(bool(line.strip()) for line in path.read_text().splitlines())
    importers: Counter[str] = Counter()
    for module, tree in trees.items():
        importers.update(set(imported_modules(tree, set(trees))) - {module})
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in nodes if isinstance(node, Function)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef) and not is_record(node)]
    fields = [count_fields(class_) for class_ in classes]
    methods = [sum(isinstance(node, Function) for node in class_.body) for class_ in classes]
    whole = {
        "lines": sum(lines.values()),
        "modules": len(trees),
        "modules with one importer": sum(count == 1 for count in importers.values()),
        "longest function": max(lengths),
        f"functions above {LONG_FUNCTION} lines": sum(length > LONG_FUNCTION for length in lengths),
        "most fields of a class": max(fields),
        "most methods of a class": max(methods),
        f"classes above {LONG_CLASS[0]} fields or {LONG_CLASS[1]} methods": sum(
            field > LONG_CLASS[0] or method > LONG_CLASS[1] for field, method in zip(fields, methods, strict=True)
        ),
    }
    return {"all": whole, "lines by package": dict(sorted(lines.items()))}


def lower(recorded: Figures, measured: Figures) -> Figures:
    """Return the recorded figures with every one that is lower by now."""
    return {
        title: {name: min(value, recorded.get(title, {}).get(name, value)) for name, value in values.items()}
        for title, values in measured.items()
    }


def describe(figures: Figures) -> str:
    return "".join(
        f"{title}:\n" + "".join(f"  {value:>7,}  {name}\n" for name, value in values.items())
        for title, values in figures.items()
    )


def main() -> None:
    figures, document = measure(), json.loads(RATCHET.read_text())
    match sys.argv[1:]:
        case ["--write"]:
            document["figures"] = lower(document["figures"], figures)
        case ["--raise", reason]:
            document["raised"].append(reason)
            document["figures"] = figures
        case options:
            sys.stdout.write(json.dumps(figures, indent=2) + "\n" if options == ["--json"] else describe(figures))
            return
    RATCHET.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
