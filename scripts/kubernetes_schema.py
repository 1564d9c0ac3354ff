"""Reduces the API schema of Kubernetes to what a Job and a Service can contain, for tests without Internet.

    python -m pip download --no-deps kubernetes-validate
    python scripts/kubernetes_schema.py kubernetes_validate-*.whl

The package carries the schemas that Kubernetes publishes for each of its versions (Apache-2.0).
"""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

VERSION = "1.31.0"
TARGET = Path(__file__).parent.parent / "tests/support/schemas" / f"kubernetes-{VERSION}.json"
ROOTS = ("io.k8s.api.batch.v1.Job", "io.k8s.api.core.v1.Service")
_WORDS = {"description", "default", "format"}


def reduce(definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the definitions that the roots need, without texts and extensions."""
    kept: dict[str, Any] = {}

    def strip(node: Any, is_names: bool = False) -> Any:
        if isinstance(node, list):
            return [strip(item) for item in node]
        if not isinstance(node, dict):
            return node
        if not is_names and "$ref" in node:
            name = node["$ref"].rpartition("/")[2]
            if name not in kept:
                kept[name] = {}
                kept[name] = strip(definitions[name])
            return {"$ref": name}
        return {
            key: strip(value, is_names=key == "properties")
            for key, value in node.items()
            if is_names or not (key in _WORDS or key.startswith("x-"))
        }

    for root in ROOTS:
        kept[root] = strip(definitions[root])
    return kept


def main(wheel: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        name = f"kubernetes_validate/kubernetes-json-schema/v{VERSION}-local-strict/_definitions.json"
        document = json.loads(archive.read(name))["$defs"]
    TARGET.write_text(json.dumps(reduce(document), separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
