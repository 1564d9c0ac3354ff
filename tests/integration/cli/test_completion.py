"""The completion script in a real bash.

Exercises `shoal completion`.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.needs import need_tool
from tests.support.programs import shoal

# What bash does when Tab is pressed: it sets these variables and calls the registered function.
ASK = """
source {script}
complete -p shoal
COMP_WORDS=({words}); COMP_CWORD={last}
_shoal shoal
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = shoal("completion", "bash")
    assert done.returncode == 0, done.stderr
    file = tmp_path_factory.mktemp("completion") / "shoal.bash"
    file.write_text(done.stdout)
    return file


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["tr"], {"train", "trace"}),
        (["train", "--glo"], {"--global-batch"}),
        (["bench", "l"], {"levers"}),
        (["bench", "levers", "--rep"], {"--repeat"}),
        (["help", "doc"], {"doctor"}),
        (["train", "--on", "local:2", "--wat"], {"--watch"}),
        (["train", "--sync", "d"], {"ddp", "diloco"}),
        (["train", "--wire", "i"], {"int8"}),
        (["train", "--precision", ""], {"auto", "fp32", "bf16"}),
        (["run", "--measure", "hoo"], set()),
        (["train", "gpt2-1"], {"gpt2-124m"}),
        (["stop", "run"], {"runs/new", "runs/old"}),
        # bash itself completes a name of a file then.
        (["verify", "other/"], set()),
        (["no-such-verb", "--"], set()),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bash_offers_what_may_follow(script: Path, typed: list[str], offered: set[str], tmp_path: Path) -> None:
    for name in ("new", "old"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    bash, words = need_tool("bash"), shlex.join(["shoal", *typed])
    text = ASK.format(script=shlex.quote(str(script)), words=words, last=len(typed))
    argv = [bash, "--norc", "--noprofile", "-c", text]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    registered, *answers = done.stdout.splitlines()
    assert registered == "complete -o default -F _shoal shoal"
    assert set(answers) - {""} == offered
