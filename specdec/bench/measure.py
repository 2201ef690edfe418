"""Methods side by side, prompt by prompt, so that whatever slows the machine down slows all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from .methods import Decoded, Method

__all__ = ["Group", "Sample", "groups_of", "measure", "warm_up"]


@dataclass(frozen=True)
class Group:
    """Prompts that are decoded together."""

    prompts: list[list[int]]
    seeds: list[int]
    category: str
    """The prompts' own; "mixed" where they differ, for then no time belongs to one of them."""


@dataclass(frozen=True)
class Sample:
    """One group by one method."""

    category: str
    seconds: float
    """Wall time of the whole call: set-up, prefill, rounds and bringing the tokens to the host."""
    decoded: Decoded

    @property
    def tokens(self) -> int:
        return sum(map(len, self.decoded.texts))


def groups_of(prompts: Sequence[list[int]], categories: Sequence[str], seeds: Sequence[int], batch: int) -> list[Group]:
    """The prompts in their order, `batch` at a time; the last group may be smaller."""
    groups = []
    for start in range(0, len(prompts), batch):
        part = slice(start, start + batch)
        kinds = set(categories[part])
        groups.append(Group(list(prompts[part]), list(seeds[part]), kinds.pop() if len(kinds) == 1 else "mixed"))
    return groups


def warm_up(methods: Mapping[str, Method], group: Group, passes: int) -> None:
    """Let every method decode `passes` times, and forget it: first passes over fresh weights are slower, and no method's fault.
    The prompts are read backwards, so that a drafter with a memory learns nothing that is asked for later."""
    for _ in range(passes):
        for decode in methods.values():
            decode([prompt[::-1] for prompt in group.prompts], group.seeds)


def measure(
    methods: Mapping[str, Method], groups: Sequence[Group], device: torch.device | str = "cpu", tick: Callable[[], object] = lambda: None
) -> dict[str, list[Sample]]:
    """Decode every group by every method, and time each call as a whole.

    The order of the methods is rotated from group to group, so that none is always first.

    Args:
        tick: called when a group is done.

    Returns:
        For each method its samples, in the order of the groups: sample i of one is paired with sample i of any other.
    """
    names = list(methods)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number, group in enumerate(groups):
        first = number % len(names)
        for name in [*names[first:], *names[:first]]:
            _settle(device)
            start = perf_counter()
            decoded = methods[name](group.prompts, group.seeds)
            samples[name].append(Sample(group.category, perf_counter() - start, decoded))
        tick()
    return samples


def _settle(device: torch.device | str) -> None:
    """What the method before left running on the device is not the next one's to pay."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
