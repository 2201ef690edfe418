"""The walk: processors with a memory see what plain decoding would have shown them, on every branch that survives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import transformers as hf
from torch import Tensor

from specdec.ragged import Ragged
from specdec.tree import chain, from_lists, root_only
from specdec.types import DraftTree
from specdec.warp import PrefixAllowed, Warper, WarpState, invalid

V = 12
INF = float("inf")


def random_tree(generator: torch.Generator, sizes: Sequence[int], last: Sequence[int]) -> DraftTree:
    def pick(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    rows = []
    for size, pending in zip(sizes, last, strict=True):
        rows.append(([pending, *(pick(V) for _ in range(size - 1))], [-1, *(pick(i) for i in range(1, size))]))
    return from_lists(rows)


def text(tree: DraftTree, prompt: list[int], row: int, node: int) -> list[int]:
    path = []
    while node >= 0:
        path.append(int(tree.tokens[row, node]))
        node = int(tree.parents[row, node])
    return [*prompt[:-1], *path[::-1]]


def begin(prompts: Sequence[list[int]]) -> Ragged:
    history = Ragged.empty(len(prompts))
    history.extend([prompt[:-1] for prompt in prompts])
    return history


def step(warper: Warper, state: WarpState, prompts: Sequence[list[int]], tree: DraftTree | None = None) -> Tensor:
    tree = root_only(torch.tensor([p[-1] for p in prompts])) if tree is None else tree
    logits = torch.zeros(*tree.tokens.shape, V, dtype=torch.float64)
    return warper(state, logits, tree, begin(prompts))


class Memory:
    """Bans odd tokens that it was called with an odd number of times, and keeps a log of what it saw."""

    def __init__(self) -> None:
        self.log: list[tuple[int, ...]] = []
        self.parity = [0] * V

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        ids = input_ids[0].tolist()
        self.log.append(tuple(ids))
        self.parity[ids[-1]] ^= 1
        for token, odd in enumerate(self.parity):
            if odd and token % 2:
                scores[:, token] = -INF  # in place: as many people write them
        return scores


def logits_after(ids: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(hash(tuple(ids)) % 2**31)
    return torch.randn(V, generator=generator, dtype=torch.float64) * 2


def plain(prompt: list[int], steps: int) -> tuple[list[int], Memory]:
    processor, ids = Memory(), list(prompt)
    for _ in range(steps):
        ids.append(int(processor(torch.tensor([ids]), logits_after(ids)[None])[0].argmax()))
    return ids[len(prompt) :], processor


class Speculator:
    """A greedy loop of rounds with random trees, in which a drafted path may agree with the target for a while."""

    def __init__(self, warper: Warper, prompts: Sequence[list[int]], answers: Sequence[list[int]], seed: int) -> None:
        self.warper, self.state, self.answers = warper, warper.begin(), list(answers)
        self.ids = [list(p) for p in prompts]
        self.new: list[list[int]] = [[] for _ in prompts]
        self.generator = torch.Generator().manual_seed(seed)

    def round(self) -> None:
        trees = []
        for ids, new, answer in zip(self.ids, self.new, self.answers, strict=True):
            tree = random_tree(self.generator, [6], [ids[-1]])
            tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
            good = int(torch.randint(4, (1,), generator=self.generator))
            below = 0
            for token in answer[len(new) : len(new) + good]:  # a right path among wrong ones
                tokens.append(token)
                parents.append(below)
                below = len(tokens) - 1
            trees.append((tokens, parents))
        tree, history = from_lists(trees), begin(self.ids)
        logits = torch.zeros(*tree.tokens.shape, V, dtype=torch.float64)
        for row, ids in enumerate(self.ids):
            for node in range(len(trees[row][0])):
                logits[row, node] = logits_after(text(tree, ids, row, node))
        logp = self.warper(self.state, logits, tree, history)
        paths = []
        for row in range(len(trees)):
            node, path = 0, [0]
            while True:
                token = int(logp[row, node].argmax())
                self.ids[row].append(token)
                self.new[row].append(token)
                children = [i for i, (t, p) in enumerate(zip(*trees[row], strict=True)) if p == node and t == token]
                if not children:
                    break
                node = children[0]
                path.append(node)
            paths.append(path)
        width = max(map(len, paths))
        padded = torch.tensor([path + [-1] * (width - len(path)) for path in paths])
        self.warper.commit(self.state, padded, torch.tensor([len(path) for path in paths]))


@pytest.mark.parametrize("seed", range(4))
def test_memory_sees_what_plain_decoding_shows_it(seed: int) -> None:
    """Rounds with rejections: the text and the log of the surviving copy are those of plain decoding; the user's object is as it was."""
    prompts = [[3], [1, 4, 1, 5], [9, 2, 6]]
    answers = [plain(prompt, 40)[0] for prompt in prompts]
    mine = Memory()
    loop = Speculator(Warper([[mine] * 3], batch=3), prompts, answers, seed)
    for _ in range(5):
        loop.round()
    assert max(map(len, loop.new)) > 5  # some drafts were accepted
    for row, prompt in enumerate(prompts):
        new, processor = plain(prompt, len(loop.new[row]))
        assert loop.new[row] == new
        assert loop.state.each[row].own[0].log == processor.log
    assert mine.log == [] and mine.parity == [0] * V


def test_selected_rows_keep_their_memory_and_their_number() -> None:
    prompts = [[3], [1, 4, 1, 5], [9, 2, 6]]
    answers = [plain(prompt, 40)[0] for prompt in prompts]
    loop = Speculator(Warper([[Memory()] * 3], batch=3), prompts, answers, 1)
    loop.round()
    loop.state = loop.warper.select(loop.state, [2, 0])
    loop.ids, loop.new = [loop.ids[2], loop.ids[0]], [loop.new[2], loop.new[0]]
    loop.answers = [answers[2], answers[0]]
    assert loop.state.rows == [2, 0]
    for _ in range(3):
        loop.round()
    loop.state = loop.warper.select(loop.state, [1])
    assert loop.state.rows == [0]
    for i, row in ((0, 2), (1, 0)):
        assert loop.new[i] == plain(prompts[row], len(loop.new[i]))[0]
    assert loop.state.each[0].own[0].log == plain(prompts[0], len(loop.new[1]))[1].log


def test_no_commit_is_a_rollback_and_a_count_of_0_leaves_a_row() -> None:
    warper = Warper([[Memory()] * 2], batch=2)
    state = warper.begin()
    first = step(warper, state, [[1], [2]])
    assert torch.equal(step(warper, state, [[1], [2]]), first)
    warper.commit(state, torch.tensor([[0], [-1]]), torch.tensor([1, 0]))
    assert [row.own[0].log for row in state.each] == [[(1,)], []]
    step(warper, state, [[1, 3], [2]])
    warper.commit(state, torch.tensor([[0], [0]]), torch.tensor([1, 1]))
    assert [row.own[0].log for row in state.each] == [[(1,), (1, 3)], [(2,)]]


def test_users_of_one_warper_do_not_meet() -> None:
    warper = Warper([[Memory()]], batch=1)
    target, drafter = warper.begin(), warper.begin()
    step(warper, target, [[1]])
    warper.commit(target, torch.tensor([[0]]), torch.tensor([1]))
    step(warper, drafter, [[1]])
    warper.commit(drafter, torch.tensor([[0]]), torch.tensor([1]))
    assert target.each[0].own[0].log == drafter.each[0].own[0].log == [(1,)]


def test_processors_that_share_memory_share_it_in_every_branch() -> None:
    class Writer:
        def __init__(self, memory: list[int]) -> None:
            self.memory = memory

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.memory.append(int(input_ids[0, -1]))
            return scores

    class Reader(Writer):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.index_fill(1, torch.tensor(self.memory), -INF)

    memory: list[int] = []
    warper = Warper([[Writer(memory)], [Reader(memory)]], batch=1)
    got = step(warper, warper.begin(), [[1]], from_lists([([1, 4, 5, 6], [-1, 0, 0, 1])]))
    banned = [set(torch.nonzero(row == -INF).flatten().tolist()) for row in got[0]]
    assert banned == [{1}, {1, 4}, {1, 5}, {1, 4, 6}] and memory == []


# ---------------------------------------------------------------------------------------------------------- dead branches


class Grammar:
    """Allows one more than the last token, or twice it; raises on anything else, as a matcher would."""

    def __init__(self) -> None:
        self.allowed: list[int] | None = None
        self.seen: list[int] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        token = int(input_ids[0, -1])
        if self.allowed is not None and token not in self.allowed:
            raise RuntimeError(f"token {token} is not in the grammar")
        self.seen.append(token)
        self.allowed = [(token + 1) % V, (2 * token) % V]
        mask = torch.full_like(scores, -INF)
        mask[:, self.allowed] = 0
        return scores + mask


def test_forbidden_tokens_and_what_is_below_them_are_not_walked() -> None:
    tree = from_lists([([3, 4, 5, 6, 7, 8], [-1, 0, 0, 1, 2, 1])])  # 5 and 7 below it, 6 below 4 are not in the language
    warper = Warper([[Grammar()]], batch=1)
    state = warper.begin()
    got = step(warper, state, [[3]], tree)
    kept = [set(torch.nonzero(row > -INF).flatten().tolist()) for row in got[0]]
    assert kept[0] == {4, 6} and kept[1] == {5, 8} and kept[5] == {9, 4} and all(len(kept[i]) == V for i in (2, 3, 4))
    warper.commit(state, torch.tensor([[0, 1, 5]]), torch.tensor([3]))
    assert state.each[0].own[0].seen == [3, 4, 8]


def test_committing_a_forbidden_token_is_an_error() -> None:
    warper = Warper([[Grammar()]], batch=1)
    state = warper.begin()
    step(warper, state, [[3]], from_lists([([3, 5], [-1, 0])]))
    with pytest.raises(ValueError, match="node 1 of row 0"):
        warper.commit(state, torch.tensor([[0, 1]]), torch.tensor([2]))


def test_a_later_rule_may_allow_what_an_earlier_one_forbade() -> None:
    """The law decides what is dead, not one stage of it: a forced token is walked, although the first stage bans it."""
    warper = Warper([[Memory()], [hf.ForcedEOSTokenLogitsProcessor(2, [1])]], batch=1)
    state = warper.begin()
    got = step(warper, state, [[1]], from_lists([([1, 1, 3], [-1, 0, 0])]))
    assert got[0, 0].exp().tolist() == [0, 1] + [0] * (V - 2)
    assert sorted(state.each[0].forks) == [0, 1]
    warper.commit(state, torch.tensor([[0, 1]]), torch.tensor([2]))
    assert state.each[0].own[0].log == [(1,), (1, 1)]


class Stops:
    """A grammar that has ended: it raises when it is shown what follows its last token, 7."""

    def __init__(self, name: str = "the grammar") -> None:
        self.name = name

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if 7 in input_ids.flatten().tolist():
            raise RuntimeError(f"{self.name} has ended")
        return scores.index_fill(1, torch.tensor([0]), -INF)


def test_an_error_on_a_branch_counts_if_its_law_was_used() -> None:
    """Plain decoding never asks what follows the last token, so a draft that goes on there must not raise for it."""
    tree = from_lists([([1, 7, 4, 5], [-1, 0, 1, 0])])
    warper = Warper([[Stops()], [Stops("another")], [hf.TemperatureLogitsWarper(0.5)]], batch=1)
    state = warper.begin()
    got = step(warper, state, [[1]], tree)
    assert not invalid(got).any() and bool((got[0, [0, 3], 0] == -INF).all())
    warper.commit(state, torch.tensor([[0, 1]]), torch.tensor([1]))  # 7 was emitted, the output ended there
    state = warper.begin()
    step(warper, state, [[1]], tree)
    with pytest.raises(RuntimeError, match="grammar has ended"):
        warper.commit(state, torch.tensor([[0, 1]]), torch.tensor([2]))
    with pytest.raises(RuntimeError, match="grammar has ended"):
        step(warper, warper.begin(), [[7]])


@pytest.mark.parametrize("pure", [False, True])
def test_a_user_who_only_guesses_is_told_of_an_error_at_the_root(pure: bool) -> None:
    """Rows that are padding throughout are left out; the others' processors go on."""
    stops = Stops()
    stops.pure = pure
    warper = Warper([[stops] * 3, [Memory()] * 3], batch=3)
    state, prompts = warper.begin(), [[1], [7], [7]]
    root = DraftTree(torch.tensor([[1], [7], [7]]), torch.tensor([[-1], [-1], [-2]]))
    raw = torch.zeros(3, 1, V, dtype=torch.float64)
    got = warper.scores(state, raw, root, begin(prompts), certain=False)
    assert state.faulty == [False, True, False] and got[0, 0, 0] == -INF and not got[1].any()
    warper.commit(state, torch.zeros(3, 1, dtype=torch.int64), torch.tensor([1, 0, 0]))
    assert state.faulty == [False] * 3
    assert [row.own[1].log for row in state.each] == [[(1,)], [], []]
    warper.scores(state, raw, root, begin(prompts), certain=False)
    with pytest.raises(RuntimeError, match="grammar has ended"):
        warper.commit(state, torch.zeros(3, 1, dtype=torch.int64), torch.tensor([1, 1, 0]))
    with pytest.raises(RuntimeError, match="grammar has ended"):
        warper.scores(warper.begin(), raw, root, begin(prompts))


def test_a_fork_and_its_origin_go_their_own_ways() -> None:
    warper = Warper([[Memory()]], batch=1)
    origin = warper.begin()
    step(warper, origin, [[1]])
    warper.commit(origin, torch.tensor([[0]]), torch.tensor([1]))
    fork = warper.fork(origin)
    for state, prompt in ((fork, [1, 2]), (origin, [1, 3])):
        step(warper, state, [prompt])
        warper.commit(state, torch.tensor([[0]]), torch.tensor([1]))
    assert [state.each[0].own[0].log for state in (fork, origin)] == [[(1,), (1, 2)], [(1,), (1, 3)]]
    rules = [Memory(), hf.TopKLogitsWarper(2), hf.RepetitionPenaltyLogitsProcessor(2.0), PrefixAllowed(lambda row, ids: [1], 0)]
    assert [Warper([[rule]], batch=1).remembers for rule in rules] == [True, False, False, False]


# ------------------------------------------------------------------------------------------------------- copies and declarations


class Locked(Memory):
    def __deepcopy__(self, memo: dict) -> Memory:
        raise ValueError("there is only one of me")


def test_what_cannot_be_copied_is_refused_at_begin() -> None:
    warper = Warper([[Locked()]], batch=1)
    with pytest.raises(TypeError, match="Locked cannot be copied.*only one of me.*pure = True"):
        warper.begin()


def test_a_function_with_a_memory_is_refused_and_one_without_is_not() -> None:
    seen: list[int] = []

    def remembers(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(len(input_ids))
        return scores

    def forbids_4(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 4] = -float("inf")
        return scores

    with pytest.raises(TypeError, match="function.*is its own copy.*pure = True"):
        Warper([[remembers]], batch=1).begin()
    warper = Warper([[forbids_4]], batch=1)
    got = step(warper, warper.begin(), [[1]], chain([[1, 2]]))
    assert bool((got[..., 4] == -INF).all()) and int((got == -INF).sum()) == 2
