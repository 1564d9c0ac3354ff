"""Load a checked configuration from preset, file and `--set`, and save it as the `config.toml` of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cli.main import load_command
from shoal.cli.options import SETTINGS
from shoal.cli.train import TrainRequest, merge_depth
from shoal.config.load import (
    build_config,
    known_keys,
    load_config,
    refuse_fixed,
    refuse_without_effect,
    to_toml,
    validate_session,
)
from shoal.config.presets import PRESETS, Overrides, depth_overrides
from shoal.config.schema import Config, DataConfig, ModelConfig
from shoal.config.sync_choice import TRAIN_METHODS, WIRE_FORMATS
from shoal.cost.model_size import parameter_count
from shoal.errors import ConfigError
from tests.support.paths import ROOT


def write(folder: Path, text: str) -> Path:
    file = folder / "my.toml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(*sets: str, **options: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build_config(sets=sets, **options)
    assert caught.value.fix, "an error without a next step"
    return caught.value


# Precedence


def test_the_defaults_are_those_of_the_schema() -> None:
    assert build_config() == Config()


def test_a_preset_overrides_the_defaults() -> None:
    config = build_config("shakespeare-char")
    assert (config.train.steps, config.data.tokenizer, config.run.preset) == (2000, "char", "shakespeare-char")
    assert config.train.beta2 == Config().train.beta2


def test_later_layers_override_earlier_ones(tmp_path: Path) -> None:
    file = write(tmp_path, "[train]\nsteps = 11\nlr = 0.5\nclip = 2.0\n")
    flags = {"train": {"lr": 0.25, "clip": 3.0}}
    train = build_config("shakespeare-char", file, flags, ["train.clip=4.0"]).train
    assert (train.warmup_steps, train.steps, train.lr, train.clip) == (100, 11, 0.25, 4.0)


def test_the_last_of_two_set_options_applies() -> None:
    assert build_config(sets=["train.steps=5", "train.steps=7"]).train.steps == 7


def test_a_file_may_have_any_part_of_the_settings(tmp_path: Path) -> None:
    assert build_config(file=write(tmp_path, "")) == Config()
    assert build_config(file=write(tmp_path, '[run]\non = "local:4"')).run.on == "local:4"


def asked(line: str) -> Overrides:
    """Return the settings of the options of `shoal train`."""
    command = load_command("train")
    values = command.read("train", line.split())
    given = {one.name: one.option for one in command.parameters if one.name in values}
    return merge_depth(TrainRequest(**values, given=given))


def test_every_flag_of_train_maps_to_a_setting() -> None:
    assert {option.setting for option in SETTINGS.values()} <= set(known_keys())


def test_flags_become_overrides_and_zero_is_not_unset() -> None:
    assert asked("--threads 0 --wire fp16") == {"run": {"threads": 0}, "sync": {"wire": "fp16"}}


def test_depth_sets_the_model_shape_and_other_flags_are_kept() -> None:
    model = build_config(flags=asked("--depth 5 --seq-len 32")).model
    assert (model.layers, model.heads, model.width, model.seq_len) == (5, 5, 320, 32)


def test_depth_twelve_is_gpt2() -> None:
    assert depth_overrides(12)["model"].items() <= PRESETS["gpt2-124m"]["model"].items()


def test_depth_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one layer"):
        depth_overrides(0)


# --set


@pytest.mark.parametrize(
    ("assignment", "value"),
    [
        ("train.steps=200", 200),
        ("train.steps = 200 ", 200),
        ("train.lr=1e-4", 1e-4),
        ("train.scaling=weak", "weak"),
        ('train.scaling="weak"', "weak"),
        ("data.path=a=b.txt", Path("a=b.txt")),
        ("data.path=C:\\texts\\a b.txt", Path("C:\\texts\\a b.txt")),
        ("data.path='it is'", Path("it is")),
        ("run.preset=false", ConfigError),
        ("train.steps=[1, 2]", ConfigError),
        ("train.steps={a = 1}", ConfigError),
        ("train.steps=", ConfigError),
        ("train.steps=2.5", ConfigError),
        ("data.path=2020-01-01", ConfigError),
    ],
)
def test_a_set_value_is_toml_or_a_plain_string(assignment: str, value: Any) -> None:
    section, name = assignment.split("=")[0].strip().split(".")
    if value is ConfigError:
        assert f"{section}.{name}=" in refusal(assignment).seen
    else:
        assert getattr(getattr(build_config(sets=[assignment]), section), name) == value


@pytest.mark.parametrize("assignment", ["train.steps", "=3", ".steps=3", "train.=3", ""])
def test_a_set_without_section_key_and_value_is_refused(assignment: str) -> None:
    error = refusal(assignment)
    assert "not of the form section.key=value" in error.seen
    assert "--set train.steps=200" in error.fix


# Errors


@pytest.mark.parametrize(
    ("typo", "meant"),
    [("train.stpes=3", "train.steps"), ("trian.steps=3", "train"), ("sync.wier=fp16", "sync.wire")],
)
def test_an_unknown_setting_names_the_nearest(typo: str, meant: str) -> None:
    error = refusal(typo)
    assert error.seen.startswith(f"unknown setting {typo.split('=')[0] if '.' in meant else 'trian'} in")
    assert error.why == f"did you mean {meant!r}?"


def test_an_unknown_setting_lists_the_settings_of_its_section() -> None:
    assert refusal("sync.xyz=1").fix == "list the settings of sync: shoal config show sync"
    assert refusal("xyz.abc=1").fix == "sections are: train, sync, run, members, model, data"


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"train": {"lr": 1}}, "it is a setting of shoal's own GPT"),
        ({"train": {"stpes": 1}}, "did you mean 'train.steps'?"),
        ({"model": {"layers": 1}}, "a session knows nothing of your model"),
    ],
)
def test_a_session_refuses_settings_that_it_lacks(values: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        validate_session(values)
    assert refused.value.why.startswith(why)
    assert "train.lr" not in refused.value.fix
    assert ", lr" not in refused.value.fix


def test_an_unknown_preset_names_the_nearest_and_lists_all() -> None:
    error = refusal(preset_name="gpt2-124")
    assert error.why == "did you mean 'gpt2-124m'?"
    assert all(name in error.fix for name in PRESETS)


@pytest.mark.parametrize(
    ("assignment", "seen"),
    [
        ("train.steps=0", "train.steps=0: input should be greater than or equal to 1"),
        ("train.steps=many", "train.steps='many': input should be a valid integer"),
        ("train.lr=0", "train.lr=0: input should be greater than 0"),
        ("train.lr=nan", "train.lr=nan: input should be a finite number"),
        ("sync.timeout_s=inf", "sync.timeout_s=inf: input should be a finite number"),
        ("train.seed=-1", "train.seed=-1: "),
        ("train.seed=99999999999999999999", "train.seed=99999999999999999999: "),
        ("model.dropout=1", "model.dropout=1: input should be less than 1"),
        ("data.tokenizer=words", "data.tokenizer='words': input should be 'char', 'byte' or 'bpe'"),
        ("data.val_fraction=0.9", "data.val_fraction=0.9: "),
        ("run.weights=1,2", "run.weights='1,2': write one number for each rank, with / between them"),
        ("run.on=3", "run.on=3: input should be a valid string"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_named(assignment: str, seen: str) -> None:
    error = refusal(assignment)
    assert error.seen.startswith(seen)
    assert "unable to parse" not in error.seen
    assert error.why == "the command line gives this value"
    assert error.fix.startswith(f"correct it: --set {assignment.split('=')[0]}=")


@pytest.mark.parametrize(
    ("assignment", "fix"),
    [
        ("train.steps=0", "--set train.steps=1"),
        ("data.tokenizer=words", "--set data.tokenizer=char"),
        ("train.lr=nan", "--set train.lr=…"),
        ("sync.mode=diloco:5", "--set sync.mode=diloco --set sync.every=5"),
        ("sync.mode=diloco+int8", "--set sync.mode=diloco --set sync.wire=int8"),
        ("sync.mode=int8", "--set sync.mode=ddp --set sync.wire=int8"),
        ("sync.mode=ddp:5", "--set sync.mode=ddp"),
        ("sync.mode=sharded", "--set sync.mode=ddp"),
        ("sync.wire=int4", "--set sync.wire=int8"),
    ],
)
def test_a_wrong_value_is_answered_with_an_allowed_one(assignment: str, fix: str) -> None:
    assert refusal(assignment).fix == f"correct it: {fix}"


def test_the_sync_methods_in_an_error_are_all_that_work() -> None:
    assert all(name in refusal("sync.mode=dilco").seen for name in TRAIN_METHODS)


def test_a_wrong_value_of_a_file_is_not_blamed_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[train]\nsteps = 0\n")
    with pytest.raises(ConfigError) as refused:
        build_config(file=file, sets=["train.lr=1e-3"])
    assert refused.value.why == f"this comes from {file}, or from the preset"


@pytest.mark.parametrize(
    ("assignment", "why", "fix"),
    [
        ("lr=0.1", "did you mean 'train.lr'?", "--set train.lr=0.1"),
        ("stpes=3", "did you mean 'train.steps'?", "--set train.steps=3"),
        ("xyz=1", "", "--set train.steps=200"),
    ],
)
def test_a_setting_without_its_section_is_answered_with_the_full_name(assignment: str, why: str, fix: str) -> None:
    error = refusal(assignment)
    assert (error.why, error.fix.partition(": ")[2]) == (why, fix)


@pytest.mark.parametrize(
    ("sets", "seen"),
    [
        (["model.heads=5"], "model.width=192 must be a multiple of model.heads=5"),
        (["sync.mode=stock", "sync.wire=fp16"], "sync.wire=fp16 needs sync.mode=ddp"),
        (["sync.mode=stock", "sync.measure=barrier"], "sync.measure=barrier takes the all-reduce out of DDP"),
    ],
)
def test_settings_that_contradict_each_other_are_both_named(sets: list[str], seen: str) -> None:
    error = refusal(*sets)
    assert error.seen.startswith(seen)
    assert "--set" not in error.fix, "no single key can be corrected"


def test_a_path_that_is_not_utf8_is_refused_before_it_is_saved() -> None:
    assert "'caf\\udce9.txt' is not UTF-8" in refusal(flags={"data": {"path": Path("caf\udce9.txt")}}).seen


# Files


@pytest.mark.parametrize("text", ["steps == 3", "[train\nsteps = 3", "train.steps = 3\n[train]\n", "\x00"])
def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = write(tmp_path, text)
    assert refusal(file=file).seen == f"{file} is not valid TOML"


def test_a_file_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "latin.toml"
    file.write_bytes('[data]\npath = "café"'.encode("latin-1"))
    assert refusal(file=file).seen == f"{file} is not valid TOML"


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    assert refusal(file=tmp_path / "no.toml").seen == f"there is no configuration file {tmp_path / 'no.toml'}"
    assert refusal(file=tmp_path).seen == f"cannot read {tmp_path}: Is a directory"


def test_a_typo_in_a_file_names_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "[trian]\nsteps = 3")
    assert refusal(file=file).seen == f"unknown setting trian in {file}"


def test_a_value_in_place_of_a_section_is_refused_despite_a_flag(tmp_path: Path) -> None:
    file = write(tmp_path, "train = 3")
    error = refusal("train.steps=5", file=file)
    assert (error.seen, error.fix) == (
        f"train in {file} is a section, not a value",
        "write [train] and its settings below",
    )


# The config.toml of a run


@given(
    path=st.one_of(st.none(), st.text(st.characters(codec="utf-8"), min_size=1).map(Path)),
    lr=st.floats(min_value=1e-300, max_value=1e300),
    steps=st.integers(min_value=1, max_value=2**60),
    preset=st.text(st.characters(codec="utf-8")),
)
def test_a_saved_config_is_loaded_unchanged(
    tmp_path_factory: pytest.TempPathFactory, path: Path | None, lr: float, steps: int, preset: str
) -> None:
    config = Config.model_validate(
        {"data": DataConfig(path=path), "train": {"lr": lr, "steps": steps}, "run": {"preset": preset}}
    )
    file = tmp_path_factory.getbasetemp() / "round-trip.toml"
    file.write_text(to_toml(config), encoding="utf-8", newline="")
    assert load_config(file) == config


@pytest.mark.parametrize("name", ['"', "\\", "a\nb", "\x7f", "\x00", "'''", "\t", "é 漢 \U0001f41f", "\u2028", "\r\n"])
def test_odd_paths_survive_saving(tmp_path: Path, name: str) -> None:
    config = Config(data=DataConfig(path=Path(name)))
    assert load_config(write(tmp_path, to_toml(config))) == config


def test_an_unset_key_stays_unset(tmp_path: Path) -> None:
    text = to_toml(Config())
    assert "micro_batch" not in text
    assert load_config(write(tmp_path, text)).train.micro_batch is None


# Sizes


def count_parameters(model: ModelConfig) -> int:
    import torch

    from shoal.model.gpt import GPT

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(model).parameters())


@pytest.mark.parametrize(
    "config",
    [*(build_config(name) for name in PRESETS), *(build_config(flags=depth_overrides(depth)) for depth in (1, 2, 7))],
    ids=[*PRESETS, "depth-1", "depth-2", "depth-7"],
)
def test_the_computed_parameter_count_is_that_of_the_real_model(config: Config) -> None:
    vocabulary = config.model.vocab_size or 321
    model = config.model.model_copy(update={"vocab_size": vocabulary})
    assert parameter_count(model) == count_parameters(model)


def test_gpt2_has_the_published_number_of_parameters() -> None:
    assert parameter_count(build_config("gpt2-124m").model) == 124_439_808
    assert parameter_count(build_config("gpt2-350m").model) == 354_823_168
    assert parameter_count(build_config("gpt2-760m").model) == 758_727_168


def test_the_docs_describe_every_sync_method_and_wire_format() -> None:
    docs = ROOT / "docs"
    assert [name for name in TRAIN_METHODS if f"`{name}" not in (docs / "sync.md").read_text()] == []
    assert [name for name in WIRE_FORMATS if f"`{name}" not in (docs / "wires.md").read_text()] == []


def test_an_unknown_sync_method_is_refused_with_the_known_ones() -> None:
    seen = refusal("sync.mode=dpd").seen
    assert seen.startswith("sync.mode='dpd': there is no such sync method: use ddp, stock, ")


def test_every_rank_may_have_its_own_device() -> None:
    config = build_config("grammar", sets=["run.devices=cuda/cpu"])
    assert [config.device_of(rank) for rank in range(3)] == ["cuda", "cpu", "auto"]
    assert "such as cuda/cpu" in refusal("run.devices=gpu/cpu").seen


@pytest.mark.parametrize("other", ["sync.measure=off", "data.sharding=modulo"])
def test_shares_that_cannot_follow_speeds_are_refused(other: str) -> None:
    config = build_config(sets=["run.balance=live", other])
    with pytest.raises(ConfigError, match=r"run\.balance has no effect here"):
        refuse_without_effect(config, ["run.balance"])
    refuse_without_effect(build_config(sets=["run.balance=off", other]), ["run.balance"])


@pytest.mark.parametrize("other", ["sync.measure=off", "members.on_loss=end", "run.launcher=torchrun"])
def test_a_slow_machine_cannot_be_left_out_where_members_or_times_are_missing(other: str) -> None:
    config = build_config(sets=["members.drop_slower_than=0.2", other])
    with pytest.raises(ConfigError, match=r"members\.drop_slower_than has no effect here"):
        refuse_without_effect(config, ["members.drop_slower_than"])
    refuse_without_effect(build_config(sets=["members.drop_slower_than=0.2"]), ["members.drop_slower_than"])


@pytest.mark.parametrize("value", ["0", "1", "20"])
def test_the_limit_for_slow_machines_is_a_part_of_the_fastest(value: str) -> None:
    with pytest.raises(ConfigError, match="drop_slower_than"):
        build_config(sets=[f"members.drop_slower_than={value}"])


def test_a_resumed_run_may_change_how_work_is_divided() -> None:
    refuse_fixed({"run.balance": "--balance", "run.weights": "run.weights"})
    refuse_fixed({"members.drop_slower_than": "--drop-slower-than"})
