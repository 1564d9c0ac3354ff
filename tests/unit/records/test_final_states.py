"""Bitwise comparison of replicas, and the ledger check that every sample was used exactly once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shoal.errors import DataError
from shoal.records.commit_log import check_ledger
from shoal.records.final_states import BLOCK_BYTES, ReplicaReport, compare_replicas

Tensors = dict[str, np.ndarray[Any, Any]]


def weights() -> Tensors:
    numbers = np.random.default_rng(1)
    return {
        "model.wte": numbers.standard_normal((40, 8)).astype(np.float32),
        "model.bias": np.zeros(8, np.float32),
        "optimizer.exp_avg.wte": numbers.standard_normal((40, 8)).astype(np.float32),
    }


def write_states(folder: Path, *states: Tensors) -> dict[int, Path]:
    files = {rank: folder / f"state-rank-{rank}.safetensors" for rank in range(len(states))}
    for rank, tensors in enumerate(states):
        save_file(tensors, files[rank], metadata={"rank": str(rank)})
    return files


def flip_bit(path: Path, offset_from_end: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[-offset_from_end] ^= 1 << bit
    path.write_bytes(content)


def test_equal_replicas_are_byte_equivalent(tmp_path: Path) -> None:
    report = compare_replicas(write_states(tmp_path, weights(), weights(), weights()))
    assert report.byte_equivalent
    assert report.equal
    assert (report.max_abs_diff, report.first_difference, report.ranks, report.tensors) == (0.0, None, 3, 3)
    assert len(set(report.digests.values())) == 1


def test_one_flipped_bit_is_named(tmp_path: Path) -> None:
    files = write_states(tmp_path, weights(), weights())
    flip_bit(files[1], offset_from_end=4)  # the lowest bit of the last tensor's last float
    report = compare_replicas(files)
    assert not report.byte_equivalent
    assert report.first_difference == "optimizer.exp_avg.wte"
    assert report.differing_ranks == [1]
    assert 0 < report.max_abs_diff < 1e-5
    assert report.equal, "the lowest bit of a small number is within the tolerance"


@given(value=st.floats(width=32), bit=st.integers(0, 31))
def test_any_flipped_bit_of_any_number_is_detected(
    tmp_path_factory: pytest.TempPathFactory, value: float, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("states")
    state = {"w": np.array([value], np.float32)}
    files = write_states(folder, state, state)
    flip_bit(files[1], offset_from_end=4 - bit // 8, bit=bit % 8)
    assert not compare_replicas(files).byte_equivalent


def test_a_difference_beyond_the_tolerance_is_named(tmp_path: Path) -> None:
    other = weights()
    other["model.wte"][3, 3] += 0.25
    report = compare_replicas(write_states(tmp_path, weights(), weights(), other))
    assert not report.equal
    assert report.max_abs_diff == pytest.approx(0.25, rel=1e-6)
    assert (report.first_difference, report.differing_ranks) == ("model.wte", [2])


def test_nans_of_the_same_bits_are_equal(tmp_path: Path) -> None:
    state = {"w": np.array([math.nan, math.inf, 1.0], np.float32)}
    assert compare_replicas(write_states(tmp_path, state, state)).byte_equivalent


def test_the_sign_of_zero_is_a_difference(tmp_path: Path) -> None:
    zero, minus = {"w": np.array([0.0], np.float32)}, {"w": np.array([-0.0], np.float32)}
    report = compare_replicas(write_states(tmp_path, zero, minus))
    assert not report.byte_equivalent
    assert report.equal
    assert report.max_abs_diff == 0.0


@pytest.mark.parametrize(("first", "second"), [(1.0, math.nan), (1.0, math.inf), (math.inf, -math.inf)])
def test_nan_and_infinity_are_infinitely_far_from_a_number(tmp_path: Path, first: float, second: float) -> None:
    report = compare_replicas(write_states(tmp_path, {"w": np.array([first])}, {"w": np.array([second])}))
    assert report.max_abs_diff == math.inf
    assert not report.equal


def test_infinity_survives_json() -> None:
    report = ReplicaReport(
        equal=False, byte_equivalent=False, max_abs_diff=math.inf, first_difference="w", ranks=2, tensors=1,
        differing_ranks=[1], digests={},
    )  # fmt: skip
    text = report.model_dump_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert ReplicaReport.model_validate_json(text) == report


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {name: tensor for name, tensor in state.items() if name != "model.bias"},
        lambda state: {**state, "model.bias": np.zeros((2, 4), np.float32)},
        lambda state: {**state, "model.bias": np.zeros(8, np.int32)},
    ],
    ids=["missing", "other shape", "other type of the same bits"],
)
def test_a_different_structure_is_named(tmp_path: Path, change: Any) -> None:
    for pair in ([weights(), change(weights())], [change(weights()), weights()]):
        report = compare_replicas(write_states(tmp_path, *pair))
        assert (report.first_difference, report.equal, report.byte_equivalent) == ("model.bias", False, False)


def test_a_difference_at_the_end_of_a_large_tensor_is_found(tmp_path: Path) -> None:
    size = BLOCK_BYTES // 4 + 1000
    first, second = np.zeros(size, np.float32), np.zeros(size, np.float32)
    second[-1] = 2.0
    report = compare_replicas(write_states(tmp_path, {"w": first}, {"w": second}))
    assert report.max_abs_diff == 2.0


def write_raw(path: Path, dtype: str, content: bytes, count: int) -> None:
    """Write a safetensors file by hand, for types that numpy lacks."""
    header = json.dumps({"w": {"dtype": dtype, "shape": [count], "data_offsets": [0, len(content)]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)


def test_bfloat16_is_compared_as_numbers(tmp_path: Path) -> None:
    files = {rank: tmp_path / f"{rank}" for rank in (0, 1)}
    write_raw(files[0], "BF16", b"\x80\x3f\x00\x40", 2)  # 1, 2
    write_raw(files[1], "BF16", b"\x80\x3f\x40\x40", 2)  # 1, 3
    assert compare_replicas(files).max_abs_diff == 1.0


def test_a_single_rank_is_byte_equivalent(tmp_path: Path) -> None:
    report = compare_replicas(write_states(tmp_path, weights()))
    assert (report.byte_equivalent, report.ranks) == (True, 1)


def test_a_comparison_without_states_is_an_error() -> None:
    with pytest.raises(DataError, match="nothing to compare") as caught:
        compare_replicas({}, folder=Path("runs/mine"))
    assert "shoal train --resume runs/mine" in caught.value.fix


def test_a_rank_that_wrote_no_state_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rank 1 wrote no state-rank-1\.safetensors"):
        compare_replicas(write_states(tmp_path, weights()), members=(0, 1))


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_truncated_state_file_is_a_data_error(tmp_path: Path, keep: int) -> None:
    files = write_states(tmp_path, weights(), weights())
    files[1].write_bytes(files[1].read_bytes()[:keep])
    with pytest.raises(DataError, match="state-rank-1") as caught:
        compare_replicas(files)
    assert "shoal train --resume" in caught.value.fix


def test_garbage_and_missing_files_are_data_errors(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.safetensors"
    garbage.write_bytes(b"\xff" * 400)
    for path in (garbage, tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(DataError):
            compare_replicas({0: path})


def commit(step: int, first: int, end: int) -> dict[str, Any]:
    return {"step": step, "samples": [first, end], "members": [0, 1], "generation": 0, "loss": 1.0}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.data())
def test_any_resume_keeps_the_ledger_valid(sizes: list[int], data: st.DataObject) -> None:
    ends = np.cumsum([0, *sizes]).tolist()
    commits = [commit(number + 1, ends[number], ends[number + 1]) for number in range(len(sizes))]
    back = data.draw(st.integers(0, len(sizes)))
    report = check_ledger([*commits, *commits[back:]])
    assert report.ok
    assert (report.steps, report.samples, report.redone) == (len(sizes), ends[-1], len(sizes) - back)


def test_a_skipped_step_is_a_gap() -> None:
    report = check_ledger([commit(1, 0, 24), commit(3, 48, 72)])
    assert not report.ok
    assert report.gaps == [(24, 48)]


def test_samples_before_the_first_step_are_a_gap() -> None:
    assert check_ledger([commit(1, 24, 48)]).gaps == [(0, 24)]


def test_samples_used_twice_are_an_overlap() -> None:
    report = check_ledger([commit(1, 0, 24), commit(2, 20, 44)])
    assert not report.ok
    assert report.overlaps == [(20, 24)]


def test_a_step_done_twice_on_different_samples_is_a_double() -> None:
    report = check_ledger([commit(1, 0, 24), commit(2, 24, 48), commit(2, 48, 72)])
    assert not report.ok
    assert report.doubles == [2]


def test_a_redo_with_another_batch_supersedes_later_steps() -> None:
    """Resumed from step 1 in a smaller world of a weakly scaled run: the earlier steps 2 and 3 are void."""
    report = check_ledger([commit(1, 0, 24), commit(2, 24, 48), commit(3, 48, 72), commit(2, 24, 36)])
    assert report.ok
    assert (report.steps, report.samples, report.redone) == (2, 36, 2)


def test_a_damaged_record_is_counted() -> None:
    for samples in ([0], "0-24", [24, 0], [0, None]):
        report = check_ledger([commit(1, 0, 24), {"step": 2, "samples": samples}])
        assert (report.unreadable, report.ok) == (1, False)


def test_an_empty_ledger_is_valid() -> None:
    assert check_ledger([]).ok
    assert json.loads(check_ledger([]).model_dump_json())["ok"] is True
