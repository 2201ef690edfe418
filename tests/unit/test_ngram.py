"""N-gram lookup against a scan of the whole context."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.base import Context
from specdec.drafters import NGramDrafter
from specdec.rng import CounterRng
from specdec.types import Budget, Commit, TargetFacts
from specdec.warp import Warper


def scan(ids: list[int], sizes: range, choice: str, length: int) -> list[int]:
    """What the drafter promises, by looking everywhere."""
    for n in reversed(sizes):
        places = [i for i in range(n, len(ids)) if ids[i - n : i] == ids[-n:]]
        if places:
            lately = [ids[p] for p in places]  # the voters' limit of 16 is not reached in these short rows
            top = max(map(lately.count, lately))
            favourite = next(t for t in reversed(lately) if lately.count(t) == top)
            frequent = max(p for p in places if ids[p] == favourite)
            start = {"first": places[0], "recent": places[-1], "frequent": frequent}[choice]
            out = list(ids)
            for i in range(length):
                out.append(out[start + i])
            return out[len(ids) :]
    return []


@given(
    rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=16), min_size=1, max_size=3),
    low=st.integers(1, 2), more=st.integers(0, 2), choice=st.sampled_from(["recent", "first", "frequent"]),
    length=st.integers(0, 6), pieces=st.integers(1, 5),
)  # fmt: skip
def test_same_draft_as_a_scan(rows: list[list[int]], low: int, more: int, choice: str, length: int, pieces: int) -> None:
    drafter = NGramDrafter(low + more, low, choice)
    warper = Warper([], batch=len(rows))
    state = drafter.begin(Context(len(rows), TargetFacts(3), warper, greedy=True, capacity=30))
    source = CounterRng([0] * len(rows)).round(range(len(rows)), [len(row) - 1 for row in rows], torch.device("cpu"))
    longest = max(map(len, rows)) - 1
    for start in range(0, longest, pieces):  # in commits of any size
        chunk = [row[:-1][start : start + pieces] for row in rows]
        tokens = torch.tensor([[*c, *[0] * (pieces - len(c))] for c in chunk])
        state = drafter.observe(state, Commit(tokens, torch.tensor([len(c) for c in chunk])))
    pending = torch.tensor([row[-1] for row in rows])
    tree = drafter.propose(state, pending, Budget.of(length, batch=len(rows)), source)
    for i, row in enumerate(rows):
        drafted = tree.tokens[i, 1:][tree.parents[i, 1:] >= 0].tolist()
        assert drafted == scan(row, range(low, low + more + 1), choice, length)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="1 <= min_ngram <= max_ngram"):
        NGramDrafter(2, 3)
    with pytest.raises(ValueError, match="allowed are recent, first, frequent"):
        NGramDrafter(choice="best")
