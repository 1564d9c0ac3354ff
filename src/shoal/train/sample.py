"""`python -m shoal.train.sample RUN`: generate sentences from a run's newest checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch

from shoal.config.defaults import SEED
from shoal.config.load import load_config
from shoal.control.rank_env import use_private_caches
from shoal.data.tokenizer import Tokenizer, load_tokenizer
from shoal.engine.checkpoint import CheckpointFolder
from shoal.engine.training_state import TrainingState
from shoal.errors import ShoalError, UsageError
from shoal.model.gpt import GPT
from shoal.run_folder import RunFolder
from shoal.terminal import protect_terminal
from shoal.train.worker import report_error


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
        sentences = write_sentences(RunFolder.open(options.run), options)
    except ShoalError as error:
        return report_error(error, options.width)
    text = json.dumps({"sentences": sentences}, ensure_ascii=False) if options.json else "\n".join(sentences)
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe; Python would fail again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def write_sentences(run: RunFolder, options: argparse.Namespace) -> list[str]:
    """Generate sentences that start a line and end with it, or after `length` tokens.

    A tokenizer without a newline has no line start: there the first token of the vocabulary replaces it, not shown.
    """
    config = load_config(run.config)
    checkpoint = CheckpointFolder(run.checkpoints, config.train.keep_checkpoints).load_latest()
    model = GPT(config.model).eval()
    TrainingState(model).load_weights(checkpoint.model)
    tokenizer = load_tokenizer(run.tokenizer)
    ids = tokenizer.encode(_line_start(tokenizer) + options.prompt).astype("int64").tolist()
    hidden_tokens = 0 if ids else 1
    start = torch.tensor(ids or [0], dtype=torch.int64)
    generator = torch.Generator().manual_seed(options.seed)
    rows = model.generate(start.repeat(options.count, 1), options.length, options.temperature, generator)
    texts = (tokenizer.decode(row.tolist()[hidden_tokens:]).removeprefix("\n") for row in rows)
    return [_printable(text.split("\n")[0]) for text in texts]


def _line_start(tokenizer: Tokenizer) -> str:
    try:
        tokenizer.encode("\n")
    except UsageError:
        return ""
    return "\n"


def _printable(text: str) -> str:
    """Replace unprintable characters: a byte-level model can write those that control a terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


if __name__ == "__main__":
    sys.exit(main())
