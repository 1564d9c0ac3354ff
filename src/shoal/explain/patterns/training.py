"""Errors of DDP, autograd, checkpoints and data loaders about the program itself."""

from __future__ import annotations

from shoal.explain.pattern import CauseOrder, Pattern

TRAINING = (
    Pattern(
        "ddp.unused-parameters",
        ("Expected to have finished reduction in the prior iteration",),
        cause="some parameters of the model were not used for the loss, so they got no gradients and DDP still waits "
        "for them; the lines below name them by index",
        fix="DistributedDataParallel(model, find_unused_parameters=True), or leave those parameters out of the model; "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL prints their names",
    ),
    Pattern(
        "ddp.different-models",
        ("appears not to match sizes of the same param in process 0", "DDP expects same model across all ranks"),
        cause="the ranks built different models: one has another size, number of layers or vocabulary",
        fix="build the model from the same configuration and the same files everywhere; compare sum(p.numel() for p "
        "in model.parameters())",
    ),
    Pattern(
        "ddp.nothing-to-train",
        ("DistributedDataParallel is not needed when a module doesn't have any parameter",),
        cause="every parameter of the model is frozen, so there are no gradients to exchange",
        fix="unfreeze what is to be trained before wrapping: parameter.requires_grad_(True); or do not wrap it",
    ),
    Pattern(
        "train.nan",
        ("returned nan values in its",),
        regex=r"Function '(?P<name>\w+)' returned nan",
        cause="a gradient became NaN in {name}: a root or logarithm of zero, a division by zero, or a training that "
        "diverged",
        fix="the traceback above it shows the forward line; add a small epsilon there, lower the learning rate, or "
        "clip gradients",
    ),
    Pattern(
        "train.state-dict",
        ("Error(s) in loading state_dict for",),
        regex=r"loading state_dict for (?P<model>\w+)",
        cause="the checkpoint does not fit this {model}: names or shapes differ (the next lines list them). Names that "
        "begin with `module.` were saved from inside DDP, those with `_orig_mod.` from a compiled model",
        fix="save model.module.state_dict(), or strip the prefix: {{k.removeprefix('module.'): v for k, v in "
        "state.items()}}",
    ),
    Pattern(
        "train.token-range",
        ("IndexError: index out of range in self",),
        cause="a token's number is beyond the size of the embedding: the text was encoded with another tokenizer than "
        "the model's, or a position lies beyond the context",
        fix="compare int(tokens.max()) with embedding.num_embeddings; encode the text again with the model's tokenizer",
    ),
    Pattern(
        "train.compiler",
        ("InvalidCxxCompiler", "No working C++ compiler found"),
        cause="torch.compile needs a C++ compiler on every machine, and this one has none",
        fix="sudo apt install g++   (or run without torch.compile: TORCHDYNAMO_DISABLE=1)",
    ),
    Pattern(
        "train.short-library",
        (": file too short", ": cannot read file data"),
        regex=r"(?P<file>/[^\s:'\"]+\.so[\d.]*): (?:file too short|cannot read file data)",
        cause="the compiled file {file} is incomplete: the disk was full, or a process was killed while it wrote it. "
        "torch.compile caches its kernels in such files and loads the broken one again in every run",
        fix="is the disk full? df -h; then remove torch.compile's kernels: rm -rf /tmp/torchinductor_$USER; "
        "for a library of an installed package: python -m pip install --force-reinstall --no-deps PACKAGE",
        check="disk.free",
    ),
    Pattern(
        "data.shared-memory",
        (
            "unable to allocate shared memory(shm)",
            "Unexpected bus error encountered in worker",
            "is killed by signal: Bus error",
        ),
        cause="the workers of a DataLoader hand their batches over through /dev/shm, and it is full (in a container "
        "it has 64 MB)",
        fix="DataLoader(num_workers=0), or more of it: docker run --shm-size=2g …; sudo mount -o remount,size=2G "
        "/dev/shm",
        covers=("disk.full", "data.worker-killed"),
    ),
    Pattern(
        "data.worker-killed",
        ("DataLoader worker (pid",),
        weight=CauseOrder.LIKELY,
        cause="a worker process of a DataLoader was killed, most often because the machine ran out of memory",
        fix="use fewer workers or smaller batches; ask the kernel: sudo dmesg | grep -i 'killed process'",
        check="memory.free",
    ),
    Pattern(
        "python.module",
        ("ModuleNotFoundError: No module named ",),
        regex=r"No module named '(?P<name>[^']+)'",
        cause="the Python that ran this has no {name}: it is not installed there, or another environment was used "
        "than the one you installed it in",
        fix="on every machine, with the Python that runs the ranks: python -m pip install {name}   (shoal setup HOSTS "
        "brings them to the same packages)",
    ),
)
