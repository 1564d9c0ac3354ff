"""Play a lesson: its experiment, the verdict, and the files that it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.cluster.lab import require_lab
from shoal.errors import Interrupted
from shoal.tools.learn.experiment import Display, Experiment, Value
from shoal.tools.learn.judge import LessonResult, make_result, next_folder, write_result
from shoal.tools.learn.lesson import LessonFolder
from shoal.tools.learn.picture import draw_picture


def check_needs(folder: LessonFolder) -> None:
    """Refuse a lesson that this machine cannot do, before anything is asked."""
    if "lab" in folder.lesson.needs:
        require_lab()


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
    try:
        with experiment:
            if experiment.is_disturbed and not is_quick:
                busy = f"other programs keep {experiment.other_cores:.1f} cores busy now"
                warn(f"{busy}: it takes longer, and times are not judged")
            result = run(experiment)
    except KeyboardInterrupt:
        raise Interrupted(
            f"lesson {lesson.number} was interrupted; what it had started has ended, and the try does not count",
            fix=f"shoal learn {lesson.number}",
        ) from None
    judged = make_result(lesson, result, experiment, out, began)
    draw_picture(result.picture, lesson.title, judged.predictions, out / judged.picture)
    write_result(judged, out)
    return judged
