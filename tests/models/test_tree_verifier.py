"""One pass over a tree against one dense pass per node, in float64 on our own model: ten digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from specdec.base import Context, Verifier
from specdec.models.tiny import TinyTarget
from specdec.testing.tolerances import TREE_PASS
from specdec.tree import chain, root_only
from specdec.types import PAD, DraftTree, Features
from specdec.verifiers.factory import make_verifier
from specdec.verifiers.sequential import SequentialVerifier
from specdec.verifiers.tree import TreeVerifier
from specdec.warp import Warper

V = 16
TARGET = TinyTarget(V)
TREE = TreeVerifier(TARGET)
CLOSE = TREE_PASS[torch.float64]


def context(batch: int, layers: tuple[int, ...] = (), warper: Warper | None = None) -> Context:
    return Context(batch, TARGET.facts, warper or Warper([], batch=batch), False, 100, Features(layers))


def started(prompts: Sequence[Sequence[int]], layers: tuple[int, ...] = (), verifier: Verifier = TREE) -> tuple[Verifier, Any]:
    state = verifier.begin(context(len(prompts), layers))
    longest = max(map(len, prompts))
    tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], dtype=torch.int64)
    verifier.extend(state, tokens, torch.tensor([len(prompt) for prompt in prompts]))
    return verifier, state


def path(parents: Tensor, node: int) -> list[int]:
    nodes: list[int] = []
    while node >= 0:
        nodes, node = [node, *nodes], int(parents[node])
    return nodes


def dense(ids: Sequence[int]) -> Tensor:
    return TARGET(torch.tensor([list(ids)]))[0].log_softmax(-1)


@st.composite
def trees(draw: st.DrawFn, batch: int) -> DraftTree:
    """Rows of their own sizes and shapes, padding among them."""
    nodes = draw(st.integers(1, 7))
    parents, tokens = [], []
    for _ in range(batch):
        size = draw(st.integers(1, nodes))
        parents.append([-1, *[draw(st.integers(0, i - 1)) for i in range(1, size)], *[PAD] * (nodes - size)])
        tokens.append([*draw(st.lists(st.integers(0, V - 1), min_size=size, max_size=size)), *[0] * (nodes - size)])
    return DraftTree(torch.tensor(tokens), torch.tensor(parents))


@settings(max_examples=25)
@given(st.data())
def test_any_rounds_agree_with_the_sequential_verifier(data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 3))
    history = [data.draw(st.lists(st.integers(0, V - 1), max_size=6)) for _ in range(batch)]
    (fast, state), (slow, truth) = started(history), started(history, verifier=SequentialVerifier(TARGET, V))
    for _ in range(data.draw(st.integers(1, 5))):
        tree = data.draw(trees(batch))
        real = tree.parents != PAD
        assert torch.allclose(fast.verify(state, tree).logp[real], slow.verify(truth, tree).logp[real], rtol=0, atol=CLOSE)
        if not data.draw(st.booleans()):
            continue  # the rollback
        chosen = [path(parents, data.draw(st.integers(0, int(row.sum()) - 1))) for parents, row in zip(tree.parents, real, strict=True)]
        chosen = [nodes[: data.draw(st.integers(0, len(nodes)))] for nodes in chosen]
        longest, count = max(map(len, chosen)), torch.tensor([len(nodes) for nodes in chosen])
        kept = torch.tensor([[*nodes, *[-1] * (longest - len(nodes))] for nodes in chosen], dtype=torch.int64)
        commit = fast.commit(state, kept, count)
        slow.commit(truth, kept, count)
        for row, nodes in enumerate(chosen):
            assert commit.tokens[row, : len(nodes)].tolist() == tree.tokens[row, nodes].tolist()
        if data.draw(st.booleans()):
            rows = data.draw(st.permutations(range(batch)))[: data.draw(st.integers(1, batch))]
            state, truth, batch = fast.select(state, rows), slow.select(truth, rows), len(rows)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 20])
def test_a_prompt_in_chunks_is_the_prompt(chunk: int) -> None:
    prompts = [list(range(13)), [3, 1, 4, 1, 5], []]
    verifier, state = TREE, TREE.begin(context(3))
    for start in range(0, 13, chunk):
        parts = [prompt[start : start + chunk] for prompt in prompts]
        longest = max(map(len, parts))
        tokens = torch.tensor([[*part, *[V + 99] * (longest - len(part))] for part in parts])  # what lies beyond a row's count is scrap
        commit = verifier.extend(state, tokens, torch.tensor([len(part) for part in parts]))
        assert commit.features is None
        assert [row[:n].tolist() for row, n in zip(commit.tokens, commit.count, strict=True)] == parts
    logp = verifier.verify(state, root_only(torch.tensor([7, 8, 9]))).logp[:, 0]
    for row, prompt in enumerate(prompts):
        assert torch.allclose(logp[row], dense([*prompt, 7 + row]), rtol=0, atol=CLOSE)


def states_of(ids: Sequence[int], layers: tuple[int, ...]) -> Tensor:
    """Dense hidden states at these input boundaries, [L, F]."""
    tokens = torch.tensor([list(ids)])
    length = len(ids)
    states = TARGET.net.hidden(tokens, torch.arange(length)[None], torch.ones(length, length, dtype=torch.bool).tril(), None)
    return torch.cat([states[layer][0] for layer in layers], -1)


def test_features_come_in_the_order_asked_for_from_the_prompt_and_from_the_path() -> None:
    layers = (2, 0, 1)
    prompts = [[1, 2, 3], [4]]
    verifier, state = TREE, TREE.begin(context(2, layers))
    commit = verifier.extend(state, torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1]))
    for row, prompt in enumerate(prompts):
        assert torch.allclose(commit.features[row, : len(prompt)], states_of(prompt, layers), rtol=0, atol=CLOSE)
    tree = DraftTree(torch.tensor([[5, 6, 7, 8], [9, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 2], [-1, 0, 1, 2]]))
    verification = verifier.verify(state, tree)
    for row, prompt in enumerate(prompts):
        for node in range(4):
            ids = [*prompt, *tree.tokens[row, path(tree.parents[row], node)].tolist()]
            assert torch.allclose(verification.features[row, node], states_of(ids, layers)[-1], rtol=0, atol=CLOSE)
    commit = verifier.commit(state, torch.tensor([[0, 2, 3], [0, 1, -1]]), torch.tensor([3, 2]))
    assert torch.allclose(commit.features[0], states_of([1, 2, 3, 5, 7, 8], layers)[3:], rtol=0, atol=CLOSE)
    assert torch.allclose(commit.features[1, :2], states_of([4, 9, 1], layers)[1:], rtol=0, atol=CLOSE)


def test_without_needs_there_are_no_features() -> None:
    verifier, state = started([[1, 2]])
    assert verifier.verify(state, root_only(torch.tensor([3]))).features is None
    assert verifier.commit(state, torch.tensor([[0]]), torch.tensor([1])).features is None


def test_a_row_does_not_see_its_batch_mates() -> None:
    prompts = [[1, 2, 3, 4, 5, 6], [7], [8, 9, 10]]
    trees = [chain([[2, 3]], [1]), chain([[4, 5, 6, 7]], [3]), root_only(torch.tensor([2]))]
    batched, state = started(prompts)
    together = batched.verify(state, chain([[2, 3], [4, 5, 6, 7], []], [1, 3, 2])).logp
    for row, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        alone, state = started([prompt])
        logp = alone.verify(state, tree).logp[0]
        assert torch.allclose(together[row, : len(logp)], logp, rtol=0, atol=1e-13)


def test_the_last_position_can_be_used_while_another_row_reads_on() -> None:
    """A row of the prompt that has ended must not run beyond the positions of the model."""
    verifier = TreeVerifier(TinyTarget(V, max_positions=8))
    state = verifier.begin(context(2))
    verifier.extend(state, torch.tensor([[1, 2, 3, 4, 5, 6], [1, 1, 1, 1, 1, 1]]), torch.tensor([6, 1]))
    verifier.extend(state, torch.tensor([[7, 0, 0, 0, 0], [1, 2, 3, 4, 5]]), torch.tensor([1, 5]))
    logp = verifier.verify(state, chain([[], [3]], [8, 9])).logp
    assert torch.allclose(logp[0, 0], dense([1, 2, 3, 4, 5, 6, 7, 8]), rtol=0, atol=CLOSE)
    assert torch.allclose(logp[1, 1], dense([1, 1, 2, 3, 4, 5, 9, 3]), rtol=0, atol=CLOSE)
    with pytest.raises(ValueError, match="position"):
        verifier.verify(state, chain([[9], []], [8, 9]))


def test_an_id_outside_the_vocabulary_does_not_reach_the_model() -> None:
    """A tree on a device is checked after its pass. What was verified is as it was given."""
    verifier, state = started([[1, 2]])
    tree = DraftTree(torch.tensor([[3, V, -1]]), torch.tensor([[-1, 0, 0]]))
    logp = verifier.verify(state, tree).logp[0]
    for node, known in ((1, V - 1), (2, 0)):
        assert torch.allclose(logp[node], dense([1, 2, 3, known]), rtol=0, atol=CLOSE)
    assert verifier.commit(state, torch.tensor([[0, 1]]), torch.tensor([2])).tokens.tolist() == [[3, V]]


def test_misuse_is_refused() -> None:
    verifier, state = started([[1, 2]])
    with pytest.raises(RuntimeError, match="no verified tree"):
        verifier.commit(state, torch.tensor([[0]]), torch.tensor([1]))
    verifier.verify(state, root_only(torch.tensor([3])))
    verifier.commit(state, torch.tensor([[0]]), torch.tensor([1]))
    with pytest.raises(RuntimeError, match="no verified tree"):
        verifier.commit(state, torch.tensor([[0]]), torch.tensor([1]))
    with pytest.raises(ValueError, match=r"layers: got \(3,\).*0 to 2"):
        started([[1, 2]], layers=(3,))
    with pytest.raises(ValueError, match=r"hidden_size \(32\).*num_heads \(3\)"):
        TinyTarget(V, num_heads=3)


def test_tiny_weights_come_from_the_seed_alone() -> None:
    ids, state = torch.tensor([[1, 2, 3]]), torch.get_rng_state()
    same, other = TinyTarget(V)(ids), TinyTarget(V, seed=1)(ids)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(same, TARGET(ids))
    assert not torch.allclose(other, same, atol=0.1)
    assert same.dtype == torch.float64
    assert TinyTarget(V, dtype=torch.float32)(ids).dtype == torch.float32


def test_factory() -> None:
    verifier, config = make_verifier(TARGET)
    assert isinstance(verifier, TreeVerifier)
    assert verifier.facts is TARGET.facts
    assert config is None
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=16)).eval()
    model.generation_config.temperature = 0.5
    verifier, config = make_verifier(model)
    assert isinstance(verifier, TreeVerifier)
    assert verifier.facts.vocab_size == V
    assert config.temperature == 0.5
    assert config is not model.generation_config
    given = SequentialVerifier(TARGET, V)
    assert make_verifier(None, given) == (given, None)
    verifier, config = make_verifier(model, given)
    assert verifier is given
    assert config.temperature == 0.5
    for other in (lambda ids: ids, None, model.transformer.wte):
        with pytest.raises(TypeError, match=rf"got {type(other).__name__}.*SequentialVerifier\(fn, vocab_size="):
            make_verifier(other)
