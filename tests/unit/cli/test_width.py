"""Tables and paragraphs fit a terminal of 60 columns, and are not padded in a pipe."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from shoal.cli.bench import parse_numbers, print_clusters, print_levers
from shoal.cli.chaos import _print_list, _print_results
from shoal.cli.doctor import _print_diagnosis, print_fix
from shoal.cli.lab import _print_lab
from shoal.cli.main import run
from shoal.cli.output import print_note, print_run, print_table
from shoal.cli.probe import print_profile
from shoal.cli.progress import BarDisplay, PlainDisplay
from shoal.errors import UsageError
from shoal.records.manifest import write_derived_files
from shoal.terminal import printable
from shoal.tools.bench.levers import CEILING, compare
from shoal.tools.bench.scaling import ScalingResult, ScalingRow
from shoal.tools.chaos.judge import ScenarioTimes
from shoal.tools.chaos.run import ScenarioResult
from shoal.tools.chaos.scenario import all_scenarios
from shoal.tools.doctor.checks import judge
from shoal.tools.doctor.run import Diagnosis
from shoal.tools.probe.run import assemble
from tests.support.doctor_facts import gpu, machine, scene
from tests.support.run_samples import all_events, demo_points, make_run, make_session_run, start, step
from tests.unit.config.test_profile import measured, with_gpus
from tests.unit.tools.bench.test_levers import point

Lines = Callable[[], list[str]]
NARROW = 60


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lines:
    """Make stdout a terminal of 60 columns; return what reads the printed lines, without styles."""
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": str(NARROW), "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)

    def read() -> list[str]:
        printed = capsys.readouterr()
        return printable(printed.out + printed.err).splitlines()

    return read


def too_wide(lines: list[str]) -> list[str]:
    return [line for line in lines if cell_len(line.rstrip()) > NARROW]


def scaling_result(folder: Path) -> ScalingResult:
    rows: list[ScalingRow] = []
    for measured_point in demo_points():
        on = f"lab:{measured_point.ranks},link=100mbit"
        row = ScalingRow(on, on, None, "", label=on)  # type: ignore[arg-type]
        row.tries.append((measured_point.model_copy(update={"name": on}), make_run(folder / str(len(rows)))))
        rows.append(row)
    failed = ScalingRow("local:9", "local:9", None, "")  # type: ignore[arg-type]
    failed.error = UsageError("this machine has too few cores for all of these ranks", why="nine are more than two")
    return ScalingResult([*rows, failed], folder, None)


def test_scaling(tmp_path: Path, lines: Lines) -> None:
    print_clusters(scaling_result(tmp_path))
    printed = lines()
    assert not too_wide(printed)
    assert sum("lab:2,link=100mbit" in line for line in printed) > 1, "the table has no second part"
    assert "all-reduce p95" in " ".join(printed)
    assert not any(re.search(r"\d{4} ms|\d{3}\.\d ms", line) for line in printed)
    assert {"wait", "efficiency"} <= {word for line in printed for word in line.split()}


def test_levers(lines: Lines) -> None:
    print_levers(compare([point(CEILING, 180), point("fp16", 229), point("accumulate:4+int8", 170)]))
    assert not too_wide(lines())


def test_probe(lines: Lines) -> None:
    print_profile(assemble(with_gpus(measured(), "nccl"), "now", 60.0, 51.0))
    printed = lines()
    assert not too_wide(printed)
    assert "memory GB/s" in "\n".join(printed)
    assert "▇" not in "".join(printed), "the bars do not fit beside their sizes"


def test_a_fix_keeps_its_commands_whole(lines: Lines) -> None:
    command = "python -c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'"
    print_fix(f"see which cards there are, and their driver: nvidia-smi; {'then ' * 12}see: {command}", "  fix:    ")
    printed = [line.strip() for line in lines()]
    assert command in printed
    assert [line for line in too_wide(printed) if line != command] == []


def test_simulation(lines: Lines, tmp_path: Path) -> None:
    scenario = tmp_path / "scenario.toml"
    scenario.write_text("nodes = 3\nstep_s = 2\ntokens_per_step = 2048\nhours = 6\nmtbf_hours = 24\nseeds = 4\n")
    assert run(["simulate", str(scenario)], debug=False) == 0
    printed = lines()
    assert not too_wide(printed)
    assert "regrouping live trains" in " ".join(printed)


def test_lab(lines: Lines) -> None:
    processes = [{"pid": 4711, "command": "python -m shoal.train.worker --folder /somewhere/far/away/runs/one"}]
    node: dict[str, Any] = {"name": "node1", "address": "10.77.0.1", "link": "100 Mbit/s, 2 ms", "cpu": 0.5}
    node |= {"memory_bytes": 1_500_000_000, "slots": 2}
    nodes = [{**node, "state": "up", "firewall": ["22", "29500-29600"], "processes": processes}]
    rest = {"rootless": True, "belongs_to": None, "ssh_config": None, "notes": ["this kernel has no netem " * 4]}
    document = {"name": "mine", "folder": "/run/shoal/labs/mine", "nodes": nodes, "cuts": [], **rest}
    _print_lab(document)
    assert not too_wide(lines())
    _print_lab({**document, "ssh_config": "/run/shoal/labs/mine/ssh/config"})
    ssh = "ssh: shoal lab exec --name mine switch -- ssh -F /run/shoal/labs/mine/ssh/config node1"
    assert too_wide(lines()) == [ssh], "a command to paste is not broken"


def test_the_summary_of_a_run(tmp_path: Path, lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for made in (make_run(Path("gpt").absolute(), all_events()), make_session_run(Path("own").absolute())):
        print_run(made, write_derived_files(made))
        printed = lines()
        # The commands to paste are not wrapped.
        assert not too_wide([line for line in printed if not line.startswith("next: ")])
        result, folder, nexts = re.sub(r"\n(?!run|next)", " ", "\n".join(printed)).splitlines()
        assert re.match(r"loss .*; speed .*; +replicas ", result)
        assert folder == f"run folder: {made.path.name}"
        assert nexts.startswith("next: ")


def test_findings_of_doctor(lines: Lines) -> None:
    cluster = scene({"machine": machine(torch="2.12.0+cpu"), "gpu": gpu(variables={"NCCL_DEBUG": "loud"})}, count=2)
    _print_diagnosis(Diagnosis(cluster, judge(cluster), proved=False, took_s=3.0))
    printed = lines()
    assert any("means:" in line for line in printed)
    commands = ("  fix:", "  again:")
    kept = [line for line in printed if not line.startswith(commands)]
    assert not too_wide(kept)


def test_notes_are_wrapped_at_words(lines: Lines) -> None:
    words = [f"word{number}" for number in range(40)]
    print_note(" ".join(words))
    printed = lines()
    assert not too_wide(printed)
    assert " ".join(printed).split() == ["note:", *words]


def test_a_command_that_does_not_fit_behind_a_note_has_a_line_of_its_own(lines: Lines) -> None:
    command = "shoal join 192.168.178.100:42589 --script train.py"
    print_note(f"on the machine to join, type: {command}")
    assert lines() == ["note: on the machine to join, type:", f"  {command}"]
    print_note("type: shoal join 10.0.0.1:42589")
    assert lines() == ["note: type: shoal join 10.0.0.1:42589"]


def test_a_long_path_in_the_first_column_leaves_room_for_others(lines: Lines) -> None:
    row = ("runs/a-run-with-a-name-that-is-as-long-as-the-terminal", "grammar", "running", "48 of 600")
    print_table(("run", "what", "state", "step"), [row])
    printed = lines()
    assert not too_wide(printed)
    assert sum(line.startswith("run ") for line in printed) == 1


def test_the_list_and_the_figures_of_chaos(lines: Lines) -> None:
    _print_list(all_scenarios())
    printed = lines()
    assert not too_wide(printed)
    # A text has more than a word or two a line.
    assert len(printed) < 5 * len(all_scenarios())
    times = ScenarioTimes(detect_s=0.12, regroup_s=0.48, next_step_s=0.51, next_commit_s=0.53)
    names = {"scenario": "kill-all-ranks-early", "row": 4, "number": 1, "run": "runs/chaos"}
    _print_results([ScenarioResult(**names, seconds=39.0, measured=times, assertions=[])])
    printed = lines()
    assert not too_wide(printed)
    assert not any("…" in line for line in printed)
    assert all(any(time in line for line in printed) for time in ("0.12", "0.48", "0.51", "0.53"))


@pytest.mark.parametrize(("width", "waiting"), [(60, False), (80, True), (120, True)])
def test_the_progress_bar_fits(width: int, waiting: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, highlight=False, color_system=None)
    display = BarDisplay(console, 2000, "tiny")
    display([start(0, 2), step(1233), step(1234)])
    display.close()
    assert isinstance(console.file, io.StringIO)
    shown = [line.strip() for line in printable(console.file.getvalue()).splitlines() if "1234/2000" in line]
    assert shown
    assert max(map(cell_len, shown)) <= width
    assert all("left" in line and "…" not in line for line in shown)
    assert any("waiting" in line for line in shown) == waiting


def test_a_table_in_a_pipe_is_whole_and_not_padded(capsys: pytest.CaptureFixture[str]) -> None:
    wide = "a cell that is wider than the sixty columns of the narrow terminal above"
    print_table(("name", "what", "number"), [("one", wide, "1"), ("a longer one", "x", "22")], right={2})
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == first.rstrip() == "name          what" + " " * (len(wide) - 4) + "  number"
    assert second.endswith(f"{wide}       1")
    assert third.endswith("  22")


@pytest.mark.parametrize(
    ("text", "numbers"), [("3", [3]), ("1,2,4", [1, 2, 4]), ("1..4", [1, 2, 3, 4]), ("1,3..4", [1, 3, 4])]
)
def test_numbers_are_lists_or_ranges(text: str, numbers: list[int]) -> None:
    assert parse_numbers("--ranks", text) == numbers


@pytest.mark.parametrize("text", ["", "1,two", "4..1", "1..", "1..900000", "-1", "1...3"])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a list of numbers"):
        parse_numbers("--ranks", text)


def test_an_error_is_wrapped_at_words_and_its_command_is_not(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.cli.main.stderr_width", lambda: NARROW)
    assert run(["join", "foo"], debug=False) == 2
    printed = [line.rstrip() for line in lines()]
    why = [line for line in printed if not line.startswith(("error: ", "  next: "))]
    assert why[0].startswith("  why:  it is an address and a port")
    assert all(line.startswith("        ") for line in why[1:])
    assert len(why) > 1
    assert too_wide(why) == []
    assert printed[-1] == "  next: copy what shoal host printed after `shoal join`"


@pytest.mark.parametrize(
    ("fix", "lines"),
    [
        (
            "check that rank 0 is running and that no firewall stands between",
            ["check that rank 0 is", "running and that no"],
        ),
        ("undo it: shoal lab heal node1 --name a-long-name", ["undo it:", "shoal lab heal node1 --name a-long-name"]),
        # A command in mid-sentence would not survive a line break.
        ("see: df -h; then use a smaller micro-batch", ["see: df -h; then use a smaller micro-batch"]),
        ("ls /there; then look at the rest of it", ["ls /there; then look at the rest of it"]),
        (
            "shoal ps\nor look at it: shoal report runs/a-long-name",
            ["shoal ps", "or look at it:", "shoal report runs/a-long-name"],
        ),
    ],
)
def test_only_prose_is_wrapped_in_a_next_step(fix: str, lines: list[str]) -> None:
    rendered = UsageError("seen", fix=fix).render(30).splitlines()[1:]
    assert [line[8:] for line in rendered][: len(lines)] == lines


def test_the_live_table_and_the_verdict_of_a_run_fit(tmp_path: Path, lines: Lines) -> None:
    folder = make_run(tmp_path / "run", all_events(2, 50))
    assert run(["watch", str(folder.path), "--terminal"], debug=False) == 0
    printed = lines()
    assert too_wide([line for line in printed if not line.startswith("next: ")]) == []
    assert any("step time compute comm wait" in line for line in printed)
    run(["verify", str(folder.path)], debug=False)
    assert too_wide(lines()) == []


def test_no_scenario_name_is_cut(lines: Lines) -> None:
    assert run(["chaos", "list"], debug=False) == 0
    printed = lines()
    assert too_wide([line for line in printed if "tests/" not in line]) == []
    assert "interrupt-twice" in "\n".join(printed)
    assert not any("…" in line for line in printed)


def test_no_unlike_option_is_suggested(lines: Lines) -> None:
    assert run(["ps", "--foo"], debug=False) == 2
    assert not any("did you mean" in line for line in lines())
    assert run(["train", "--stepz", "3"], debug=False) == 2
    assert any("did you mean '--steps'?" in line for line in lines())


def test_notes_between_the_lines_of_a_script_fit_and_their_command_is_whole(lines: Lines) -> None:
    resume = "shoal run --resume runs/a-long-name-20260131-235959 --steps 4000"
    text = f"two ranks of the script have saved a checkpoint after step 20 and have ended; to go on: {resume}"
    display = PlainDisplay(Console(), 20, "my_train")
    display([start(0), {"event": "note", "text": text}])
    printed = lines()
    assert too_wide([line for line in printed if line.strip() != resume]) == []
    assert f"  {resume}" in printed
