"""Figures of pages: what is drawn of many steps hides none that stands out."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from shoal.tools.draw.pages import (
    MAX_POINTS,
    embed_json,
    make_areas,
    make_curve,
    stack_parts,
    thin_keeping_extremes,
    thin_with_envelope,
)
from shoal.tools.draw.palette import PHASE_NAMES
from tests.unit.tools.report.test_page import EVIL

LONG = 250_000


def with_a_spike() -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    values = np.ones(LONG)
    values[123_456] = 50.0
    return np.arange(1, LONG + 1), values


def test_long_curves_are_thinned_and_keep_their_spikes() -> None:
    x, y = thin_keeping_extremes(*with_a_spike())
    assert len(x) == len(y) <= MAX_POINTS
    assert x == sorted(x)
    assert max(y) == 50.0


def test_a_gap_does_not_hide_a_spike_beside_it() -> None:
    steps, values = with_a_spike()
    values[123_450] = math.nan
    thinned = thin_keeping_extremes(steps, values)[1]
    assert max(value for value in thinned if not math.isnan(value)) == 50.0
    assert sum(map(math.isnan, thinned)) == 1


def test_a_mean_has_the_lowest_and_the_highest_beside_it() -> None:
    points = thin_with_envelope(*with_a_spike())
    assert len(points) == MAX_POINTS
    assert [1, 1, 1, 1] in points
    assert [point[3] for point in points if point[3] != 1] == [50]
    assert max(point[1] or 0 for point in points) == pytest.approx(1 + 49 / 250)
    assert thin_with_envelope(np.arange(1, 4), np.array([1.0, math.nan, 3.0])) == [[1, 1], [2, None], [3, 3]]


def test_short_curves_are_unchanged() -> None:
    thinned = thin_keeping_extremes(np.arange(1, 4), np.array([1.0, math.nan, 3.0]))
    assert make_curve("loss", "measured", *thinned)["points"] == [[1, 1], [2, None], [3, 3]]


def test_the_longest_step_of_many_is_drawn() -> None:
    steps, values = with_a_spike()
    figure = make_areas(PHASE_NAMES, steps, {"forward": values, "wait": np.zeros(LONG), "other": np.ones(LONG)})
    assert [one["colour"] for one in figure["series"]] == ["forward", "other"], "a part that never took time"
    rows = figure["panels"][0]["rows"]
    assert (len(rows), figure["thinned"]) == (MAX_POINTS, True)
    assert {len(row) for row in rows} == {4}
    assert max(row[3] for row in rows) == 51_000
    assert len(make_areas(PHASE_NAMES, steps, {"forward": values}, ranks=64)["panels"][0]["rows"]) < 200


def test_a_rank_that_was_away_has_a_gap() -> None:
    steps = np.array([1, 2, 3, 50, 51])
    assert make_areas(PHASE_NAMES, steps, {"forward": 1e-3 * steps})["panels"][0]["rows"] == [
        [1, 1], [2, 2], [3, 3], None, [50, 50], [51, 51],
    ]  # fmt: skip
    assert make_areas(PHASE_NAMES, steps[:0], {"forward": np.zeros(0)})["panels"][0]["rows"] == []


def test_parts_of_steps_are_stacked_in_ms() -> None:
    figure = stack_parts(["one", "two"], [{"forward": 0.1}, {"forward": 0.2, "wait": 0.05}], PHASE_NAMES)
    assert [(one["colour"], one["values"]) for one in figure["series"]] == [("forward", [100, 200]), ("wait", [0, 50])]


def test_embedded_json_cannot_close_its_element() -> None:
    text = embed_json({"name": EVIL + "<!--"})
    assert "<" not in text
    assert json.loads(text) == {"name": EVIL + "<!--"}
