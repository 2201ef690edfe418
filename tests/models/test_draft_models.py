"""Hugging Face models as draft models: beside each other, beside our own target, and their first layers beside the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import specdec
from specdec import Drafter, FixedPlanner, NullDrafter
from specdec.drafters import EarlyExitDrafter, ModelDrafter
from specdec.models.tiny import TinyTarget
from specdec.tree import check
from specdec.types import Budget

pytestmark = pytest.mark.slow

V = 40
PROMPTS = [[5, 6, 7, 5, 6], [9], [11, 12, 11, 12, 11, 12, 11]]


def llama(layers: int, *, vocab_size: int = V, positions: int = 128, seed: int = 1, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=positions, pad_token_id=None, bos_token_id=1, eos_token_id=None,
    ))  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)  # the usual 0.02 makes every law uniform
    return model.to(dtype).eval()


TARGET = llama(2)
ALL = {"max_length": 28, "planner": FixedPlanner(4), "seed": 3}


def plain(**options: object) -> torch.Tensor:
    return specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), **{**ALL, **options}).sequences


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.2}])
def test_a_model_drafts_for_itself(sampling):
    found = specdec.generate(TARGET, PROMPTS, drafter=ModelDrafter(TARGET), **ALL, **sampling)
    assert found.stats.drafted > 40 and found.stats.accepted == found.stats.drafted
    if "do_sample" not in sampling:
        assert found.sequences.equal(plain(**sampling))


@pytest.mark.parametrize("draft", [
    llama(1, seed=2), llama(1, vocab_size=V + 8), llama(1, vocab_size=V - 8), llama(1, positions=16), llama(1, dtype=torch.bfloat16),
    TinyTarget(V, num_layers=1, seed=2),
], ids=["small", "larger vocabulary", "smaller vocabulary", "smaller context", "bfloat16", "our own"])  # fmt: skip
def test_another_model_drafts(draft):
    drafter = ModelDrafter(draft)
    found = specdec.generate(TARGET, PROMPTS, drafter=drafter, **ALL)
    assert found.sequences.equal(plain())
    sampled = specdec.generate(TARGET, PROMPTS, drafter=drafter, do_sample=True, return_rounds="all", **ALL)
    assert all(done.tree.laws is None or done.tree.laws.shape[-1] == V for done in sampled.rounds)
    assert 0 < sampled.stats.accepted < sampled.stats.drafted


def test_a_hugging_face_model_drafts_for_our_own_target():
    target = TinyTarget(V, seed=2)
    found = specdec.generate(target, PROMPTS, drafter=ModelDrafter(llama(1, vocab_size=V)), **ALL)
    assert found.sequences.equal(specdec.generate(target, PROMPTS, drafter=NullDrafter(), **ALL).sequences)


def test_the_law_is_that_of_a_dense_pass():
    model = llama(2, seed=4)
    done = next(iter(specdec.stream(TARGET, PROMPTS, drafter=ModelDrafter(model), do_sample=True, top_k=0, keep_all=True, **ALL)))
    check(done.tree, torch.tensor([row[-1] for row in PROMPTS]), Budget.of(4, batch=3), V, sums=True)
    for row, prompt in enumerate(PROMPTS):
        for i in range(4):
            with torch.no_grad():
                dense = model(torch.tensor([[*prompt, *done.tree.tokens[row, 1 : i + 1].tolist()]])).logits[0, -1]
            torch.testing.assert_close(done.tree.laws[row, i], dense.softmax(-1), atol=1e-5, rtol=0)


def test_a_function_that_needs_the_padding_holds_for_the_text_and_only_holds_drafting_back():
    """`generate` shows the target's processors the padding; the draft's see the text alone, which is too short for this one at first."""
    ids = torch.tensor([[0] * 7 + [9], [5, 6, 7, 5, 6, 11, 12, 11]])
    mask = torch.tensor([[0] * 7 + [1], [1] * 8])

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [(int(ids[7]) + int(ids[-1]) + i) % V for i in range(12)]

    options = {"attention_mask": mask, "prefix_allowed_tokens_fn": allowed, "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    rounds = Rounds(ModelDrafter(TARGET))
    found = TARGET.generate(ids, custom_generate=specdec.custom_generate(drafter=rounds), **options)
    assert found.equal(TARGET.generate(ids, **options))
    assert rounds.drafted[0][0] == 0 and rounds.drafted[0][1] > 0 and rounds.drafted[-1][0] > 0


class Rounds(Drafter):
    """Keeps how much each round drafted."""

    def __init__(self, inner: ModelDrafter) -> None:
        self.inner, self.draws, self.drafted = inner, inner.draws, []

    def begin(self, *args):
        return self.inner.begin(*args)

    def observe(self, *args):
        return self.inner.observe(*args)

    def select(self, *args):
        return self.inner.select(*args)

    def propose(self, *args):
        tree = self.inner.propose(*args)
        self.drafted.append((tree.parents >= 0).sum(-1).tolist())
        return tree


def test_the_draft_model_stays_as_it_is():
    model = llama(1, seed=5)
    before, config = {name: tensor.clone() for name, tensor in model.state_dict().items()}, model.config.to_dict()
    specdec.generate(TARGET, PROMPTS, drafter=ModelDrafter(model), do_sample=True, **ALL)
    assert model.config.to_dict() == config and not any(module._forward_hooks for module in model.modules())
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_first_layers_of_a_hugging_face_model():
    whole, half = EarlyExitDrafter(TARGET, 2), EarlyExitDrafter(TARGET, 1)
    found = specdec.generate(TARGET, PROMPTS, drafter=whole, **ALL)
    assert found.sequences.equal(plain()) and found.stats.accepted == found.stats.drafted
    found = specdec.generate(TARGET, PROMPTS, drafter=half, **ALL)
    assert found.sequences.equal(plain()) and found.stats.accepted < found.stats.drafted
    assert TARGET.config.num_hidden_layers == 2 and len(TARGET.model.layers) == 2
    with pytest.raises(ValueError, match="layers"):
        EarlyExitDrafter(TARGET, 3)
