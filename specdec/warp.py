"""One warper turns logits into the law, for the target and for a drafter that draws as the target does.

It applies Hugging Face logits processors to every node of a tree, each with the token ids that the node's path really has. Plain
decoding calls a processor once per token, in order. A tree has branches, most of which come to nothing, so what an object may
remember decides how it is called; the tables below say it per class:

- free of history: one call for all nodes of all rows;
- pure functions of (ids, scores), row by row: one call for all nodes with equally many ids, so that nothing is padded.
  An object of your own is treated so if it has an attribute `pure = True`;
- anything else is *walked*: parents first, every node with a deep copy of its parent's object, so that the copy that survives has
  seen what plain decoding would have shown it, and nothing else.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PrefixConstrainedLogitsProcessor, RepetitionPenaltyLogitsProcessor, TopPLogitsWarper

from .ragged import Ragged
from .types import PAD, ROOT, Bool, DraftTree, Float, Int64

__all__ = ["PrefixAllowed", "WarpState", "Warper", "invalid"]

Processor = Callable[..., Any]


def _classes(*names: str) -> frozenset[Any]:
    return frozenset(getattr(transformers, name) for name in names if hasattr(transformers, name))  # versions differ


_FREE = _classes(
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper", "TopHLogitsWarper",
    "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor", "LogitNormalization", "SuppressTokensLogitsProcessor",
)  # fmt: skip
_PURE = _classes(
    "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor",
    "ExponentialDecayLengthPenalty", "SuppressTokensAtBeginLogitsProcessor", "WatermarkLogitsProcessor",
)  # fmt: skip
_RAISES_ON_NAN = _classes("TopHLogitsWarper", "EtaLogitsWarper")
"""They build a torch distribution, which refuses a NaN in any row; here a rejected branch may hold one."""
_REFUSED = _classes("UnbatchedClassifierFreeGuidanceLogitsProcessor")
"""It runs the model on a cache of its own, of which every branch would need a copy."""


class PrefixAllowed:
    """What Hugging Face's `prefix_allowed_tokens_fn` asks for, for one row of the call.

    Args:
        fn: `fn(row, ids) -> allowed token ids`, a function of its arguments: it is never copied, and asked about branches too.
        row: the row of the call, which `fn` is told.
    """

    def __init__(self, fn: Callable[..., Any], row: int) -> None:
        def allowed(_: int, ids: Tensor) -> Any:
            tokens = fn(row, ids)
            if len(tokens) == 0:
                last = ids[-8:].tolist()
                raise ValueError(f"prefix_allowed_tokens_fn: row {row} may not go on after ids ending in {last}; return at least one")
            return tokens

        self._one_row = PrefixConstrainedLogitsProcessor(allowed, 1)  # how scores are masked is left to the installed version

    def __call__(self, input_ids: Any, scores: Float[Tensor, "1 V"]) -> Float[Tensor, "1 V"]:
        return self._one_row(input_ids, scores)


class _Kind(Enum):
    FREE = 0
    PURE = 1
    BOUND = 2
    """Walked, but knows its row and has no memory."""
    WALK = 3


def _kind(processor: Processor) -> _Kind:
    known = type(processor)  # exactly: a subclass may remember
    if known in _FREE:
        return _Kind.FREE
    if known in _PURE or getattr(processor, "pure", False):
        return _Kind.PURE
    return _Kind.BOUND if known is PrefixAllowed else _Kind.WALK


def _bound(processor: Processor, row: int) -> Processor:
    """The processor as it acts on this row, where a transformers class looks at the place in the batch."""
    if type(processor) is PrefixConstrainedLogitsProcessor:
        # Called with a batch it would ask its function about pairs of row and ids that do not exist, so take the function.
        functions = [value for value in vars(processor).values() if callable(value)]
        return PrefixAllowed(functions[0], row) if len(functions) == 1 else processor
    if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(processor.prompt_ignore_length, Tensor):
        return RepetitionPenaltyLogitsProcessor(processor.penalty, int(processor.prompt_ignore_length[row]))
    return processor


def _fork(processors: Sequence[Processor]) -> list[Processor]:
    """The same processors, with copies of those that may remember; what these share, their copies share."""
    memo: dict[int, Any] = {}
    return [_copy(processor, memo) if _kind(processor) is _Kind.WALK else processor for processor in processors]


def _copy(processor: Processor, memo: dict[int, Any]) -> Processor:
    if isinstance(processor, FunctionType) and processor.__closure__ is None:
        return processor
    advice = (
        "every branch needs a copy of its own; give it a `__deepcopy__`, or set `pure = True` on it if its result depends on "
        "input_ids and scores alone"
    )
    try:
        copied = copy.deepcopy(processor, memo)
    except Exception as error:
        raise TypeError(f"logits_processor: {type(processor).__name__} cannot be copied ({error}); {advice}") from error
    if copied is processor:
        raise TypeError(f"logits_processor: {type(processor).__name__} {processor!r} is its own copy; {advice}")
    return copied


@dataclass
class _Row:
    index: int
    own: list[Processor]
    """One per stage, advanced to the committed tokens."""
    forks: dict[int, list[Processor]] = field(default_factory=dict)
    faults: dict[int, Exception] = field(default_factory=dict)


@dataclass
class WarpState:
    """Where one user of a warper stands. Written in place."""

    each: list[_Row]

    @property
    def rows(self) -> list[int]:
        """The row of the call that each current row is."""
        return [row.index for row in self.each]

    @property
    def faulty(self) -> list[bool]:
        """Of each row, whether a processor raised in the latest pass, of which nothing was committed yet."""
        return [bool(row.faults) for row in self.each]


@dataclass
class _Node:
    row: _Row
    node: int
    ids: Int64[Tensor, " L"]
    processors: list[Processor]
    certain: bool
    """Whether plain decoding comes here too, and raises if a processor does."""
    fault: Exception | None = None


class Warper:
    """Turns the logits of a tree's nodes into log-probabilities. Holds no state; who uses it asks for one with `begin`.

    Args:
        stages: what is applied, in this order; a stage is one processor per row of the call. Rows may share an object; they differ
            where a rule counts from the row's own prompt. The objects are copied before use, so the given ones stay as they are,
            except those with `pure = True`.
        batch: rows of the call. A walked object is called with this many equal rows of which its own counts, so that one that looks
            at its place in the batch finds the row of the call, whichever rows have ended since.
    """

    def __init__(self, stages: Sequence[Sequence[Processor]], *, batch: int) -> None:
        for stage in stages:
            if len(stage) != batch:
                raise ValueError(f"stages: {len(stage)} processors in a stage for a batch of {batch}; give one per row")
            for processor in stage:
                if type(processor) in _REFUSED:
                    raise ValueError(f"logits_processor: {type(processor).__name__} runs the model itself: it cannot follow a tree")
        self.batch = batch
        self._rows = [[_bound(stage[row], row) for stage in stages] for row in range(batch)]
        kinds = {_kind(processor) for row in self._rows for processor in row}
        self.idle = not kinds
        """Whether scores stay what the logits are."""
        self.free = kinds <= {_Kind.FREE}
        """Whether ids play no part."""
        self.walks = bool(kinds & {_Kind.WALK, _Kind.BOUND})
        """Whether some processor is walked, which costs a read from the device per level of the tree."""
        self.remembers = _Kind.WALK in kinds
        """Whether some processor has to be shown every token, in order."""

    def begin(self) -> WarpState:
        """A state at the beginning of the call. TypeError if a processor with memory cannot be copied."""
        copies: dict[int, Processor] = {}

        def own(processor: Processor) -> Processor:
            if type(processor) not in _FREE | _PURE:
                return processor
            if id(processor) not in copies:  # some prepare tables on their first call, which the user's object must not show
                copies[id(processor)] = copy.deepcopy(processor)
            return copies[id(processor)]

        return WarpState([_Row(index, [own(p) for p in _fork(row)]) for index, row in enumerate(self._rows)])

    def fork(self, state: WarpState) -> WarpState:
        """A state of its own that stands where this one does: what is committed to one is not to the other."""
        # The same objects serve both: a row's own processors with memory are never called, copies of them are.
        return WarpState([_Row(row.index, row.own) for row in state.each])

    def __call__(self, state: WarpState, logits: Float[Tensor, "B N V"], tree: DraftTree, history: Ragged) -> Float[Tensor, "B N V"]:
        """The law after every node, as log-probabilities; see `scores`."""
        return self.scores(state, logits, tree, history).log_softmax(-1)

    def scores(self, state: WarpState, logits: Float[Tensor, "B N V"], tree: DraftTree, history: Ragged, *,
               certain: bool = True) -> Float[Tensor, "B N V"]:  # fmt: skip
        """The processed logits of every node: float64 if the logits are, else float32. `logits` are left alone.

        Rejected branches may be bad, so nothing is raised for a node whose scores are no law (see `invalid`), nor for a drafted node
        on which a processor raises: `commit` raises it if the node's law was used. Nodes below a token of probability zero are
        not walked. Rows of such nodes and of padding mean nothing.

        Args:
            tree: best on the CPU; elsewhere its tokens and parents are read back, unless `free`.
            history: each row's committed tokens, without the pending one, which is the root of the tree.
            certain: whether plain decoding asks for the law after the roots, so that what a processor raises there is raised at once.
                A drafter may only be guessing: without this it is kept like that of any other node, and `state.faulty` tells the rows.
        """
        scores = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        if self.free:
            for stage in zip(*(row.own for row in state.each), strict=True):
                shared = all(processor is stage[0] for processor in stage)
                blocks = [scores.flatten(0, 1)] if shared else list(scores)
                scores = torch.cat([_apply(p, None, block) for p, block in zip(stage, blocks, strict=False)]).view_as(scores)
        else:
            for row in state.each:
                row.forks, row.faults = {}, {}
            scores = self._by_level(state, scores.clone() if scores is logits else scores, tree, history, certain)
        return scores

    def commit(self, state: WarpState, path: Int64[Tensor, "B D"], count: Int64[Tensor, " B"]) -> None:
        """The processors of each row's last committed node become the row's own, and what one raised on the path is raised now.

        Args:
            path: the nodes after which a token was emitted, from the root down; like `count` on the CPU.
            count: how many they are; 0 leaves the row as it was.
        """
        if self.free:
            return
        for row, nodes, depth in zip(state.each, path.tolist(), count.tolist(), strict=True):
            for node in nodes[:depth]:
                if node in row.faults:
                    raise row.faults[node]
                if node not in row.forks:
                    raise ValueError(f"path: node {node} of row {row.index} was not scored: its token is one that the processors forbid")
                row.own = row.forks[node]
            row.forks, row.faults = {}, {}

    def select(self, state: WarpState, rows: Sequence[int]) -> WarpState:
        """The state with these of its current rows, in this order."""
        return WarpState([state.each[row] for row in rows])

    def _by_level(self, state: WarpState, scores: Float[Tensor, "B N V"], tree: DraftTree, history: Ragged,
                  certain: bool) -> Float[Tensor, "B N V"]:  # fmt: skip
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        flat, width = scores.flatten(0, 1), scores.shape[1]
        levels: dict[int, list[tuple[int, int]]] = defaultdict(list)
        paths: dict[tuple[int, int], list[int]] = {}
        for row in range(len(tokens)):
            for node, (token, parent) in enumerate(zip(tokens[row], parents[row], strict=True)):
                if parent != PAD:
                    paths[row, node] = [*(paths[row, parent] if parent != ROOT else ()), token]
                    # Only a walk needs the parents' final scores before their children's turn.
                    levels[len(paths[row, node]) if self.walks else 0].append((row, node))
        for at in levels.values():
            if self.walks:
                above = [(row, parents[row][node], tokens[row][node]) for row, node in at]
                at = [pair for pair, alive in zip(at, self._alive(state, flat, width, above), strict=True) if alive]
            nodes = []
            for row, node in at:
                mine, parent = state.each[row], parents[row][node]
                ids = torch.cat([history.row(row), torch.tensor(paths[row, node], dtype=torch.int64, device="cpu")]).to(flat.device)
                origin = mine.own if parent == ROOT or not self.walks else mine.forks[parent]
                nodes.append(_Node(mine, node, ids, _fork(origin), certain and node == 0))
            if nodes:
                index = torch.tensor([row * width + node for row, node in at], device=flat.device)
                flat[index] = self._level(nodes, flat[index])
        return flat.view_as(scores)

    def _alive(self, state: WarpState, flat: Float[Tensor, "BN V"], width: int, above: list[tuple[int, int, int]]) -> list[bool]:
        """For (row, parent, token): whether the token may follow, and its parent was processed. A grammar would raise otherwise."""
        row, parent, token = torch.tensor(above, device=flat.device).unbind(-1)
        allowed = (~flat[row * width + parent.clamp_min(0), token].isneginf() | (parent == ROOT)).tolist()
        return [ok and (up == ROOT or up in state.each[row].forks) for ok, (row, up, _) in zip(allowed, above, strict=True)]

    def _level(self, nodes: list[_Node], raw: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        scores = raw.clone()
        for stage in range(len(self._rows[0])):
            groups: dict[tuple[int, int], list[int]] = defaultdict(list)
            for i, node in enumerate(nodes):
                processor = node.processors[stage]
                kind = _kind(processor)
                key = 0 if kind is _Kind.FREE else len(node.ids) if kind is _Kind.PURE else -1 - i
                groups[id(processor), key].append(i)
            if len(groups) == 1:
                scores = self._group(nodes, stage, scores)
                continue
            order = [i for members in groups.values() for i in members]
            parts = [self._group([nodes[i] for i in members], stage, scores[members]) for members in groups.values()]
            scores = torch.empty_like(scores).index_copy_(0, torch.tensor(order, device=scores.device), torch.cat(parts))
        for i, node in enumerate(nodes):
            if node.fault is None:
                node.row.forks[node.node] = node.processors
            else:
                node.row.faults[node.node] = node.fault
                scores[i] = raw[i]
        return scores

    def _group(self, nodes: list[_Node], stage: int, scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
        first, processor = nodes[0], nodes[0].processors[stage]
        kind = _kind(processor)
        if kind is _Kind.FREE:
            return _apply(processor, None, scores)
        if len(nodes) > 1:
            try:
                # a copy: what raises half way may have written into it
                return _apply(processor, torch.stack([node.ids for node in nodes]), scores.clone())
            except Exception:  # one node by one, to find out whose it is: a drafted token may lead where it refuses to go
                return torch.cat([self._group([node], stage, scores[i : i + 1]) for i, node in enumerate(nodes)])
        if first.fault is not None:
            return scores
        repeat, mine = (1, 0) if kind in (_Kind.PURE, _Kind.BOUND) else (self.batch, first.row.index)
        try:
            return _apply(processor, first.ids.repeat(repeat, 1), scores.repeat(repeat, 1))[mine : mine + 1]
        except Exception as error:
            if first.certain:
                raise
            first.fault = error
            return scores


def _apply(processor: Processor, ids: Int64[Tensor, "n L"] | None, scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
    if type(processor) is TopPLogitsWarper and scores.device.type == "cpu":
        return _top_p(processor, scores)
    ids = scores.new_zeros(len(scores), 0, dtype=torch.int64) if ids is None else ids
    if type(processor) in _RAISES_ON_NAN:
        bad = ~scores.logsumexp(-1, keepdim=True).isfinite()
        return processor(ids, scores.masked_fill(bad, 0.0)).masked_fill(bad, torch.nan)
    shape, result = scores.shape, processor(ids, scores)
    if not isinstance(result, Tensor) or result.shape != shape:
        given = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise TypeError(f"logits_processor: {type(processor).__name__} returned {given}, expected processed scores of shape {list(shape)}")
    return result.to(scores.dtype)


def _top_p(processor: Any, scores: Float[Tensor, "n V"]) -> Float[Tensor, "n V"]:
    """What the processor does, without sorting the whole vocabulary, which takes the CPU longer than a small model's pass: the
    nucleus is in the head, as soon as the head holds that much mass. Of equals on its edge the lowest ids are in it, where the
    processor leaves that to chance; sums rounded in another order may move the edge by a token."""
    probs, vocab = scores.softmax(-1), scores.shape[-1]
    for size in (256, 4096, vocab):
        head, token = scores.topk(min(max(size, processor.min_tokens_to_keep), vocab))
        mass = probs.gather(1, token)
        before = mass.cumsum(-1) - mass
        if bool((before[:, -1] >= processor.top_p).all()):
            break
    # How many of each row's head it is, and the last one's score, are the same whatever else was sorted: which of equals came out is not.
    count = (~(before >= processor.top_p)).sum(-1, keepdim=True).clamp_min(min(processor.min_tokens_to_keep, vocab))
    last = head.gather(1, count - 1)
    keep, room = scores >= last, count - (head > last).sum(-1, keepdim=True)
    if bool(((head == last).sum(-1, keepdim=True) > room).any() or (head[:, -1:] == last).any()):
        equal = scores == last
        keep &= ~equal | (equal.cumsum(-1) <= room)
    keep |= probs[:, :1].isnan()  # a row that is no law stays as it is
    return scores.masked_fill(~keep, processor.filter_value)


def invalid(logp: Float[Tensor, "B N V"]) -> Bool[Tensor, "B N"]:
    """Nodes whose scores were no law: a NaN or +inf somewhere, or -inf everywhere. Costs one column: such a row is NaN throughout."""
    return logp[..., 0].isnan()
