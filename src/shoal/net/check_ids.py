"""The checks that find a failure before a run, by id. Explanations name them; this is the one place that lists them."""

from __future__ import annotations

CHECKS = {
    "reach.store": "every machine reaches the store's port on the first one",
    "reach.pair": "in every pair the higher address reaches the lower one on an ephemeral port",
    "reach.route": "every machine has a route to the address by which each other one is known",
    "interface.wrong": "the interface exists, has an address, and is the one on the way to the peers",
    "mtu.mismatch": "packets of full size pass between every two machines",
    "names.resolve": "the names that are used resolve, everywhere",
    "names.loopback": "a machine's own name does not resolve to a loopback address",
    "names.reverse": "addresses are looked up quickly in reverse; a dead name server freezes the store",
    "port.taken": "the store's port is free, or whose it is",
    "port.privileged": "the store's port may be used by this user",
    "leftovers.processes": "no worker of an earlier run is left",
    "leftovers.files": "no meeting file of an earlier run is left",
    "limits.files": "enough file descriptors",
    "limits.processes": "enough processes and threads",
    "sameness.os": "the same operating system; gloo cannot mix them",
    "sameness.torch": "the same torch, Python and shoal",
    "sameness.environment": "the same packages",
    "clock.offset": "the clocks agree; torchrun's rendezvous goes wrong where they do not",
    "memory.free": "enough free memory, and who else uses it",
    "memory.shared": "enough of /dev/shm for data loaders",
    "disk.free": "enough disk space",
    "disk.writable": "the folders of a run can be written",
    "power.sleep": "no machine falls asleep, by its lid or its Wi-Fi",
    "gpu.present": "torch sees the GPUs that are asked for, and each rank has one of its own",
    "tools.compiler": "a C++ compiler, for torch.compile",
    "ssh.login": "every host lets us in without a question",
    "ssh.key": "every host proves to be the one we know",
    "proof.pair": "a real all-reduce between every two machines, with a deadline of seconds",
}
