"""Whole trainings with `--sync auto`: the choice is reported, applied, saved, and kept to the bit after a resume.

Exercises engine.auto_sync, cost.select_sync.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.train import before_start
from shoal.config.load import build_config, load_config, write_profile
from shoal.config.profile import Profile
from shoal.config.schema import Config
from shoal.cost.select_sync import pick
from shoal.cost.strategy import strategy_of_config
from shoal.data.prepare import create_run
from shoal.records.commit_log import check_ledger
from shoal.records.summary import summarize
from shoal.run_folder import RunFolder
from shoal.tools.plan.compare import config_as_run, sync_options
from shoal.tools.probe.run import assemble
from tests.integration.train.test_outer_runs import back_to, figures
from tests.support.labs import need_lab
from tests.support.programs import TINY, events_of, read_jsonl, set_flags, shoal, train_tiny
from tests.unit.config.test_profile import measured

STEPS = 22
SETS = (
    f"train.steps={STEPS}",
    "train.global_batch=12",
    "train.eval_every=50",
    "train.checkpoint_every=4",
    "train.keep_checkpoints=9",
)
# The first two steps are warm-up, the next four are measured.
CHOSEN_AFTER = 6


@pytest.fixture(scope="module")
def local_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Train on one machine, where the exchange through shared memory is too fast for outer steps to pay."""
    folder = tmp_path_factory.mktemp("auto") / "run"
    return folder, train_tiny(folder, "--on", "local:2", "--sync", "auto", sets=SETS)


@pytest.mark.long
def test_a_cheap_exchange_keeps_ddp(local_run: tuple[Path, dict[str, Any]]) -> None:
    folder, manifest = local_run
    strategy = manifest["strategy"]
    assert (manifest["sync"], manifest["wire"], manifest["byte_equivalent"]) == ("ddp", "fp32", True)
    assert (strategy["asked"], strategy["every"], strategy["choice"]["step"]) == ("auto", 1, CHOSEN_AFTER)
    assert strategy["choice"]["why"].startswith("ddp in fp32: a step takes")
    assert manifest["choice_notes"].startswith(f"After step {CHOSEN_AFTER} the run continued with ddp in fp32")
    for rank in range(2):
        [choice] = events_of(folder, "choice", rank)
        assert choice["why"] == strategy["choice"]["why"]
    assert summarize(RunFolder.open(folder).read_all_events()).measured == (15, STEPS)


@pytest.mark.long
def test_a_run_too_short_to_choose_reports_it(tmp_path: Path) -> None:
    done = shoal("train", "--out", tmp_path / "run", "--sync", "auto", "--steps", "3", *set_flags(*TINY))
    assert done.returncode == 0, done.stderr
    assert "the first steps alone choose how to synchronise" in done.stderr
    assert "Nothing was chosen by step 3" in done.stdout


def rewrite_choice(folder: Path, **changes: Any) -> None:
    """Change the choice in the events of rank 0 and remove it from those of rank 1."""
    events = read_jsonl(folder / "events" / "rank-0.jsonl")
    changed = [{**event, **changes} if event["event"] == "choice" else event for event in events]
    (folder / "events" / "rank-0.jsonl").write_text("".join(json.dumps(event) + "\n" for event in changed))
    others = [event for event in read_jsonl(folder / "events" / "rank-1.jsonl") if event["event"] != "choice"]
    (folder / "events" / "rank-1.jsonl").write_text("".join(json.dumps(event) + "\n" for event in others))


def resume_from(folder: Path, saved: int) -> dict[str, Any]:
    back_to(folder, saved)
    done = shoal("train", "--resume", folder, "--json")
    assert done.returncode == 0, done.stderr
    assert f"continues after step {saved}" in done.stderr
    assert check_ledger(read_jsonl(folder / "commits.jsonl")).ok
    manifest: dict[str, Any] = json.loads(done.stdout)
    assert manifest["byte_equivalent"] is True
    return manifest


@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(("diloco", "fp16", 5), marks=pytest.mark.exhaustive),
        pytest.param(("streaming", "fp32", 8), marks=pytest.mark.exhaustive),
        pytest.param(("ddp", "int8", 1), marks=pytest.mark.exhaustive),
    ],
)
def test_a_resumed_run_keeps_its_choice(
    local_run: tuple[Path, dict[str, Any]], chosen: tuple[str, str, int], tmp_path: Path
) -> None:
    """A resume from before the choice applies it at its step, a resume from after it at once, with the same bits."""
    mode, wire, every = chosen
    folder = tmp_path / "run"
    shutil.copytree(local_run[0], folder)
    rewrite_choice(folder, sync=mode, wire=wire, round_steps=every)
    manifest = resume_from(folder, 4)
    assert (manifest["sync"], manifest["wire"], manifest["strategy"]["every"]) == chosen
    assert manifest["strategy"]["choice"]["step"] == CHOSEN_AFTER
    assert local_run[1]["theoretical_bytes_per_step"] == 0 < manifest["theoretical_bytes_per_step"]
    first = {rank: figures(folder, rank)[STEPS:] for rank in range(2)}
    state = (folder / "state-rank-1.safetensors").read_bytes()
    assert first[0][:2] == figures(local_run[0], 0)[4:CHOSEN_AFTER]
    assert first[0][2:] != figures(local_run[0], 0)[CHOSEN_AFTER:]
    again = resume_from(folder, 12)
    assert (again["sync"], again["strategy"]["choice"]["step"]) == (mode, CHOSEN_AFTER)
    for rank in range(2):
        assert figures(folder, rank)[-(STEPS - 12) :] == first[rank][8:]
    assert (folder / "state-rank-1.safetensors").read_bytes() == state
    assert len(events_of(folder, "choice")) == 2
    if mode == "diloco":
        refuse_resume_without_events(folder)


def refuse_resume_without_events(folder: Path) -> None:
    """Check that a run without events is not resumed: its replicas have their own moments."""
    for rank in range(2):
        (folder / "events" / f"rank-{rank}.jsonl").unlink()
    done = shoal("train", "--resume", folder, "--steps", str(STEPS + 4))
    assert done.returncode != 0
    assert "is of replicas with moments of their own" in done.stderr


@pytest.mark.long
def test_a_run_interrupted_before_its_choice_chooses_after_the_resume(
    local_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(local_run[0], folder)
    rewrite_choice(folder, event="forgotten")
    assert resume_from(folder, 4)["strategy"]["choice"]["step"] == 4 + CHOSEN_AFTER


@pytest.mark.long
def test_measurements_are_recorded_under_the_mode_that_ran(
    local_run: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(local_run[0], folder)
    rewrite_choice(folder, sync="diloco", wire="fp16", round_steps=5)
    ran = config_as_run(load_config(folder / "config.toml"), summarize(RunFolder.open(folder).read_all_events()))
    assert str(strategy_of_config(ran.sync)) == "diloco every 5 steps, fp16"


@pytest.mark.long
def test_a_slow_link_leads_to_outer_steps(tmp_path: Path) -> None:
    """The plan expected another link."""
    need_lab()
    run = tmp_path / "run"
    sets = (*SETS, "model.width=32", "sync.every=8", "sync.planned=ddp:1,fp16", "sync.planned_step_s=0.02")
    manifest = train_tiny(run, "--on", "lab:2,link=10mbit", "--sync", "auto", sets=sets)
    choice = manifest["strategy"]["choice"]
    assert manifest["sync"] in ("diloco", "streaming")
    assert (manifest["wire"], manifest["strategy"]["every"], manifest["byte_equivalent"]) == ("fp16", 8, True)
    assert (choice["step"], choice["planned"], choice["agrees"]) == (CHOSEN_AFTER, "ddp in fp16", False)
    assert choice["expected_step_s"] < choice["measured_step_s"] / 2
    assert manifest["choice_notes"].count("the plan had chosen ddp in fp16 with 20 ms a step") == 1
    assert [commit["step"] for commit in read_jsonl(run / "commits.jsonl")] == list(range(1, STEPS + 1))
    assert events_of(run, "start")[0]["wire"] == "fp16"
    before = {rank: figures(run, rank) for rank in range(2)}
    state = (run / "state-rank-0.safetensors").read_bytes()
    again = resume_from(run, 12)
    assert again["sync"] == manifest["sync"]
    for rank in range(2):
        assert figures(run, rank)[STEPS:] == before[rank][12:]
    assert (run / "state-rank-0.safetensors").read_bytes() == state
    assert shoal("report", run).returncode == 0
    assert "How replicas agree" in (run / "report.html").read_text()


# The choice of a plan


@pytest.fixture
def profile() -> Profile:
    return assemble(measured(), "2026-11-15T10:00:00+00:00", 60.0, 51.0)


def with_slower_link(profile: Profile, slower: float) -> Profile:
    """Return the profile of the same machines with a link `slower` times as slow."""
    entries = tuple(
        fit.model_copy(update={"beta_s_per_byte": slower * fit.beta_s_per_byte}) for fit in profile.collectives
    )
    return profile.model_copy(update={"collectives": entries})


def in_lab(profile: Profile) -> Profile:
    nodes = [node.model_copy(update={"address": f"10.77.0.{number}"}) for number, node in enumerate(profile.nodes, 1)]
    return profile.model_copy(update={"on": "lab:2,link=1gbit", "nodes": tuple(nodes)})


def settings(*sets: str) -> Config:
    return build_config(flags={"run": {"on": "lab:2,link=1gbit"}, "sync": {"mode": "auto"}}, sets=sets)


@pytest.mark.parametrize(("slower", "modes"), [(1e-3, {"ddp"}), (1e3, {"diloco", "streaming"})])
def test_a_plan_chooses_by_the_profile(profile: Profile, slower: float, modes: set[str], tmp_path: Path) -> None:
    options = sync_options(settings(), with_slower_link(in_lab(profile), slower), tmp_path)
    assert [option.choice.mode for option in options] == ["ddp", "ddp", "ddp", "diloco", "streaming"]
    assert pick(options).choice.mode in modes


def test_options_that_do_not_fit_are_not_planned(profile: Profile, tmp_path: Path) -> None:
    nodes = tuple(node.model_copy(update={"memory_bytes": 650 * 10**6}) for node in in_lab(profile).nodes)
    small = in_lab(profile).model_copy(update={"nodes": nodes})
    modes = [option.choice.mode for option in sync_options(settings("train.micro_batch=1"), small, tmp_path)]
    assert modes == ["ddp"]


@pytest.mark.long
def test_a_plan_is_saved_and_confirmed(profile: Profile, tmp_path: Path) -> None:
    nodes = (profile.nodes[0].model_copy(update={"name": "local", "address": "127.0.0.1", "ranks": 2}),)
    summary = profile.summary.model_copy(update={"nodes": 1})
    local_profile = profile.model_copy(update={"on": "local:2", "nodes": nodes, "links": (), "summary": summary})
    file, run = tmp_path / "here.toml", tmp_path / "run"
    write_profile(local_profile, file)
    flags = set_flags(*TINY, *SETS)
    done = shoal("train", "--out", run, "--on", "local:2", "--sync", "auto", "--profile", file, *flags)
    assert done.returncode == 0, done.stderr
    assert "plan: ddp in fp32: a step takes" in done.stderr
    assert "predicted: a step takes" in done.stderr
    assert "; as planned" in done.stderr
    assert "; as planned. Since then a step took" in done.stdout
    assert "A step was predicted to take" in done.stdout
    assert load_config(run / "config.toml").sync.planned == "ddp:1,fp32"


def test_a_plan_for_another_cluster_is_refused(profile: Profile, tmp_path: Path) -> None:
    file, run = tmp_path / "profile.toml", tmp_path / "run"
    write_profile(profile, file)
    done = shoal("train", "--out", run, "--on", "local:2", "--sync", "auto", "--profile", file, *set_flags(*TINY))
    assert done.returncode == 2
    assert not run.exists()


@pytest.mark.parametrize("is_used", [True, False])
def test_the_profile_in_the_current_folder_is_used_only_for_its_cluster(
    profile: Profile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    is_used: bool,
) -> None:
    of_lab = in_lab(profile)
    on = of_lab.on if is_used else "local:2"
    monkeypatch.chdir(tmp_path)
    write_profile(of_lab, Path("profile.toml"))
    config = build_config(sets=[*TINY, f"run.on={on}", "sync.mode=auto", f"data.cache_dir={tmp_path / 'cache'}"])
    run = create_run(config, tmp_path / "run", 2)
    before_start(config, profile=None, plan=False)(run)
    error_text = capsys.readouterr().err
    assert ("by profile.toml; the first steps will show" in error_text) == is_used
    assert ("plan: ./profile.toml is not used: " in error_text) == (not is_used)
    # A prediction is made only on request.
    assert "predicted" not in error_text
    assert (load_config(run.config).sync.planned is not None) == is_used
