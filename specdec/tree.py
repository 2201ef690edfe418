"""Pure functions on draft trees: everything that `parents` implies, and the checks a tree must pass.

One representation serves chains, Medusa and EAGLE trees, suffix trees, merged trees and Lookahead's probes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .types import PAD, ROOT, Acceptance, Bool, Budget, DraftTree, Draws, Float, Int64, Kind, sent

__all__ = [
    "acceptable", "ancestors", "answer_form", "chain", "check", "check_answer", "depths", "draw_law", "draw_parents", "evidence",
    "follow", "from_lists", "landed", "padded_chain", "path_to", "root_only", "sort_draws",
]  # fmt: skip


def depths(parents: Int64[Tensor, "B N"]) -> Int64[Tensor, "B N"]:
    """Edges between each node and the root; 0 for padding."""
    return (ancestors(parents).sum(-1) - 1).clamp_min(0)


def ancestors(parents: Int64[Tensor, "B N"]) -> Bool[Tensor, "B N N"]:
    """`[b, i, j]`: node j is node i or lies above it. This is the mask of tree attention; padding sees itself alone."""
    batch, nodes = parents.shape
    # What has no parent is its own: going up from there changes nothing.
    above = torch.where(parents >= 0, parents, torch.arange(nodes, device=parents.device))
    reach = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    generations = 1
    # Pointer doubling: after k steps `reach` holds 2^k generations, so the work is log N gathers, not N.
    while generations < nodes:
        reach = reach | reach.gather(1, above[..., None].expand(-1, -1, nodes))
        above = above.gather(1, above)
        generations *= 2
    return reach


def path_to(parents: Int64[Tensor, "B N"], node: Int64[Tensor, " B"],
            reach: Bool[Tensor, "B N N"] | None = None) -> tuple[Int64[Tensor, "B N"], Int64[Tensor, " B"]]:  # fmt: skip
    """The nodes from the root down to `node`, padded with -1, and how many they are. `reach` are the `ancestors`, if they are known."""
    batch, nodes = parents.shape
    reach = ancestors(parents) if reach is None else reach
    above = reach.gather(1, node[:, None, None].expand(-1, 1, nodes))[:, 0]
    order = torch.arange(nodes, device=parents.device).expand(batch, -1)
    # Parents come before children, so the ancestors in index order are the path from the top.
    path = torch.where(above, order, nodes).sort(-1).values
    return torch.where(path < nodes, path, -1), above.sum(-1)


def acceptable(tree: DraftTree) -> Bool[Tensor, "B N"]:
    """Nodes on which a draw landed. The root and probes are not among them."""
    batch, nodes = tree.tokens.shape
    hit = torch.zeros(batch, nodes + 1, dtype=torch.bool, device=tree.tokens.device)
    return hit.scatter(1, torch.where(tree.draws.node < 0, nodes, tree.draws.node), True)[:, :nodes]


def follow(tree: DraftTree, choice: Int64[Tensor, "B N"], reach: Bool[Tensor, "B N N"] | None = None) -> Int64[Tensor, " B"]:
    """The deepest node that is reached by taking, at every node, the child that holds `choice` there; `reach` as in `path_to`."""
    agrees = acceptable(tree) & (tree.tokens == choice.gather(1, tree.parents.clamp_min(0)))
    agrees[:, 0] = True
    reach = ancestors(tree.parents) if reach is None else reach
    reached = ~(reach & ~agrees[:, None, :]).any(-1)
    # argmax takes the first of equals: of two equally deep nodes, which then hold the same path, the elder
    return torch.where(reached, reach.sum(-1), 0).argmax(-1)


def draw_parents(tree: DraftTree) -> Int64[Tensor, "B M"]:
    """The node below which each draw was made; `PAD` for padding."""
    node = tree.draws.node
    return torch.where(node >= 0, tree.parents.gather(1, node.clamp_min(0)), PAD)


def sort_draws(tree: DraftTree) -> tuple[Int64[Tensor, "B M"], Int64[Tensor, "B M"]]:
    """Indices of the draws grouped by parent, siblings in draw order, padding last; and the parents in that order.

    Parents come before children, so one pass in this order meets a node's children after the node itself.
    """
    parent = draw_parents(tree)
    parent, order = torch.where(parent < 0, tree.parents.shape[1], parent).sort(dim=-1, stable=True)
    return order, parent


def landed(tree: DraftTree, draw: Int64[Tensor, " B"]) -> tuple[Int64[Tensor, " B"], Int64[Tensor, " B"]]:
    """The node that draw number `draw` of each row landed on, and its token; the root's where the draw is padding."""
    node = tree.draws.node.gather(1, draw[:, None]).clamp_min(0)
    return node[:, 0], tree.tokens.gather(1, node)[:, 0]


def draw_law(tree: DraftTree, draw: Int64[Tensor, " B"], dtype: torch.dtype, vocab_size: int) -> Float[Tensor, "B V"]:
    """The law that draw number `draw` of each row really followed, given the draws before it.

    A point mass for a point draw; for a draw without replacement its law less the earlier siblings drawn so from the same law.
    Rows where the draw is padding hold any law.
    """
    draws, at = tree.draws, draw[:, None]
    node = draws.node.gather(1, at)
    if draws.kinds <= {Kind.POINT}:
        return _points(tree.tokens.gather(1, node.clamp_min(0)), dtype, vocab_size)
    if tree.laws is None:
        raise ValueError("laws: the tree holds sampled draws, but their laws are gone; ask for return_rounds='all' to keep them")
    index = draws.law.gather(1, at)
    law = tree.laws[torch.arange(len(draw), device=draw.device), index[:, 0].clamp_min(0)].to(dtype)
    if Kind.WITHOUT_REPLACEMENT in draws.kinds:
        earlier = torch.arange(draws.node.shape[1], device=draw.device) < at
        same = (draws.law == index) & (draws.kind == Kind.WITHOUT_REPLACEMENT) & (draws.kind.gather(1, at) == Kind.WITHOUT_REPLACEMENT)
        same = same & earlier & (draw_parents(tree) == tree.parents.gather(1, node.clamp_min(0)))
        gone = torch.where(same, tree.tokens.gather(1, draws.node.clamp_min(0)), vocab_size)
        law = torch.nn.functional.pad(law, (0, 1)).scatter(1, gone, 0.0)[:, :-1]
    law = law / law.sum(-1, keepdim=True, dtype=torch.float64).to(dtype).clamp_min(torch.finfo(dtype).tiny)
    if Kind.POINT not in draws.kinds:
        return law
    points = _points(tree.tokens.gather(1, node.clamp_min(0)), dtype, vocab_size)
    return torch.where(draws.kind.gather(1, at) == Kind.POINT, points, law)


def _points(token: Int64[Tensor, "B 1"], dtype: torch.dtype, vocab_size: int) -> Float[Tensor, "B V"]:
    return torch.zeros(len(token), vocab_size, dtype=dtype, device=token.device).scatter_(1, token, 1.0)


# ------------------------------------------------------------------------------------------------------------ building


def root_only(pending: Int64[Tensor, " B"]) -> DraftTree:
    """The tree that drafts nothing: a round with it is a step of plain decoding."""
    return DraftTree(pending[:, None], torch.full_like(pending[:, None], ROOT))


def chain(tokens: Sequence[Sequence[int]] | Int64[Tensor, "B N"], pending: Int64[Tensor, " B"] | Sequence[int] | None = None,
          laws: Float[Tensor, "B K V"] | None = None) -> DraftTree:  # fmt: skip
    """One chain of drafted tokens per row.

    Args:
        tokens: the drafted tokens of each row, of any lengths; an empty row drafts nothing.
        pending: the pending token of each row. Left out, the first token of each row is it.
        laws: `[B, K, V]`, the law that each drafted token was drawn from, token k of a row from law k; point draws if left out.
    """
    rows = [list(map(operator.index, row)) for row in (tokens.tolist() if isinstance(tokens, Tensor) else tokens)]
    if pending is not None:
        first = pending.tolist() if isinstance(pending, Tensor) else list(pending)
        rows = [[int(token), *row] for token, row in zip(first, rows, strict=True)]
    if not all(rows):
        raise ValueError("tokens: a row is empty and no pending token was given")
    nodes = max(map(len, rows))
    if laws is not None and laws.shape[:2] != (len(rows), nodes - 1):
        raise ValueError(f"laws must be [{len(rows)}, {nodes - 1}, V], one law per drafted token, got {list(laws.shape)}")
    tokens = torch.tensor([[*row, *[0] * (nodes - len(row))] for row in rows], dtype=torch.int64, device="cpu")
    return padded_chain(tokens if laws is None else sent(tokens, laws.device), [len(row) - 1 for row in rows], laws)


def padded_chain(tokens: Int64[Tensor, "B N"], lengths: Sequence[int], laws: Float[Tensor, "B K V"] | None = None) -> DraftTree:
    """`chain` for tokens that lie on a device, and stay there unread.

    Args:
        tokens: each row's pending token, and behind it what was drafted.
        lengths: how many of the drafted tokens count in each row; what stands behind them is padding.
        laws: `[B, N - 1, V]`, on the same device, as in `chain`.
    """
    step = torch.arange(tokens.shape[1] - 1, device="cpu")
    above = torch.where(step < torch.tensor(lengths, device="cpu")[:, None], step, PAD)
    tree = DraftTree(tokens, sent(torch.nn.functional.pad(above, (1, 0), value=ROOT), tokens.device))
    if laws is None:
        return tree
    node, kinds = tree.draws.node, frozenset({Kind.IID}) if len(step) else frozenset()
    draws = Draws(node, torch.full_like(node, Kind.IID), (node - 1).clamp_min(-1), kinds)
    return DraftTree(tokens, tree.parents, draws, laws)


def from_lists(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> DraftTree:
    """A tree of point draws from `(tokens, parents)` of each row; node 0 is the pending token. On the CPU."""
    nodes = max(len(tokens) for tokens, _ in rows)
    tokens = torch.tensor([[*t, *[0] * (nodes - len(t))] for t, _ in rows], dtype=torch.int64, device="cpu")
    parents = torch.tensor([[*p, *[PAD] * (nodes - len(p))] for _, p in rows], dtype=torch.int64, device="cpu")
    return DraftTree(tokens, parents)


# ------------------------------------------------------------------------------------------------------------ checking


_KINDS = frozenset(map(int, Kind))
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 2e-2}
"""How far the sum of a law may lie from one: a float32 softmax of 262k tokens is off by 4e-5 on the CPU. What was drawn from is the law
divided by its sum, and that is what `draw_law` gives."""


def evidence(tree: DraftTree) -> Float[Tensor, "B M 3"] | None:
    """What `check` needs to know of each draw's law: its mass on the token drawn, its sum and its least entry; `None` without laws."""
    if tree.laws is None:
        return None
    if tree.laws.ndim != 3 or len(tree.laws) != len(tree.tokens):
        raise ValueError(f"laws must be [{len(tree.tokens)}, K, V], got {list(tree.laws.shape)}")
    if not tree.laws.shape[1]:
        return None
    law, token = tree.draws.law.clamp(0, tree.laws.shape[1] - 1), tree.tokens.gather(1, tree.draws.node.clamp(0, tree.tokens.shape[1] - 1))
    batch = torch.arange(len(law), device=law.device)[:, None]
    mass = tree.laws[batch, law, token.clamp(0, tree.laws.shape[2] - 1)]
    total = tree.laws.sum(-1, dtype=torch.promote_types(tree.laws.dtype, torch.float32))
    return torch.stack([mass.double(), total.double().gather(1, law), tree.laws.amin(-1).double().gather(1, law)], -1)


def check(tree: DraftTree, pending: Int64[Tensor, " B"], budget: Budget, vocab_size: int, *, sums: bool = False,
          known: Float[Tensor, "B M 3"] | None = None, chain: bool = False) -> None:  # fmt: skip
    """Raise `ValueError` naming row and node if the tree is malformed, breaks its budget, or does not start at `pending`.

    It reads the tree on the host; for one on another device bring it over first, with `known` in place of its laws.

    Args:
        sums: also check that every law used is non-negative and sums to one.
        known: `evidence` of the tree, if it was computed before.
        chain: also check that no node has two children, and no two draws land on one.
    """
    batch, nodes = tree.tokens.shape
    devices = {x.device for x in (tree.tokens, tree.parents, tree.draws.node, tree.draws.kind, tree.draws.law, tree.laws) if x is not None}
    if len(devices) > 1 and known is None:
        raise ValueError(f"tree: its tensors lie on {', '.join(sorted(map(str, devices)))}; keep them together")
    if tree.tokens.dtype != torch.int64 or tree.parents.dtype != torch.int64:
        raise ValueError(f"tree: tokens ({tree.tokens.dtype}) and parents ({tree.parents.dtype}) must be int64")
    if tree.parents.shape != tree.tokens.shape or batch != len(pending):
        raise ValueError(f"tree: tokens {list(tree.tokens.shape)} and parents {list(tree.parents.shape)} must both be [{len(pending)}, N]")
    limits = zip(pending.tolist(), budget.nodes.tolist(), budget.depth.tolist(), budget.width.tolist(), strict=True)
    for row, (tokens, parents, limit) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), limits, strict=True)):
        bad = _bad_node(tokens, parents, *limit, vocab_size, tree.height, chain)
        if bad is not None:
            node, what = bad
            raise ValueError(f"tree: row {row}, node {node} (token {tokens[node]}, parent {parents[node]}) {what}")
    shapes = [list(x.shape) for x in (tree.draws.node, tree.draws.kind, tree.draws.law)]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2] or len(shapes[0]) != 2 or shapes[0][0] != batch:
        raise ValueError(f"draws: node, kind and law must all be [{batch}, M], got {shapes}")
    if any(x.dtype != torch.int64 for x in (tree.draws.node, tree.draws.kind, tree.draws.law)):
        raise ValueError("draws: node, kind and law must be int64")
    _check_draws(tree, vocab_size, sums, evidence(tree) if known is None else known, chain)


def _bad_node(tokens: list[int], parents: list[int], pending: int, most: int, deepest: int, widest: int, vocab_size: int,
              height: int, chain: bool) -> tuple[int, str] | None:  # fmt: skip
    """The first node of a row that must not be as it is, and why."""
    if parents[0] != ROOT:
        return 0, f"must be the root, with parent {ROOT}"
    if tokens[0] != pending:
        return 0, "must hold the pending token"
    count, depth, children = 0, [0] * len(tokens), [0] * len(tokens)
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent == PAD and node:
            continue
        if not 0 <= token < vocab_size:
            return node, f"lies outside the vocabulary of {vocab_size}"
        if node == 0:
            continue
        if not 0 <= parent < node:
            return node, f"needs a parent before it, or {PAD} for padding"
        if parents[parent] == PAD:
            return node, "hangs below padding"
        count, depth[node] = count + 1, depth[parent] + 1
        children[parent] += 1
        if count > most:
            return node, "is one more than the budget's nodes"
        if depth[node] > deepest:
            return node, "is deeper than the budget's depth"
        if chain and children[parent] > 1:
            return node, "is a second child, but the drafter says that it drafts chains"
        if children[parent] > widest:
            return node, "has more siblings than the budget's width"
        if depth[node] > height:
            return node, f"lies at depth {depth[node]}, but the tree's height says {height}"
    return None


def _check_draws(tree: DraftTree, vocab_size: int, sums: bool, known: Float[Tensor, "B M 3"] | None, chain: bool) -> None:
    draws, (batch, nodes) = tree.draws, tree.tokens.shape
    count = 0 if tree.laws is None else tree.laws.shape[1]
    if count and tree.laws.shape[::2] != (batch, vocab_size):
        raise ValueError(f"laws must be [{batch}, K, {vocab_size}], got {list(tree.laws.shape)}")
    slack = _SLACK.get(tree.laws.dtype, 0.0) if count else 0.0
    facts = [[(0.0, 0.0, 0.0)] * draws.node.shape[1]] * batch if known is None else known.tolist()
    rows = zip(
        tree.tokens.tolist(), tree.parents.tolist(), draws.node.tolist(), draws.kind.tolist(), draws.law.tolist(), facts, strict=True
    )
    for row, (tokens, parents, *drawn) in enumerate(rows):
        gone: set[tuple[int, int, int]] = set()
        hit: set[int] = set()
        for draw, (node, kind, law, (mass, total, least)) in enumerate(zip(*drawn, strict=True)):
            if node < 0:
                continue
            bad = None
            if not 0 < node < nodes or parents[node] < 0:
                bad = "must land on a drafted node"
            elif kind not in _KINDS:
                bad = "is of no known kind"
            elif chain and node in hit:
                bad = "lands where another draw did, but the drafter says that it drafts chains"
            elif kind not in draws.kinds:
                bad = f"is of kind {Kind(kind).name}, which `kinds` does not name"
            elif kind != Kind.POINT:
                key = (parents[node], tokens[node], law)
                if not 0 <= law < count:
                    bad = f"needs one of the {count} laws"
                elif kind == Kind.WITHOUT_REPLACEMENT and key in gone:
                    bad = "was drawn before: without replacement a token comes once"
                elif not mass > 0:
                    bad = "landed where its declared law has no mass"
                elif sums and not (abs(total - 1) <= slack and least >= 0):
                    bad = f"has a law that is negative, NaN or does not sum to one (sum {total:g}, least {least:g})"
                if kind == Kind.WITHOUT_REPLACEMENT:
                    gone.add(key)
            hit.add(node)
            if bad:
                raise ValueError(f"draws: row {row}, draw {draw} (node {node}) {bad}")


def answer_form(tree: DraftTree, answer: Any) -> None:
    """Raise `TypeError` if an acceptor's answer is no `Acceptance`, `ValueError` if a field of it has the wrong shape or dtype; values are
    not read."""
    if not isinstance(answer, Acceptance):
        raise TypeError(f"acceptance: an acceptor must answer with a specdec.Acceptance, got {type(answer).__name__}")
    batch = len(tree.tokens)
    for name, value, axes in (("path", answer.path, "D"), ("count", answer.count, ""), ("next_token", answer.next_token, "")):
        if value.dtype != torch.int64 or value.ndim != 1 + len(axes) or len(value) != batch or 0 in value.shape[1:]:
            allowed = f"[{', '.join([str(batch), *axes])}]"
            raise ValueError(f"acceptance: {name} is {list(value.shape)} {value.dtype}; allowed is {allowed} torch.int64")


def check_answer(tree: DraftTree, answer: Acceptance, vocab_size: int) -> None:
    """Raise `ValueError`, naming row and node, unless an acceptor's answer is a path of drafted nodes from the root down, with -1 behind
    its `count`, and a next token of the vocabulary. All on the host."""
    answer_form(tree, answer)
    answers = (answer.path.tolist(), answer.count.tolist(), answer.next_token.tolist())
    rows = zip(*answers, tree.parents.tolist(), tree.draws.node.tolist(), strict=True)
    for row, (path, count, token, parents, drawn) in enumerate(rows):
        node, bad = None, None
        if not 0 <= token < vocab_size:
            bad = f"the next token lies outside the vocabulary of {vocab_size}"
        elif not 1 <= count <= len(path):
            bad = "count must be at least 1 and at most the length of the path"
        for place, node in enumerate(path if bad is None else ()):
            above = path[place - 1] if place else ROOT
            if place >= count:
                bad = None if node == -1 else "should be -1, behind the end of the path"
            elif not 0 <= node < len(parents):
                bad = "is no node of the tree"
            elif parents[node] != above:
                bad = "is no child of the node before it" if place else "is not the root"
            elif place and node not in drawn:
                bad = "is a node on which no draw landed"
            if bad is not None:
                break
        if bad is not None:
            where = f"row {row}" if node is None else f"row {row}, node {node}"
            raise ValueError(f"acceptance: {where} (path {path}, count {count}, next token {token}) {bad}")
