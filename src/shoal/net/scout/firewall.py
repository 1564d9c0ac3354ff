"""Which firewall stands on this machine, as far as whoever runs us may look."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

_TOOLS = ("ufw", "firewall-cmd", "nft", "iptables")
_SYSTEM_FOLDERS = "/usr/sbin:/sbin:/usr/local/sbin"
_UFW_SETTINGS = Path("/etc/ufw/ufw.conf")
_WITHIN_S = 3.0


def observe() -> dict[str, Any]:
    """`chains`: those that incoming or outgoing packets pass and that may drop them; None where we may not look."""
    tools = {name: path for name in _TOOLS if (path := _find(name))}
    return {
        "tools": list(tools),
        "ufw": "ufw" in tools and _ufw_is_on(),
        "firewalld": "firewall-cmd" in tools and _says(["systemctl", "is-active", "firewalld"]).strip() == "active",
        "chains": _chains(tools["nft"]) if "nft" in tools else None,
    }


def blocking_chains(ruleset: dict[str, Any]) -> list[dict[str, str]]:
    """Of what `nft -j list ruleset` prints. A chain that hands on to others may find a drop there."""
    entries = ruleset.get("nftables", [])
    rules = [entry["rule"] for entry in entries if "rule" in entry]
    found = []
    for chain in (entry["chain"] for entry in entries if "chain" in entry):
        family, table, name = place = (chain["family"], chain["table"], chain["name"])
        own = [rule for rule in rules if (rule["family"], rule["table"], rule["chain"]) == place]
        blocks = chain.get("policy") == "drop" or any(_may_drop(rule) for rule in own)
        if chain.get("hook") in ("input", "output") and family in ("ip", "ip6", "inet") and blocks:
            found.append({"family": family, "table": table, "name": name, "hook": chain["hook"]})
    return found


def _may_drop(rule: dict[str, Any]) -> bool:
    return any(key in ("drop", "reject", "jump", "goto", "vmap") for part in rule.get("expr", []) for key in part)


def _chains(nft: str) -> list[dict[str, str]] | None:
    try:
        return blocking_chains(json.loads(_says([nft, "-j", "list", "ruleset"])))
    except ValueError:
        return None


def _ufw_is_on() -> bool:
    try:
        return "ENABLED=yes" in _UFW_SETTINGS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{_SYSTEM_FOLDERS}")


def _says(argv: list[str]) -> str:
    """Nothing when it fails, or takes its time."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_WITHIN_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
