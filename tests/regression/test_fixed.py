"""One test for every fault that was found and mended; each states the property that was broken."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import specdec
from specdec import ContextDrafter, DraftTree, Draws, FixedPlanner, Kind, NullDrafter, Verification
from specdec.models.tiny import TinyTarget
from specdec.ragged import Ragged, pad_rows, unpad_rows
from specdec.rng import CounterRng, Purpose, derive_seeds
from specdec.tree import check, draw_law, follow

V = 17
TARGET = TinyTarget(vocab_size=V, seed=3)
PROMPT = [1, 2, 3]
CPU = torch.device("cpu")


class Replay(ContextDrafter):
    """Drafts a given text, wherever the row stands in it."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def guess(self, ids: list[torch.Tensor], budget: specdec.Budget) -> list[list[int]]:
        return [self.text[len(row) : len(row) + int(k)] for row, k in zip(ids, budget.depth, strict=True)]


def test_target_noise_is_shared_by_all_parts_of_a_source() -> None:
    source = CounterRng([5]).round([0], [9], CPU)
    assert source.part(1)._uniform(Purpose.TARGET, 2) == source._uniform(Purpose.TARGET, 2)
    assert source.part(1)._uniform(Purpose.DRAFT, 2) != source._uniform(Purpose.DRAFT, 2)


def test_match_follows_every_twin() -> None:
    """Two siblings hold one token, and only the second has the child that the target draws next: both are on the path."""
    tree = DraftTree(torch.tensor([[0, 5, 5, 7]]), torch.tensor([[-1, 0, 0, 2]]))
    logp = torch.full((1, 4, V), -torch.inf, dtype=torch.float64)
    logp[0, 0, 5] = logp[0, 1, 7] = logp[0, 2, 7] = logp[0, 3, 1] = 0.0
    for acceptor in (specdec.MatchAcceptor(), specdec.CoupledAcceptor(), specdec.GreedyAcceptor()):
        out = acceptor.accept(tree, Verification(logp), CounterRng([1]).round([0], [3], CPU))
        assert (out.count.tolist(), out.path[0, :3].tolist(), out.next_token.tolist()) == ([3], [0, 2, 3], [1])
    assert follow(tree, logp.argmax(-1)).tolist() == [3]


def test_a_law_that_was_dropped_is_not_taken_for_a_point_mass() -> None:
    kind = torch.tensor([[int(Kind.IID)]])
    tree = DraftTree(torch.tensor([[0, 1]]), torch.tensor([[-1, 0]]), Draws(torch.tensor([[1]]), kind, torch.tensor([[0]])))
    with pytest.raises(ValueError, match="return_rounds='all'"):
        draw_law(tree, torch.tensor([0]), torch.float64, 4)


def test_an_incompatible_rule_is_refused_before_anything_is_shown() -> None:
    with pytest.raises(ValueError, match="needs do_sample=True"):
        specdec.stream(TARGET, [[1]], drafter=NullDrafter(), acceptor=specdec.MatchAcceptor())


def test_parts_are_not_asked_to_select_no_rows() -> None:
    class Strict(NullDrafter):
        def select(self, state: None, rows: list[int]) -> None:
            assert rows, "a batch of no rows"

    out = specdec.generate(TARGET, [[1], [2, 3]], drafter=Strict(), max_new_tokens=0)
    assert out.finish_reason == ["length", "length"]


def test_integers_of_other_makes_are_seeds() -> None:
    assert derive_seeds(np.int64(3), 2) == derive_seeds(3, 2)


def test_a_budget_of_no_rows_says_what_is_wrong() -> None:
    assert specdec.Budget.of([]).nodes.tolist() == []
    with pytest.raises(ValueError, match="one number of at least 0 per row"):
        specdec.Budget.of([1], [1, 2])


def test_greedy_reads_scores_that_normalising_would_make_equal() -> None:
    """At log V = 11 a step of float32 is 1e-6: these logits differ, their log-softmax does not."""

    def flat(ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(ids), 50_000)
        logits[:, 7], logits[:, 9] = 1e-7, 2e-7
        return logits

    verifier = specdec.SequentialVerifier(flat, 50_000, dtype=torch.float32)
    assert specdec.generate(None, [[1]], verifier=verifier, drafter=NullDrafter(), max_new_tokens=2).new_tokens[0].tolist() == [9, 9]


def test_a_stream_may_leave_and_enter_inference_mode() -> None:
    plain = specdec.generate(TARGET, [PROMPT, [4]], drafter=specdec.NGramDrafter(), max_new_tokens=300, eos_token_id=[]).new_tokens
    texts: list[list[int]] = [[], []]
    with torch.inference_mode():
        stream = specdec.stream(TARGET, [PROMPT, [4]], drafter=specdec.NGramDrafter(), max_new_tokens=300, eos_token_id=[])
        first = next(stream)
    for done in (first, *stream):
        for row, tokens in zip(done.rows, done.emitted, strict=True):
            texts[row] += tokens
    assert texts == [text.tolist() for text in plain]


class Touchy:
    """A pure rule that bans a token, and refuses to speak of texts that hold it."""

    pure = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if (input_ids == 13).any():
            raise ValueError("13 was banned")
        return scores.index_fill(1, torch.tensor([13]), -torch.inf)


def test_a_pure_processor_may_refuse_a_branch() -> None:
    options = {"logits_processor": [Touchy()], "max_new_tokens": 12, "eos_token_id": []}
    plain = specdec.generate(TARGET, [PROMPT], drafter=NullDrafter(), **options).new_tokens[0].tolist()
    for wrong in ([13] * 20, plain[:3] + [13] * 20):
        assert specdec.generate(TARGET, [PROMPT], drafter=Replay(PROMPT + wrong), **options).new_tokens[0].tolist() == plain
    with pytest.raises(ValueError, match="13 was banned"):
        specdec.generate(TARGET, [[13]], drafter=NullDrafter(), **options)


def test_the_context_is_named_where_it_cuts_the_default_length() -> None:
    short = TinyTarget(vocab_size=V, max_positions=8)
    assert specdec.generate(short, [[1, 2, 3]], drafter=NullDrafter(), eos_token_id=[]).finish_reason == ["context"]


def test_host_data_stays_on_the_host_whatever_the_default_device() -> None:
    with torch.device("meta"):
        history = Ragged.empty(1)
        history.extend([PROMPT])
        found = [
            history.ids,
            history.last(),
            specdec.chain([[1, 2]]).tokens,
            *unpad_rows([PROMPT]),
            *pad_rows([PROMPT], 0),
            specdec.Budget.of(3).nodes,
        ]
        assert derive_seeds(3, 1) and {tensor.device.type for tensor in found} == {"cpu"}


def test_without_replacement_a_token_comes_once() -> None:
    kind = torch.full((1, 2), int(Kind.WITHOUT_REPLACEMENT))
    draws = Draws(torch.tensor([[1, 2]]), kind, torch.tensor([[0, 0]]))
    tree = DraftTree(torch.tensor([[0, 1, 1]]), torch.tensor([[-1, 0, 0]]), draws, torch.full((1, 1, 3), 1 / 3))
    with pytest.raises(ValueError, match="without replacement a token comes once"):
        check(tree, torch.tensor([0]), specdec.Budget.of(2), 3)


def test_laws_that_are_none_are_refused_in_the_loop() -> None:
    class Logits(specdec.Drafter):
        draws = frozenset({Kind.IID})

        def begin(self, ctx: specdec.Context) -> None: ...
        def observe(self, state: None, commit: specdec.Commit, round: specdec.Round | None = None) -> None: ...
        def select(self, state: None, rows: list[int]) -> None: ...
        def propose(self, state: None, pending: torch.Tensor, budget: specdec.Budget, source: object) -> DraftTree:
            return specdec.chain([[1]] * len(pending), pending, torch.full((len(pending), 1, V), 3.0))

    with pytest.raises(ValueError, match="does not sum to one"):
        specdec.generate(TARGET, [PROMPT], drafter=Logits(), do_sample=True)


REFUSED = {
    "encoding": ({"input_ids": {"input_ids": [[1]]}}, "input_ids: got dict"),
    "text": ({"input_ids": "hello"}, "input_ids: got str"),
    "texts": ({"input_ids": ["hello"]}, "input_ids: row 0 is 'hello'"),
    "nothing": ({"input_ids": None}, "input_ids: got NoneType"),
    "mixed": ({"input_ids": [1, [2]]}, "input_ids: row 0 is 1"),
    "empty batch": ({"input_ids": []}, "the batch is empty"),
    "empty row": ({"input_ids": [[1], []]}, "row 1 is empty"),
    "additive mask": ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.tensor([[0.0, -1e9]])}, "1 at real tokens"),
    "short mask": ({"input_ids": torch.tensor([[1, 2]]), "attention_mask": [[1]]}, "does not fit input_ids"),
    "float seed": ({"seed": 1.5}, "seed: got 1.5"),
    "float seeds": ({"seed": [1.5]}, r"seed: got \[1.5\]"),
    "no drafter": ({"drafter": None}, "drafter: got None; give an instance"),
    "a class": ({"drafter": NullDrafter}, "drafter: got NullDrafter; give an instance"),
    "a number": ({"planner": 4}, "planner: got 4; give an instance"),
    "an undecided criterion": ({"stopping_criteria": [lambda ids, scores: None]}, "answered None for one row"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_named(case: str) -> None:
    wrong, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        specdec.generate(TARGET, **{"input_ids": [PROMPT], "drafter": NullDrafter(), **wrong})


# ------------------------------------------------------------------------------------------- laws that are none


class Poison:
    """Makes what follows one token no law at all."""

    pure = True

    def __init__(self, token: int, value: float) -> None:
        self.token, self.value = token, value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.where((input_ids[:, -1] == self.token)[:, None], self.value, scores)


RULES = {
    "greedy": {},
    "coupled": {"do_sample": True, "seed": 3, "acceptor": specdec.CoupledAcceptor()},
    "match": {"do_sample": True, "seed": 2, "acceptor": specdec.MatchAcceptor()},
    "rejection": {"do_sample": True, "seed": 2, "acceptor": specdec.RejectionAcceptor()},
    "traversal": {"do_sample": True, "seed": 2, "acceptor": specdec.TraversalAcceptor()},
}


def text_of(rule: str, **options: object) -> list[int]:
    planner = FixedPlanner(4)
    out = specdec.generate(TARGET, [PROMPT], **{"max_new_tokens": 12, "eos_token_id": [], "planner": planner, **RULES[rule], **options})
    return out.new_tokens[0].tolist()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", RULES)
def test_a_rejected_branch_without_a_law_does_not_matter(rule: str, value: float) -> None:
    banned = {"suppress_tokens": [5], "drafter": Replay(PROMPT + [5] * 20)}  # never accepted: its probability is zero
    assert text_of(rule, logits_processor=[Poison(5, value)], **banned) == text_of(rule, **banned)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_node_without_a_law_matters_if_the_text_goes_on_there(rule: str, value: float) -> None:
    clean = text_of(rule, drafter=NullDrafter())
    last = clean[4]
    poisoned = {"drafter": Replay(PROMPT + clean), "logits_processor": [Poison(last, value)]}
    assert text_of(rule, eos_token_id=[last], **poisoned) == clean[: clean.index(last) + 1]
    with pytest.raises(FloatingPointError, match="row 0, node"):
        text_of(rule, **poisoned)
