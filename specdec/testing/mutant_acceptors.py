"""Negative controls: acceptors with one fault each, the check that must reject them, and the honest acceptor beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..acceptors import BlockAcceptor, GreedyAcceptor, KSeqAcceptor, MatchAcceptor, RejectionAcceptor, TypicalAcceptor
from ..base import Acceptor
from ..rng import Purpose, Source
from ..tree import depths, draw_law, landed, path_to, sort_draws
from ..types import Acceptance, Bool, DraftTree, Float, Kind, Verification
from .mutant_deferred import mutant_deferred
from .mutant_trees import as_iid, left_over, normalised
from .mutants import Mutant

__all__ = ["Recursive", "mutant_acceptors"]

Weights = Float[Tensor, "B V"]
_OFF = "defect ([0-9.]+e-0[12]|0[.][0-9]+|1[.]0);"


class Recursive(Acceptor):
    """Recursive rejection in which each decision may be replaced by a faulty one.

    Args:
        weigh: `num, den` of a coin, from the honest ones.
        left: the law that the node goes on with when a child fails, from: what it had, the target's at the node, the target's at the child,
            the draft's.
        finish: the law of the correction or bonus, from: what is left, the target's at the node, the last failed child's draft law, and
            whether any child failed.
        number: of a coin, from its honest number and the depth of the child.
        read: the target's laws, from what the rule is shown.
    """

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def __init__(self, *, weigh: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda num, den: (num, den),
                 left: Callable[[Weights, Weights, Weights, Weights], Weights] = lambda had, target, child, draft: left_over(had, draft),
                 finish: Callable[[Weights, Weights, Weights, Bool[Tensor, " B"]], Weights] = lambda left, target, draft, failed: left,
                 number: Callable[[int, int], int] = lambda number, depth: number,
                 read: Callable[[Verification], Tensor] = lambda verification: verification.logp.exp()) -> None:  # fmt: skip
        self.weigh, self.left, self.finish, self.number, self.read = weigh, left, finish, number, read

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        law = self.read(verification)
        rows, vocab = torch.arange(len(law)), law.shape[-1]
        node = torch.zeros(len(law), dtype=torch.int64)
        residual = law[:, 0]
        failed, tried = torch.zeros(len(law), dtype=torch.bool), torch.zeros_like(residual)
        order, parents = sort_draws(tree)
        for number in range(order.shape[1]):
            draw, here = order[:, number], parents[:, number] == node
            child, token = landed(tree, draw)
            drafted = draw_law(tree, draw, law.dtype, vocab)
            num, den = self.weigh(residual[rows, token], drafted[rows, token])
            depth = int(depths(tree.parents)[rows, child].max())
            passed = source.accept(num, den, self.number(number, depth), here)
            rest = self.left(residual, law[rows, node], law[rows, child], drafted)
            failed = torch.where(here, ~passed, failed)
            tried = torch.where((here & ~passed)[:, None], drafted, tried)
            residual = torch.where(passed[:, None], law[rows, child], torch.where(here[:, None], rest, residual))
            node = torch.where(passed, child, node)
        path, count = path_to(tree.parents, node)
        last = self.finish(residual, law[rows, node], tried, failed)
        return Acceptance(path, count, source.categorical(last, Purpose.NEXT, 0))


class _PositionCoins(Source):
    """Coins that belong to the drafted token's own absolute position. Coins behind the accepted token were looked at, and the next round
    would look at them again."""

    def __init__(self, inner: Source) -> None:
        self.inner = inner

    def accept(self, num: Tensor, den: Tensor, number: int, active: Tensor | None = None) -> Tensor:
        chance = (num / den).clamp(0, 1)
        return (self.categorical(torch.stack([chance, 1 - chance], -1), Purpose.TARGET, number, active) == 0) & (active is None or active)

    def categorical(self, weights: Tensor, purpose: Purpose, number: int, active: Tensor | None = None) -> Tensor:
        return self.inner.categorical(weights, purpose, number, active)

    def part(self, index: int) -> Source:
        return _PositionCoins(self.inner.part(index))


class _AtPositions(Acceptor):
    """Block verification with such coins."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)
    chains: ClassVar[bool] = True

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        return BlockAcceptor().accept(tree, verification, _PositionCoins(source))


class _Impure(Acceptor):
    """Rounds the target's law in place."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        verification.scores.clamp_(min=-1e4)
        return RejectionAcceptor().accept(tree, verification, source)


class _FirstRow(Acceptor):
    """Takes the first row's law where its own is more spread."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        logp = verification.logp.clone()
        spread = logp[:, :1].amax(-1, keepdim=True) < logp[:1, :1].amax(-1, keepdim=True)
        return MatchAcceptor().accept(tree, Verification(torch.where(spread, logp[:1], logp)), source)


class _Probing(Acceptor):
    """Accepts whatever node holds the target's token, drafted or not."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        return MatchAcceptor().accept(DraftTree(tree.tokens, tree.parents), verification, source)


class _Trailing(Acceptor):
    """Leaves node ids behind the end of its path."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        got = MatchAcceptor().accept(tree, verification, source)
        return Acceptance(got.path.clamp_min(0), got.count, got.next_token)


class _Argmax(Acceptor):
    """Accepts a drafted token if and only if it is the target's most likely one, and draws the token behind."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        got = GreedyAcceptor().accept(tree, verification, source)
        last = got.path.gather(1, got.count[:, None] - 1)[:, 0]
        return Acceptance(got.path, got.count, source.categorical(verification.law(last), Purpose.NEXT, 0))


class _Claims(Acceptor):
    """Another rule, said to be lossless for every kind of draw."""

    lossless: ClassVar[bool] = True
    takes: ClassVar[frozenset[Kind]] = frozenset(Kind)

    def __init__(self, inner: Acceptor, alter: Callable[[DraftTree], DraftTree] = lambda tree: tree) -> None:
        self.inner, self.alter = inner, alter

    def accept(self, tree: DraftTree, verification: Verification, source: Source) -> Acceptance:
        return self.inner.accept(self.alter(tree), verification, source)


def mutant_acceptors() -> dict[str, Mutant]:
    """Every faulty acceptor by the name of its fault."""
    honest: Any = Recursive()

    def wrong(check: str, says: str = _OFF, **fault: Any) -> Mutant:
        return Mutant(Recursive(**fault), check, honest, says)

    chain, tree, level = "law-chain-3-iid", "law-tree-(2,2)-without-replacement", "law-level-2-iid"
    return {
        "no residual": wrong(chain, finish=lambda left, target, draft, failed: target),
        "residual of the wrong node": wrong(chain, left=lambda had, target, child, draft: left_over(child, draft)),
        "residual forgets most of the draft's law": wrong(
            chain, left=lambda had, target, child, draft: left_over(had, draft * (draft >= draft.amax(-1, keepdim=True)))
        ),
        "residual is one token": wrong(
            chain, left=lambda had, target, child, draft: torch.nn.functional.one_hot((had - draft).argmax(-1), had.shape[-1]).to(had)
        ),
        "residual not chained among siblings": wrong(tree, left=lambda had, target, child, draft: left_over(target, draft)),
        "siblings tested against the target, not the residual": wrong(
            level, left=lambda had, target, child, draft: target,
            finish=lambda left, target, draft, failed: torch.where(failed[:, None], left_over(target, draft), left),
        ),
        "bonus from unprocessed logits": wrong(  # before a temperature of one half
            chain, finish=lambda left, target, draft, failed: torch.where(failed[:, None], left, normalised(left.sqrt()))
        ),
        "bonus from the last residual": wrong(tree, finish=lambda left, target, draft, failed: left_over(left, draft)),
        "accepts with <=, so also at p = 0": wrong(
            chain, "defect [0-9.]+e-08", weigh=lambda num, den: (torch.where(num > 0, num, den * 2.0**-24), den)
        ),
        "ratio the wrong way round": wrong(chain, weigh=lambda num, den: (den, num)),
        "lenience of 2": wrong(chain, weigh=lambda num, den: (num * 2, den)),
        "lenience of 1.1": wrong(chain, weigh=lambda num, den: (num * 1.1, den)),
        "accepts whenever p >= q": wrong(chain, weigh=lambda num, den: ((num >= den) * den, den)),
        "accepts the argmax alone": Mutant(_Argmax(), chain, MatchAcceptor(), _OFF),
        "accepts whatever is likely enough": wrong(chain, weigh=lambda num, den: (torch.where(num >= 0.5, den, num), den)),
        "residual is the absolute difference": wrong(chain, left=lambda had, target, child, draft: normalised((had - draft).abs())),
        "typical acceptance, said to be lossless": Mutant(_Claims(TypicalAcceptor()), chain, TypicalAcceptor(), _OFF),
        "K-SEQ takes draws without replacement": Mutant(
            _Claims(KSeqAcceptor(), as_iid), "law-level-2-without-replacement", KSeqAcceptor(), _OFF
        ),
        "takes scores for log-probabilities": wrong(level, read=lambda verification: verification.scores.exp()),
        "takes raw logits, which no processor changed": wrong(level, read=lambda verification: verification.logits.softmax(-1)),
        "a small residual counts as none": wrong(
            level, "defect 0[.]000[0-9]+; worst for the pair of laws 'nearly equal'",
            left=lambda had, target, child, draft: torch.where(
                (had - draft).clamp_min(0).sum(-1, keepdim=True) < 1e-3, had, left_over(had, draft)
            ),
        ),
        "one coin for all siblings": wrong(level, "AddressReuse.*purpose ACCEPT, number 1", number=lambda number, depth: depth),
        "coins belong to absolute positions": Mutant(
            _AtPositions(), "law-two-rounds-iid", BlockAcceptor(), "AddressReuse.*purpose TARGET"
        ),
        "writes into its arguments": Mutant(_Impure(), chain, RejectionAcceptor(), "Touched: verification.scores"),
        "sees its batch mates": Mutant(_FirstRow(), "batch-invariance", MatchAcceptor(), "in the batch"),
        "accepts probes": Mutant(_Probing(), "probes", MatchAcceptor(), "no draw landed"),
        "path not padded with -1": Mutant(_Trailing(), "answer", MatchAcceptor(), "should be -1, behind the end"),
        **mutant_deferred(),
    }  # fmt: skip
