"""The warper against a slow oracle: for every node, fresh processors of transformers called with that node's own ids alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from specdec.ragged import Ragged
from specdec.tree import chain, from_lists, root_only
from specdec.types import DraftTree
from specdec.warp import PrefixAllowed, Warper, WarpState, invalid

V = 12
EOS = torch.tensor([2, 7])
INF = float("inf")

RULES: dict[str, Callable[[int], Any]] = {  # a fresh processor for a row with a prompt of n tokens
    "sequence_bias": lambda n: hf.SequenceBiasLogitsProcessor({(3,): 1.5, (1, 4): -2.0, (5, 5, 6): 3.0}),
    "repetition": lambda n: hf.RepetitionPenaltyLogitsProcessor(1.4),
    "repetition_after_prompt": lambda n: hf.RepetitionPenaltyLogitsProcessor(1.4, n),
    "no_repeat_ngram": lambda n: hf.NoRepeatNGramLogitsProcessor(2),
    "bad_words": lambda n: hf.NoBadWordsLogitsProcessor([[4], [1, 3], [0, 0, 1]], EOS),
    "min_length": lambda n: hf.MinLengthLogitsProcessor(7, EOS),
    "min_new_tokens": lambda n: hf.MinNewTokensLengthLogitsProcessor(n, 2, EOS),
    "prefix": lambda n: hf.PrefixConstrainedLogitsProcessor(lambda row, ids: [int(ids[-1]), (len(ids) * 5) % V, 3], 1),
    "forced_bos": lambda n: hf.ForcedBOSTokenLogitsProcessor(5),
    "forced_eos": lambda n: hf.ForcedEOSTokenLogitsProcessor(n + 3, EOS),
    "remove_invalid": lambda n: hf.InfNanRemoveLogitsProcessor(),
    "decay": lambda n: hf.ExponentialDecayLengthPenalty((1, 1.3), EOS, n),
    "suppress": lambda n: hf.SuppressTokensLogitsProcessor([1, 9]),
    "suppress_at_begin": lambda n: hf.SuppressTokensAtBeginLogitsProcessor([6, 8], n),
    "temperature": lambda n: hf.TemperatureLogitsWarper(0.6),
    "top_h": lambda n: hf.TopHLogitsWarper(0.5),
    "top_k": lambda n: hf.TopKLogitsWarper(5),
    "top_p": lambda n: hf.TopPLogitsWarper(0.8),
    "min_p": lambda n: hf.MinPLogitsWarper(0.1),
    "typical": lambda n: hf.TypicalLogitsWarper(0.7),
    "epsilon": lambda n: hf.EpsilonLogitsWarper(0.05),
    "eta": lambda n: hf.EtaLogitsWarper(0.2),
    "watermark": lambda n: hf.WatermarkLogitsProcessor(V, "cpu"),
    "synthid": lambda n: hf.SynthIDTextWatermarkLogitsProcessor(3, [5, 6, 7], 64, 0, 16, torch.device("cpu")),
    "normalize": lambda n: hf.LogitNormalization(),
}  # fmt: skip
COUNTS_FROM_PROMPT = {"repetition_after_prompt", "min_new_tokens", "forced_eos", "decay", "suppress_at_begin"}


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


def oracle(names: Sequence[str], prompt: list[int], ids: list[int], raw: dict[tuple[int, ...], Tensor]) -> Tensor:
    """Plain decoding up to `ids`, with processors of this text alone; `raw` are the logits after each text, asked for by its ids."""
    processors = hf.LogitsProcessorList([RULES[name](len(prompt)) for name in names])
    scores = torch.empty(0)
    for length in range(len(prompt), len(ids) + 1):
        scores = processors(torch.tensor([ids[:length]]), raw[tuple(ids[:length])][None].clone())[0]
    return scores.log_softmax(-1)


def begin(prompts: Sequence[list[int]]) -> Ragged:
    history = Ragged.empty(len(prompts))
    history.extend([prompt[:-1] for prompt in prompts])
    return history


def stages(names: Sequence[str], prompts: Sequence[list[int]]) -> list[list[Any]]:
    made = []
    for name in names:
        shared = RULES[name](0)
        made.append([RULES[name](len(p)) if name in COUNTS_FROM_PROMPT else shared for p in prompts])
    return made


def compare(names: Sequence[str], seed: int, prompts: Sequence[list[int]], sizes: Sequence[int]) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, sizes, [p[-1] for p in prompts])
    logits = torch.randn(*tree.tokens.shape, V, dtype=torch.float64, generator=generator) * 2
    before = logits.clone()
    warper = Warper(stages(names, prompts), batch=len(prompts))
    got = warper(warper.begin(), logits, tree, begin(prompts))
    assert torch.equal(logits, before) and got.dtype == torch.float64
    dead: set[tuple[int, int]] = set()
    for row, prompt in enumerate(prompts):
        for node in range(sizes[row]):
            parent = int(tree.parents[row, node])
            if node and ((row, parent) in dead or not got[row, parent, tree.tokens[row, node]] > -INF):  # below no law neither
                dead.add((row, node))
                continue
            at, raw = node, {}
            while at >= 0:
                raw[tuple(text(tree, prompt, row, at))] = logits[row, at]
                at = int(tree.parents[row, at])
            expected = oracle(names, prompt, text(tree, prompt, row, node), raw)
            if bool(expected.isnan().any()):
                assert bool(invalid(got)[row, node])
            else:
                torch.testing.assert_close(got[row, node], expected, rtol=1e-12, atol=1e-12)
                assert bool((got[row, node] <= 0).all()) and not bool(invalid(got)[row, node])


PROMPTS = ([3], [1, 4, 1, 5, 9], [2, 6, 5, 3, 5])


@pytest.mark.parametrize("name", RULES)
def test_each_processor_on_random_trees(name: str) -> None:
    for seed in range(2):
        compare([name], seed, PROMPTS, (9, 6, 9))


@given(st.lists(st.sampled_from(sorted(RULES)), max_size=5, unique=True), st.integers(0, 2**20))
def test_processors_together(names: list[str], seed: int) -> None:
    compare(names, seed, PROMPTS, (7, 4, 7))


def test_plain_decoding_step_and_no_processors() -> None:
    logits = torch.randn(2, 1, V)
    tree = root_only(torch.tensor([3, 5]))
    warper = Warper([], batch=2)
    got = warper(warper.begin(), logits, tree, begin([[1, 3], [5]]))
    assert torch.equal(got, logits.log_softmax(-1)) and warper.free and not warper.walks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("names", [[], ["top_k", "temperature"], ["repetition"], ["prefix"]])
def test_low_precision_is_raised_before_anything(dtype: torch.dtype, names: list[str]) -> None:
    logits = torch.randn(1, 3, V).to(dtype)
    before, tree = logits.clone(), chain([[1, 2, 3]])
    warper = Warper(stages(names, [[1]]), batch=1)
    got = warper(warper.begin(), logits, tree, begin([[1]]))
    high = warper(warper.begin(), logits.float(), tree, begin([[1]]))
    assert got.dtype == torch.float32 and torch.equal(got, high) and torch.equal(logits, before)


def test_rows_with_different_history_free_objects() -> None:
    logits = torch.randn(2, 3, V, dtype=torch.float64)
    warper = Warper([[hf.TemperatureLogitsWarper(0.5), hf.TopKLogitsWarper(3)]], batch=2)
    got = warper(warper.begin(), logits, chain([[1, 2, 3], [1, 2, 3]]), begin([[1], [1]]))
    torch.testing.assert_close(got[0], (logits[0] / 0.5).log_softmax(-1))
    assert bool(((got[1] > -INF).sum(-1) == 3).all())


# ------------------------------------------------------------------------------------------------------------ no law


@pytest.mark.parametrize("names", [[], ["temperature"], ["top_k"], ["top_p"], ["min_p"], ["typical"], ["top_h"], ["eta"],
                                   ["epsilon"], ["repetition"], ["normalize"], ["suppress"], ["prefix", "top_h"],
                                   ["min_new_tokens", "eta"]])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_that_is_no_law_is_nan_throughout(names: list[str], dtype: torch.dtype) -> None:
    """NaN anywhere, +inf anywhere, -inf everywhere: found in the first column, and the other rows are as they would be without."""
    token = 3  # every rule above leaves this one alone
    logits = torch.randn(1, 4, V, dtype=dtype)
    tree = from_lists([([3, 0, 4, 5], [-1, 0, 0, 0])])
    warper = Warper(stages(names, [[3]]), batch=1)
    clean = warper(warper.begin(), logits, tree, begin([[3]]))
    for spoil in ("nan", "inf", "all"):
        bad = logits.clone()
        bad[0, 2] = torch.full((V,), -INF, dtype=dtype) if spoil == "all" else bad[0, 2]
        if spoil != "all":
            bad[0, 2, token] = float(spoil)
        got = warper(warper.begin(), bad, tree, begin([[3]]))
        if spoil != "all" or "prefix" not in names:  # newer versions force an allowed token where all is -inf
            assert bool(got[0, 2].isnan().all()) and invalid(got).tolist() == [[False, False, True, False]]
        torch.testing.assert_close(got[0, [0, 1, 3]], clean[0, [0, 1, 3]])


def test_every_column_can_spoil_a_row() -> None:
    warper = Warper([], batch=1)
    state, tree = warper.begin(), root_only(torch.tensor([1]))
    for value in (float("nan"), INF):
        for column in range(V):
            logits = torch.full((1, 1, V), -INF)
            logits[0, 0, :] = torch.randn(V) if column % 2 else -INF
            logits[0, 0, column] = value
            got = warper(state, logits, tree, begin([[1]]))
            assert bool(got.isnan().all()) and bool(invalid(got).all())
    assert not invalid(warper(state, torch.tensor([[[-INF] * (V - 1) + [-3e38]]]), tree, begin([[1]]))).any()


def test_a_law_is_never_above_zero() -> None:
    warper = Warper([], batch=1)
    for scale in (1e-3, 1.0, 1e4, 1e30):
        got = warper(warper.begin(), torch.randn(1, 64, V) * scale, chain([[0] * 64]), begin([[0]]))
        assert bool((got <= 0).all()) and not invalid(got).any()


# -------------------------------------------------------------------------------------------------------- the row it belongs to


def step(warper: Warper, state: WarpState, prompts: Sequence[list[int]], tree: DraftTree | None = None) -> Tensor:
    tree = root_only(torch.tensor([p[-1] for p in prompts])) if tree is None else tree
    logits = torch.zeros(*tree.tokens.shape, V, dtype=torch.float64)
    return warper(state, logits, tree, begin(prompts))


class PerRow:
    """Looks at its place in the batch, as transformers' own prefix rule does."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert (input_ids == input_ids[0]).all() and (scores == scores[0]).all()
        return scores.index_put((torch.arange(len(scores)), torch.arange(len(scores))), torch.tensor(-INF, dtype=scores.dtype))


def test_an_object_finds_its_row_after_others_have_left() -> None:
    warper = Warper([[PerRow()] * 3], batch=3)
    state = warper.begin()
    got = step(warper, state, [[5], [5], [5]])
    assert [int((row[0] == -INF).nonzero()) for row in got] == [0, 1, 2]
    state = warper.select(state, [2, 1])
    got = step(warper, state, [[5], [5]])
    assert [int((row[0] == -INF).nonzero()) for row in got] == [2, 1]


@pytest.mark.parametrize("theirs", [False, True])
def test_prefix_function_is_asked_true_pairs(theirs: bool) -> None:
    """Whether our rule holds it or transformers' class, the function never sees ids that are not its row's."""
    asked: list[tuple[int, list[int]]] = []

    def allowed(row: int, ids: Tensor) -> list[int]:
        asked.append((row, ids.tolist()))
        assert ids[0] == row
        return [row + 1, row + 2]

    class_ = hf.PrefixConstrainedLogitsProcessor(allowed, 1)
    stage = [class_] * 3 if theirs else [PrefixAllowed(allowed, row) for row in range(3)]
    warper = Warper([stage], batch=3)
    state = warper.select(warper.begin(), [2, 0])
    got = step(warper, state, [[2], [0]], from_lists([([2, 4, 9], [-1, 0, 0]), ([0, 1, 2], [-1, 0, 1])]))
    assert [torch.nonzero(got[i, 1] > -INF).flatten().tolist() for i in range(2)] == [[3, 4], [1, 2]]
    assert sorted(asked) == [(0, [0]), (0, [0, 1]), (0, [0, 1, 2]), (2, [2]), (2, [2, 4])]


def test_prefix_function_without_an_answer_names_the_row() -> None:
    warper = Warper([[PrefixAllowed(lambda row, ids: [], row) for row in range(2)]], batch=2)
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn.*row 0"):
        step(warper, warper.begin(), [[5], [6]])


def test_prompt_lengths_given_per_batch_element() -> None:
    """Newer transformers take a tensor of prompt lengths, one per batch element: each row has its own."""
    ignore: Any = torch.tensor([1, 3])
    rule = hf.RepetitionPenaltyLogitsProcessor(2.0)
    rule.prompt_ignore_length = ignore
    warper = Warper([[rule, rule]], batch=2)
    state = warper.select(warper.begin(), [1])
    got = warper(state, torch.ones(1, 1, V), root_only(torch.tensor([6])), begin([[4, 5, 5, 6]]))
    assert torch.nonzero(got[0, 0] < got[0, 0].max()).flatten().tolist() == [6]


# ------------------------------------------------------------------------------------------------------- copies and declarations


class Declared:
    """Depends on ids and scores alone, and says so; cannot be copied."""

    pure = True

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(tuple(input_ids.shape))
        scores.scatter_(1, input_ids, -INF)
        return scores

    def __deepcopy__(self, memo: dict) -> Declared:
        raise ValueError("no")


def test_declared_pure_is_called_in_rectangles() -> None:
    rule = Declared()
    warper = Warper([[rule, rule]], batch=2)
    tree = from_lists([([1, 2, 3, 4], [-1, 0, 0, 1]), ([5, 6], [-1, 0])])
    logits = torch.zeros(2, 4, V)
    got = warper(warper.begin(), logits, tree, begin([[0, 1], [5]]))
    banned = [[torch.nonzero(x == -INF).flatten().tolist() for x in row] for row in got]
    assert banned[0] == [[0, 1], [0, 1, 2], [0, 1, 3], [0, 1, 2, 4]] and banned[1][:2] == [[5], [5, 6]]
    assert sorted(rule.calls) == [(1, 1), (1, 4), (2, 2), (2, 3)]
    assert bool((logits == 0).all()) and not warper.walks


def test_a_subclass_of_a_known_class_may_remember() -> None:
    class Mine(hf.TemperatureLogitsWarper):
        pass

    assert Warper([[Mine(0.5)]], batch=1).walks
    assert Warper([[hf.TemperatureLogitsWarper(0.5)]], batch=1).free


def test_the_given_objects_stay_as_they_are() -> None:
    """Also those that transformers prepares at their first call."""
    bias, decay = RULES["sequence_bias"](1), RULES["decay"](1)
    before = [copy.deepcopy(vars(x)) for x in (bias, decay)]
    warper = Warper([[bias], [decay]], batch=1)
    step(warper, warper.begin(), [[1]], chain([[1, 2, 3, 4]]))
    assert vars(bias) == before[0] and vars(decay).keys() == before[1].keys()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="2 processors in a stage for a batch of 3"):
        Warper([[hf.LogitNormalization()] * 2], batch=3)
    guidance = hf.UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, None)
    with pytest.raises(ValueError, match="UnbatchedClassifierFreeGuidance.*runs the model"):
        Warper([[guidance]], batch=1)

    def forgets(input_ids: Tensor, scores: Tensor) -> None:
        return None

    with pytest.raises(TypeError, match="function returned NoneType"):
        warper = Warper([[forgets]], batch=1)
        step(warper, warper.begin(), [[1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("top_p, least", [(0.05, 1), (0.9, 1), (0.9, 300), (0.999, 1), (0.9, 9000)])
def test_top_p_keeps_what_transformers_keeps(dtype: torch.dtype, spread: float, top_p: float, least: int) -> None:
    """All of the vocabulary may be needed, or one token of it. Sums in another order round differently, so that a token on the very
    edge may fall on either side; where all are equal it is anyone's choice which of them are kept."""
    scores = torch.randn(5, 6000, generator=torch.Generator().manual_seed(1), dtype=dtype) * spread
    scores[2, ::3] = -INF
    oracle = hf.TopPLogitsWarper(top_p, min_tokens_to_keep=least)
    expected = oracle(None, scores)
    warper = Warper([[oracle]], batch=1)
    tree = chain([[0] * 4], [0])
    got = warper.scores(warper.begin(), scores[None].clone(), tree, begin([[1]]))[0]
    assert bool(((got == scores) | got.isneginf()).all())
    mass = scores.softmax(-1)
    for row in range(5):
        differ = got[row] != expected[row]
        if spread == 0:
            assert abs(int((got[row] > -INF).sum()) - int((expected[row] > -INF).sum())) <= 1
        else:
            assert float(mass[row][differ].sum()) < 1e-4 and int(differ.sum()) <= 2
