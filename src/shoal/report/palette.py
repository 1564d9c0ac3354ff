"""Colours of the phases, the same in every figure. Okabe and Ito's set, told apart by colour-blind readers too."""

from __future__ import annotations

PHASE_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed communication",
    "wait": "wait for the slowest",
    "optimizer": "optimizer",
    "data": "data",
    "other": "other",
}
PHASE_COLOURS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "exposed": "#d55e00",
    "wait": "#e69f00",
    "optimizer": "#009e73",
    "data": "#cc79a7",
    "other": "#999999",
}
# Between the set's two blues: a thin line of the darker one is lost on a dark page.
MEASURED = "#1f86c7"
IDEAL = "#8a8a8a"
LINEAGE_COLOURS = ("#1f86c7", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#999999")
VALIDATION = "#d55e00"
