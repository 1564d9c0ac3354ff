"""Presets: named starting points. Each lists only what differs from the defaults of the schema."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from shoal.config.sync_choice import join_or
from shoal.errors import ConfigError

Overrides = dict[str, dict[str, Any]]

HEAD_WIDTH = 64


def _gpt2(layers: int, heads: int, width: int, lr: float) -> Overrides:
    """Return the settings of a model with GPT-2's vocabulary and context."""
    return {
        "model": {"layers": layers, "heads": heads, "width": width, "seq_len": 1024, "vocab_size": 50_257},
        "data": {"tokenizer": "bpe", "bpe_vocab": 8192},
        "train": {
            "global_batch": 4,
            "base_batch": 4,
            "micro_batch": 1,
            "lr": lr,
            "warmup_steps": 20,
            "beta2": 0.95,
            "eval_sequences": 8,
        },
    }


PRESETS: dict[str, Overrides] = {
    # The demo, of depth 3: learns English verb forms from a generated corpus in a minute on two cores.
    "grammar": {},
    # nanoGPT's CPU setting for tiny Shakespeare, which reaches a validation loss of 1.88 there in 2,000 steps. Without
    # `data.path` it trains on the two plays that come with shoal, a quarter of that text.
    "shakespeare-char": {
        "model": {"layers": 4, "heads": 4, "width": 128, "seq_len": 64},
        "data": {"builtin": "shakespeare", "tokenizer": "char"},
        "train": {
            "steps": 2000,
            "global_batch": 12,
            "base_batch": 12,
            "lr": 1e-3,
            "warmup_steps": 100,
            "eval_every": 250,
            "checkpoint_every": 250,
        },
    },
    # GPT-2 small as published: 124,439,808 parameters with its own vocabulary and context.
    "gpt2-124m": _gpt2(layers=12, heads=12, width=768, lr=6e-4),
    # The next sizes of the same family, with the shapes and rates of GPT-3 Medium and Large: 355M and 759M parameters.
    "gpt2-350m": _gpt2(layers=24, heads=16, width=1024, lr=3e-4),
    "gpt2-760m": _gpt2(layers=24, heads=16, width=1536, lr=2.5e-4),
}


PRESET_NAMES = join_or(tuple(PRESETS))


def preset(name: str) -> Overrides:
    if name not in PRESETS:
        raise ConfigError(
            f"there is no preset {name!r}",
            why=did_you_mean(name, PRESETS) or "a preset is a named starting configuration",
            fix=f"use one of: {', '.join(PRESETS)}",
        )
    return PRESETS[name]


def depth_overrides(depth: int | None) -> Overrides:
    """Derive width and heads from the depth: 64 wide per head and one head per layer, as in GPT-2 (depth 12)."""
    if depth is None:
        return {}
    if depth < 1:
        raise ConfigError(f"--depth {depth}: a model has at least one layer", fix="use --depth 3 (the demo's size)")
    return {"model": {"layers": depth, "heads": depth, "width": HEAD_WIDTH * depth}}


def flag_of(name: str) -> str:
    """Return the flag of a parameter: `--step-s` for `step_s`, `--set` for `set_`."""
    return "--" + name.rstrip("_").replace("_", "-")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `did you mean 'train.steps'?`, or '' if no name is similar. Of equally similar names it is the first."""
    # Without the dashes of options, by which --foo would resemble --on.
    similarity = {name: difflib.SequenceMatcher(None, name.lstrip("-"), word.lstrip("-")).ratio() for name in known}
    nearest = max(similarity, key=similarity.__getitem__, default=None)
    return f"did you mean {nearest!r}?" if nearest is not None and similarity[nearest] >= 0.5 else ""
