"""Several runs on one page, the page of a script without steps, and stand-ins for names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli.main import run
from shoal.errors import DataError, UsageError
from shoal.events import Event
from shoal.run_folder import RunFolder
from shoal.tools.report import pdf
from shoal.tools.report.compare import compare_runs, comparison_file, name_runs, read_runs, render_comparison
from shoal.tools.report.page import write_report
from shoal.tools.report.redact import Redactor
from shoal.tools.report.script_page import render_script_page
from tests.support.run_samples import all_events, make_run, make_session_run, rank_events, start, step
from tests.unit.tools.report.test_page import EVIL, Page


def compared(*runs: RunFolder, redactor: Redactor | None = None) -> Page:
    return Page(render_comparison(read_runs(runs, redactor)))


def test_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    slow = [{**event, "step_s": 2 * event["step_s"]} if event["event"] == "step" else event for event in all_events()]
    runs = (make_run(tmp_path / "fast"), make_run(tmp_path / "slow", slow, "train.seed=7", "train.compile=off"))
    page = compared(*runs)
    assert set(page.figures) == {"loss-gpt", "speed-tokens", "parts"}
    for name in ("loss-gpt", "speed-tokens"):
        assert [one["name"] for one in page.figures[name]["series"]] == ["fast", "slow"]
        assert len({one["colour"] for one in page.figures[name]["series"]}) == 2
    assert page.figures["parts"]["names"] == ["fast", "slow"]
    assert "0.50×" in page.text
    assert "seed357" in page.text.replace("\n", "").replace("35000", "35"), "the settings that differ"
    assert "train.compileautooff" in page.text.replace("\n", "")
    assert page.text.count("seed") == 1
    rows = compare_runs(read_runs(runs))
    assert [row["run"] for row in rows] == ["fast", "slow"]
    assert rows[1]["step_s"] == pytest.approx(2 * rows[0]["step_s"])
    assert sum(rows[1]["phases"].values()) == pytest.approx(rows[1]["step_s"])


def test_a_script_and_a_gpt_have_curves_of_their_own(tmp_path: Path) -> None:
    figures = compared(make_run(tmp_path / "gpt"), make_session_run(tmp_path / "images")).figures
    assert set(figures) == {"loss-gpt", "loss-script", "speed-tokens", "speed-samples", "parts"}
    assert figures["loss-script"]["legend"], "one series, whose name is not shown otherwise"


def test_equal_folder_names_are_told_apart(tmp_path: Path) -> None:
    runs = [RunFolder(tmp_path / name) for name in ("a/run", "b/run", "c/other")]
    assert name_runs(runs) == ["a/run", "b/run", "c/other"]
    assert name_runs(runs[1:]) == ["run", "other"]
    assert name_runs([runs[0], runs[0]]) == ["run", "run"]


def test_other_runs_get_another_file() -> None:
    names = [f"grammar-20261116-{number:06}" for number in range(9)]
    runs = [RunFolder(Path("/runs") / name) for name in names]
    assert comparison_file(runs[:2]) == f"compare-{names[0]}-{names[1]}.html"
    files = {comparison_file(runs[:count]) for count in range(2, 10)}
    assert len(files) == 8
    assert max(map(len, files)) < 130


def test_names_of_runs_cannot_inject_markup(tmp_path: Path) -> None:
    page = compared(make_run(tmp_path / "<img src=x>"), make_run(tmp_path / "<b>x"))
    assert not [tag for tag, _ in page.tags if tag in ("img", "b")]
    assert [one["name"] for one in page.figures["loss-gpt"]["series"]] == ["<img src=x>", "<b>x"], "labels are text"


def script_run(folder: Path, ended: Event | None = None) -> RunFolder:
    made = RunFolder.create(folder, is_training=False)
    command = "shoal run --on alice@10.1.2.3,bob@server.corp.example /home/alice/my train.py"
    job = {"script": ["/home/alice/train.py"], "on": "alice@10.1.2.3", "commands": [command]}
    made.job.write_text(json.dumps(job))
    events = [
        {"event": "supervising", "rank": 0, "time": 1_790_000_000.0, "pid": 1},
        {"event": "note", "rank": 0, "time": 1_790_000_003.0, "text": "rank 1 on alpha was killed"},
    ]
    with made.supervisor.open("w") as file:
        file.writelines(json.dumps(event) + "\n" for event in [*events, *([ended] if ended else [])])
    made.log("alpha", 1).parent.mkdir(parents=True)
    made.log("alpha", 1).write_text(f"10%\r90%\nconnect to 10.1.2.3 failed on alpha\n{EVIL}\n")
    made.journal("alpha").parent.mkdir()
    made.journal("alpha").write_text("")
    return made


def test_a_script_without_steps_has_a_page(tmp_path: Path) -> None:
    ended = {
        "event": "ended",
        "rank": 0,
        "time": 1_790_000_090.0,
        "code": 1,
        "seen": "rank 1 failed",
        "fix": "see logs",
    }
    page = Page(render_script_page(script_run(tmp_path / "run", ended)))
    for text in ("failed with exit code 1", "1 min 30 s", "rank 1 failed", "was killed", "90%", "shoal run --measure"):
        assert text in page.text
    assert "10%\r" not in page.text
    assert page.figures == {}
    with pytest.raises(DataError, match="recorded no steps"):
        read_runs([RunFolder(tmp_path / "run"), make_run(tmp_path / "other")])


def test_a_redacted_page_has_no_host_address_user_or_path(tmp_path: Path) -> None:
    secrets = (
        "alpha", "beta.corp.example", "10.7.8.9", "fd00::12", "alice", "/home/alice", "/data/corpus",
        "aa:bb:cc:dd:ee:ff", "my-project", "fileserver.lan",
    )  # fmt: skip
    text = (
        "rank 1 on alpha: connect to alice@beta.corp.example (10.7.8.9 port 29500, fd00::12, aa:bb:cc:dd:ee:ff) "
        "failed; see /home/alice/run/logs/x.log: No such file; http://fileserver.lan/my-project/x; ALPHA said 12:30:45"
    )
    fault = {"event": "fault", "rank": 1, "error": "RunFailed", "seen": text, "why": text, "fix": text}
    warning = {"event": "warning", "rank": 0, "seen": text, "why": text, "fix": text}
    log = {"event": "log", "rank": 0, "step": 1, "time": 1_790_000_001.0, "loss on alpha": 1.0}
    begun = [start(0, node="alpha", interface="wlxaabbccddeeff"), start(1, node="beta.corp.example"), log]
    events = [*begun, step(1), step(1, 1), step(2), step(2, 1), log | {"step": 2}, fault, warning]
    trained = make_run(tmp_path / "run", events, 'data.path="/data/corpus/all of it.txt"')
    commands = ["shoal train --on alice@10.7.8.9 --data /data/corpus/all of it.txt --out my-project/run"]
    trained.job.write_text(json.dumps({"commands": commands}))
    page = write_report(trained, file=tmp_path / "out.html", redactor=Redactor()).read_text(encoding="utf-8")
    shown = Page(page)
    for secret in (*secrets, "aabbccddeeff", str(tmp_path)):
        assert secret.lower() not in (shown.text + shown.scripts[0]).lower(), secret
    assert "rank 1 on node-1: connect to user-" in shown.text
    assert "12:30:45" in shown.text
    assert "port 29500" in shown.text
    assert "2(N−1)/N·S" in shown.text, "not every slash begins a path"
    assert "alpha" in write_report(trained).read_text(encoding="utf-8")


def test_a_stand_in_is_the_same_everywhere(tmp_path: Path) -> None:
    events = [*rank_events(0), *rank_events(1)]
    for event in events:
        if event["event"] == "start":
            event["node"] = ("zulu", "yankee")[event["rank"]]
    runs = [make_run(tmp_path / name, events) for name in ("one", "two")]
    redactor = Redactor()
    read_runs(runs, redactor)
    assert redactor.text("zulu and yankee, zulu.local; zulus") == "node-1 and node-2, node-1; zulus"
    once = redactor.text("alice@10.0.0.7 wrote /srv/a/b.txt. 10.0.0.7, 127.0.0.1, torch 2.13.0")
    assert redactor.text(once) == once, "a second pass changes nothing"
    assert "127.0.0.1, torch 2.13.0" in once
    assert once.count("address-1") == 2
    assert once.startswith("user-")


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (r'File "C:\Users\alice\proj\train.py", line 3', 'File "path-1", line 3'),
        (r"C:\Users\Alice B\my runs\a.txt is missing", "path-1 is missing"),
        (r"\\fileserver\home\alice\data.txt: no such file", "path-1: no such file"),
        (r'{"folder": "C:\\Users\\alice"}', '{"folder": "path-1"}'),
        ("00-1A-2B-3C-4D-5E, 00:1a:2b:3c:4d:5e", "address-1, address-1"),
        (r"error:\n 2026-11-18-10-20-30-40", r"error:\n 2026-11-18-10-20-30-40"),
    ],
)
def test_paths_of_windows_and_hardware_addresses_are_redacted(text: str, redacted: str) -> None:
    assert Redactor().text(text) == redacted


def test_the_logs_of_a_redacted_script_have_stand_ins(tmp_path: Path) -> None:
    page = Page(render_script_page(script_run(tmp_path / "run"), Redactor()))
    assert "connect to address-1 failed on node-1" in page.text
    for secret in ("alice", "alpha", "10.1.2.3", "bob", "corp.example"):
        assert secret not in page.text
    assert "unfinished" in page.text


def test_a_pdf_needs_a_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(UsageError, match="needs Chromium") as error:
        pdf.find_chromium()
    assert "apt install chromium" in str(error.value.fix)


def test_the_verb_writes_where_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(make_run(tmp_path / "runs" / name).path) for name in ("one", "two")]
    assert run(["report", *runs, "--json"], debug=False) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["report"] == str(tmp_path / "runs" / "compare-one-two.html")
    assert [row["run"] for row in document["runs"]] == ["one", "two"]
    assert run(["report", runs[0], "--redact", "--json"], debug=False) == 0
    assert json.loads(capsys.readouterr().out) == {"report": f"{runs[0]}/report-redacted.html"}
    assert not (tmp_path / "runs" / "one" / "report.html").exists()
    for out, page in (("folder", "folder/report.html"), ("my.html", "my.html")):
        assert run(["report", runs[0], "-o", str(tmp_path / out)], debug=False) == 0
        assert (tmp_path / page).is_file()
    capsys.readouterr()
    script = str(script_run(tmp_path / "script").path)
    assert run(["report", runs[0], script], debug=False) == DataError.exit_code
    assert "recorded no steps" in capsys.readouterr().err
    assert run(["report", script], debug=False) == 0


def test_damaged_lines_are_counted_and_shown(tmp_path: Path) -> None:
    damaged = make_run(tmp_path / "run")
    with damaged.events(1).open("ab") as file:
        file.write(b'{"event":"step","rank":1}\n\xff\xfe\n[1]\n\n{"event":"st')
    page = Page(write_report(damaged).read_text(encoding="utf-8"))
    assert "4 lines could not be read and are left out: 4 in rank-1.jsonl" in page.text
    assert "Damaged lines" not in Page(write_report(make_run(tmp_path / "whole")).read_text(encoding="utf-8")).text
