"""Where a row's output ends: at exactly the token at which plain decoding would end it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

from .types import Int64

__all__ = ["Ends"]

Criterion = Callable[..., Any]

_SHARED = frozenset({StopStringCriteria, MaxTimeCriteria})
"""They remember nothing, and the first is large."""


class Ends:
    """The events that end a row: EOS, stop strings, stopping criteria, the length limit, the context limit.

    Args:
        eos: token ids that end a row.
        limits: per row of the call, how long it may become, the prompt included.
        context: how long any row may become because the target cannot read more, or each row, where rows begin with padding that it
            does not read; `None` if it can.
        criteria: Hugging Face stopping criteria, called once per kept token as plain decoding calls them, with `[1, L]` ids and no
            scores. With one row the objects themselves are called; with more, each row has a copy, so that a criterion with memory
            sees one text. TypeError if it cannot be copied then.
        device: where criteria find the ids.
    """

    def __init__(self, *, eos: frozenset[int], limits: Sequence[int], context: int | Sequence[int] | None = None,
                 criteria: Sequence[Criterion] = (), device: torch.device | str = "cpu") -> None:  # fmt: skip
        self.eos = eos
        contexts = [context] * len(limits) if context is None or isinstance(context, int) else context
        self.limits = [limit if most is None else min(limit, most) for limit, most in zip(limits, contexts, strict=True)]
        self._reasons = ["length" if most is None or limit <= most else "context" for limit, most in zip(limits, contexts, strict=True)]
        self._criteria = [[_own(criterion, len(limits)) for criterion in criteria] for _ in limits]
        self._device = device

    @classmethod
    def of(cls, criteria: Sequence[Criterion], *, lengths: Sequence[int], limits: Sequence[int], eos: frozenset[int],
           context: int | Sequence[int] | None = None, device: torch.device | str = "cpu") -> Ends:  # fmt: skip
        """Ends from a list of criteria in which transformers' own may stand: as in `model.generate`, an `EosTokenCriteria` takes the
        place of `eos` and a `MaxLengthCriteria` that of `limits`. `lengths` are the prompts'."""
        lasts = [token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.flatten().tolist()]
        longest = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
        rest = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        if longest:  # plain decoding asks after a token, so a limit that is passed already lets one through
            limits = [max(min(longest), length + 1) for length in lengths]
        return cls(eos=frozenset(lasts) if lasts else eos, limits=limits, context=context, criteria=rest, device=device)

    def room(self, row: int, length: int) -> int:
        """How many more tokens this row of the call may emit, now that it has `length`."""
        return max(0, self.limits[row] - length)

    def why_not(self, row: int, length: int) -> str | None:
        """Why a row of this length may not emit any token, "length" or "context"; `None` if it may."""
        return None if self.room(row, length) else self._reasons[row]

    def scan(self, row: int, ids: Int64[Tensor, " L"], new: Sequence[int]) -> tuple[int, str | None]:
        """How many of the `new` tokens are kept, and why the row ends with the last one of them; `None` if it goes on.

        Where several events fall on one token the first of "eos", "stop", "criteria", "length", "context" is named.

        Args:
            row: the row of the call.
            ids: the row's tokens before, the pending one included, on the CPU. Not written to.
        """
        criteria, limit, length = self._criteria[row], self.limits[row], len(ids)
        # Assembled once a round; what a criterion sees, and may keep, are views of a buffer that nobody writes to again.
        text = torch.cat([ids, torch.tensor(new, dtype=torch.int64, device="cpu")])[None].to(self._device) if criteria and new else ids
        for kept, token in enumerate(new, 1):
            # Plain decoding asks every criterion about every token, also about one that ends the row anyway.
            fired = [criterion for criterion in criteria if _says(criterion, text[:, : length + kept])]
            if token in self.eos:
                return kept, "eos"
            if fired:
                return kept, "stop" if any(isinstance(criterion, StopStringCriteria) for criterion in fired) else "criteria"
            if length + kept >= limit:
                return kept, self._reasons[row]
        return len(new), None


def _says(criterion: Criterion, ids: Int64[Tensor, "1 L"]) -> bool:
    answer = criterion(ids, None)
    if isinstance(answer, bool) or (isinstance(answer, Tensor) and answer.numel() == 1):
        return bool(answer)
    raise TypeError(
        f"stopping_criteria: {type(criterion).__name__} answered {answer!r} for one row; allowed are a bool or a tensor of one element"
    )


def _own(criterion: Criterion, batch: int) -> Criterion:
    if batch == 1 or type(criterion) in _SHARED or getattr(criterion, "pure", False):
        return criterion
    if isinstance(criterion, FunctionType) and criterion.__closure__ is None:
        return criterion
    name = type(criterion).__name__
    advice = "in a batch each row needs its own; pass one row at a time, or set `pure = True` on it if it remembers nothing"
    try:
        own = copy.deepcopy(criterion)
    except Exception as error:
        raise TypeError(f"stopping_criteria: {name} cannot be copied ({error}); {advice}") from error
    if own is criterion:
        raise TypeError(f"stopping_criteria: {name} {criterion!r} is its own copy; {advice}")
    return own
