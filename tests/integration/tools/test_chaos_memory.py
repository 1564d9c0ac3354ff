"""A weight is located in a process's memory by its bytes and damaged there.

Exercises tools.chaos.
"""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import LabError
from shoal.tools.chaos.damage import MemoryDamage, known_weight, prepare_memory_damage

WEIGHTS = struct.pack("<100f", *(0.01 * number for number in range(100)))
# Holds the weights and prints them on request.
HOLDER = """
import sys
weights = bytearray(sys.stdin.buffer.read(400))
print("here", flush=True)
sys.stdin.buffer.read(1)
sys.stdout.buffer.write(weights)
"""


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Create an older checkpoint, the newest one, and an unfinished one."""
    for step, whole in ((50, True), (100, True), (150, False)):
        folder = tmp_path / f"step-{step:08d}"
        folder.mkdir()
        content = WEIGHTS if step == 100 else bytes(400)
        header = json.dumps({
            "__metadata__": {},
            "a.bias": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b.weight": {"dtype": "F32", "shape": [10, 10], "data_offsets": [8, 408]},
        }).encode()  # fmt: skip
        model = struct.pack("<Q", len(header)) + header + bytes(8) + content
        (folder / "model.safetensors").write_bytes(model)
        if whole:
            (folder / "manifest.json").write_text("{}")
    return tmp_path


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(WEIGHTS)
        process.stdin.flush()
        assert process.stdout.readline() == b"here\n"
        yield process


def test_the_first_matrix_of_the_newest_complete_checkpoint_is_chosen(checkpoints: Path) -> None:
    assert known_weight(checkpoints) == ("b.weight", WEIGHTS[:256])


@pytest.mark.parametrize("how", ["flip", "nan"])
def test_one_number_in_a_running_process_is_damaged(
    checkpoints: Path, holder: subprocess.Popen[bytes], how: MemoryDamage
) -> None:
    prepare_memory_damage(holder.pid, checkpoints, how, random.Random(1))()
    memory = holder.communicate(b"x")[0]
    [changed] = [at for at in range(100) if memory[4 * at : 4 * at + 4] != WEIGHTS[4 * at : 4 * at + 4]]
    (number,) = struct.unpack_from("<f", memory, 4 * changed)
    bits = [(new ^ old).bit_count() for new, old in zip(memory, WEIGHTS, strict=True)]
    assert number != number if how == "nan" else sum(bits) == 1


def test_a_weight_that_is_not_in_memory_is_reported(checkpoints: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        with pytest.raises(LabError, match=r"b\.weight of the last checkpoint is nowhere") as caught:
            prepare_memory_damage(other.pid, checkpoints, "flip", random.Random(1))
        assert "lr = 1e-30" in caught.value.fix
        other.communicate(b"\n")


def test_a_missing_checkpoint_is_reported(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="there is no checkpoint"):
        known_weight(tmp_path)
