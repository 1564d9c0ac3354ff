"""The Kubernetes manifest that `shoal emit k8s` prints; its pods live in tests/integration/runs/test_pods.py."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from shoal.cluster.node import Node
from shoal.cluster.pods.spec import RUN_FAILED, parse_pods
from shoal.config.load import parse_set
from shoal.errors import ConfigError, UsageError
from shoal.launch.emit_k8s import Pods, k8s_text, script_pods, training_pods
from tests.integration.cli.test_commands import Call
from tests.support.kubernetes import find_faults
from tests.unit.launch.test_emit import SHAKESPEARE, assert_golden, job

POD = ("spec", "template", "spec")
THREE = tuple(Node(f"node{number}", f"10.77.0.{number}", "eth0", 1, 4) for number in (1, 2, 3))
PODS = Pods("reg/shoal:1", "nfs", "8Gi")


def manifest(*sets: str, nodes: tuple[Node, ...] = THREE, pods: Pods = PODS) -> tuple[dict[str, Any], dict[str, Any]]:
    service, work = yaml.safe_load_all(k8s_text(training_pods(job(*sets, nodes=nodes)), pods))
    return service, work


def expanded(text: str, **variables: str) -> str:
    """Return what Kubernetes makes of a value: it replaces $(NAME) where it knows the name, and $$ by one dollar."""
    return re.sub(
        r"\$\$|\$\((\w+)\)", lambda match: "$" if match[1] is None else variables.get(match[1], match[0]), text
    )


def container(work: dict[str, Any]) -> dict[str, Any]:
    [trainer] = work["spec"]["template"]["spec"]["containers"]
    return dict(trainer)


def test_the_manifest_is_what_it_was() -> None:
    run = training_pods(job(*SHAKESPEARE, "train.device=cuda", preset="shakespeare-char", nodes=THREE))
    assert_golden("k8s.yaml", k8s_text(run, Pods("example/shoal:1", gpus="nvidia")))


@pytest.mark.parametrize("gpus", [None, "nvidia", "amd"])
def test_the_api_of_kubernetes_knows_every_field(gpus: str | None) -> None:
    service, work = manifest(pods=Pods("reg/shoal:1", gpus=gpus))
    assert find_faults(service) == []
    assert find_faults(work) == []
    limits = container(work)["resources"]["limits"]
    assert limits.keys() == {"cpu", "memory", *([f"{gpus}.com/gpu"] if gpus else [])}


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("spec", "completion"), 3, "Job.spec has an unknown field completion"),
        (("spec", "completions"), "3", "Job.spec.completions is '3'"),
        (("spec", "podFailurePolicy", "rules"), [{}], "Job.spec.podFailurePolicy.rules[0] has no action"),
        ((*POD, "containers"), [{}], "Job.spec.template.spec.containers[0] has no name"),
    ],
)
def test_a_wrong_manifest_is_found(path: tuple[str, ...], value: object, fault: str) -> None:
    wrong = copy.deepcopy(manifest()[1])
    place = wrong
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    assert any(text.startswith(fault) for text in find_faults(wrong)), find_faults(wrong)


def test_a_lost_pod_is_replaced_and_a_failed_run_ends_the_job() -> None:
    service, work = manifest()
    spec, template = work["spec"], work["spec"]["template"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    # Limits for each index, and failure policies, are only allowed where no container restarts by itself.
    assert template["spec"]["restartPolicy"] == "Never"
    assert spec["backoffLimitPerIndex"] > 0
    # Two pods of one index would be one node of the run twice.
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["ttlSecondsAfterFinished"] > 3600
    [ignored, failed] = spec["podFailurePolicy"]["rules"]
    assert (ignored["action"], failed["action"]) == ("Ignore", "FailJob")
    assert failed["onExitCodes"]["containerName"] == container(work)["name"]
    # Others are those of a lost pod: Python's own for an error is 1, and killed processes have 137 and 143.
    assert failed["onExitCodes"]["values"] == [RUN_FAILED]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == service["metadata"]["name"]


def test_the_pods_know_each_other_and_what_to_do() -> None:
    service, work = manifest("train.steps=7", nodes=tuple(Node(f"n{i}", "", None, 2, 8) for i in range(2)))
    trainer, name = container(work), service["metadata"]["name"]
    env = {variable["name"]: variable.get("value") for variable in trainer["env"]}
    assert env["SHOAL_PODS"] == f"{name}-0.{name} {name}-1.{name}"
    assert env["SHOAL_PODS_FOLDER"] == "/data/runs/.mine-pods-$(SHOAL_JOB)"
    names = [variable["name"] for variable in trainer["env"]]
    assert names.index("SHOAL_JOB") < names.index("SHOAL_PODS_FOLDER"), "Kubernetes replaces earlier variables only"
    assert trainer["command"] == ["python3", "-P", "-m", "shoal.runs.pod"]
    out, on, command, *words = trainer["args"]
    assert (out, command) == ("runs/mine", "train")
    assert (parse_pods(on).pods, parse_pods(on).slots) == (2, 2)
    assert words[:3] == ["grammar", "--set", "train.steps=7"]


def test_a_pod_has_image_resources_and_volumes() -> None:
    _, work = manifest(nodes=tuple(Node(f"n{i}", "", None, 2, 8) for i in range(2)), pods=PODS)
    trainer, pod = container(work), work["spec"]["template"]["spec"]
    assert trainer["image"] == "reg/shoal:1"
    assert trainer["resources"] == {"requests": {"cpu": "8", "memory": "8Gi"}, "limits": {"cpu": "8", "memory": "8Gi"}}
    mounts = {mount["name"]: mount["mountPath"] for mount in trainer["volumeMounts"]}
    assert mounts == {"work": trainer["workingDir"], "shm": "/dev/shm"}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "nfs"}


@pytest.mark.parametrize(
    ("preset", "ranks", "memory"), [("grammar", 2, "4Gi"), ("gpt2-124m", 1, "5Gi"), ("gpt2-124m", 2, "9Gi")]
)
def test_a_pod_has_the_memory_of_its_ranks_and_of_dev_shm(preset: str, ranks: int, memory: str) -> None:
    one = (Node("big", "10.0.0.1", "eno1", ranks, 8),)
    _, work = yaml.safe_load_all(k8s_text(training_pods(job(preset=preset, nodes=one)), Pods("reg/shoal:1")))
    resources = container(work)["resources"]
    assert (resources["requests"]["memory"], resources["limits"]["memory"]) == (memory, memory)


def test_a_script_keeps_its_words() -> None:
    words = ["my train.py", "--note", 'a "b" $(date) $HOME $$(X) a$$b', "--set", "x"]
    run = script_pods(words, THREE, ["--set", "train.steps=9"], Path("runs/mine"), "python3")
    _, work = yaml.safe_load_all(k8s_text(run, PODS))
    given = container(work)["args"]
    expected = ["runs/mine", "pods:3", "run", "--set", "train.steps=9", *words]
    assert [expanded(word) for word in given] == expected


def test_a_module_names_its_job(call: Call) -> None:
    service, work = yaml.safe_load_all(call("emit", "k8s", "--on", "lab:2", "-m", "my.training", "--epochs", "3").out)
    assert service["metadata"]["name"] == work["metadata"]["name"] == "shoal-training"
    assert container(work)["args"][0] == "runs/training"
    refused = call("emit", "k8s", "-m")
    assert (refused.code, "-m without a module" in refused.err) == (2, True)


@pytest.mark.parametrize("name", ["it's", '"q"', "a: b # c", "ü", "tab\tand \x7f", "- x", "$(y)"])
def test_any_name_of_a_text_can_be_written(name: str) -> None:
    _, work = manifest(f"data.path={json.dumps(name, ensure_ascii=True)}")
    [word] = [word for word in container(work)["args"] if word.startswith("data.path=")]
    assert parse_set(expanded(word)) == {"data": {"path": name}}


@pytest.mark.parametrize("name", ["x", "exp #3", "a: b", "$x", "it's"])
def test_each_job_has_a_folder_of_its_own(name: str) -> None:
    run = training_pods(job(out=f"runs/{name}", nodes=THREE))
    _, work = yaml.safe_load_all(k8s_text(run, PODS))
    env = {variable["name"]: variable.get("value") for variable in container(work)["env"]}
    assert expanded(env["SHOAL_PODS_FOLDER"], SHOAL_JOB="uid") == f"/data/runs/.{name}-pods-uid"
    assert find_faults(work) == []


@pytest.mark.parametrize("out", ["/elsewhere/run", "../run"])
def test_a_run_folder_outside_the_volume_is_refused(out: str) -> None:
    with pytest.raises(UsageError, match="outside the volume"):
        k8s_text(training_pods(job(out=out, nodes=THREE)), PODS)


def test_nodes_with_different_ranks_are_refused() -> None:
    unequal = (Node("n0", "", None, 2, 4), Node("n1", "", None, 1, 4))
    with pytest.raises(ConfigError, match="different numbers of ranks"):
        manifest(nodes=unequal)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return Call(monkeypatch, capsys)


def test_options_stand_before_or_behind_a_preset_and_before_a_script(call: Call) -> None:
    for words in (("grammar", "--on", "lab:2"), ("--on", "lab:2", "grammar")):
        assert "completions: 2" in call("emit", "k8s", *words).out
    script = call("emit", "k8s", "--on", "lab:2", "train.py", "--on", "lab:3")
    assert "completions: 2" in script.out
    assert '- "--on"\n        - "lab:3"\n' in script.out
    assert "--depth does not go with a script" in call("emit", "k8s", "--depth", "4", "train.py").err
    assert "'more' after grammar means nothing" in call("emit", "k8s", "grammar", "more").err
    assert "--gpus intel names no kind of GPU" in call("emit", "k8s", "--gpus", "intel").err
