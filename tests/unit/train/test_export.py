"""Weights for other programs: the layout of GPT-2, compared with a forward pass written from its published names."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config.load import build_config, to_toml, validate_session
from shoal.data.tokenizer import build_tokenizer, load_tokenizer, save_tokenizer
from shoal.engine.checkpoint import Checkpoint, CheckpointFolder, Progress
from shoal.engine.training_state import StateTree, TrainingState
from shoal.errors import CheckpointError, ShoalError, UsageError
from shoal.model.gpt import GPT
from shoal.run_folder import RunFolder
from shoal.train.export import export_weights

TEXT = "she sells sea shells by the sea shore\n"


def make_gpt_run(folder: Path, tokenizer_name: str = "bpe") -> tuple[RunFolder, GPT]:
    """Return a run of a small GPT whose weights are all different from their first values."""
    run = RunFolder.create(folder)
    tokenizer = build_tokenizer(tokenizer_name, TEXT, bpe_vocab=280)
    shape = ("layers=2", "heads=3", "width=12", "seq_len=7", f"vocab_size={tokenizer.vocab_size}", "dropout=0.25")
    config = build_config(sets=[f"model.{setting}" for setting in shape])
    run.config.write_text(to_toml(config), encoding="utf-8")
    save_tokenizer(tokenizer, run.tokenizer)
    model = GPT(config.model).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    save(run, model, step=40)
    return run, model


def save(run: RunFolder, model: nn.Module, step: int) -> None:
    state = Checkpoint(Progress(step, step), TrainingState(model).weights(), StateTree({}, None))
    CheckpointFolder(run.checkpoints, keep=2).save(state)


def test_exported_weights_have_the_mode_of_any_new_file(tmp_path: Path) -> None:
    run, _ = make_gpt_run(tmp_path / "run")
    export_weights(run, "state-dict", tmp_path / "weights.safetensors")
    (tmp_path / "other").touch()
    assert (tmp_path / "weights.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def gpt2_logits(config: dict[str, Any], weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Compute GPT-2 as its authors published it: `x @ w + b` with w as inputs × outputs, pre-norm, a tied head."""
    left = dict(weights)

    def take(name: str) -> Tensor:
        return left.pop(f"transformer.{name}")

    def norm(x: Tensor, name: str) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return (x - mean) / torch.sqrt(variance + config["layer_norm_epsilon"]) * take(f"{name}.weight") + take(
            f"{name}.bias"
        )

    def conv1d(x: Tensor, name: str) -> Tensor:
        return x @ take(f"{name}.weight") + take(f"{name}.bias")

    table, length, heads = take("wte.weight"), tokens.shape[1], config["n_head"]
    assert (table.shape, length) == ((config["vocab_size"], config["n_embd"]), config["n_positions"])
    x = table[tokens] + take("wpe.weight")
    for layer in range(config["n_layer"]):
        block = f"h.{layer}"
        q, k, v = conv1d(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + conv1d(mixed, f"{block}.attn.c_proj")
        hidden = conv1d(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        assert (hidden.shape[-1], config["activation_function"]) == (config["n_inner"], "gelu_new")
        hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + conv1d(hidden, f"{block}.mlp.c_proj")
    logits = norm(x, "ln_f") @ table.t()
    assert left == {}
    return logits


def test_gpt2_of_the_exported_files_has_the_same_logits(tmp_path: Path) -> None:
    run, model = make_gpt_run(tmp_path / "run")
    assert export_weights(run, "hf", tmp_path / "new" / "hf") == 40
    folder = tmp_path / "new" / "hf"
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["model_type"], config["tie_word_embeddings"]) == (
        ["GPT2LMHeadModel"], "gpt2", True,
    )  # fmt: skip
    assert [config[f"{name}_pdrop"] for name in ("embd", "resid", "attn")] == [0.25] * 3
    tokens = torch.randint(config["vocab_size"], (5, 7), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(
            gpt2_logits(config, load_file(folder / "model.safetensors"), tokens), model(tokens), rtol=1e-4, atol=1e-5
        )
    with safe_open(folder / "model.safetensors", "pt") as file:
        # transformers refuses a file without it.
        assert file.metadata() == {"format": "pt"}


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_transformers_computes_the_same_logits(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    run, model = make_gpt_run(tmp_path / "run")
    export_weights(run, "hf", tmp_path / "hf")
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()(tokens).logits
        torch.testing.assert_close(logits, model(tokens), rtol=1e-4, atol=1e-5)


def test_the_exported_tokenizer_gives_the_same_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    run, _ = make_gpt_run(tmp_path / "run")
    export_weights(run, "hf", tmp_path / "hf")
    exported = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert exported.encode(TEXT).ids == load_tokenizer(run.tokenizer).encode(TEXT).tolist()


def test_characters_have_no_tokenizer_of_transformers(tmp_path: Path) -> None:
    run, _ = make_gpt_run(tmp_path / "run", "char")
    export_weights(run, "hf", tmp_path / "hf")
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "model.safetensors"}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.layer(x)))


def make_script_run(folder: Path) -> RunFolder:
    run = RunFolder.create(folder, is_training=False)
    run.config.write_text(to_toml(validate_session({"run": {"preset": "images"}})), encoding="utf-8")
    return run


def test_a_state_dict_loads_into_the_users_model(tmp_path: Path) -> None:
    run, model = make_script_run(tmp_path / "run"), Normed()
    model(torch.randn(8, 3))
    save(run, model, step=3)
    assert export_weights(run, "state-dict", tmp_path / "weights.safetensors") == 3
    other = Normed()
    other.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    run, model = make_gpt_run(tmp_path / "run")
    save(run, model, step=50)
    damaged = run.checkpoints / "step-00000050" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert export_weights(run, "state-dict", tmp_path / "weights.safetensors") == 40
    assert load_file(tmp_path / "weights.safetensors").keys() == model.state_dict().keys()
    assert damaged.exists()


def test_a_script_has_no_gpt2(tmp_path: Path) -> None:
    run = make_script_run(tmp_path / "run")
    save(run, Normed(), step=3)
    with pytest.raises(UsageError, match="the script images trained its own model") as caught:
        export_weights(run, "hf", tmp_path / "hf")
    assert "--format state-dict" in caught.value.fix
    assert not (tmp_path / "hf").exists()


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    run, _ = make_gpt_run(tmp_path / "run")
    run.config.write_text(run.config.read_text().replace("seq_len = 7", "seq_len = 8"), encoding="utf-8")
    with pytest.raises(CheckpointError, match="not those of the model"):
        export_weights(run, "hf", tmp_path / "hf")


def test_a_run_without_checkpoint_is_refused(tmp_path: Path) -> None:
    run = make_script_run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no checkpoint to take weights from") as caught:
        export_weights(run, "state-dict", tmp_path / "weights.safetensors")
    assert caught.value.why.endswith("a script saves checkpoints with shoal.Session")
    assert caught.value.fix == f"see how far the run is: shoal report {run.path}"


def test_a_training_without_checkpoint_is_not_taken_for_a_script(tmp_path: Path) -> None:
    run, _ = make_gpt_run(tmp_path / "run")
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError, match="no checkpoint to take weights from") as caught:
        export_weights(run, "hf", tmp_path / "hf")
    assert "script" not in caught.value.why


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    run, _ = make_gpt_run(tmp_path / "run")
    with pytest.raises(ShoalError, match="cannot write") as caught:
        export_weights(run, "state-dict", tmp_path / "missing" / "weights.safetensors")
    assert "--out" in caught.value.fix
