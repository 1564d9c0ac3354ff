"""Commands that doctor prints, run on real files.

Exercises tools.doctor.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.doctor_facts import complaints, machine, names, only, scene
from tests.support.needs import need_tool


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("127.0.0.1 localhost\n127.0.1.1 node2\n", "10.77.0.2 node2\n127.0.0.1 localhost\n"),
        ("127.0.0.1\tlocalhost node2 node2-old\n", "10.77.0.2 node2\n127.0.0.1\tlocalhost node2-old\n"),
        ("127.0.1.1 node2.lan node2\n::1 localhost node2", "10.77.0.2 node2\n127.0.1.1 node2.lan\n::1 localhost\n"),
        ("# own\n10.77.0.9 other\n", "10.77.0.2 node2\n# own\n10.77.0.9 other\n"),
    ],
)
def test_the_fix_moves_the_name_in_the_hosts_file(tmp_path: Path, before: str, after: str) -> None:
    file = tmp_path / "hosts"
    file.write_text(before)
    finding = {"names": names(2, means=["127.0.1.1"], published="127.0.1.1"), "machine": machine(is_root=True)}
    fix = only(complaints(scene({}, finding))).fix
    subprocess.run([need_tool("sh"), "-c", fix.replace("/etc/hosts", str(file))], check=True, capture_output=True)
    assert file.read_text() == after
