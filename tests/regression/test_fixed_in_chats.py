"""Faults that came with draft models, sessions and the drop-in, and were mended."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import specdec
from specdec import AdaptivePlanner, ContextDrafter, CoupledAcceptor, FixedPlanner, NullDrafter
from specdec.bench.workloads import read_prompts
from specdec.cache import causal_target
from specdec.models.tiny import TinyTarget
from specdec.ragged import Ragged
from specdec.rng import derive_seeds
from specdec.tree import check, from_lists
from specdec.types import Commit, Scores, TargetFacts
from specdec.warp import Warper


def test_which_of_equals_is_in_the_nucleus_does_not_depend_on_other_rows() -> None:
    """How much of the vocabulary is sorted follows from all rows, and sorting equals in another number orders them otherwise."""
    logits = torch.full((1, 2, 49152), -20.0)
    logits[0, 0, [11, 222, 3333, 44444]] = 5.0
    warper = Warper([[tf.TopPLogitsWarper(0.6)]], batch=1)
    history = Ragged.empty(1)
    history.extend([[1]])
    tree = specdec.chain([[0]], [0])
    alone, (scores,) = logits.clone(), (warper.scores(warper.begin(), logits.clone(), tree, history),)
    alone[0, 1] = alone[0, 0]
    other = warper.scores(warper.begin(), alone, tree, history)
    assert (scores[0, 0] > -1e9).nonzero()[:, 0].tolist() == [11, 222, 3333]
    assert torch.equal(scores[0, 0], other[0, 0])


@pytest.mark.parametrize("top_p", [0.3, 0.6, 0.9])
def test_the_nucleus_of_a_row_is_its_own(top_p: float) -> None:
    """Few different values, as in half precision, and rows of every flatness in one batch and alone."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.stack([(torch.randn(9000, generator=generator) * spread).to(torch.bfloat16).float() for spread in (0, 0.5, 2, 8)])
    warper, history = Warper([[tf.TopPLogitsWarper(top_p)]], batch=1), Ragged.empty(1)
    history.extend([[1]])
    together = warper.scores(warper.begin(), logits[None].clone(), specdec.chain([[0] * 3], [0]), history)[0]
    for row in range(4):
        alone = warper.scores(warper.begin(), logits[None, row : row + 1].clone(), specdec.tree.root_only(torch.tensor([0])), history)
        assert torch.equal(alone[0, 0], together[row])


def dynamic_llama() -> tf.PreTrainedModel:
    torch.manual_seed(1)
    config = tf.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)
    return model.eval()


def test_a_rotary_module_with_a_memory_is_one_in_the_view_and_in_the_model() -> None:
    model, long = dynamic_llama(), torch.randint(3, 40, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(long).logits
        specdec.generate(model, [[5]], drafter=NullDrafter(), max_new_tokens=5, eos_token_id=[])
        assert torch.allclose(model(long).logits, before, atol=1e-4)
        verifier = specdec.TreeVerifier(causal_target(model))
        for start in range(3, 13):
            model(long)
            ours = specdec.generate(model, [[start]], drafter=NullDrafter(), verifier=verifier, max_new_tokens=8, eos_token_id=[])
            plain = model.generate(torch.tensor([[start]]), max_new_tokens=8, do_sample=False, eos_token_id=None)
            assert ours.sequences.tolist() == plain.tolist()


def test_a_verifier_that_is_kept_sees_modules_that_were_replaced() -> None:
    torch.manual_seed(1)
    config = tf.LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                            num_key_value_heads=2, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0)  # fmt: skip
    model, options = tf.LlamaForCausalLM(config).eval(), {"drafter": NullDrafter(), "max_new_tokens": 8, "eos_token_id": []}
    verifier = specdec.TreeVerifier(causal_target(model))
    specdec.generate(model, [[5, 6]], verifier=verifier, **options)
    model.lm_head = nn.Linear(32, 40, bias=False)
    kept, fresh = specdec.generate(model, [[5, 6]], verifier=verifier, **options), specdec.generate(model, [[5, 6]], **options)
    assert kept.sequences.tolist() == fresh.sequences.tolist()


def test_a_plain_softmax_of_a_large_vocabulary_is_a_law() -> None:
    """In float32 it misses one by up to 4e-5 on the CPU."""
    laws = (4 * torch.randn(1, 1, 262144, generator=torch.Generator().manual_seed(0))).softmax(-1)
    tree = specdec.chain([[int(laws[0, 0].argmax())]], [0], laws)
    check(tree, torch.tensor([0]), specdec.Budget.of(1), 262144, sums=True)
    with pytest.raises(ValueError, match="does not sum to one"):
        check(replace(tree, laws=laws * 1.01), torch.tensor([0]), specdec.Budget.of(1), 262144, sums=True)


def test_a_bare_drafter_is_refused_by_generate_rather_than_passed_over() -> None:
    """transformers calls what it can call, and decodes plainly with anything else."""
    with pytest.raises(TypeError, match="NGramDrafter is no decoding method; wrap it"):
        dynamic_llama().generate(torch.tensor([[5, 6, 7]]), custom_generate=specdec.NGramDrafter(), max_new_tokens=4)


class InPlace:
    """Writes into the scores it is handed, before it finds out that it does not want to go on."""

    pure = True

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 5] += 2
        if bool((ids[:, -1] == 3).any()):
            raise RuntimeError("not behind a 3")
        return scores


def test_a_pure_processor_that_raises_half_way_is_not_applied_twice() -> None:
    logits = torch.zeros(1, 4, 9)
    warper, history = Warper([[InPlace()]], batch=1), Ragged.empty(1)
    history.extend([[1]])
    tree = from_lists([([0, 2, 3, 4], [-1, 0, 0, 0])])
    scores = warper.scores(warper.begin(), logits.clone(), tree, history)
    assert scores[0, [0, 1, 3], 5].tolist() == [2.0, 2.0, 2.0]


def test_a_line_ends_at_a_newline_and_nowhere_else(tmp_path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes("\ufeff".encode() + '{"turns": ["one\u2028two\u0085three"]}\r\n\r\n{"turns": ["four"]}'.encode())
    assert [prompt.turns for prompt in read_prompts(file)] == [("one\u2028two\u0085three",), ("four",)]


def test_what_is_no_number_is_no_plan_and_a_tensor_may_be_a_seed() -> None:
    for bad in (lambda: AdaptivePlanner(first=float("nan")), lambda: AdaptivePlanner(more=float("nan"))):
        with pytest.raises(ValueError, match="first, more, memory"):
            bad()
    for planner in (AdaptivePlanner, FixedPlanner):
        begin: Any = inspect.unwrap(planner.__init__)  # as users have it: the tests' own checks of annotations would come first
        with pytest.raises(TypeError, match="as an integer"):
            begin(object.__new__(planner), [3, 4])
    assert derive_seeds(torch.tensor(5), 2) == derive_seeds(5, 2)
    assert derive_seeds(torch.tensor([5, 6]), 2) == [5, 6]


class Elsewhere(specdec.Verifier):
    """A target whose scores lean on nothing; it counts the time it takes to be told what was accepted."""

    facts = TargetFacts(9)

    def begin(self, ctx: specdec.Context) -> dict[str, Any]:
        return {}

    def extend(self, state: dict[str, Any], tokens: Tensor, count: Tensor) -> Commit:
        return Commit(tokens, count)

    def verify(self, state: dict[str, Any], tree: specdec.DraftTree) -> Scores:
        state["tree"] = tree
        return Scores(torch.zeros(*tree.tokens.shape, 9))

    def commit(self, state: dict[str, Any], path: Tensor, count: Tensor) -> Commit:
        return Commit(state["tree"].tokens.gather(1, path.clamp_min(0)), count)

    def select(self, state: dict[str, Any], rows: list[int]) -> dict[str, Any]:
        return state


class Slow(ContextDrafter):
    def guess(self, ids: list[Tensor], budget: specdec.Budget) -> list[list[int]]:
        return [[]] * len(ids)


def test_the_time_of_a_round_holds_what_follows_its_commit(monkeypatch) -> None:
    """The drafter's and the planner's `observe` belong to the round that they observe, the last one's too."""
    ticks = iter(range(10**6))
    monkeypatch.setattr("specdec.loop.perf_counter", lambda: float(next(ticks)))
    rounds = list(specdec.stream(None, [[1, 2]], drafter=Slow(), verifier=Elsewhere(), max_new_tokens=3))
    first, *later = [done.seconds for done in rounds]
    assert later and all(one == later[0] for one in later)
    assert later[0]["draft"] == 2 and later[0]["other"] == 3  # propose and observe; plan, cut and the planner's observe
    assert first.pop("prefill") == 1 and first == later[0]


def test_coupled_text_stays_a_function_of_the_seed_where_logits_tie() -> None:
    class Tied(TinyTarget):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            logits, features = super().forward(*args, **kwargs)
            return None if logits is None else (logits / 4).round() * 4, features

    target, options = Tied(600, seed=3), {"max_new_tokens": 12, "eos_token_id": [], "do_sample": True, "top_k": 0, "top_p": 0.6, "seed": 5}
    rule = {"acceptor": CoupledAcceptor(), **options}
    plain = specdec.generate(target, [[1, 2, 3]], drafter=NullDrafter(), **rule).new_tokens[0].tolist()
    ngram = specdec.generate(target, [[4], [1, 2, 3]], drafter=specdec.NGramDrafter(), **{**rule, "seed": [1, derive_seeds(5, 1)[0]]})
    assert ngram.new_tokens[1].tolist() == plain
