"""`python -m shoal.train.export RUN FORMAT OUT`: write the weights of the newest whole checkpoint for other programs.

`state-dict` has the parameters and buffers by the names of the model that was trained. `hf` is shoal's GPT in the
layout of GPT-2 that the library transformers loads: shoal's GPT computes what GPT-2 does, so that only names and the
orientation of matrices differ.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.config.load import load_settings
from shoal.config.schema import Config, ModelConfig
from shoal.control.rank_env import use_private_caches
from shoal.data.tokenizer import load_tokenizer
from shoal.engine.checkpoint import Checkpoint, CheckpointFolder, savable
from shoal.errors import CheckpointError, ShoalError, UsageError
from shoal.model.gpt import GPT
from shoal.run_folder import RunFolder, write_atomically
from shoal.terminal import protect_terminal
from shoal.train.worker import report_error

_PREFIX = "model."
# Readers of such files check that the tensors were written by torch.
_METADATA = {"format": "pt"}
# Parts of the names of shoal's GPT, and what they are called in GPT-2.
_GPT2_BLOCK = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "feedforward_norm": "ln_2",
    "feedforward.0": "mlp.c_fc",
    "feedforward.2": "mlp.c_proj",
}
_GPT2_REST = {"token": "wte", "position": "wpe", "norm": "ln_f"}


def main() -> int:
    protect_terminal()
    parser = argparse.ArgumentParser(prog="python -m shoal.train.export")
    parser.add_argument("run", type=Path)
    parser.add_argument("format", choices=("hf", "state-dict"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--best", action="store_true", help="take the checkpoint that session.best keeps")
    parser.add_argument("--width", type=int, help="columns of the terminal that shows an error")
    options = parser.parse_args()
    try:
        use_private_caches()
        step = export_weights(RunFolder.find(options.run), options.format, options.out, options.best)
    except ShoalError as error:
        return report_error(error, options.width)
    print(step)
    return 0


def export_weights(run: RunFolder, kind: str, out: Path, best: bool = False) -> int:
    """Write the weights as `hf`, into the folder `out`, or as `state-dict`, into the file `out`; return their step."""
    checkpoint = CheckpointFolder(run.checkpoints, keep=1).load_best() if best else _newest_checkpoint(run)
    try:
        if kind == "hf":
            config = load_settings(run.config)
            if not isinstance(config, Config):
                raise UsageError(
                    f"{run.path} has no GPT of shoal: the script {config.run.preset} trained its own model",
                    why="--format hf writes shoal's GPT as the GPT-2 that transformers knows; it cannot translate "
                    "another model",
                    fix=f"take the weights by the names of your model: shoal export {shlex.quote(str(run.path))} "
                    "--format state-dict",
                )
            weights = to_gpt2(config.model, own_names(checkpoint))
            out.mkdir(parents=True, exist_ok=True)
            _save(weights, out / "model.safetensors")
            for name, document in {"config.json": gpt2_config(config.model), **_hf_tokenizer(run)}.items():
                write_atomically(out / name, json.dumps(document, indent=2) + "\n")
        else:
            _save(own_names(checkpoint), out)
    except (OSError, SafetensorError) as error:
        raise ShoalError(
            f"cannot write {out}: {error}",
            why="the checkpoint is untouched; only the copy made from it is missing",
            fix=f"write it elsewhere: shoal export {shlex.quote(str(run.path))} --format {kind} --out PATH",
        ) from None
    return checkpoint.progress.step


def _newest_checkpoint(run: RunFolder) -> Checkpoint:
    try:
        return CheckpointFolder(run.checkpoints, keep=1).load_latest()
    except CheckpointError as error:
        why = error.why or error.seen
        if not run.config.is_file() or not isinstance(load_settings(run.config), Config):
            why += "; a script saves checkpoints with shoal.Session"
        raise CheckpointError(
            f"{run.path} has no checkpoint to take weights from",
            why=why,
            fix=f"see how far the run is: shoal report {shlex.quote(str(run.path))}",
        ) from None


def own_names(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return parameters and buffers by the names that `model.state_dict()` has."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in checkpoint.model.items()}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a file that is put in place when it is whole, with the mode of any new file."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        # It writes files that only their owner may read, and these are made to be passed on.
        save_file(savable(tensors), temporary, _METADATA)
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def to_gpt2(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of shoal's GPT by GPT-2's names.

    GPT-2 keeps matrices as inputs × outputs, torch's linear layers as outputs × inputs. The head is the token table,
    which transformers ties itself.
    """
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in GPT(config).state_dict().items()}
    if expected != {name: tensor.shape for name, tensor in weights.items()}:
        raise CheckpointError(
            "the weights in the checkpoint are not those of the model that the run's config.toml describes",
            why="one of them was written by another version of shoal, or was changed",
            fix="compare both with: shoal verify RUN",
        )
    renamed = {}
    for name, tensor in weights.items():
        layer, _, kind = name.rpartition(".")
        if layer.startswith("blocks."):
            _, number, part = layer.split(".", 2)
            is_matrix = kind == "weight" and not part.endswith("norm")
            renamed[f"transformer.h.{number}.{_GPT2_BLOCK[part]}.{kind}"] = tensor.t() if is_matrix else tensor
        else:
            renamed[f"transformer.{_GPT2_REST[layer]}.{kind}"] = tensor
    return renamed


def gpt2_config(config: ModelConfig) -> dict[str, Any]:
    """Return the `config.json` of a GPT-2 that computes the same as shoal's GPT of this shape."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.seq_len,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": 4 * config.width,
        "activation_function": "gelu_new",  # GELU by tanh
        "layer_norm_epsilon": nn.LayerNorm(1).eps,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
        "initializer_range": 0.02,
        # Texts of shoal have no such tokens; GPT-2's own number may be outside of the vocabulary.
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }


def _hf_tokenizer(run: RunFolder) -> dict[str, Any]:
    """Return the files of the run's tokenizer, by name; none for characters and bytes, which transformers lacks."""
    tokenizer = load_tokenizer(run.tokenizer).to_json()
    if "bpe" not in tokenizer:
        return {}
    return {"tokenizer.json": tokenizer["bpe"], "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"}}


if __name__ == "__main__":
    sys.exit(main())
