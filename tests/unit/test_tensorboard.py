"""TensorBoard event files, decoded by a reader that shares nothing with the writer."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run as run_command
from shoal.tensorboard import ScalarWriter, crc32c
from shoal.tools.report.export import RunMetrics, export_metrics, write_tensorboard
from tests.support.run_samples import make_run, make_session_run, start, step


def slow_crc32c(content: bytes) -> int:
    """Divide bit by bit, as the definition has it."""
    value = 0xFFFFFFFF
    for byte in content:
        for bit in range(8):
            value = (value >> 1) ^ (0x82F63B78 if (value ^ (byte >> bit)) & 1 else 0)
    return value ^ 0xFFFFFFFF


def read_records(content: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        body = content[at + 12 : at + 12 + length]
        for place, checked in ((at + 8, content[at : at + 8]), (at + 12 + length, body)):
            crc = slow_crc32c(checked)
            assert struct.unpack_from("<I", content, place)[0] == ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
        yield body
        at += 16 + length
    assert at == len(content)


def read_message(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protobuf message."""
    file = io.BytesIO(content)

    def varint() -> int | None:
        value = shift = 0
        while True:
            byte = file.read(1)
            if not byte:
                return None
            value |= (byte[0] & 0x7F) << shift
            shift += 7
            if byte[0] < 0x80:
                return value

    while (key := varint()) is not None:
        wire_type = key & 7
        if wire_type == 0:
            yield key >> 3, varint()
        elif wire_type == 2:
            length = varint()
            assert length is not None
            yield key >> 3, file.read(length)
        else:
            yield (
                key >> 3,
                struct.unpack("<d", file.read(8))[0] if wire_type == 1 else struct.unpack("<f", file.read(4))[0],
            )


def read_scalars(path: Path) -> dict[str, list[tuple[int, float, float]]]:
    """Return step, time and value of each scalar, by tag."""
    first, *records = read_records(path.read_bytes())
    assert dict(read_message(first))[3] == b"brain.Event:2"
    scalars: dict[str, list[tuple[int, float, float]]] = {}
    for record in records:
        event = dict(read_message(record))
        for number, content in read_message(event[5]):
            assert number == 1
            value = dict(read_message(content))
            scalars.setdefault(value[1].decode(), []).append((event[2], event[1], value[2]))
    return scalars


def event_file(folder: Path) -> Path:
    (path,) = folder.glob("events.out.tfevents.*")
    return path


def test_the_checksum_is_crc32c() -> None:
    # From RFC 3720, B.4.
    assert [crc32c(content) for content in (bytes(32), b"\xff" * 32, bytes(range(32)), b"123456789", b"")] == [
        0x8A9136AA, 0x62A8AB43, 0x46DD794E, 0xE3069283, 0,
    ]  # fmt: skip


def test_a_training_becomes_scalars_of_the_run_and_of_each_rank(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert export_metrics(run, "tensorboard", tmp_path / "board").steps == 100
    scalars = read_scalars(event_file(tmp_path / "board"))
    assert scalars.keys() == {"loss", "val_loss", "lr", "grad_norm", "step_s", "tokens_per_s", "world_size"}
    assert [at for at, _, _ in scalars["loss"]] == list(range(1, 101))
    recorded = [step(3, rank) for rank in (0, 1)]
    slowest_s = max(event["step_s"] for event in recorded)
    assert scalars["loss"][2] == pytest.approx((3, recorded[0]["time"], recorded[0]["loss"]), rel=1e-6)
    assert scalars["tokens_per_s"][2][2] == pytest.approx(recorded[0]["tokens"] / slowest_s, rel=1e-6)
    assert [at for at, _, _ in scalars["val_loss"]] == [50, 100]
    for rank in (0, 1):
        own = read_scalars(event_file(tmp_path / "board" / f"rank-{rank}"))
        assert own["wait_s"][2][2] == pytest.approx(recorded[rank]["wait_s"], rel=1e-6)
        assert "loss" not in own


def test_values_of_a_users_program_are_scalars(tmp_path: Path) -> None:
    run = make_session_run(tmp_path / "run")
    export_metrics(run, "tensorboard")
    scalars = read_scalars(event_file(run.path / "tensorboard"))
    # Of two ranks that recorded it, the lower one's.
    assert [at for at, _, _ in scalars["accuracy"]] == [10, 20]
    assert [value for _, _, value in scalars["accuracy"]] == pytest.approx([0.1, 0.2])
    assert "samples_per_s" in scalars


def test_a_second_export_replaces_the_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start(0, 1), step(1)])
    assert run_command(["export", str(run.path), "--format", "tensorboard"], debug=False) == 0
    with run.events(0).open("a") as file:
        file.write(json.dumps(step(2)) + "\n")
    assert run_command(["export", str(run.path), "--format", "tensorboard"], debug=False) == 0
    assert [at for at, _, _ in read_scalars(event_file(run.path / "tensorboard"))["loss"]] == [1, 2]
    assert len(list((run.path / "tensorboard").iterdir())) == 2


@pytest.mark.parametrize(
    ("value", "written"), [(math.inf, math.inf), (1e300, math.inf), (-1e300, -math.inf), (2**62, 2.0**62), (0, 0.0)]
)
def test_any_number_can_be_written(value: float, written: float, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        ScalarWriter(file, 1.5).write(2**40, 2.5, {"a/ü": value, "b": math.nan})
    scalars = read_scalars(tmp_path / "file")
    assert scalars["a/ü"] == [(2**40, 2.5, written)]
    assert math.isnan(scalars["b"][0][2])


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    peaks = []
    for steps in (1800, 3000):
        run = make_run(tmp_path / f"run{steps}", [start(0, 1)])
        with run.events(0).open("a") as file:
            file.writelines(json.dumps(step(number)) + "\n" for number in range(1, steps + 1))
        metrics = RunMetrics(run)
        tracemalloc.start()
        assert write_tensorboard(metrics, tmp_path / f"board{steps}") == steps
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_it(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator

    export_metrics(make_run(tmp_path / "run"), "tensorboard", tmp_path / "board")
    board = event_accumulator.EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert [scalar.step for scalar in board.Scalars("loss")] == list(range(1, 101))
