"""Every colour by its name, for pages and PNG files. A page gets them as CSS variables: WARNING is `var(--warning)`."""

from __future__ import annotations

# The colours of Okabe and Ito, which colour-blind readers can distinguish.
_BLUE, _SKY, _GREEN, _AMBER, _RED, _PINK, _GREY = (
    "#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#999999",
)  # fmt: skip

# Between the set's two blues: a thin line in the darker one is hard to see on a dark page.
MEASURED = "#1f86c7"
VALIDATION = _RED
IDEAL = "#8a8a8a"
NOTE = "#555555"  # small text of PNG files
# Marks and borders; text in these colours would be too faint, see `warning-text` and `bad` below.
WARNING, FAULT = _AMBER, "#d5401f"
# Series that have no colour of their own: runs, lineages, nodes, methods.
SERIES = (MEASURED, _AMBER, _GREEN, _PINK, _RED, _SKY, "#7a5cbf")

# The parts of a step in the order in which they are stacked.
_PHASES = {
    "forward": ("forward", _SKY),
    "backward": ("backward", _BLUE),
    "exposed": ("exposed communication", _RED),
    "wait": ("wait for the slowest", _AMBER),
    "optimizer": ("optimizer", _GREEN),
    "data": ("data", _PINK),
    "other": ("other", _GREY),
}
PHASE_NAMES, PHASE_COLOURS = ({phase: look[part] for phase, look in _PHASES.items()} for part in (0, 1))
# Forward and backward as one block, where a figure shows what is added to the computing time.
_PARTS = {
    "compute": ("forward + backward", _BLUE),
    **{phase: _PHASES[phase] for phase in ("exposed", "wait", "optimizer")},
    "other": ("data and other", _GREY),
}
PART_NAMES, PART_COLOURS = ({part: look[which] for part, look in _PARTS.items()} for which in (0, 1))
# Marks on the time axis of the live page.
_MARKS = {
    "members": _PINK, "checkpoint": IDEAL, "verdict": _SKY, "warning": WARNING, "fault": FAULT, "start": IDEAL,
    "end": IDEAL, "note": IDEAL,
}  # fmt: skip

_LIGHT = {
    "paper": "#ffffff", "panel": "#f5f7f9", "ink": "#1b2329", "soft": "#5b6770", "rule": "#dde3e8",
    "good": "#00734f", "bad": "#b3261e", "accent": "#0072b2", "warning-text": "#8a5a00",
}  # fmt: skip
_DARK = {
    "paper": "#14191d", "panel": "#1d242a", "ink": "#e6ebef", "soft": "#9aa7b1", "rule": "#313b43",
    "good": "#4cc79d", "bad": "#ff8a80", "accent": "#56b4e9", "warning-text": "#f0b84a",
}  # fmt: skip


def css_variables() -> str:
    """Return the style that names all colours. A page is printed in the light ones."""
    series = {f"series-{number}": colour for number, colour in enumerate(SERIES)}
    named = {"measured": MEASURED, "validation": VALIDATION, "ideal": IDEAL}
    always = PHASE_COLOURS | PART_COLOURS | _MARKS | series | named
    return (
        f":root {{ color-scheme: light dark; {_declarations(always | _LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not(.printing) {{ {_declarations(_DARK)} }} }}\n"
    )


def _declarations(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())
