"""The Python API tests software that is not shoal: an HTTP server and a client, a link that is slowed and cut.

Exercises src/shoal_lab.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shoal_lab
from shoal_lab import Lab, LabError, LabUsageError, Link, make_spec
from tests.support.labs import Traces, assert_gone, need_lab, new_name, running_lab
from tests.support.paths import ROOT
from tests.support.waiting import wait_until


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    """An HTTP server and a client: as built, over a slow link, cut off, healed, and with the server killed."""
    need_lab()
    text = (ROOT / "docs/lab.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    name = new_name()
    assert example.count('name="http"') == 1
    script = tmp_path / "example.py"
    script.write_text(example.replace('name="http"', f'name="{name}"'))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=90, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    built, slow, cut, healed, killed = done.stdout.splitlines()
    assert re.fullmatch(r"as built: \d+\.\d s", built)
    assert re.fullmatch(r"over 8 Mbit/s: [1-9]\d*\.\d s", slow)
    assert (cut, killed) == ("cut off: no answer", "killed: no answer")
    assert re.fullmatch(r"healed: \d+\.\d s", healed)
    assert_gone(Traces(name))


def test_the_lab_needs_no_module_of_shoal() -> None:
    """Also not through the modules that are imported late."""
    names = [path.stem for path in Path(shoal_lab.__file__).parent.glob("*.py") if path.stem not in ("__init__",)]
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(f'shoal_lab.{name}')\n"
        "from shoal_lab.state import list_labs, read_state\n"
        "read_state('none'), list_labs()\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('shoal', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_every_public_name_resolves() -> None:
    assert all(getattr(shoal_lab, name) is not None for name in shoal_lab.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lab_error'"):
        shoal_lab.lab_error  # noqa: B018


def test_a_node_reports_and_changes_its_state(tmp_path: Path) -> None:
    with running_lab(2, link="100mbit") as lab:
        node = lab.node("node2")
        assert (node.address, node.spec.link, node.is_alive) == ("10.77.0.2", Link(rate_bps=100e6), True)
        assert node.run("hostname").stdout == "node2\n"
        assert node.run("sh", "-c", "echo no >&2; exit 3").returncode == 3
        node.set_link(loss="1%")
        assert node.spec.link == Link(rate_bps=100e6, loss=0.01)
        process = node.start("sh", "-c", "echo $WORD; sleep 60", log=tmp_path / "log", env={"WORD": "begun"})
        wait_until(lambda: (tmp_path / "log").read_text() == "begun\n")
        node.freeze()
        with pytest.raises(LabUsageError, match="node2 is frozen"):
            node.run("true")
        node.thaw()
        node.kill(silent=True)
        assert process.wait(10) != 0
        assert not node.is_alive
        with pytest.raises(LabError, match=r"node2 of lab .* is not running"):
            node.run("true")
        node.restart()
        assert node.run("hostname").stdout == "node2\n"
        assert node.spec.link == Link(rate_bps=100e6, loss=0.01)


def test_an_error_prints_cause_and_next_command() -> None:
    with pytest.raises(LabUsageError) as caught:
        make_spec(2, profile="wiffi")
    assert str(caught.value).splitlines() == [
        "there is no link profile 'wiffi'",
        "  why:  did you mean 'wifi'?",
        "  next: use one of: 100mbit, 1gbe, 2.5gbe, 10gbe, wifi, wan",
    ]
    with pytest.raises(LabUsageError, match="no lab 'not-there'"), Lab.open("not-there"):
        pass
