"""Play a lesson: its experiment, the verdict, and the files that it leaves."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.cluster.lab import can_limit_cpu, require_lab
from shoal.errors import UsageError
from shoal.host.node_stats import usable_cpus
from shoal.host.topology import this_topology
from shoal.tools.learn.experiment import Display, Experiment, Value
from shoal.tools.learn.judge import LessonResult, make_result, next_folder, read_result, result_path, write_result
from shoal.tools.learn.lesson import Lesson, LessonFolder
from shoal.tools.learn.picture import draw_picture

# Of a lesson with limited CPUs: with fewer, its nodes would also wait for each other's.
_LEAST_CORES = 2


def check_needs(lesson: Lesson, out: Path) -> None:
    """Refuse a lesson that this machine cannot do, or whose result cannot be kept, before anything is asked."""
    read_result(result_path(out, lesson.number))
    if lesson.needs:
        require_lab()
    if "cpu limits" in lesson.needs and (lack := _lack_of_cpu_limits()):
        raise UsageError(
            f"lesson {lesson.number} cannot be played here", why=lack, fix="choose another one: shoal learn"
        )


def _lack_of_cpu_limits() -> str:
    """Return why nodes here cannot be limited to parts of a processor; empty if they can."""
    if not can_limit_cpu():
        needs_root = "; as root it usually can" if os.geteuid() else ""
        return f"it needs a control group with a cpu controller, which this user cannot make here{needs_root}"
    quota = this_topology().quota
    cores = min(len(usable_cpus()[1]), quota.cores if quota else math.inf)
    return f"its nodes need two cores, and {cores:g} is usable here" if cores < _LEAST_CORES else ""


def play(
    folder: LessonFolder,
    out: Path,
    answers: Mapping[str, Value],
    display: Display,
    warn: Callable[[str], None] = lambda sentence: None,
    *,
    is_quick: bool = False,
    takes_theory: bool = False,
) -> LessonResult:
    """Run the experiment, judge it, and write result and picture below `out`. `warn` gets a sentence if the machine is
    too busy from the beginning."""
    lesson, run = folder.lesson, folder.load_check()
    began = time.time()
    place = next_folder(out, lesson.number)
    experiment = Experiment(place, place.parent, answers, display, is_quick=is_quick, takes_theory=takes_theory)
    with experiment:
        if experiment.is_disturbed and not is_quick:
            busy = f"other programs keep {experiment.other_cores:.1f} cores busy now"
            warn(f"{busy}: it takes longer, and times are not judged")
        result = run(experiment)
    judged = make_result(folder, result, experiment, out, began)
    draw_picture(result.picture, lesson.title, judged.predictions, out / judged.picture)
    write_result(judged, out)
    return judged
