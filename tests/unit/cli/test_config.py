"""`shoal config`, and the page of all settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.config import list_settings
from shoal.cli.main import run
from shoal.config.load import build_config, known_keys

PAGE = Path(__file__).parents[3] / "docs/settings.md"


def test_every_setting_has_a_meaning_and_a_reason_to_change_it() -> None:
    settings = list_settings()
    assert [setting.key for setting in settings] == known_keys()
    assert [setting.key for setting in settings if not (setting.meaning and setting.when)] == []
    by_key = {setting.key: setting for setting in settings}
    assert by_key["train.steps"].values == "a whole number from 1"
    assert by_key["train.micro_batch"].values == "a whole number from 1"
    assert by_key["data.bpe_vocab"].values == "a whole number from 257 to 65536"
    assert by_key["train.scaling"].values == "strong, weak"
    assert by_key["train.micro_batch"].default == "unset"
    assert (by_key["train.steps"].flag, by_key["train.compile"].flag, by_key["sync.timeout_s"].flag) == (
        "--steps", "--compile", ""
    )  # fmt: skip


def test_the_page_of_settings_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Write it anew: shoal config show --markdown > docs/settings.md."""
    assert run(["config", "show", "--markdown"], debug=False) == 0
    assert capsys.readouterr().out == PAGE.read_text(encoding="utf-8")


def test_one_setting_is_explained_by_its_key_or_its_last_part(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for key in ("sync.timeout_s", "timeout_s"):
        assert run(["config", "explain", key], debug=False) == 0
        text = capsys.readouterr().out
        assert text.startswith("sync.timeout_s = 60.0\n")
        assert max(map(len, text.splitlines())) <= 60
    assert run(["config", "explain", "seed", "--json"], debug=False) == 0
    keys = [setting["key"] for setting in json.loads(capsys.readouterr().out)["settings"]]
    assert keys == ["train.seed", "data.seed"]
    assert run(["config", "explain", "train.stpes"], debug=False) == 2
    assert "did you mean 'train.steps'?" in capsys.readouterr().err
    assert run(["config", "show", "modl"], debug=False) == 2
    assert "did you mean 'model'?" in capsys.readouterr().err


def test_a_written_file_gives_the_settings_of_its_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["config", "init", "gpt2-124m", "--out", "my.toml"], debug=False) == 0
    assert "shoal train gpt2-124m --config my.toml" in capsys.readouterr().out
    assert build_config("gpt2-124m", Path("my.toml")) == build_config("gpt2-124m")
    assert run(["config", "init", "--out", "my.toml"], debug=False) == 2
    assert "my.toml exists already" in capsys.readouterr().err
