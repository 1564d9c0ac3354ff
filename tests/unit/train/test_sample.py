"""Texts that a trained model generates."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from shoal.config.load import build_config, to_toml
from shoal.data.tokenizer import build_tokenizer, save_tokenizer
from shoal.engine.checkpoint import Checkpoint, CheckpointFolder, Progress
from shoal.engine.training_state import StateTree, TrainingState
from shoal.model.gpt import GPT
from shoal.run_folder import RunFolder
from shoal.train.sample import write_sentences


@pytest.mark.parametrize(("prompt", "begins"), [("", ""), ("sea", "sea")])
def test_a_model_of_a_text_without_line_ends_generates_samples(tmp_path: Path, prompt: str, begins: str) -> None:
    run = RunFolder.create(tmp_path / "run")
    tokenizer = build_tokenizer("char", "she sells sea shells", bpe_vocab=300)
    shape = ("layers=1", "heads=1", "width=8", "seq_len=4", f"vocab_size={tokenizer.vocab_size}")
    config = build_config(sets=[f"model.{setting}" for setting in shape])
    run.config.write_text(to_toml(config), encoding="utf-8")
    save_tokenizer(tokenizer, run.tokenizer)
    state = Checkpoint(Progress(1, 1), TrainingState(GPT(config.model)).weights(), StateTree({}, None))
    CheckpointFolder(run.checkpoints, keep=1).save(state)
    options = Namespace(prompt=prompt, count=3, length=6, temperature=1.0, seed=1)
    sentences = write_sentences(run, options)
    assert [len(sentence) for sentence in sentences] == [len(prompt) + 6] * 3
    assert all(sentence.startswith(begins) and set(sentence) <= set("she sells sea shells") for sentence in sentences)
