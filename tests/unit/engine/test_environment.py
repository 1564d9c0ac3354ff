"""The settings with which a session starts: the script's own and those of `shoal run`."""

from __future__ import annotations

import json

import pytest

from shoal.control.rank_env import SETTINGS
from shoal.engine import environment
from shoal.errors import ConfigError


def test_a_setting_of_the_launcher_that_the_scripts_mode_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the session knows both: the mode comes from the script and the setting from the command line."""
    monkeypatch.setattr(environment, "use_private_caches", lambda: None)
    monkeypatch.setattr(environment, "_catch_stop_signals", lambda stop: pytest.fail("the setting was accepted"))
    monkeypatch.setenv(SETTINGS, json.dumps({"run": {"on": "local:1"}, "sync": {"every": 4}}))
    with pytest.raises(ConfigError, match=r"sync\.every has no effect here"):
        environment.open_session({"train": {"steps": 4, "global_batch": 8}, "sync": {"mode": "ddp"}}, None)
