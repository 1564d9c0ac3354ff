"""Parts of the commands that findings print."""

from __future__ import annotations

import shlex

from shoal.net.scene import Facts, Scene


def sudo(facts: Facts) -> str:
    """Nothing for root, who in a container often has no sudo either."""
    return "" if facts.get("machine", {}).get("is_root") else "sudo "


def again(scene: Scene) -> str:
    return f"shoal doctor --on {shlex.quote(scene.on)}" if scene.on else "shoal doctor"


def same_versions(scene: Scene, otherwise: str) -> str:
    """On machines that shoal sets up, from here; on this one alone there is only `otherwise` to be typed."""
    if not scene.on or scene.on.partition(":")[0] in ("local", "lab"):
        return otherwise
    return f"shoal setup {shlex.quote(scene.on)}"
