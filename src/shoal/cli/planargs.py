"""What the words of `shoal plan` mean: which nodes, which workload, which lever."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from shoal.config.load import build_config
from shoal.config.presets import PRESETS, depth_overrides, did_you_mean
from shoal.config.schema import Config, TrainConfig
from shoal.config.wire import WireName
from shoal.cost.advice import Option
from shoal.cost.lever import Lever, Sync, lever_of
from shoal.cost.plan import Plan
from shoal.cost.predict import speeds
from shoal.cost.sheet import positive
from shoal.cost.workload import GRADIENT_BYTES, Workload, bare_workload, workload_of
from shoal.errors import UsageError

MOST_NODES = 16_384
MOST_ROWS = 64
_RANGE = re.compile(r"(\d{1,9})(?:\.\.(\d{1,9}))?")
_WITH_NUMBER = re.compile(r"([a-z0-9]+)(?::(\d{1,9}))?")

# A bare model is planned with what GPT-2 had, and a batch that a few machines can share.
BARE_SEQ_LEN = 1024
BARE_BATCH = 16

_FLAGS = {
    "global_batch": "train.global_batch",
    "micro_batch": "train.micro_batch",
    "scaling": "train.scaling",
    "seq_len": "model.seq_len",
}
# What a bare model has no place for.
_NOT_BARE = ("preset", "config", "depth", "set_", "seq_len")
# Settings that a plan decides itself.
_OURS = ("train.global_batch", "sync.mode", "sync.every", "sync.accumulate", "sync.wire", "run.weights")
_EVERY = {"local": 8, "diloco": 100, "streaming": 100}


def parse_nodes(text: str) -> list[int]:
    """`3`, `1..8`, `1,2,4` or `1,2,4..8`."""
    found: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else 0
        if not 1 <= first <= last <= MOST_NODES:
            raise _no_nodes(text)
        found += range(first, last + 1)
    if len(found) > MOST_ROWS:
        raise UsageError(
            f"--nodes {text} are {len(found)} rows",
            why=f"a plan has {MOST_ROWS} at most",
            fix="name those that matter: --nodes 1,2,4,8,16,32,64",
        )
    return sorted(set(found))


def one_preset(words: list[str] | None) -> str | None:
    if words and len(words) > 1:
        raise UsageError(
            f"{' '.join(words)} are several presets",
            why="a plan is made for one model; several runs go with --calibrate",
            fix=f"shoal plan {words[0]}",
        )
    return words[0] if words else None


def _no_nodes(text: str) -> UsageError:
    return UsageError(
        f"--nodes {text} names no numbers of nodes",
        why=f"they count from 1 to {MOST_NODES:,}, the smaller one first",
        fix="write for example: --nodes 1..8, --nodes 4 or --nodes 1,2,4",
    )


def what_to_plan(given: dict[str, Any], most_ranks: int) -> tuple[Workload, Lever, list[str]]:
    """And what has to be said about it."""
    config = None
    if given["params"] is not None:
        asked = bare(given)
    else:
        config = make_config(given)
        asked = preset_workload(config, given)
    lever = parse_lever(config, given["wire"], given["sync"], given["accumulate"])
    workload = fit_batch(asked, most_ranks, is_batch_stated(asked, given))
    notes = []
    if workload != asked:
        notes.append(
            f"global batch {workload.train.global_batch} instead of {asked.train.global_batch}: each of {most_ranks} "
            "ranks needs a sequence"
        )
    return workload, lever, notes


def make_config(given: dict[str, Any]) -> Config:
    overrides = depth_overrides(given["depth"]) if given["depth"] is not None else {}
    for flag, key in _FLAGS.items():
        if given[flag] is not None:
            section, name = key.split(".")
            overrides.setdefault(section, {})[name] = given[flag]
    return build_config(given["preset"] or "grammar", given["config"], overrides, given["set_"] or [])


def bare(given: dict[str, Any]) -> Workload:
    """Of `--params` alone; `--tokens` is what a step of the whole world computes."""
    if (extra := next((name for name in _NOT_BARE if given[name]), None)) is not None:
        named = given["preset"] if extra == "preset" else "--" + extra.rstrip("_").replace("_", "-")
        raise UsageError(
            f"--params does not go with {named}",
            why="it stands for a model of which nothing but the size is known",
            fix="leave one of them out",
        )
    _refuse_two_batches(given)
    parameters = round(positive("--params", given["params"], 1e14))
    batch = BARE_BATCH if given["global_batch"] is None else given["global_batch"]
    if given["tokens"] is not None:
        batch = _sequences(given["tokens"], BARE_SEQ_LEN)
    changes = {name: given[name] for name in ("micro_batch", "scaling") if given[name] is not None}
    config = build_config(flags={"train": {"global_batch": batch, "base_batch": batch, **changes}})
    return bare_workload(parameters, BARE_SEQ_LEN, config.train, gradient_type(given["grad_dtype"]))


def preset_workload(config: Config, given: dict[str, Any]) -> Workload:
    _refuse_two_batches(given)
    if given["tokens"] is None:
        return workload_of(config, gradient_type(given["grad_dtype"]))
    sequences = _sequences(given["tokens"], config.model.seq_len)
    return workload_of(config, gradient_type(given["grad_dtype"])).with_batch(sequences)


def _refuse_two_batches(given: dict[str, Any]) -> None:
    if given["tokens"] is not None and given["global_batch"] is not None:
        raise UsageError(
            "--tokens does not go with --global-batch",
            why="both say how large a step of the whole world is",
            fix="leave one of them out",
        )


def _sequences(tokens: float, seq_len: int) -> int:
    return max(1, round(positive("--tokens", tokens, 1e12) / seq_len))


def fit_batch(workload: Workload, ranks: int, is_stated: bool) -> Workload:
    """A preset's own batch grows until every rank has a micro-batch; one that was asked for stays, and is refused."""
    train = workload.train
    each = train.micro_batch or 1
    if is_stated or train.scaling == "weak" or train.global_batch >= each * ranks:
        return workload
    return workload.with_batch(each * ranks)


def is_batch_stated(workload: Workload, given: dict[str, Any]) -> bool:
    """By a flag, a setting or a file; saying the preset's own number again does not count."""
    if given["params"] is not None:
        return given["global_batch"] is not None or given["tokens"] is not None
    return given["global_batch"] is not None or workload.train.global_batch != _preset_batch(given)


def parse_lever(config: Config | None, wire: str | None, sync: str | None, accumulate: int | None) -> Lever:
    """From the configuration, and from flags that know levers which no training can use yet."""
    lever = Lever() if config is None else lever_of(config.sync)
    if accumulate is not None:
        lever = lever.with_(accumulation=round(positive("--accumulate", accumulate, 1e6)))
    if wire is not None:
        name, number = _named("--wire", wire, get_args(WireName))
        lever = lever.with_(wire=name, **({"rank": number} if number else {}))
    if sync is not None:
        name, number = _named("--sync", sync, get_args(Sync))
        lever = lever.with_(sync=name, every=number or _EVERY.get(name, 1) if name in _EVERY else 1)
    return lever


def _named(flag: str, text: str, known: tuple[str, ...]) -> tuple[str, int]:
    match = _WITH_NUMBER.fullmatch(text.strip().lower())
    if match is None or match[1] not in known or match[2] == "0":
        raise UsageError(
            f"{flag} {text!r} is not known",
            why=did_you_mean(text.partition(":")[0], known),
            fix=f"use one of: {', '.join(known)}; with a number as in powersgd:4 or diloco:100",
        )
    return match[1], int(match[2] or 0)


def gradient_type(text: str) -> Any:
    if text not in GRADIENT_BYTES:
        raise UsageError(
            f"--grad-dtype {text!r} is not known", why=did_you_mean(text, GRADIENT_BYTES), fix="use fp32 or bf16"
        )
    return text


def train_words(given: dict[str, Any], plan: Plan, option: Option) -> list[str]:
    """The command that does what was planned; every flag of the plan that a training has too is in it."""
    lever = option.lever
    words = ["train", given["preset"] or "grammar", "--on", given["on"]]
    for flag in ("config", "depth", "seq_len", "scaling", "micro_batch"):
        words += ["--" + flag.replace("_", "-"), str(given[flag])] if given[flag] is not None else []
    batch = plan.workload.accumulated(lever.accumulation).train.global_batch
    words += ["--global-batch", str(batch)] if batch != _preset_batch(given) else []
    # A file with settings may say how to synchronise, and how many batches make a step.
    named = ["--sync", lever.sync, "--accumulate", "1"] if given["config"] is not None else []
    words += ["--sync", lever.sync, "--every", str(lever.every)] if lever.every > 1 else named
    kept = [setting for setting in given["set_"] or [] if setting.partition("=")[0].strip() not in _OURS]
    settings = kept + ([f"sync.wire={lever.wire_setting}"] if lever.wire != "fp32" else [])
    if lever.balanced:
        weights = speeds(plan.workload, plan.setting.speed, option.row.prediction.world_size)
        settings.append("run.weights=" + "/".join(f"{weight:g}" for weight in weights))
    return words + [word for setting in settings for word in ("--set", setting)]


def _preset_batch(given: dict[str, Any]) -> int:
    own = PRESETS[given["preset"] or "grammar"].get("train", {})
    return int(own.get("global_batch", TrainConfig().global_batch))


def check_picture(path: Path) -> None:
    if path.suffix != ".png":
        raise UsageError(f"{path} is no picture", why="-o writes a PNG", fix=f"write -o {path.with_suffix('.png')}")
