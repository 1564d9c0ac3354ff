"""Run the learner's ddp.py on two ranks, and judge what each rank saw."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

from shoal.tools.learn.experiment import Bars, Check, Experiment, Result

HERE = Path(__file__).parent
# In the solution a comment names each gap, and what follows it fills the gap.
_FILLED = re.compile(r"(?m)^    # (gap \d: .*)\n(?:    .*\n)+")
_OPEN = re.compile(r'NotImplementedError\("(gap \d)')
_ERROR = re.compile(r"(?m)^error: (.*)$")
# In a traceback: the function of ddp.py in which a rank failed.
_PLACE = re.compile(r'ddp\.py", line \d+, in (\w+)')
GAPS = (
    "init_distributed", "make_shard", "wrap_for_ddp", "is_main_process", "exchange_only_with_the_last",
)  # fmt: skip


def run(experiment: Experiment) -> Result:
    learners_file = experiment.files / "ddp.py"
    if not learners_file.exists():
        learners_file.write_text(make_gaps())
    shutil.copyfile(HERE / "train.py", experiment.files / "train.py")
    shutil.copyfile(HERE / "solution.py" if experiment.takes_theory else learners_file, experiment.folder / "ddp.py")
    shutil.copyfile(HERE / "train.py", experiment.folder / "train.py")
    if still_open := _OPEN.findall((experiment.folder / "ddp.py").read_text()):
        text = f"the gaps of {Path(*learners_file.parts[-3:])} are filled"
        return _result([Check(text, is_met=False, seen=f"open: {', '.join(still_open)}")])
    done = experiment.shoal("run", "--measure", "--on", "local:2", "--out", "run", "train.py", codes=range(256))
    facts = [json.loads(path.read_text()) for path in sorted(experiment.folder.glob("facts-*.json"))]
    if done.code or not facts:
        return _result([_failure(done.err, done.code)])
    return _result(list(judge_facts(facts)), facts)


def make_gaps() -> str:
    """Return the solution without what fills its gaps."""
    return _FILLED.sub(r'    raise NotImplementedError("\1")\n', (HERE / "solution.py").read_text())


def _failure(err: str, code: int) -> Check:
    """Name the gap in which a rank failed, by the traceback."""
    errors = _ERROR.findall(err) or [f"exit code {code}"]
    places = [name for name in _PLACE.findall(err) if name in GAPS]
    gap = f"gap {GAPS.index(places[-1]) + 1}, {places[-1]}: " if places else ""
    return Check(f"{gap}train.py runs to its end with your ddp.py", is_met=False, seen=errors[0])


def judge_facts(facts: list[dict[str, Any]]) -> list[Check]:
    first, steps = facts[0], facts[0]["steps"]
    taken = sorted(sample for one in facts for sample in one["shard"])
    sizes = [len(one["shard"]) for one in facts]
    last = first["micro_batches"] - 1
    exchanged = [one["exchanged"] for one in facts]
    where = " and ".join(str(1 + number) for number in sorted({*itertools.chain(*exchanged)})) or "none"
    main = [one["rank"] for one in facts if one["is_main"]]
    return [
        Check(
            "gap 1, init_distributed: both ranks are in one group over gloo",
            len(facts) == 2 and all((one["group_size"], one["backend"]) == (2, "gloo") for one in facts),
            f"{len(facts)} ranks wrote results, in a group of {first['group_size']} over {first['backend']}",
        ),
        Check(
            "gap 2, make_shard: every sample is in one shard, and the sizes differ by one at most",
            taken == list(range(first["samples"])) and max(sizes) - min(sizes) <= 1,
            f"{' and '.join(map(str, sizes))} of {first['samples']}, {len(set(taken))} different",
        ),
        Check(
            "gap 3, wrap_for_ddp: DistributedDataParallel with gradient_as_bucket_view",
            all(one["is_ddp"] and one["gradient_as_bucket_view"] for one in facts),
            "" if first["is_ddp"] else "the model was not wrapped",
        ),
        Check("gap 4, is_main_process: true on rank 0 alone", main == [0], f"true on {main or 'no rank'}"),
        Check(
            "gap 5, exchange_only_with_the_last: one exchange in a step, with the last of its two micro-batches",
            all(numbers == [last] * steps for numbers in exchanged),
            f"{' and '.join(str(len(one)) for one in exchanged)} exchanges in {steps} steps, with micro-batch {where}",
        ),
        Check(
            "gaps 1, 3 and 5: after the last step both ranks have equal weights",
            len({one["digest"] for one in facts}) == 1 and len(facts) == 2,
            ", ".join(one["digest"][:8] for one in facts),
        ),
    ]


def _result(checks: list[Check], facts: list[dict[str, Any]] | None = None) -> Result:
    series = {f"rank {one['rank']}": [len(one["shard"]), len(one["exchanged"])] for one in facts or ()}
    picture = Bars("What each rank had and did", "", ["samples", "exchanges"], series) if facts else None
    return Result(theory={}, checks=checks, picture=picture)
