"""Choice of Python, address and environment from the facts of a host. No host is contacted."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from shoal.cluster.hosts.facts import (
    HostFacts,
    PythonFacts,
    Requirements,
    host_name_of,
    misfits,
    need_same_kind,
    settle,
    wanted_here,
)
from shoal.cluster.hosts.setup import cannot_make, plan_environment, usable_python
from shoal.cluster.hosts.spec import Host, HostsSpec
from shoal.errors import HostError
from shoal.host.facts import public_version

SPEC = HostsSpec(path=Path("hosts.toml"), hosts=(Host(host="me@laptop-b"),))
HOST = SPEC.hosts[0]
WANTED = Requirements("3.11", {"numpy": "2.4.6", "torch": "2.13.0"}, {"numpy": "2.0", "torch": "2.9"})


def python(origin: str = "named", version: str = "3.11.2", **packages: str) -> PythonFacts:
    path = {"named": "/opt/python", "own": "/srv/shoal/env/bin/python", "found": "/usr/bin/python3"}[origin]
    facts = {"origin": origin, "executable": path, "version": version, "packages": packages, "has_venv": True}
    return PythonFacts.model_validate(facts)


def facts(*pythons: PythonFacts) -> HostFacts:
    return HostFacts(
        pythons=pythons,
        others=("/usr/bin/python3.9",),
        folder="/srv/shoal",
        arch="x86_64",
        os="Linux",
        interfaces={"lo": ["127.0.0.1"], "eth0": ["192.168.1.7"], "wg0": ["10.8.0.2"], "wlan0": []},
        link_mbps={"eth0": 1000},
        has_code=False,
        files=(),
        project_digest="",
        project_files={},
    )


GOOD = {"torch": "2.13.0+cpu", "numpy": "2.4.6"}


def test_a_suitable_python_is_accepted() -> None:
    assert misfits(python(torch="2.13.0+cu130", numpy="2.1.0"), WANTED) == []
    assert misfits(python(torch="2.13.0", numpy="2.1.0"), WANTED, exactly=True) == [
        "it has numpy 2.1.0, and here is 2.4.6"
    ]
    assert public_version("2.13.0+cpu") == "2.13.0"


@pytest.mark.parametrize(
    ("candidate", "seen"),
    [
        (python(version="3.9.2", **GOOD), "it is Python 3.9.2, and here is 3.11"),
        (python(numpy="2.4.6"), "torch is not installed, and here is 2.13.0"),
        (python(torch="2.9.1+cpu", numpy="1.0"), "it has torch 2.9.1+cpu, and here is 2.13.0"),
        (python(torch="2.13.0", numpy="1.26"), "it has numpy 1.26, and shoal needs 2.0 or newer"),
    ],
)
def test_an_unsuitable_python_is_refused(candidate: PythonFacts, seen: str) -> None:
    assert misfits(candidate, WANTED)[0] == seen
    with pytest.raises(HostError, match="the Python of laptop-b cannot run this") as caught:
        usable_python(HOST, SPEC, facts(candidate), WANTED)
    assert seen in caught.value.seen
    assert caught.value.fix == "shoal setup hosts.toml"


def test_the_required_packages_are_those_installed_here() -> None:
    wanted = wanted_here()
    assert {"torch", "numpy", "pydantic"} <= wanted.packages.keys()
    assert "pytest" not in wanted.packages, "only development needs it"
    assert wanted.packages["torch"] == importlib.metadata.version("torch").partition("+")[0]
    assert wanted.least["torch"] == "2.9"


NAMED = HOST.model_copy(update={"python": "/opt/python"})


def test_an_environment_is_made_only_where_needed() -> None:
    own, system = python("own", **GOOD), python("found")
    assert plan_environment(NAMED, SPEC, facts(python(**GOOD)), WANTED).state == "present"
    assert plan_environment(HOST, SPEC, facts(own, system), WANTED).python == own
    made = plan_environment(HOST, SPEC, facts(system), WANTED)
    assert (made.state, made.python) == ("made", system)
    old = python("own", torch="2.12.0", numpy="2.4.6")
    updated = plan_environment(HOST, SPEC, facts(old, system), WANTED)
    assert (updated.state, updated.why) == ("updated", "it has torch 2.12.0, and here is 2.13.0")
    beside = plan_environment(NAMED, SPEC, facts(python(torch="2.9.0")), WANTED)
    assert (beside.state, beside.why) == ("made", "it has torch 2.9.0, and here is 2.13.0")
    assert plan_environment(HOST, SPEC, facts(python("own", "3.10.1"), system), WANTED).state == "made"


@pytest.mark.parametrize(
    ("host", "pythons", "seen"),
    [
        (HOST, (python("found", "3.9.2"),), "there is no Python 3.11 on laptop-b"),
        (
            HOST,
            (python("found").model_copy(update={"has_venv": False}),),
            "/usr/bin/python3 on laptop-b cannot make environments",
        ),
        (NAMED, (python("own", torch="2.12.0"),), "there is no /opt/python on laptop-b"),
        (NAMED, (python(version="3.12.1", **GOOD),), "there is no Python 3.11 on laptop-b"),
    ],
)
def test_a_missing_environment_is_explained(host: Host, pythons: tuple[PythonFacts, ...], seen: str) -> None:
    with pytest.raises(HostError, match=seen) as caught:
        plan_environment(host, SPEC, facts(*pythons), WANTED)
    assert caught.value.why
    assert caught.value.fix


def test_address_and_interface_are_taken_from_the_host() -> None:
    host_facts = facts(python())
    assert settle(HOST, SPEC, "192.168.1.7", host_facts) == ("192.168.1.7", "eth0")
    through = HOST.model_copy(update={"interface": "wg0"})
    assert settle(through, SPEC, "192.168.1.7", host_facts) == ("10.8.0.2", "wg0")
    with pytest.raises(HostError, match="laptop-b has no interface eth9") as caught:
        settle(HOST.model_copy(update={"interface": "eth9"}), SPEC, "192.168.1.7", host_facts)
    assert caught.value.why == "there are: lo, eth0, wg0, wlan0"
    with pytest.raises(HostError, match=r"does not have the address 203\.0\.113\.5") as caught:
        settle(HOST, SPEC, "203.0.113.5", host_facts)
    assert "192.168.1.7 on eth0, 10.8.0.2 on wg0" in caught.value.why


def test_another_architecture_is_refused() -> None:
    need_same_kind(HOST, facts(), "Linux", "x86_64")
    with pytest.raises(HostError, match="Linux on x86_64, and here is Darwin on arm64"):
        need_same_kind(HOST, facts(), "Darwin", "arm64")


def test_the_host_name_is_read_from_the_ssh_configuration() -> None:
    assert host_name_of("user me\nhostname laptop-b.lan\nport 22\n") == "laptop-b.lan"
    assert host_name_of("") == ""


@pytest.mark.parametrize(
    ("answer", "seen", "fix"),
    [
        ({"error": "room", "needed": 1.5e9, "free": 2e8}, "the disk of laptop-b is full", "df -h /srv/shoal"),
        ({"error": "full", "log": "[Errno 28] No space left on device"}, "the disk of laptop-b is full", "df -h"),
        ({"error": "pip", "log": "ERROR: [Errno 28] No space left on device"}, "the disk of laptop-b is full", "df -h"),
        ({"error": "busy"}, "another shoal setup is at work", "wait"),
        ({"error": "in the way", "log": "/srv/shoal/env"}, "/srv/shoal/env on laptop-b is in the way", "folder"),
        ({"error": "pip", "log": "NewConnectionError: Failed"}, "cannot reach a package index", "--wheels DIR"),
        (
            {"error": "pip", "log": "ERROR: No matching distribution found for torch==2.13.0"},
            "finds no torch==2.13.0 for x86_64",
            "--wheels",
        ),
        ({"error": "pip", "log": "strange"}, "could not install", "cat /srv/shoal/setup.log"),
        ({"error": "use", "log": "ImportError: libfoo.so"}, "cannot be used", "cat /srv/shoal/setup.log"),
        ({"error": "venv", "log": "no"}, "cannot make /srv/shoal/env on laptop-b", "cat /srv/shoal/setup.log"),
    ],
)
def test_a_failed_setup_is_explained(answer: dict[str, object], seen: str, fix: str) -> None:
    error = cannot_make(HOST, SPEC, facts(), WANTED, answer, "")
    assert seen in error.seen
    assert fix in error.fix
