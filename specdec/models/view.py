"""A second tree of modules over a model's own parameters: what is set on it does not show on the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["RowLinear", "view"]


def view(model: nn.Module, change: Callable[[nn.Module], None]) -> nn.Module:
    """A shallow copy of every module. Parameters, buffers and hooks are the model's own, and so are later changes to them, but modules
    that are replaced later are not seen. A method that was set on a module acts on its copy; a function that knows the module otherwise
    stays what it is, and acts on the module. A leaf with buffers is not copied: it may keep in attributes what belongs to them, as
    dynamic rotary embeddings do.

    Args:
        change: called with each copy, children first; it may set the copy's attributes, but not write into what they hold.
    """
    made: dict[nn.Module, nn.Module] = {}  # a module that stands in two places is one module here too

    def mirror(module: nn.Module) -> nn.Module:
        if module._buffers and not module._modules:
            return module
        if module not in made:
            made[module] = twin = copy.copy(module)
            twin._modules = {name: child and mirror(child) for name, child in module._modules.items()}
            vars(twin).update({name: _rebound(value, module, twin) for name, value in vars(twin).items()})
            change(twin)
        return made[module]

    return mirror(model)


def _rebound(value: Any, module: nn.Module, twin: nn.Module) -> Any:
    """What is bound to the module, bound to its copy: a method, or a `partial` with the module in front, as accelerate's hooks make it."""
    if isinstance(value, MethodType) and value.__self__ is module:
        return MethodType(value.__func__, twin)
    if type(value) is partial and value.args and value.args[0] is module:
        bound = partial(value.func, twin, *value.args[1:], **value.keywords)
        vars(bound).update(vars(value))  # by `__wrapped__` its signature is known
        return bound
    return value


class RowLinear(nn.Linear):
    """A linear layer on the CPU that is quicker where a step of plain decoding asks for one row: a matrix-vector product reads
    half-precision weights as they lie, where the general product rearranges them first."""

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() != self.in_features:
            return super().forward(input)
        row = torch.mv(self.weight, input.reshape(-1)).view(*input.shape[:-1], -1)
        return row if self.bias is None else row + self.bias
