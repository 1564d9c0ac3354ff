"""Errors of torch and NCCL about GPUs."""

from __future__ import annotations

from shoal.explain.pattern import CauseOrder, Pattern

CUDA = (
    Pattern(
        "cuda.memory",
        ("CUDA out of memory", "CUDA error: out of memory"),
        cause="the GPU's memory is full: batch, sequences or model are too large for it, or another process uses it",
        fix="see which process uses it: nvidia-smi; then use a smaller micro-batch (shoal: --micro-batch) with more "
        "accumulation",
        check="gpu.memory",
    ),
    Pattern(
        "cuda.missing",
        (
            "Torch not compiled with CUDA enabled",
            "No CUDA GPUs are available",
            "Found no NVIDIA driver on your system",
            "module 'torch._C' has no attribute '_cuda_",
        ),
        cause="the program needs a GPU, and this torch sees none: it is the CPU build, the driver is missing, or "
        "CUDA_VISIBLE_DEVICES is empty",
        fix="see: nvidia-smi; python -c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'; to "
        "train without one: device = 'cpu' (shoal: --device cpu)",
        check="gpu.torch",
    ),
    Pattern(
        "cuda.nccl",
        ("Distributed package doesn't have NCCL built in", "ProcessGroupNCCL is only supported with GPUs"),
        cause="the program asks for NCCL, which needs GPUs and a CUDA build of torch; CPU ranks exchange over gloo",
        fix="init_process_group('gloo'), or with no name at all: torch then chooses",
    ),
    Pattern(
        "cuda.backend-name",
        ("Unknown backend type ",),
        regex=r"Unknown backend type (?P<name>\w+)",
        cause="torch has no backend of the name {name}; RCCL, the library for AMD's GPUs, has the name nccl in torch",
        fix="init_process_group('nccl') on GPUs, of AMD too; 'gloo' on CPUs; with no name at all torch chooses",
    ),
    Pattern(
        "cuda.no-backend",
        ("No backend type associated with device type",),
        regex=r"associated with device type (?P<device>\w+)",
        cause="a tensor on the device {device} was given to a process group that has no backend for it: one made with "
        "'nccl' alone exchanges only tensors on GPUs",
        fix="init_process_group('cpu:gloo,cuda:nccl'), which has one for each; or move the tensor to the GPU first: "
        "tensor.to('cuda')",
    ),
    Pattern(
        "cuda.watchdog",
        ("Watchdog caught collective operation timeout",),
        weight=CauseOrder.LIKELY,
        regex=r"OpType=(?P<what>\w+).*ran for (?P<ms>\d+) milliseconds",
        cause="{what} did not end for {ms} ms, and NCCL's watchdog ended the process: another rank is late, has died, "
        "or is in another collective (a loop of another length, an `if rank`, a long save or evaluation on one rank)",
        fix="look at the end of the other ranks' logs for the one that failed or is slow; see where each rank is: "
        "py-spy dump --pid PID; raise timeout= in init_process_group only for intended pauses",
        check="reach.pair",
    ),
    Pattern(
        "cuda.nccl-interface",
        ("Bootstrap : no socket interface found",),
        cause="NCCL found no network interface to use: NCCL_SOCKET_IFNAME names one that this machine does not have, "
        "or only loopback is up",
        fix="see the names with: ip -br addr; then: export NCCL_SOCKET_IFNAME=NAME   (or: unset NCCL_SOCKET_IFNAME)",
        check="nccl.interface",
        covers=("cuda.nccl-internal",),
    ),
    Pattern(
        "cuda.nccl-internal",
        ("ncclInternalError",),
        weight=CauseOrder.LIKELY,
        cause="a check inside NCCL failed; the line after `Last error:` says which. Most often its settings are wrong "
        "(NCCL_TOPO_FILE, NCCL_GRAPH_FILE, NCCL_SOCKET_IFNAME), or the machines have different versions of NCCL",
        fix="run once with NCCL_DEBUG=WARN, which prints what was wrong; see the settings: env | grep ^NCCL_; the "
        "version on every machine: python -c 'import torch; print(torch.cuda.nccl.version())'",
    ),
    Pattern(
        "cuda.nccl-system",
        ("ncclSystemError",),
        weight=CauseOrder.LIKELY,
        cause="a system call of NCCL failed; the line after `Last error:` says which: an address that no "
        "interface has, a connection to a rank that has ended or that a firewall drops, or a full /dev/shm",
        fix="run once with NCCL_DEBUG=INFO; look at the end of the other ranks' logs; check: df -h /dev/shm",
        check="reach.pair",
    ),
    Pattern(
        "cuda.one-for-two",
        ("Duplicate GPU detected",),
        regex=r"rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device",
        cause="rank {one} and rank {other} were both put on one GPU, and NCCL needs one for each",
        fix="call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first; start no more ranks on a machine than "
        "it has GPUs",
    ),
    Pattern(
        "cuda.ordinal",
        ("CUDA error: invalid device ordinal",),
        cause="a rank asked for a GPU by a number that this machine does not have: more ranks than GPUs, or the "
        "global rank was used instead of the local one",
        fix="torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); see the numbers: nvidia-smi -L",
    ),
    Pattern(
        "cuda.assertion",
        ("CUDA error: device-side assert triggered",),
        cause="an index was out of range on the GPU, most often a token or a label that the model has no row for; "
        "what the traceback shows may be a later line",
        fix="run the same on the CPU, which names the line: CUDA_VISIBLE_DEVICES= python SCRIPT   (or "
        "CUDA_LAUNCH_BLOCKING=1)",
    ),
    Pattern(
        "cuda.two-devices",
        ("Expected all tensors to be on the same device",),
        cause="one tensor is on the CPU and another on a GPU, or they are on two GPUs",
        fix="move the batch to where the model is: inputs = inputs.to(next(model.parameters()).device)",
    ),
    Pattern(
        "cuda.checkpoint",
        ("Attempting to deserialize object on a CUDA device",),
        cause="the checkpoint was saved from a GPU and is loaded on a machine without one",
        fix="torch.load(path, map_location='cpu', weights_only=True)",
    ),
)
