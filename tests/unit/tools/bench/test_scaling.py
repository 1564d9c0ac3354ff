"""`shoal bench scaling`: which rows there are, and what remains when one cannot be measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from shoal.cli.bench import print_clusters, refuse_wrong_rows
from shoal.config.load import build_config
from shoal.config.schema import Config
from shoal.errors import ConfigError, DataError, HostError, Interrupted, LabError, RunFailed, ShoalError, UsageError
from shoal.run_folder import RunFolder
from shoal.tools.bench import scaling
from shoal.tools.bench.scaling import ScalingResult, cluster_rows, measure_scaling, node_rows, scaling_csv
from tests.support.run_samples import all_events, make_run

HOSTS = "".join(f'[[host]]\nhost = "{name}"\n' for name in ("one", "two", "three"))


def config(*sets: str) -> Config:
    return build_config("grammar", sets=sets)


def hosts_file(folder: Path) -> Path:
    path = folder / "hosts.toml"
    path.write_text(HOSTS)
    return path


# Rows


def test_the_first_machines_of_a_hosts_file_are_measured(tmp_path: Path) -> None:
    hosts = hosts_file(tmp_path)
    rows = node_rows(config("run.weights=2/1/1"), str(hosts), [3, 1, 2], tmp_path / "out")
    assert [row.key for row in rows] == ["1", "2", "3"]
    assert [row.config.run.weights for row in rows] == ["2", "2/1", "2/1/1"]
    assert rows[2].config.run.on == str(hosts)
    assert Path(rows[1].config.run.on).read_text().count("[[host]]") == 2


def test_the_first_nodes_of_a_lab_keep_their_link(tmp_path: Path) -> None:
    rows = node_rows(config(), "lab:3,link=100mbit", [1, 2, 3], tmp_path)
    assert [row.config.run.on for row in rows] == ["lab:1", "lab:2,link=100mbit", "lab:3,link=100mbit"]


@pytest.mark.parametrize(
    ("on", "counts", "seen"),
    [
        ("local:4", [1, 2], "--nodes does not go with --on local:4"),
        ("join:3", [1, 2], "--nodes does not go with --on join:3"),
        ("lab:2", [1, 3], "--nodes 3: --on lab:2 has 2"),
        ("lab:2", [0], "cannot measure on 0 machines"),
    ],
)
def test_nodes_that_a_cluster_has_not_are_refused(tmp_path: Path, on: str, counts: list[int], seen: str) -> None:
    with pytest.raises(UsageError) as refused:
        node_rows(config(), on, counts, tmp_path)
    assert refused.value.seen == seen
    assert refused.value.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("on", "nodes", "ranks", "seen"),
    [
        (["local:1"], None, "1,2", "--ranks 1,2 does not go with --on local:1"),
        ([], "1,2", None, "--nodes 1,2 goes with one --on, and there is none"),
        (["lab:3", "lab:2"], "1,2", None, "--nodes 1,2 goes with one --on, and there are 2"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    on: list[str], nodes: str | None, ranks: str | None, seen: str
) -> None:
    with pytest.raises(UsageError) as refused:
        refuse_wrong_rows(on, nodes, ranks)
    assert refused.value.seen == seen
    assert refused.value.why
    assert refused.value.fix


def test_rows_are_checked_before_the_first_run() -> None:
    with pytest.raises(ConfigError, match="99 ranks cannot share"):
        cluster_rows(config(), ["local:1", "local:99"])
    with pytest.raises(ConfigError, match="name different devices"):
        cluster_rows(config("train.device=cpu"), ["local:1", "local:1,device=cuda"])
    # A lab that is not up can only be found out here, and the other rows can be measured.
    down, up = cluster_rows(config(), ["lab:not-there", "local:1"])
    assert down.status == "skipped"
    assert "not-there" in down.reason
    assert up.error is None


# Measuring, with recorded runs in place of trainings


Outcome = int | ShoalError


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Outcome]:
    """Map a cluster to how its training ends: after a number of steps, or in an error (after three steps if it says
    so)."""
    chosen: dict[str, Outcome] = {}

    def start_training(config: Config, out: Path, watch: object) -> tuple[RunFolder, None]:
        outcome = chosen.get(config.run.on, 20)
        ranks = 2 if "2" in config.run.on else 1
        if isinstance(outcome, DataError):
            raise outcome
        steps = outcome if isinstance(outcome, int) else 3 if "half-way" in outcome.seen else 0
        run = make_run(out, all_events(ranks, steps) if steps else [])
        if isinstance(outcome, ShoalError):
            raise outcome
        return run, None

    monkeypatch.setattr(scaling, "start_training", start_training)
    return chosen


def measure(out: Path, *clusters: str, repeat: int = 1, note: Callable[[str], object] = print) -> ScalingResult:
    return measure_scaling(cluster_rows(config(), clusters), out, lambda config: None, repeat, note)  # type: ignore[arg-type, return-value]


def read(out: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((out / "scaling.json").read_text())
    return document


def test_rows_that_cannot_run_are_skipped_with_the_reason(
    tmp_path: Path, outcomes: dict[str, Outcome], capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes["lab:2"] = LabError("a lab needs root", why="namespaces", fix="sudo")
    outcomes["local:2"] = RunFailed("rank 1 died half-way", fix="look")
    notes: list[str] = []
    result = measure(tmp_path, "lab:2", "local:1", "local:2", "local:1,device=cpu", note=notes.append)
    assert notes == ["skipped: lab:2: a lab needs root (namespaces)", "failed: local:2: rank 1 died half-way"]
    rows = {row["cluster"]: row for row in read(tmp_path)["rows"]}
    assert [row["status"] for row in rows.values()] == ["skipped", "measured", "failed", "measured"]
    assert rows["local:1"]["speedup"] == 1.0
    assert rows["lab:2"]["tokens_per_s"] is None
    assert read(tmp_path)["baseline"] == "local:1"
    table = list(csv.DictReader(result.table.read_text().splitlines()))
    assert [line["cluster"] for line in table] == list(rows)
    assert table[0]["reason"] == "a lab needs root (namespaces)"
    assert table[1]["allreduce_p50_ms"] == ""
    assert scaling_csv(result) == result.table.read_text()
    assert imread(result.picture).shape[1] == 1320
    capsys.readouterr()
    print_clusters(result)
    printed = capsys.readouterr().out
    assert "failed: local:2: rank 1 died half-way" in printed
    assert "speed-up and efficiency: against local:1\n" in printed


def test_a_result_is_kept_when_the_bench_is_interrupted(tmp_path: Path, outcomes: dict[str, Outcome]) -> None:
    outcomes["local:2"] = Interrupted("interrupted", fix="shoal train --resume RUN")
    with pytest.raises(Interrupted) as stopped:
        measure(tmp_path, "local:1", "local:2", "local:3")
    measured, again = stopped.value.fix.splitlines()
    assert measured == f"what was measured so far: {tmp_path / 'scaling.csv'}"
    assert again.startswith("measure again")
    assert [row["status"] for row in read(tmp_path)["rows"]] == ["measured", "not measured yet", "not measured yet"]


def test_wrong_settings_end_the_bench(tmp_path: Path, outcomes: dict[str, Outcome]) -> None:
    """They would be wrong for every row."""
    outcomes["local:1"] = DataError("there is no text")
    with pytest.raises(DataError, match="there is no text"):
        measure(tmp_path, "local:1", "local:2")


def test_a_row_that_lost_a_rank_is_not_measured(
    tmp_path: Path, outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "plot_clusters", lambda *_: None)
    result = measure(tmp_path, "local:1", "local:3")
    assert [row.status for row in result.rows] == ["measured", "failed"]
    assert result.rows[1].reason.startswith("1 of 3 ranks were left")


def test_nothing_measured_is_an_error_that_names_every_reason(tmp_path: Path, outcomes: dict[str, Outcome]) -> None:
    outcomes |= {"lab:2": LabError("no root", fix="sudo"), "local:1": HostError("no route")}
    with pytest.raises(RunFailed) as failed:
        measure(tmp_path, "lab:2", "local:1")
    assert failed.value.why == "lab:2: no root\nlocal:1: no route"
    assert failed.value.fix == "sudo"
    assert (tmp_path / "scaling.json").is_file()


def test_a_round_that_fails_keeps_the_rounds_before(
    tmp_path: Path, outcomes: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_from_now_on(result: ScalingResult) -> None:
        if result.rows[1].tries:
            outcomes["local:2"] = RunFailed("gone half-way")

    monkeypatch.setattr(scaling, "write_figures", fail_from_now_on)
    monkeypatch.setattr(scaling, "plot_clusters", lambda *_: None)
    notes: list[str] = []
    result = measure(tmp_path, "local:1", "local:2", repeat=3, note=notes.append)
    assert [len(row.tries) for row in result.rows] == [3, 1]
    assert notes == ["failed: local:2: gone half-way"]
    assert set(result.runs) == {"local:1", "local:2"}
