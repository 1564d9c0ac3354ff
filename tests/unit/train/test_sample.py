"""Texts that a trained model generates."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from shoal.config.load import build_config, to_toml
from shoal.data.tokenizer import build_tokenizer, save_tokenizer
from shoal.engine.checkpoint import Checkpoint, CheckpointFolder, Progress
from shoal.engine.training_state import StateTree, TrainingState
from shoal.model.gpt import GPT
from shoal.run_folder import RunFolder
from shoal.train.sample import TextStream, write_texts


def make_model(folder: Path, text: str, *sets: str) -> RunFolder:
    """Make a run with an untrained model of single characters."""
    run = RunFolder.create(folder)
    tokenizer = build_tokenizer("char", text, bpe_vocab=300)
    shape = ("layers=1", "heads=1", "width=8", "seq_len=4", f"vocab_size={tokenizer.vocab_size}")
    config = build_config(sets=[*(f"model.{setting}" for setting in shape), *sets])
    run.config.write_text(to_toml(config), encoding="utf-8")
    save_tokenizer(tokenizer, run.tokenizer)
    state = Checkpoint(Progress(1, 1), TrainingState(GPT(config.model)).weights(), StateTree({}, None))
    CheckpointFolder(run.checkpoints, keep=1).save(state)
    return run


@pytest.mark.parametrize(("prompt", "begins"), [("", ""), ("sea", "sea")])
def test_a_model_of_a_text_without_line_ends_generates_samples(tmp_path: Path, prompt: str, begins: str) -> None:
    run = make_model(tmp_path / "run", "she sells sea shells")
    sentences = write_texts(run, Namespace(prompt=prompt, count=3, length=6, temperature=1.0, seed=1))
    assert [len(sentence) for sentence in sentences] == [len(prompt) + 6] * 3
    assert all(sentence.startswith(begins) and set(sentence) <= set("she sells sea shells") for sentence in sentences)


def test_only_a_model_of_generated_sentences_ends_a_text_with_its_line(tmp_path: Path) -> None:
    options = Namespace(prompt="a", count=3, length=200, temperature=1.0, seed=1)
    sentences = write_texts(make_model(tmp_path / "grammar", "a\nb"), options)
    assert all("\n" not in sentence for sentence in sentences)
    for name, source in (("own", f"data.path={tmp_path}/play.txt"), ("plays", "data.builtin=shakespeare")):
        texts = write_texts(make_model(tmp_path / name, "a\nb", source), options)
        assert all("\n" in text and len(text) > 100 for text in texts)


def test_a_text_is_shown_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.train.sample._SHOW_EVERY_S", 0.0)
    run = make_model(tmp_path / "run", "she sells sea shells")
    shown: list[str] = []
    options = Namespace(prompt="sea", count=2, length=5, temperature=1.0, seed=1)
    texts = write_texts(run, options, shown.append)
    assert shown == [texts[0][:length] for length in range(4, 9)]
    assert texts == write_texts(run, options)


def test_only_whole_characters_of_a_growing_text_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    stream, printed = TextStream(), []
    for text in ("sea", "sea \ufffd", "sea é", "sea é\n", "sea é\n\nshe"):
        stream.show(text)
        printed.append(capsys.readouterr().out)
    stream.show("sea é\n\nshe\nother\n", is_whole=True)
    assert [*printed, capsys.readouterr().out] == ["sea", " ", "é", "", "\n\nshe", "\nother\n"]


def test_the_checkpoint_that_replaces_a_damaged_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_model(tmp_path / "run", "she sells sea shells")
    older = run.checkpoints / "step-00000001"
    shutil.copytree(older, run.checkpoints / "step-00000002")
    write_texts(run, Namespace(prompt="", count=1, length=2, temperature=1.0, seed=1))
    warning = capsys.readouterr().err
    assert warning.startswith(f"warning: {run.checkpoints}/step-00000002/state.json is damaged")
    assert warning.endswith("the checkpoint of step 1 is used\n")
