from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from shoal.cluster.pods.spec import FOLDER, HOSTS, INDEX, PodJob, PodsSpec, own_job, parse_pods
from shoal.cluster.target import first_nodes, parse_on, rank_count
from shoal.errors import UsageError


@pytest.mark.parametrize("text", ["pods:3", "pods:2,slots=4", "pods:2,slots=2,interface=eth1"])
def test_pods_are_written_as_they_are_read(text: str) -> None:
    assert str(parse_pods(text)) == text


@pytest.mark.parametrize(
    "text", ["pods:0", "pods:", "pods:x", "pods:2,slots=0", "pods:2,gpus=1", "pods:2,slots", "pods:2,slots=2,slots=4"]
)
def test_other_words_name_no_pods(text: str) -> None:
    with pytest.raises(UsageError, match="names no pods"):
        parse_pods(text)


def test_the_ranks_of_all_pods_count_and_the_first_are_a_cluster(tmp_path: Path) -> None:
    on = parse_on("pods:3,slots=2")
    assert rank_count(on) == 6
    assert first_nodes(on, 2, tmp_path) == "pods:2,slots=2"


def test_outside_of_a_job_there_are_no_pods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (HOSTS, FOLDER, INDEX):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="shoal emit k8s"):
        own_job()
    monkeypatch.setenv(HOSTS, "a-0.a a-1.a")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(INDEX, "1")
    assert own_job(PodsSpec(2)) == PodJob(("a-0.a", "a-1.a"), 1, tmp_path)
    with pytest.raises(UsageError, match="asks for 3 pods, and the job has 2"):
        own_job(PodsSpec(3))


def test_all_pods_have_one_code_which_others_cannot_read(tmp_path: Path) -> None:
    hosts = tuple(f"h{index}" for index in range(16))
    jobs = [PodJob(hosts, index, tmp_path / "pods") for index in range(16)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        codes = set(pool.map(PodJob.read_code, jobs))
    assert len(codes) == 1
    assert [path.name for path in (tmp_path / "pods").iterdir()] == ["code"]
    assert (tmp_path / "pods/code").stat().st_mode & 0o077 == 0


def test_a_volume_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"file/pods cannot be used: Not a directory") as refused:
        PodJob(("h0",), 0, tmp_path / "file/pods").read_code()
    assert "ReadWriteMany" in refused.value.fix
    # A full volume: the file is there, and nothing in it. No pod may take that for a secret.
    job = PodJob(("h0",), 0, tmp_path / "pods")
    job.folder.mkdir()
    (job.folder / "code").touch()
    monkeypatch.setattr("shoal.cluster.pods.spec._CODE_WITHIN_S", 0.2)
    with pytest.raises(UsageError, match="the pod that made the code could not write it"):
        job.read_code()
    assert len(job.read_code()) == 64


def test_only_earlier_jobs_of_the_same_run_are_former_ones(tmp_path: Path) -> None:
    for name in (".gpt-pods-a", ".gpt-pods-b", ".gpt-pods-4-pods-c", ".gpt-2-pods-d", "gpt"):
        (tmp_path / name).mkdir()
    job = PodJob(("h0",), 0, tmp_path / ".gpt-pods-b")
    assert [path.name for path in job.former_folders()] == [".gpt-pods-a"]
    assert PodJob(("h0",), 0, tmp_path / "elsewhere").former_folders() == []
