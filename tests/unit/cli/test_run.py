"""`shoal run`: options that do not go together are refused before anything starts."""

from __future__ import annotations

import pytest

from shoal.cli.run import run
from shoal.errors import UsageError


@pytest.mark.parametrize("option", [{"measure": True}, {"resume": "runs/earlier"}])
def test_a_plan_that_cannot_be_made_is_refused(option: dict[str, object]) -> None:
    with pytest.raises(UsageError) as raised:
        run(["train.py"], plan="runs/alone", **option)  # type: ignore[arg-type]
    assert f"--plan does not go with --{next(iter(option))}" in raised.value.seen
    assert "--plan runs/alone" in raised.value.fix


def test_a_profile_without_a_plan_is_refused() -> None:
    with pytest.raises(UsageError, match="--profile does not go with a run without --plan"):
        run(["train.py"], profile="profile.toml")  # type: ignore[arg-type]
