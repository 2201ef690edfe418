"""A state machine for verifiers and their caches: whatever happens, the next law is that of a fresh prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from ..base import Context, Verifier
from ..ragged import pad_rows
from ..tree import root_only
from ..types import NO_FEATURES, DraftTree, Features, Float, Int64
from ..warp import Warper
from .strategies import picks, texts, trees

__all__ = ["verifier_machine"]


def verifier_machine(make: Callable[[], Verifier], oracle: Callable[[], Verifier], *, tolerance: float, capacity: int = 48, nodes: int = 6,
                     most_rows: int = 3, needs: Features = NO_FEATURES) -> type[RuleBasedStateMachine]:  # fmt: skip
    """A machine that drives a verifier through any sequence of prompts in chunks, chains, trees, empty drafts, commits of any path or of
    nothing, verifications that are not committed, and changes of the batch.

        TestCache = verifier_machine(lambda: TreeVerifier(target), lambda: SequentialVerifier(target, 12), tolerance=1e-10).TestCase

    Args:
        make: the verifier under test.
        oracle: a slow one for the same target, without a cache; `SequentialVerifier` for example.
        tolerance: of log-probabilities, absolute.
        capacity: tokens in a row at most.
        nodes: drafted nodes in a row at most.
        most_rows: rows of the batch at most.
        needs: features to ask the verifier under test for; they must come out finite and for every committed token.
    """

    class VerifierMachine(RuleBasedStateMachine):
        @initialize(rows=st.integers(1, most_rows))
        def begin(self, rows: int) -> None:
            self.verifier = make()
            self.vocab_size = self.verifier.facts.vocab_size
            self.texts: list[list[int]] = [[] for _ in range(rows)]
            self.state = self.verifier.begin(self._context(self.verifier, rows, needs))

        def _context(self, verifier: Verifier, rows: int, features: Features = NO_FEATURES) -> Context:
            return Context(rows, verifier.facts, Warper([], batch=rows), False, capacity, features)

        def _fits(self) -> bool:
            return max(map(len, self.texts)) + nodes + 1 <= capacity

        @rule(data=st.data())
        @precondition(_fits)
        def extend(self, data: Any) -> None:
            new = data.draw(texts(self.vocab_size, len(self.texts)))
            tokens, count = _padded(new)
            self._committed(self.verifier.extend(self.state, tokens, count), new)

        @rule(data=st.data())
        @precondition(_fits)
        def commit(self, data: Any) -> None:
            tree = data.draw(trees(self.vocab_size, len(self.texts), nodes=nodes))
            self._verify(tree)
            path, count = data.draw(picks(tree))
            path = path[:, : max(1, int(count.max()))]
            new = [[int(tree.tokens[row, node]) for node in nodes_[:n]] for row, (nodes_, n) in enumerate(zip(path, count, strict=True))]
            self._committed(self.verifier.commit(self.state, path, count), new)

        @rule(data=st.data())
        @precondition(_fits)
        def reject(self, data: Any) -> None:
            """Verify and leave it at that."""
            self._verify(data.draw(trees(self.vocab_size, len(self.texts), nodes=nodes)))

        @rule(data=st.data())
        @precondition(_fits)
        def plain_step(self, data: Any) -> None:
            """A round without a draft."""
            pending = data.draw(st.lists(st.integers(0, self.vocab_size - 1), min_size=len(self.texts), max_size=len(self.texts)))
            self._verify(root_only(torch.tensor(pending)))
            ones = torch.ones(len(pending), dtype=torch.int64)
            self._committed(self.verifier.commit(self.state, ones[:, None] - 1, ones), [[token] for token in pending])

        @rule(data=st.data())
        def select(self, data: Any) -> None:
            rows = data.draw(st.permutations(range(len(self.texts))).flatmap(lambda p: st.integers(1, len(p)).map(lambda n: list(p[:n]))))
            self.state = self.verifier.select(self.state, rows)
            self.texts = [list(self.texts[row]) for row in rows]

        def _committed(self, commit: Any, new: list[list[int]]) -> None:
            told = [row[:n] for row, n in zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)]
            assert told == new, f"the commit holds {told}, committed were {new}"
            if needs:
                assert all(bool(commit.features[row, :n].isfinite().all()) for row, n in enumerate(map(len, new)))
            self.texts = [[*text, *more] for text, more in zip(self.texts, new, strict=True)]

        def _verify(self, tree: DraftTree) -> None:
            """The law after every node against that of the oracle after a fresh prefill."""
            fresh = oracle()
            state = fresh.begin(self._context(fresh, len(self.texts)))
            fresh.extend(state, *_padded(self.texts))
            got, wanted = self.verifier.verify(self.state, tree).logp.cpu(), fresh.verify(state, tree).logp.cpu()
            there = tree.parents >= 0
            there[:, 0] = True
            assert _close(got[there], wanted[there], tolerance), f"texts {self.texts}, tree {tree.tokens.tolist()}, {tree.parents.tolist()}"

    return VerifierMachine


def _padded(rows: list[list[int]]) -> tuple[Int64[Tensor, "B T"], Int64[Tensor, " B"]]:
    """At least one column, so that a call in which nothing is read has a shape."""
    tokens, _ = pad_rows([[*row, 0] for row in rows], 0)
    return tokens, torch.tensor([len(row) for row in rows])


def _close(a: Float[Tensor, "n V"], b: Float[Tensor, "n V"], tolerance: float) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=0, atol=tolerance)
