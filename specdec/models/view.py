"""A second tree of modules over a model's own parameters: what is set on it does not show on the model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["RowLinear", "view"]


def view(model: nn.Module, change: Callable[[nn.Module], None]) -> nn.Module:
    """A shallow copy of every module. Parameters, buffers and hooks are the model's own, and so are later changes to them.

    Args:
        change: called with each copy, children first; it may set the copy's attributes, but not write into what they hold.
    """
    made: dict[nn.Module, nn.Module] = {}  # a module that stands in two places is one module here too

    def mirror(module: nn.Module) -> nn.Module:
        if module not in made:
            made[module] = twin = copy.copy(module)
            twin._modules = {name: child and mirror(child) for name, child in module._modules.items()}
            change(twin)
        return made[module]

    return mirror(model)


class RowLinear(nn.Linear):
    """A linear layer on the CPU that is quicker where a step of plain decoding asks for one row: a matrix-vector product reads
    half-precision weights as they lie, where the general product rearranges them first."""

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() != self.in_features:
            return super().forward(input)
        row = torch.mv(self.weight, input.reshape(-1)).view(*input.shape[:-1], -1)
        return row if self.bias is None else row + self.bias
