"""No rule waits for the device: nothing reads a value there, and no shape depends on one."""

from __future__ import annotations

import pytest
import torch

from specdec import acceptors
from specdec.rng import CounterSource
from specdec.types import DraftTree, Draws, Kind, Verification

ROWS, VOCAB = 2, 5
BRANCHED, CHAIN = [-1, 0, 0, 1], [-1, 0, 1, 2]
ALL = frozenset(Kind)


def tree(parents, kinds, merged):
    """A tree on a device where there are no values to be read, and nothing of the CPU's can be mixed in."""
    node = [*range(1, len(parents)), *([1] if merged else [])]
    cycle = sorted(kinds)
    kind = [int(cycle[i % len(cycle)]) for i in range(len(node))]
    law = [-1 if k == Kind.POINT else parents[n] for n, k in zip(node, kind, strict=True)]
    rows = [torch.tensor([row] * ROWS, device="meta") for row in (node, kind, law)]
    laws = torch.full((ROWS, len(parents), VOCAB), 1 / VOCAB, device="meta") if kinds - {Kind.POINT} else None
    tokens = torch.zeros(ROWS, len(parents), dtype=torch.int64, device="meta")
    return DraftTree(tokens, torch.tensor([parents] * ROWS, device="meta"), Draws(*rows, kinds), laws, height=3)


@pytest.mark.parametrize("name", acceptors.__all__)
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kinds", [ALL, frozenset({Kind.POINT})], ids=lambda kinds: "-".join(kind.name for kind in sorted(kinds)))
def test_accepting_waits_for_nothing(name, merged, kinds):
    acceptor = getattr(acceptors, name)()
    given = tree(CHAIN if acceptor.chains else BRANCHED, kinds & acceptor.takes, merged)
    scores = torch.zeros(*given.tokens.shape, VOCAB, device="meta")
    source = CounterSource(*(torch.zeros(ROWS, dtype=torch.int64, device="meta") for _ in range(2)))
    for best in (None, scores.argmax(-1)) if acceptor.greedy else (None,):
        got = acceptor.accept(given, Verification(scores=scores, best=best), source)
        assert {x.device.type for x in (got.path, got.count, got.next_token)} == {"meta"}
        assert got.path.shape[0] == ROWS and got.count.shape == got.next_token.shape == (ROWS,)


READS = {
    "bool": lambda x: bool(x.any()), "item": lambda x: x[0].item(), "tolist": torch.Tensor.tolist, "nonzero": torch.Tensor.nonzero,
    "mask": lambda x: x[x > 0], "unique": torch.Tensor.unique, "cpu": torch.Tensor.cpu, "equal": lambda x: torch.equal(x, x),
}  # fmt: skip


@pytest.mark.parametrize("read", READS)
def test_a_read_would_show(read):
    with pytest.raises(RuntimeError):
        READS[read](torch.zeros(1, device="meta"))
