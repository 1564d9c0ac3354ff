"""Checks manifests against the API schema of Kubernetes; see scripts/kubernetes_schema.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SCHEMA = Path(__file__).parent / "schemas/kubernetes-1.31.0.json"
_KINDS: dict[str, type | tuple[type, ...]] = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "null": type(None),
    "number": (int, float),
    "object": dict,
    "string": str,
}


def find_faults(document: dict[str, Any]) -> list[str]:
    """Return what the schema of the document's kind does not allow: unknown or missing fields, wrong types."""
    definitions: dict[str, Any] = json.loads(_SCHEMA.read_text(encoding="utf-8"))
    [name] = [name for name in definitions if name.startswith("io.k8s.api.") and name.endswith(f".{document['kind']}")]
    return list(_faults(document, definitions[name], definitions, document["kind"]))


def _faults(value: Any, schema: dict[str, Any], definitions: dict[str, Any], place: str) -> Iterator[str]:
    if "$ref" in schema:
        yield from _faults(value, definitions[schema["$ref"]], definitions, place)
        return
    if "oneOf" in schema:
        if not any(not list(_faults(value, one, definitions, place)) for one in schema["oneOf"]):
            yield f"{place} is {value!r}"
        return
    kinds = schema.get("type", [])
    allowed = [_KINDS[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)]
    if allowed and not any(isinstance(value, kind) and (kind is bool or value is not True) for kind in allowed):
        yield f"{place} is {value!r}, and not {kinds}"
    if value not in schema.get("enum", [value]):
        yield f"{place} is {value!r}, and not one of {schema['enum']}"
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from _faults(item, schema["items"], definitions, f"{place}[{index}]")
    if isinstance(value, dict):
        yield from (f"{place} has no {name}" for name in schema.get("required", []) if name not in value)
        others = schema.get("additionalProperties", {})
        for name, item in value.items():
            inner = schema.get("properties", {}).get(name, others)
            if inner is False:
                yield f"{place} has an unknown field {name}"
            elif isinstance(inner, dict):
                yield from _faults(item, inner, definitions, f"{place}.{name}")
