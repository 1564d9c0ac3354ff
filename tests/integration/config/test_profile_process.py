"""The profile file of a probe, written by real processes.

Exercises config.profile.
"""

from __future__ import annotations

from pathlib import Path

from tests.support.programs import shoal


def test_only_a_profile_file_is_overwritten(tmp_path: Path) -> None:
    notes = tmp_path / "notes.toml"
    notes.write_text("mine = true\n")
    for wrong in (notes, tmp_path / "no/such/folder.toml"):
        done = shoal("probe", "-o", wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert str(wrong.parent if "no/such" in str(wrong) else wrong) in done.stderr
    assert notes.read_text() == "mine = true\n"
