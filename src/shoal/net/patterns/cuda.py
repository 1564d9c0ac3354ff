"""What torch and NCCL say about GPUs."""

from __future__ import annotations

from shoal.net.pattern import Pattern, Weight

CUDA = (
    Pattern(
        "cuda.memory",
        Weight.CAUSE,
        ("CUDA out of memory", "CUDA error: out of memory"),
        cause="the GPU's memory is full: batch, sequences or model are too large for it, or another process uses it",
        fix="see who uses it: nvidia-smi; then use a smaller micro-batch (shoal: --micro-batch) with more accumulation",
        check="memory.free",
    ),
    Pattern(
        "cuda.missing",
        Weight.CAUSE,
        ("Torch not compiled with CUDA enabled", "No CUDA GPUs are available", "Found no NVIDIA driver on your system"),
        cause="the program wants a GPU, and this torch sees none: it is the CPU build, the driver is missing, or "
        "CUDA_VISIBLE_DEVICES is empty",
        fix="see: nvidia-smi; python -c 'import torch; print(torch.version.cuda, torch.cuda.device_count())'; to "
        "train without one: device = 'cpu' (shoal: --device cpu)",
    ),
    Pattern(
        "cuda.nccl",
        Weight.CAUSE,
        ("Distributed package doesn't have NCCL built in", "ProcessGroupNCCL is only supported with GPUs"),
        cause="the program asks for NCCL, which needs GPUs and a CUDA build of torch; CPU ranks exchange over gloo",
        fix="init_process_group('gloo'), or with no name at all: torch then chooses",
    ),
    Pattern(
        "cuda.one-for-two",
        Weight.CAUSE,
        ("Duplicate GPU detected",),
        regex=r"rank (?P<one>\d+) and rank (?P<other>\d+) both on CUDA device",
        cause="rank {one} and rank {other} were both put on one GPU, and NCCL wants one for each",
        fix="torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first thing; start no more ranks on a machine than "
        "it has GPUs",
    ),
    Pattern(
        "cuda.ordinal",
        Weight.CAUSE,
        ("CUDA error: invalid device ordinal",),
        cause="a rank asked for a GPU by a number that this machine does not have: more ranks than GPUs, or the "
        "global rank was taken for the local one",
        fix="torch.cuda.set_device(int(os.environ['LOCAL_RANK'])); see the numbers: nvidia-smi -L",
    ),
    Pattern(
        "cuda.assertion",
        Weight.CAUSE,
        ("CUDA error: device-side assert triggered",),
        cause="an index was out of range on the GPU, most often a token or a label that the model has no row for; "
        "what the traceback shows may be a later line",
        fix="run the same on the CPU, which names the line: CUDA_VISIBLE_DEVICES= python SCRIPT   (or "
        "CUDA_LAUNCH_BLOCKING=1)",
    ),
    Pattern(
        "cuda.two-devices",
        Weight.CAUSE,
        ("Expected all tensors to be on the same device",),
        cause="a tensor is on the CPU and another on a GPU, or they are on two GPUs",
        fix="move the batch to where the model is: inputs = inputs.to(next(model.parameters()).device)",
    ),
    Pattern(
        "cuda.checkpoint",
        Weight.CAUSE,
        ("Attempting to deserialize object on a CUDA device",),
        cause="the checkpoint was saved from a GPU and is loaded on a machine without one",
        fix="torch.load(path, map_location='cpu', weights_only=True)",
    ),
)
