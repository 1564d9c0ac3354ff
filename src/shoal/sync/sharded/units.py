"""Which modules of a model get their weights together where weights are divided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shoal.errors import UsageError
from shoal.units import join_words


@dataclass(frozen=True)
class ModuleUnit:
    """Modules whose weights are on this rank at the same time, and the parameters that belong to no other unit."""

    name: str
    modules: tuple[nn.Module, ...]  # Before the forward of one of these the weights are gathered.
    parameters: tuple[nn.Parameter, ...]


def find_units(model: nn.Module, names: Sequence[str] = ()) -> list[ModuleUnit]:
    """Divide a model into units, in the order of backward: its repeated blocks, or the modules with these names, from
    the last to the first; then the rest.

    Blocks are the members of a `ModuleList` or `Sequential` whose type comes more than once in it: the layers of a
    transformer, the stages of a convolutional network.
    """
    known = dict(model.named_modules())
    if any(module._compiled_call_impl is not None for module in model.modules()):
        raise UsageError(
            "zero3 cannot divide the weights of a compiled model",
            why="weights are gathered before each block and freed behind it, which compiled code has no place for",
            fix="leave torch.compile out, or use --sync zero2",
        )
    if unknown := [name for name in names if name not in known]:
        raise UsageError(
            f"sync.units names {unknown[0]}, which is not a module of the model",
            why=f"it has {join_words([name for name, _ in model.named_children()])}",
            fix="name modules as model.named_modules() does, or leave sync.units out",
        )
    blocks = {name: known[name] for name in names} if names else _repeated_blocks(model)
    owners = Counter(p for module in model.modules() for p in set(module.parameters(recurse=False)))
    taken: set[nn.Parameter] = set()
    units = []
    for name, module in blocks.items():
        inside = Counter(p for part in module.modules() for p in set(part.parameters(recurse=False)))
        # A weight that modules of several blocks share is of the rest.
        own = [p for p in module.parameters() if p.requires_grad and p not in taken and inside[p] == owners[p]]
        units += _by_type(name, (module,), own)
        taken.update(own)
    rest = [p for p in model.parameters() if p.requires_grad and p not in taken]
    rest_set = set(rest)
    # A program may call a part of a model: each module gets the weights of the rest that it has itself.
    users = [m for m in model.modules() if m is not model and any(p in rest_set for p in m.parameters(recurse=False))]
    return units[::-1] + _by_type("", (model, *users), rest)


def _by_type(name: str, modules: tuple[nn.Module, ...], parameters: Sequence[nn.Parameter]) -> list[ModuleUnit]:
    """Return a unit for every type of numbers: each travels by itself."""
    types = dict.fromkeys(parameter.dtype for parameter in parameters)
    return [ModuleUnit(name, modules, tuple(p for p in parameters if p.dtype == dtype)) for dtype in types]


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost repeated modules, by name, in the order of the model."""
    blocks: dict[str, nn.Module] = {}
    for name, container in model.named_modules():
        if any(name == block or name.startswith(f"{block}.") for block in blocks):
            continue
        if isinstance(container, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in container)
            for child_name, child in container.named_children():
                has_layers = len(list(child.children())) > 1
                if kinds[type(child)] > 1 and has_layers:
                    blocks[f"{name}.{child_name}" if name else child_name] = child
    return blocks
