"""The training objective against what it stands for, written out slowly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.training.lesson import frequent, fresh_head
from specdec.training.objective import distilled, unrolled


def head_of(target, layers=(0, 1, 2), size=12):
    ids = torch.arange(0, 2 * size, 2)[:size] % target.facts.vocab_size
    torch.manual_seed(0)
    head = fresh_head(target.lend(), target.facts, layers, ids.unique()).double()
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, dtype=weight.dtype))
    return head


def alone(head, embedded, features, row, steps):
    """What a drafter would compute that knows the features up to `row`: pair after pair, each over those that it may see."""
    hidden = head.fuse(features)
    keys, values, said = [], [], None
    for t in range(row + 1 + steps - 1):
        inputs = hidden[:, t : t + 1] if t <= row else said
        residual, query, key, value = head.project(embedded[:, t + 1 : t + 2], inputs, torch.tensor([[t]] * 2))
        keys.append(key)
        values.append(value)
        groups = query.shape[1] // key.shape[1]
        k, v = (torch.cat(part, 2).repeat_interleave(groups, 1) for part in (keys, values))
        weights = (query @ k.mT * query.shape[-1] ** -0.5).softmax(-1)
        said = head.finish(residual, weights @ v)
        if t >= row:
            yield head.final(said)[:, 0]


def test_unrolled_is_what_a_drafter_computes(tiny_float64):
    head, steps, width = head_of(tiny_float64), 3, 7
    with torch.no_grad():
        embedded, features = torch.randn(2, width, 32).double(), torch.randn(2, width, 96).double()
        said = unrolled(head, embedded, features, steps)
        assert [part.shape[1] for part in said] == [width - 2, width - 3, width - 4]
        for row in range(width - 4):
            for step, wanted in enumerate(alone(head, embedded, features, row, steps)):
                torch.testing.assert_close(said[step][:, row], wanted, rtol=1e-10, atol=1e-10)


@given(rows=st.integers(1, 40), seed=st.integers(0, 99))
def test_distilled_is_the_cross_entropy_and_its_gradient(rows, seed):
    noise = torch.Generator().manual_seed(seed)
    said, head, truth, other = (torch.randn(*shape, generator=noise).double() for shape in ((rows, 6), (11, 6), (rows, 8), (11, 8)))
    weight = torch.rand(rows, generator=noise).double()
    said.requires_grad_()
    head.requires_grad_()
    slow = -((truth @ other.T).softmax(-1) * (said @ head.T).log_softmax(-1)).sum(-1) @ weight
    wanted = torch.autograd.grad(slow, (said, head))
    fast = distilled(said, head, truth, other, weight)
    torch.testing.assert_close(fast.double(), slow, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(fast, (said, head)), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_fresh_head_begins_as_the_target_s_last_layer(tiny_float64):
    """Shown the input of the last layer and no token, it says what that layer does."""
    target, ids = tiny_float64, torch.arange(16)
    depth = target.facts.num_layers
    head = fresh_head(target.lend(), target.facts, (0, 1, depth - 1), ids).double()
    tokens, positions = torch.arange(6)[None] % 16, torch.arange(6)[None]
    cache = target.new_cache(1)
    cache.open(6)
    logits, features = target.forward(tokens, positions, None, cache, logits=True, layers=(0, 1, depth - 1))
    with torch.no_grad():
        residual, query, key, value = head.project(torch.zeros(1, 6, 32).double(), head.fuse(features), positions)
        weights = (query @ key.mT * head.config.head_dim**-0.5).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)
        found = head.lm_head(head.final(head.finish(residual, weights @ value)))
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)  # the norms' epsilon is float32's in one of them


def test_frequent_tokens_rise_and_of_equals_the_lowest_are_taken():
    assert frequent([torch.tensor([5, 5, 3, 3, 1, 0])], 8, 3).tolist() == [0, 3, 5]
    assert frequent([], 4, 2).tolist() == [0, 1]


@pytest.fixture
def tiny_float64():
    from specdec.models.tiny import TinyTarget

    return TinyTarget(num_layers=3)


@pytest.mark.parametrize("kind", ("Qwen2", "Qwen3", "Gemma2", "Llama"))
def test_a_fresh_head_takes_what_it_has_a_place_for(kind):
    """Biases, norms of queries and keys, heads wider than the model, stretched positions."""
    import transformers

    from specdec.cache import causal_target
    from specdec.models.hf import HFTarget

    given = {"head_dim": 24} if kind == "Qwen3" else {}
    if kind == "Llama":
        stretched = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
        given = {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **stretched}}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=20, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, **given,
    )  # fmt: skip
    if kind == "Gemma2":
        config.layer_types = ["full_attention"] * 4
    target = causal_target(getattr(transformers, f"{kind}ForCausalLM")(config).eval())
    assert isinstance(target, HFTarget)
    before = [weight.clone() for weight in target.lend().layer.values()]
    head = fresh_head(target.lend(), target.facts, (1, 2, 3), torch.arange(10))
    assert all(bool(weight.isfinite().all()) for weight in head.parameters())
    assert head.config.rope_theta == (5000.0 if kind == "Llama" else 10000.0)
    assert (head.config.rope_scaling is not None) == (kind == "Llama")
    assert all(a.equal(b) for a, b in zip(before, target.lend().layer.values(), strict=True))
