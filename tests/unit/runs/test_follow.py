"""The display of a run whose ranks leave and join."""

from __future__ import annotations

import io
import json
import re
import signal
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from shoal.cli import main
from shoal.cli.progress import BarDisplay, LineDisplay, PlainDisplay, StatusDisplay, make_display, name_training
from shoal.cli.runs import watch_script
from shoal.config.load import build_config, to_toml, validate_session
from shoal.events import Event, EventLog
from shoal.launch.logs import LogLine
from shoal.run_folder import RunFolder, default_out
from shoal.runs.follow import RunEvents, SupervisorLog, forwarding_signals
from shoal.runs.manage import describe, read_opening
from shoal.runs.supervisor import RunJob
from tests.support.member_samples import entered, killed_and_rejoined, steps, time_of
from tests.support.run_samples import make_run, start, step

LEFT = "box-1 lost all of its ranks. box-2 goes on, as generation 2, with step 4."


def note(text: str) -> Event:
    return {"event": "note", "rank": 0, "time": 1.0, "text": text}


def console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=120, highlight=False)


def output_of(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


def shard(rank: int) -> Event:
    return {"event": "shard", "rank": rank, "size": 10, "total": 20, "first": "Do they go?"}


def test_the_progress_line_follows_another_rank_when_the_first_has_left() -> None:
    shown = console()
    display = PlainDisplay(shown, 5, "tiny")
    for rank in (0, 1):
        display([start(rank, 2), shard(rank), entered(rank, "1-0", (0, 1), 0, how="first"), *steps(rank, 1, 3)])
    display([note(LEFT), entered(1, "2-1", (1,), 3), *steps(1, 4, 5)])
    lines = output_of(shown).splitlines()
    assert lines[-2] == f"note: {LEFT}"
    assert lines[-1].startswith("step 5/5  loss ")
    assert output_of(shown).count("tiny: ") == 1


def test_a_training_on_ones_own_text_has_the_name_of_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_training(build_config()) == "grammar"
    own = build_config(sets=("data.path=/home/me/my play.txt",))
    assert name_training(own) == "my play"
    assert name_training(build_config("gpt2-124m", sets=("data.path=/home/me/play.txt",))) == "gpt2-124m"
    monkeypatch.chdir(tmp_path)
    assert default_out(name_training(own)).name.startswith("my-play-20")


def test_what_takes_long_before_the_first_step_is_shown() -> None:
    doing = {"event": "doing", "rank": 0, "time": 1.0, "text": "compiling a part of the model"}
    plain, terminal = console(), Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    PlainDisplay(plain, 5, "tiny")([doing])
    assert output_of(plain) == "compiling a part of the model\n"
    bar = BarDisplay(terminal, 5, "tiny")
    bar([doing])
    bar([start(0, 2, compiled=True)])
    bar.close()
    assert "compiling a part of the model" in output_of(terminal)
    assert "compiling the model, for up to a minute, and computing the first step" in output_of(terminal)


def test_the_log_of_a_training_has_steps_now_and_then_and_what_was_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [start(0, 1), *({**step(number), "time": 3.0 * number} for number in range(1, 21))]
    run = make_run(tmp_path / "run", events, "train.steps=40")
    supervisor = EventLog(run.supervisor, 0)
    supervisor.write("supervising", pid=1)
    supervisor.write("note", text=LEFT)
    assert main.run(["logs", str(run.path)], debug=False) == 0
    shown = capsys.readouterr().err
    assert re.findall(r"^step (\d+)/40 ", shown, re.MULTILINE) == ["1", "5", "9", "13", "17"]
    assert f"note: {LEFT}" in shown


def test_a_script_on_a_terminal_has_a_bar_below_its_lines() -> None:
    screen = Screen()
    lines = LineDisplay(Console(file=screen, force_terminal=True, width=120))
    lines.status = "starting the ranks"
    lines.lines([])
    display = StatusDisplay(lines, build_config(sets=("train.steps=4",)))
    for number in (1, 2):
        display([step(number)])
        lines.lines([LogLine(1.0, 0, "local", f"mine {number}")])
    lines.close()
    shown = screen.getvalue()
    assert shown.startswith("starting the ranks\n\x1b[1A")
    assert re.search(r"\[0\] .*mine 2\nstep 2/4 ━+ +loss .*\n\x1b\[1A\r\x1b\[J$", shown)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_rank_that_rejoins_is_not_introduced_again() -> None:
    shown = console()
    display = PlainDisplay(shown, 9, "tiny")
    display([start(0, 2), shard(0), start(1, 2), shard(1), *steps(0, 1, 3)])
    display([start(0, 2), shard(0), entered(0, "4-1", (1, 0), 3, how="joined"), shard(5)])
    assert output_of(shown).count("tiny: ") == 1
    assert [output_of(shown).count(f"rank {rank}: 10 of 20") for rank in (0, 1, 5)] == [1, 1, 1]


def test_an_older_generation_does_not_change_the_displayed_rank() -> None:
    """Files are read rank after rank, so what rank 1 wrote first may be read last."""
    shown = console()
    display = PlainDisplay(shown, 9, "tiny")
    display([entered(0, "5-0", (0, 1), 4), entered(1, "2-1", (1,), 2), step(9, 0)])
    assert "step 9/9" in output_of(shown)


def test_the_bar_shows_that_members_are_being_agreed_on() -> None:
    shown = Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False)
    display = BarDisplay(shown, 9, "tiny")
    display([start(0, 2), step(1), {"event": "lost", "rank": 0, "generation": "1-0", "step": 2, "why": "closed"}])
    display.close()
    assert "agreeing on the members" in output_of(shown)


def test_ranks_that_join_later_are_followed_from_their_first_event(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [start(0, 1), step(1)])
    news = RunEvents(run)
    assert news.poll() == []
    for event in (start(7, 2), step(2, 7)):
        with run.events(7).open("a") as file:
            file.write(json.dumps(event) + "\n")
    assert [(event["event"], event["rank"]) for event in news.poll()] == [("start", 7), ("step", 7)]


def compact_run(folder: Path, events: list[Event]) -> RunFolder:
    """Write compact lines as ranks do: readers select lines by their beginning."""
    run = make_run(folder, [])
    for event in events:
        with run.events(event["rank"]).open("a") as file:
            file.write(json.dumps(event, separators=(",", ":")) + "\n")
    return run


def test_attaching_shows_the_ranks_that_take_part(tmp_path: Path) -> None:
    events = read_opening(compact_run(tmp_path / "run", killed_and_rejoined()))
    assert [(event["event"], event["rank"], event.get("generation")) for event in events if event["rank"] == 2] == [
        ("start", 2, 0),
        ("membership", 2, "4-0"),
        ("step", 2, None),
    ]
    left = compact_run(tmp_path / "left", [start(0, 2), entered(0, "2-0", (0,), 4), step(5), start(1, 2), step(1, 1)])
    assert {event["rank"] for event in read_opening(left)} == {0}


def test_attaching_shows_the_last_step_of_the_newest_launch(tmp_path: Path) -> None:
    events = [start(0, 1), step(1), step(2)]
    assert [event.get("step") for event in read_opening(compact_run(tmp_path / "run", events))] == [None, 2]
    resumed = [*events, start(0, 1)]
    assert [event.get("step") for event in read_opening(compact_run(tmp_path / "resumed", resumed))] == [None]


def test_attaching_to_a_plain_launch_shows_no_older_generations(tmp_path: Path) -> None:
    older = [start(0, 1), entered(0, "1-0", (0, 1), 0, how="first"), step(1)]
    run = compact_run(tmp_path / "run", [*older, start(0, 1, time=time_of(90)), step(2)])
    assert [event["event"] for event in read_opening(run)] == ["start", "step"]
    named_first = [entered(0, "9-0", (0,), 2, "9-0", "first"), start(0, 1, time=time_of(95))]
    again = compact_run(tmp_path / "again", [*older, *named_first, step(3)])
    assert [event["event"] for event in read_opening(again)] == ["membership", "start", "step"]


def test_notes_of_an_earlier_launch_are_not_repeated(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    lines = [{"event": "supervising"}, note("old"), {"event": "supervising"}, {"event": "running"}, note(LEFT)]
    run.supervisor.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = SupervisorLog(run)
    assert [event["text"] for event in log.poll()] == [LEFT]
    assert log.poll() == []


def test_a_training_whose_folder_is_being_removed_is_described(tmp_path: Path) -> None:
    """It may have lost its config.toml and still have a job.json, which names no script."""
    RunFolder(tmp_path).job.write_text(json.dumps(asdict(RunJob())))
    state = describe(tmp_path, [])
    assert (state.what, state.on, state.steps) == ("", "", None)


def test_a_launched_script_shows_its_session_beside_its_own_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its warnings, its notes and its steps; the settings that it had in an earlier launch do not count."""
    run = RunFolder.create(tmp_path / "run", is_training=False)
    write_settings(run, steps=5)
    display, watch = watch_script(with_progress=True)
    show = watch(run)
    show([note("the ranks are started")])
    write_settings(run, steps=9)
    display.lines([LogLine(0.0, 0, "local", "the script's own line")])
    slow = {"event": "warning", "rank": 0, "time": 2.0, "seen": "rank 1 is slow", "why": "", "fix": "look at it"}
    run.events(0).parent.mkdir(exist_ok=True)
    run.events(0).write_text("".join(json.dumps(event) + "\n" for event in (start(0), step(1), slow)))
    show([])
    printed = capsys.readouterr()
    assert "note: the ranks are started" in printed.err
    assert printed.err.count("step 1/9  loss") == 1
    assert printed.err.count("warning: rank 1 is slow (look at it)") == 1
    assert printed.out == "[0] the script's own line\n"


def write_settings(run: RunFolder, steps: int) -> None:
    run.config.write_text(to_toml(validate_session({"train": {"steps": steps, "global_batch": 4}})))


def test_ctrl_c_is_answered_at_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    passed_on: list[int] = []
    monkeypatch.setattr("shoal.runs.follow.os.kill", lambda pid, signum: passed_on.append(signum))
    with forwarding_signals(lambda: cast(Any, SimpleNamespace(pid=1))):
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == "\nstopping after this step; Ctrl-C again quits now\n"
        signal.raise_signal(signal.SIGINT)
        assert capfd.readouterr().err == "\nquitting now\n"
    assert passed_on == [signal.SIGINT, signal.SIGINT]


def test_the_header_names_the_text_the_sync_method_and_the_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    make_display(build_config("grammar", sets=["data.path=notes.txt"]))
    make_display(build_config("grammar", sets=["sync.mode=diloco", "sync.wire=int8"]), title="diloco+int8 (2 of 6)")
    make_display(build_config("grammar", sets=["sync.mode=local", "sync.every=1000000000"]), title="no exchange")
    assert capsys.readouterr().err.splitlines() == [
        "notes: notes.txt; 100 steps on local:2; sync ddp in fp32",
        "diloco+int8 (2 of 6): English sentences that shoal generates; 100 steps on local:2; "
        "sync diloco every 50 steps in int8",
        "no exchange: English sentences that shoal generates; 100 steps on local:2; "
        "sync none: no gradients are exchanged",
    ]


def test_a_terminal_shows_a_spinner_until_the_first_step() -> None:
    shown = Console(file=io.StringIO(), force_terminal=True, width=120, highlight=False)
    display = BarDisplay(shown, 9, "tiny")
    display.wait("starting the ranks")
    display([start(0, 2)])
    display([step(1)])
    display.close()
    text = output_of(shown)
    order = [text.index(part) for part in ("starting the ranks", "computing the first step", "step 1/9")]
    assert order == sorted(order)
