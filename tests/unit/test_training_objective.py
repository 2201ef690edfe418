"""The training objective against what it stands for, written out slowly."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.training import MedusaLesson, PairLesson, Seen, frequent, fresh_head, fresh_medusa, fresh_mtp
from specdec.training.objective import distilled, unrolled


def head_of(target, layers=(0, 1, 2), size=12):
    ids = torch.arange(0, 2 * size, 2)[:size] % target.facts.vocab_size
    torch.manual_seed(0)
    head = fresh_head(target.lend(), target.facts, layers, target.lend().head.weight, ids.unique()).double()
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
    head = fresh_head(target.lend(), target.facts, (0, 1, depth - 1), target.lend().head.weight, ids).double()
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
    if kind == "Gemma2":
        with pytest.warns(UserWarning, match="random weights"):
            fresh_head(target.lend(), target.facts, (1, 2, 3), target.lend().head.weight, torch.arange(10))
        return
    before = [weight.clone() for weight in target.lend().layer.values()]
    head = fresh_head(target.lend(), target.facts, (1, 2, 3), target.lend().head.weight, torch.arange(10))
    layer = target.lend().layer
    assert head.layer.mlp.up_proj.weight.equal(layer["mlp.up_proj.weight"])
    assert head.layer.hidden_norm.weight.equal(layer["input_layernorm.weight"])
    assert head.norm.weight.equal(target.lend().norm.weight)
    assert head.layer.self_attn.q_proj.weight[:, 32:].equal(layer["self_attn.q_proj.weight"])
    assert head.lm_head.weight.equal(target.lend().head.weight[:10])
    assert head.config.rope_theta == (5000.0 if kind == "Llama" else 10000.0)
    assert (head.config.rope_scaling is not None) == (kind == "Llama")
    assert all(a.equal(b) for a, b in zip(before, target.lend().layer.values(), strict=True))


def seen_of(own, tokens=None, width=8):
    torch.manual_seed(0)
    tokens = torch.randint(12, own.shape) if tokens is None else tokens
    return Seen(tokens, own, *(torch.randn(*own.shape, size).double() for size in (32, 96, 32)))


def lessons(target):
    rows, ids = target.lend().head.weight.detach(), torch.arange(0, 16, 2)
    lent, facts = target.lend(), target.facts
    yield PairLesson(fresh_head(lent, facts, (0, 1, 2), rows, ids).double(), rows[ids], 3)
    mtp, heads = fresh_mtp(lent, facts, ids, scale=3.0).double(), fresh_medusa(facts, ids, 3).double()
    with torch.no_grad():
        for weight in (*mtp.parameters(), *heads.parameters()):
            weight.add_(0.3 * torch.randn(weight.shape, dtype=weight.dtype))
    yield PairLesson(mtp, rows[ids], 3)
    yield MedusaLesson(heads, rows[ids], 3)


def test_only_own_words_are_learned_and_counted(tiny_float64):
    """The loss is the sum over the own words in reach; what the head would say of others changes neither it nor the agreement."""
    for lesson in lessons(tiny_float64):
        own = torch.rand(2, 9, generator=torch.Generator().manual_seed(3)) < 0.5
        seen, ids, best = seen_of(own), lesson.learner.ids, torch.randint(0, 16, (2, 9))
        loss, counts = 0.0, [[0, 0] for _ in range(3)]
        with torch.no_grad():
            for step, said in enumerate(lesson.said(seen)):
                laws = (seen.final @ lesson.rows.T).softmax(-1)
                logs = (said @ lesson.output(step).T).log_softmax(-1)
                for row in range(2):
                    for t in range(9 - 2 - step):
                        word = t + 2 + step
                        if bool(own[row, word]) and int(seen.tokens[row, word]) in ids.tolist():
                            loss -= 0.8**step * float(laws[row, word - 1] @ logs[row, t])
                        right = [int(ids[(part[row, t] @ lesson.output(n).T).argmax()]) == int(best[row, t + 1 + n])
                                 for n, part in enumerate(lesson.said(seen)[: step + 1])]  # fmt: skip
                        if all(bool(own[row, t + 2 + n]) for n in range(step + 1)) and all(right[:-1]):
                            counts[step][0] += right[-1]
                            counts[step][1] += 1
            assert float(lesson(seen)) == pytest.approx(loss, rel=1e-4)
            assert [list(pair) for pair in lesson.agreement(seen, best)] == counts


def test_medusa_heads_read_the_same_state_and_say_tokens_further_and_further_ahead(tiny_float64):
    *_, lesson = lessons(tiny_float64)
    seen = seen_of(torch.ones(1, 7, dtype=torch.bool))
    for step, said in enumerate(lesson.said(seen)):
        assert said.shape == (1, 5 - step, 32)
        assert said.equal(lesson.learner.said(step, seen.final[:, : 5 - step]))


def test_a_shared_output_head_gets_no_gradient_and_gives_one(tiny_float64):
    _, mtp, medusa = lessons(tiny_float64)
    for lesson in (mtp, medusa):
        lesson(seen_of(torch.ones(2, 9, dtype=torch.bool))).backward()
        grads = {name: weight.grad for name, weight in lesson.learner.named_parameters()}
        assert not lesson.rows.requires_grad
        assert all(grad is not None and bool(grad.any()) for name, grad in grads.items()), grads
