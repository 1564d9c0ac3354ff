"""The figures of a run at this moment, for the live page and the terminal, and what viewers are sent."""

from __future__ import annotations

import contextlib
import shlex
import time
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from shoal.config.defaults import SIMILAR_SPEED
from shoal.control.membership.types import NEVER
from shoal.events import read_last_events
from shoal.records.rank_log import as_float, is_step
from shoal.records.scaling import SCALING_FILE
from shoal.terminal import printable_line
from shoal.tools.watch.run_state import LiveState, NodeState
from shoal.tools.watch.step_series import AMOUNT, LOSS, RankState, clean_name, finite, short
from shoal.units import unit_of

# The steps that show the pace of a run.
_RATE_STEPS = 50
# A rank that takes this many times as long as the median rank for its own work is marked.
_SLOW_FACTOR = 1.15
_COMMIT_TAIL_BYTES = 16384
_LONGEST_TEXT = 500
_LONGEST_NAME = 80


def snapshot(state: LiveState) -> dict[str, Any]:
    """Return everything about a run as a JSON document. It does not change what the next `update` returns."""
    return {"summary": summarize(state), **state.everything()}


def update(state: LiveState) -> dict[str, Any] | None:
    """Return what changed since the last update, as a JSON document; None if viewers need the snapshot."""
    changes = state.take_changes()
    return None if changes is None else {"summary": summarize(state), **changes}


def summarize(state: LiveState) -> dict[str, Any]:
    """Return the figures of this moment."""
    ranks = _ranks_of_run(state)
    first = next((rank for rank in ranks if rank.recent and _is_present(state, rank)), None)
    first = first or max(ranks, key=lambda rank: rank.last_step, default=None)
    start = first.start if first is not None else {}
    step, steps = max((rank.last_step for rank in ranks), default=0), start.get("steps")
    newest = first.recent[-1] if first is not None and first.recent else None
    step_s = first.means().step_s if first is not None else 0.0
    status, status_text = _status(state, ranks)
    amount = newest[AMOUNT] if newest is not None else None
    config, job = state.document(state.run.config), state.document(state.run.job)
    commands = job.get("commands")
    command = printable_line(str(commands[-1]), _LONGEST_TEXT) if isinstance(commands, list) and commands else ""
    return {
        "name": state.run.path.name,
        "what": clean_name(_section(config, "run").get("preset")) or _script_name(job.get("script")),
        "on": clean_name(_section(config, "run").get("on") or job.get("on")),
        "command": command,
        "status": status,
        "status_text": status_text,
        "now": time.time(),
        "first_time": state.first_time,
        "last_time": state.last_time,
        "step": max(0, step),
        "steps": steps if is_step(steps) and steps > 0 else None,
        "left_s": _left_s(first, steps) if status == "running" else None,
        "loss": newest[LOSS] if newest is not None else None,
        "val_loss": state.series.val_loss.last_value if state.series.val_loss.last_step >= 0 else None,
        "unit": unit_of(start).name,
        "speed": amount / step_s if amount is not None and step_s else None,
        "speedup": _speedup(state, ranks, step_s, amount),
        "step_s": step_s,
        "predicted": _predicted(state),
        "generation": str(state.members.generation),
        "params": finite(start.get("params")),
        "sync": clean_name(start.get("sync")),
        "wire": clean_name(start.get("wire")),
        "copies": start.get("copies") if is_step(start.get("copies")) else None,
        "device": clean_name(start.get("device")),
        "ranks": _rank_figures(state, ranks),
        "nodes": _node_figures(state, ranks),
        "values": {name: value.last_value for name, value in state.series.values.items()},
        "unreadable": state.files.unreadable,
        "unfinished": state.files.unfinished,
        "loaded": state.files.loaded,
    }


def _status(state: LiveState, ranks: list[RankState]) -> tuple[str, str]:
    """Return the state of the run in one word, and in a sentence where there is more to say."""
    if state.supervision.ended is not None:
        code = state.supervision.ended["code"]
        name = "finished" if not code else "interrupted" if code == 130 else "failed"
        return name, state.run.name_in(printable_line(str(state.supervision.ended.get("seen") or ""), _LONGEST_TEXT))
    if state.supervision.started and not state.supervision.is_alive:
        if state.is_dead:
            verb = "run" if state.document(state.run.job).get("script") else "train"
            resume = f"; continue it: shoal {verb} --resume {shlex.quote(str(state.run.path))}"
            return "unfinished", f"all of its processes have ended{resume if state.run.has_checkpoint() else ''}"
        return "lost", "its supervisor is not running on this machine; the ranks may go on without it"
    ends = [rank.ended for rank in ranks]
    if not state.supervision.started and ends and all(ends):
        return ("finished" if set(ends) == {"finished"} else "interrupted"), ""
    present = [rank for rank in ranks if _is_present(state, rank)]
    if any(rank.is_lost for rank in present):
        return "regrouping", "between two generations: agreeing on the members"
    launched_at = as_float(state.supervision.started.get("time"), 0.0)
    if all(rank.last_step < 0 or as_float(rank.start.get("time"), 0.0) < launched_at for rank in ranks):
        doing = next((rank.doing for rank in ranks if rank.doing), "")
        return "starting", printable_line(doing, _LONGEST_TEXT)
    return "running", ""


def _ranks_of_run(state: LiveState) -> list[RankState]:
    """Return the ranks of the newest launch, in order: a run resumed on fewer ranks leaves files of the others."""
    ranks = [state.series.ranks[number] for number in sorted(state.series.ranks)]
    nodes = {name for name, node in state.nodes.items() if node.launch == state.newest_launch[1]}
    nodes |= set(state.members.nodes)
    return [rank for rank in ranks if not nodes or rank.node in nodes] or ranks


def _is_present(state: LiveState, rank: RankState) -> bool:
    if state.members.ids and rank.rank not in state.members.ids:
        return False
    return _is_node_present(state, rank.node)


def _is_node_present(state: LiveState, name: str) -> bool:
    if state.is_dead:
        return False
    # Agents decide on a generation a moment before their ranks enter it.
    if state.members.are_decided:
        return name in state.members.nodes
    on_node = [rank.rank for rank in state.series.ranks.values() if rank.node == name]
    return not state.members.ids or not on_node or any(rank in state.members.ids for rank in on_node)


def _rank_figures(state: LiveState, ranks: list[RankState]) -> list[dict[str, Any]]:
    work = {rank.rank: rank.means().compute_s for rank in ranks if rank.recent and _is_present(state, rank)}
    typical = median(work.values()) if len(work) > 1 else 0.0
    figures = []
    for rank in ranks:
        means = rank.means()
        slow = work[rank.rank] / typical if rank.rank in work and typical > 0 else 1.0
        figures.append(
            {
                "rank": rank.rank,
                "node": rank.node,
                "is_present": _is_present(state, rank),
                "step": max(0, rank.last_step),
                "step_s": short(means.step_s),
                "compute_s": short(means.compute_s),
                "exposed_s": short(means.exposed_s),
                "wait_s": short(means.wait_s),
                "slow": short(slow) if slow >= _SLOW_FACTOR else None,
                "threads": finite(rank.start.get("threads")),
                "doing": printable_line(rank.doing, _LONGEST_NAME),
            }
        )
    return figures


def _node_figures(state: LiveState, ranks: list[RankState]) -> list[dict[str, Any]]:
    names = [name for name, node in state.nodes.items() if node.launch == state.newest_launch[1]]
    names = sorted({*names, *state.members.nodes, *(rank.node for rank in ranks)})
    figures = []
    for name in names:
        node = state.nodes.get(name, NodeState(name))
        own = [rank for rank in ranks if rank.node == name]
        start = own[0].start if own else {}
        hardware = start.get("hardware")
        facts: dict[str, Any] = hardware if isinstance(hardware, dict) else {}
        is_present = _is_node_present(state, name) and not node.has_left
        sent = [rate for rank in own if is_present and (rate := rank.means().sent_bytes_per_s) is not None]
        figures.append(
            {
                "name": name,
                "address": node.address,
                "interface": node.interface or clean_name(start.get("interface")),
                "link_mbps": finite(start.get("link_mbps")),
                "cores": node.cores or finite(facts.get("cores")),
                "cpu": clean_name(facts.get("cpu")),
                "memory_bytes": finite(facts.get("memory_bytes")),
                "ranks": [rank.rank for rank in own],
                "is_present": is_present,
                "generation": str(max((rank.generation for rank in own), default=NEVER)),
                "sent_bps": short(8 * sum(sent)) if sent else None,
                "sample": node.sample,
            }
        )
    return figures


def _left_s(rank: RankState | None, steps: Any) -> float | None:
    """Return the time left by the pace of the newest steps, evaluations and checkpoints included."""
    if rank is None or not is_step(steps) or len(rank.recent) < 2:
        return None
    times = [float(record[1] or 0.0) for record in rank.newest(_RATE_STEPS)]
    between = [after - before for before, after in pairwise(times) if after > before]
    if not between:
        return None
    # A recovery is not a part of the pace.
    usual = 10 * median(between)
    return max(0, steps - rank.last_step) * fmean(gap for gap in between if gap <= usual)


def _speedup(state: LiveState, ranks: list[RankState], step_s: float, amount: float | None) -> dict[str, Any] | None:
    """Compare the speed with that of one rank or node: measured beside this run, or estimated.

    The estimate is the time that the fastest would take for the shares of all.
    """
    points = state.document(state.run.path / SCALING_FILE).get("points")
    for point in points if isinstance(points, list) else ():
        alone = finite(point.get("tokens_per_s")) if isinstance(point, dict) and point.get("ranks") == 1 else None
        if alone and amount and step_s:
            return {"ratio": short(amount / step_s / alone), "than": "one rank", "is_estimate": False}
    present = [rank for rank in ranks if _is_present(state, rank) and rank.recent]
    if len(present) < 2 or not step_s:
        return None
    shares = _last_shares(state.run.commits)
    if not shares.keys() >= {rank.rank for rank in present}:
        shares = {rank.rank: 1 for rank in present}
    has_nodes = len({rank.node for rank in present}) > 1
    rates: dict[str, float] = {}
    for rank in present:
        name = rank.node if has_nodes else str(rank.rank)
        work_s = rank.means().work_s
        if not work_s:
            return None
        rates[name] = rates.get(name, 0.0) + shares[rank.rank] / work_s
    # The optimizer and the rest do not divide.
    rest_s = max(rank.means().compute_s - rank.means().work_s for rank in present)
    fastest = max(rates.values())
    alone_s = sum(shares[rank.rank] for rank in present) / fastest + max(0.0, rest_s)
    which = "one" if fastest <= SIMILAR_SPEED * min(rates.values()) else "the fastest"
    than = f"{which} {'node' if has_nodes else 'rank'}"
    return {"ratio": short(alone_s / step_s), "than": than, "is_estimate": True}


def _last_shares(commits: Path) -> dict[int, int]:
    """Return the samples of every member in the newest step of the ledger; nothing if it has none."""
    with contextlib.suppress(OSError):
        for commit in reversed(read_last_events(commits, _COMMIT_TAIL_BYTES)):
            match commit:
                case {"members": [*members], "shares": [*shares]} if len(members) == len(shares):
                    if all(is_step(number) for number in (*members, *shares)) and all(shares):
                        return dict(zip(members, shares, strict=True))
    return {}


def _predicted(state: LiveState) -> dict[str, float] | None:
    prediction = state.document(state.run.prediction)
    names = ("step_s", "compute_s", "exposed_s", "wait_s", "optimizer_s", "other_s")
    numbers = {name: number for name in names if (number := finite(prediction.get(name))) is not None}
    return numbers if numbers.get("step_s", 0.0) > 0 else None


def _section(document: dict[str, Any], name: str) -> dict[str, Any]:
    section = document.get(name)
    return section if isinstance(section, dict) else {}


def _script_name(script: Any) -> str:
    words = [word for word in script if isinstance(word, str)] if isinstance(script, list) else []
    return clean_name(words[1] if words[:1] == ["-m"] and len(words) > 1 else Path(words[0]).name) if words else ""
