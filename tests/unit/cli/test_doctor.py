"""The end of doctor's output: what passed, what failed, and what did not apply."""

from __future__ import annotations

import re
from dataclasses import replace

from shoal.cli.doctor import count_checks
from shoal.errors import HostError, ShoalError
from shoal.tools.doctor.checks import CHECK_MEANINGS, applicable_checks, judge
from shoal.tools.doctor.facts import ClusterFacts
from shoal.tools.doctor.run import Diagnosis
from tests.support.doctor_facts import gpu, machine, processes, scene


def count(cluster: ClusterFacts) -> str:
    return count_checks(Diagnosis(cluster, judge(cluster), proved=bool(cluster.proofs), took_s=1.0))


def test_checks_without_anything_to_look_at_are_counted_apart() -> None:
    alone = scene(count=1)
    applied = applicable_checks(alone)
    assert (
        applied & {"gpu.driver", "reach.pair", "sameness.python", "port.taken", "speed.battery", "proof.gloo"} == set()
    )
    assert {"sameness.torch", "memory.free", "disk.free", "leftover.worker", "reach.host"} <= applied
    left_out = len(CHECK_MEANINGS) - len(applied)
    assert count(alone) == f"{len(applied)} of {len(applied)} checks passed, {left_out} do not apply here"


def test_more_machines_and_devices_make_more_checks_apply() -> None:
    alone, three = applicable_checks(scene(count=1)), applicable_checks(scene(count=3))
    assert {"sameness.python", "clock.offset", "reach.pair", "mtu.path"} <= three - alone
    with_gpu = applicable_checks(scene({"gpu": gpu()}, count=1))
    assert {"gpu.driver", "gpu.torch", "memory.shm", "nccl.debug"} <= with_gpu - alone
    laptop = scene({"machine": machine(power={"on_battery": False, "percent": 80})}, count=1)
    assert applicable_checks(laptop) - alone == {"speed.battery"}
    with_port = scene({"processes": processes(port={"number": 29500, "holders": []})}, count=1)
    assert applicable_checks(with_port) - alone == {"port.taken"}
    proved = replace(scene(count=1), proofs=[{"ok": True, "members": [0, 1], "node": "node1", "detail": ""}])
    assert applicable_checks(proved) - alone == {"proof.start", "proof.gloo"}


def test_checks_of_machines_that_cannot_be_reached_are_not_counted_as_passed() -> None:
    three = scene(count=3)
    applied = len(applicable_checks(three))
    errors: dict[str, ShoalError] = {node.name: HostError(f"{node.name} does not answer") for node in three.nodes}
    none = count(replace(three, facts={}, unreached=errors, trials=[]))
    total = len(applicable_checks(replace(three, facts={}, unreached=errors)))
    assert none.startswith(f"0 of {total} checks passed, 3 errors, {total - 1} not made")
    first = three.nodes[0].name
    others = {name: error for name, error in errors.items() if name != first}
    one = count(replace(three, facts={first: three.facts[first]}, unreached=others, trials=[]))
    numbers = [int(number) for number in re.findall(r"\d+", one)]
    assert f"of {applied} checks passed on 1 of 3 machines, 2 errors" in one
    assert 0 < numbers[0] < applied
    assert re.search(r"\d+ not made", one)


def test_a_failed_check_is_not_counted_as_passed() -> None:
    drained = scene({"machine": machine(power={"on_battery": True, "percent": 8})}, count=1)
    applied = len(applicable_checks(drained))
    assert count(drained).startswith(f"{applied - 1} of {applied} checks passed, 1 warning, ")
