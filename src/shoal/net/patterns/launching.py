"""What a program says when it was started in the wrong way."""

from __future__ import annotations

from shoal.net.pattern import Pattern, Weight

LAUNCHING = (
    Pattern(
        "launch.variable",
        Weight.CAUSE,
        ("expected, but not set",),
        regex=r"environment variable (?P<name>\w+) expected, but not set",
        cause="the program was started without a launcher: {name} says which rank it is or where the ranks meet, and "
        "nobody has set it",
        fix="start it with: shoal run --on local:2 SCRIPT   (or: torchrun --nproc-per-node=2 SCRIPT)",
    ),
    Pattern(
        "launch.local-rank",
        Weight.CAUSE,
        ("KeyError: 'LOCAL_RANK'", "KeyError: 'RANK'", "KeyError: 'WORLD_SIZE'", "KeyError: 'LOCAL_WORLD_SIZE'"),
        regex=r"KeyError: '(?P<name>\w+)'",
        cause="the program reads {name} from its environment, and was started without a launcher that sets it",
        fix="start it with: shoal run --on local:2 SCRIPT   (or: torchrun --nproc-per-node=2 SCRIPT)",
    ),
    Pattern(
        "launch.no-group",
        Weight.CAUSE,
        ("Default process group has not been initialized",),
        cause="the program asks for its rank or exchanges tensors before it has joined a process group",
        fix="call torch.distributed.init_process_group() first, on every rank",
    ),
    Pattern(
        "launch.group-twice",
        Weight.CAUSE,
        ("trying to initialize the default process group twice",),
        cause="init_process_group was called a second time; a library (Lightning, Accelerate, …) may have made the "
        "first call",
        fix="guard it: if not torch.distributed.is_initialized(): …",
    ),
    Pattern(
        "launch.pickle",
        Weight.CAUSE,
        ("Can't pickle local object", "cannot pickle '", "Can't get local object"),
        cause="processes that are spawned get their function and arguments as pickle, and one of them cannot be "
        "pickled: a function inside a function, a lambda, an open file",
        fix="move the function to the top level of the module; or start the ranks with: shoal run SCRIPT",
    ),
    Pattern(
        "launch.main-guard",
        Weight.CAUSE,
        ("An attempt has been made to start a new process before the",),
        cause="every spawned process imports the script again, and the script starts processes while it is imported",
        fix="put what starts them under: if __name__ == '__main__':",
    ),
)
