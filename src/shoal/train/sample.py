"""`python -m shoal.train.sample RUN`: generate texts from a run's newest checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from shoal.config.defaults import SEED
from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.control.rank_env import use_private_caches
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.engine.checkpoint import CheckpointFolder
from shoal.engine.training_state import TrainingState
from shoal.errors import ShoalError, UsageError
from shoal.model.gpt import GPT
from shoal.run_folder import RunFolder
from shoal.terminal import protect_terminal
from shoal.train.worker import report_error

_RULE = "-" * 20  # between texts of several lines
_SHOW_EVERY_S = 0.05


def main() -> int:
    protect_terminal()
    parser = argparse.ArgumentParser(prog="python -m shoal.train.sample")
    parser.add_argument("run", type=Path)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--length", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--width", type=int, help="columns of the terminal that shows an error")
    options = parser.parse_args()
    try:
        use_private_caches()
        run = RunFolder.open(options.run)
        between = "\n" if has_sentences(load_config(run.config)) else f"\n{_RULE}\n"
        if options.json:
            print(json.dumps({"sentences": write_texts(run, options)}, ensure_ascii=False), flush=True)
            return 0
        stream = TextStream()
        texts = write_texts(run, options, stream.show)
        stream.show(between.join(texts) + "\n", is_whole=True)
    except ShoalError as error:
        return report_error(error, options.width)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; Python would fail again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


class TextStream:
    """Print a growing text as it becomes longer."""

    def __init__(self) -> None:
        self._printed = ""

    def show(self, text: str, is_whole: bool = False) -> None:
        # The next token may complete a character, and line ends at the end of a text are not printed.
        stable = text if is_whole else text.rstrip("\n\ufffd")
        sys.stdout.write(stable[len(self._printed) :])
        sys.stdout.flush()
        self._printed = stable


def has_sentences(config: Config) -> bool:
    """Return whether the run trained on the sentences that shoal generates, one a line."""
    return config.data.path is None and config.data.builtin == "grammar"


def write_texts(
    run: RunFolder, options: argparse.Namespace, show: Callable[[str], None] = lambda text: None
) -> list[str]:
    """Generate texts that start a line and have `length` tokens; those of the generated sentences end with the line.

    `show` is called with the first text as it becomes longer; the others are made at the same time. A tokenizer without
    a newline has no line start: there the first token of the vocabulary replaces it, not shown.
    """
    config = load_config(run.config)
    damaged: list[str] = []
    checkpoint = CheckpointFolder(run.checkpoints, config.train.keep_checkpoints).load_latest(
        on_error=lambda error: damaged.append(error.seen)
    )
    for seen in damaged:
        sys.stderr.write(f"warning: {seen}; the checkpoint of step {checkpoint.progress.step} is used\n")
    model = GPT(config.model).eval()
    TrainingState(model).load_weights(checkpoint.model)
    tokenizer = load_tokenizer(run.tokenizer)
    ids = tokenizer.encode(_line_start(tokenizer) + options.prompt).astype("int64").tolist()
    hidden_tokens = 0 if ids else 1
    start = torch.tensor(ids or [0], dtype=torch.int64)
    generator = torch.Generator().manual_seed(options.seed)

    def to_text(row: torch.Tensor) -> str:
        text = tokenizer.decode(row.tolist()[hidden_tokens:]).removeprefix("\n")
        return _printable(text.split("\n")[0] if has_sentences(config) else text.rstrip("\n"))

    shown_at = -_SHOW_EVERY_S
    for rows in model.generate(start.repeat(options.count, 1), options.length, options.temperature, generator):
        # Not for every token: all of a long text is decoded each time.
        if time.monotonic() - shown_at >= _SHOW_EVERY_S:
            show(to_text(rows[0]))
            shown_at = time.monotonic()
    return [to_text(row) for row in rows]


def _line_start(tokenizer: Tokenizer) -> str:
    try:
        tokenizer.encode("\n")
    except UsageError:
        return ""
    return "\n"


def _printable(text: str) -> str:
    """Replace unprintable characters: a byte-level model can write those that control a terminal."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)


if __name__ == "__main__":
    sys.exit(main())
