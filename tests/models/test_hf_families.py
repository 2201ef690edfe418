"""Hugging Face families as targets: every node of every tree against a fresh dense forward of its own path."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from specdec.base import Context
from specdec.models.hf import HFTarget
from specdec.testing.tolerances import TREE_PASS
from specdec.tree import root_only
from specdec.types import PAD, DraftTree, Features
from specdec.verifiers.tree import TreeVerifier
from specdec.warp import Warper

pytestmark = pytest.mark.slow

V = 40
SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GQA = {**SIZES, "num_key_value_heads": 2}
SMALL = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "Llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GQA)),
    "Qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**GQA)),
    "Qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GQA, head_dim=8)),
    "Mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**GQA, sliding_window=None)),
    "GPT2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**SMALL)),
    "GPTNeoX": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZES)),
}
# Rotary embeddings, norms and softmax stay in float32 inside a Hugging Face model in float64.
TOLERANCE = {torch.float64: 1e-6, torch.float32: TREE_PASS[torch.float32]}


def build(family: str, attention: str = "sdpa", dtype: torch.dtype = torch.float32) -> tf.PreTrainedModel:
    torch.manual_seed(1)
    model = FAMILIES[family]()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)  # the usual 0.02 makes every law uniform
    model.config._attn_implementation = attention
    return model.to(dtype).eval()


def context(target: HFTarget, batch: int, layers: tuple[int, ...] = ()) -> Context:
    return Context(batch, target.facts, Warper([], batch=batch), False, 64, Features(layers))


def random_tree(batch: int, nodes: int, generator: torch.Generator) -> DraftTree:
    """Row b has b nodes fewer, but its root."""
    tokens = torch.randint(3, V, (batch, nodes), generator=generator)
    parents = [[-1, *[int(torch.randint(0, i, (), generator=generator)) for i in range(1, nodes)]] for _ in range(batch)]
    keep = torch.arange(nodes) < (nodes - torch.arange(batch)[:, None]).clamp_min(1)
    return DraftTree(torch.where(keep, tokens, 0), torch.where(keep, torch.tensor(parents), PAD))


def path(parents: Tensor, node: int) -> list[int]:
    nodes: list[int] = []
    while node >= 0:
        nodes, node = [node, *nodes], int(parents[node])
    return nodes


@torch.no_grad()
def dense(model: tf.PreTrainedModel, rows: list[list[int]]) -> Tensor:
    """The law after each row. Rows are filled up behind their end, which a causal model does not see."""
    longest = max(map(len, rows))
    logits = model(input_ids=torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows]), use_cache=False).logits
    return logits[torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])].log_softmax(-1)


def assert_tree(model: tf.PreTrainedModel, logp: Tensor, tree: DraftTree, history: list[list[int]]) -> None:
    real = (tree.parents != PAD).nonzero().tolist()
    expected = dense(model, [history[row] + tree.tokens[row, path(tree.parents[row], node)].tolist() for row, node in real])
    got = torch.stack([logp[row, node] for row, node in real])
    assert torch.allclose(got, expected, rtol=0, atol=TOLERANCE[model.dtype]), f"{(got - expected).abs().amax(-1)} at {real}"


# Nodes, how many of the path to its last node each row keeps (None: roll back), rows to go on with (None: all).
ROUNDS = [(6, (3, 1, 2), None), (1, (1, 1, 1), None), (5, None, None), (4, (9, 0, 1), [2, 0]), (7, (9, 9), [1]), (5, (9,), None)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounds_of_trees_agree_with_dense_forwards(family: str, attention: str, dtype: torch.dtype) -> None:
    model = build(family, attention, dtype)
    verifier = TreeVerifier(HFTarget(model))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, V, (n,), generator=generator).tolist() for n in (9, 4, 1)]
    state = verifier.begin(context(HFTarget(model), 3))
    for start, chunk in ((0, 1), (1, 3), (4, 20)):
        parts = [prompt[start : start + chunk] for prompt in prompts]
        longest = max(map(len, parts))
        verifier.extend(state, torch.tensor([[*p, *[0] * (longest - len(p))] for p in parts]), torch.tensor([len(p) for p in parts]))
    history = prompts
    for nodes, keep, rows in ROUNDS:
        batch = len(history)
        tree = random_tree(batch, nodes, generator)
        assert_tree(model, verifier.verify(state, tree).logp, tree, history)
        if keep is None:
            continue  # the rollback
        last = [int((parents != PAD).sum()) - 1 for parents in tree.parents]
        chosen = [path(parents, node)[:n] for parents, node, n in zip(tree.parents, last, keep, strict=True)]
        longest = max(map(len, chosen))
        kept = torch.tensor([[*c, *[-1] * (longest - len(c))] for c in chosen])
        verifier.commit(state, kept, torch.tensor([len(c) for c in chosen]))
        history = [ids + tree.tokens[row, c].tolist() for row, (ids, c) in enumerate(zip(history, chosen, strict=True))]
        if rows is not None:
            state, history = verifier.select(state, rows), [history[row] for row in rows]


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_runs_and_stays_near(family: str, dtype: torch.dtype) -> None:
    """A wrong mask or position would show as a difference of order one."""
    model = build(family).to(dtype)
    verifier = TreeVerifier(HFTarget(model))
    state = verifier.begin(context(HFTarget(model), 2))
    verifier.extend(state, torch.tensor([[3, 4, 5], [6, 0, 0]]), torch.tensor([3, 1]))
    tree = random_tree(2, 5, torch.Generator().manual_seed(0))
    logp = verifier.verify(state, tree).logp
    assert logp.dtype == torch.float32
    paths = [tree.tokens[row, path(tree.parents[row], 3)].tolist() for row in range(2)]
    expected = dense(model.float(), [[3, 4, 5, *paths[0]], [6, *paths[1]]])
    assert torch.allclose(logp[:, 3], expected, rtol=0, atol=0.15)


# ---------------------------------------------------------------------------------------------------------------- features


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_hidden_states_of_the_dense_forward(family: str) -> None:
    model = build(family, dtype=torch.float64)
    target, layers = HFTarget(model), (2, 0, 1)
    verifier = TreeVerifier(target)
    state = verifier.begin(context(target, 1, layers))
    ids = [5, 6, 7, 8, 9]
    prompt = verifier.extend(state, torch.tensor([ids[:3]]), torch.tensor([3])).features
    tree = DraftTree(torch.tensor([[8, 30, 9]]), torch.tensor([[-1, 0, 0]]))
    verification = verifier.verify(state, tree)
    commit = verifier.commit(state, torch.tensor([[0, 2]]), torch.tensor([2]))
    assert torch.equal(commit.features, verification.features[:, [0, 2]])
    with torch.no_grad():
        hidden = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
        norm = [m for m in model.get_decoder().children() if not isinstance(m, (nn.ModuleList, nn.Embedding, nn.Dropout))][0]
        got = torch.cat([prompt, commit.features], 1).split(32, -1)
        assert torch.allclose(got[1], hidden[0], rtol=0, atol=1e-6)
        assert torch.allclose(got[2], hidden[1], rtol=0, atol=1e-6)
        assert torch.allclose(norm(got[0]), hidden[2], rtol=0, atol=1e-6), "transformers shows the last one behind the final norm"
        assert not torch.allclose(got[0], hidden[2], rtol=0, atol=1e-2)


def test_a_token_has_the_same_features_from_the_prompt_and_from_a_round() -> None:
    target = HFTarget(build("Llama", dtype=torch.float64))
    verifier, ids = TreeVerifier(target), [5, 6, 7, 8]
    state = verifier.begin(context(target, 1, (0, 1, 2)))
    read = verifier.extend(state, torch.tensor([ids]), torch.tensor([4])).features
    state = verifier.begin(context(target, 1, (0, 1, 2)))
    verifier.verify(state, DraftTree(torch.tensor([ids]), torch.arange(-1, 3)[None]))
    scored = verifier.commit(state, torch.arange(4)[None], torch.tensor([4])).features
    assert torch.allclose(read, scored, rtol=0, atol=1e-6)


def test_unknown_layers_are_refused() -> None:
    target = HFTarget(build("Llama"))
    verifier = TreeVerifier(target)
    for layers in ((3,), (0, -1)):
        state = verifier.begin(context(target, 1, layers))
        with pytest.raises(ValueError, match=r"layers: got \(.*boundaries 0 to 2"):
            verifier.verify(state, root_only(torch.tensor([3])))


# ------------------------------------------------------------------------------------------------------------------- facts


def test_facts() -> None:
    facts = HFTarget(build("GPT2", dtype=torch.float64)).facts
    assert (facts.vocab_size, facts.dtype, facts.max_positions, facts.hidden_size, facts.num_layers) == (V, torch.float64, 64, 32, 2)
    assert facts.device == torch.device("cpu")


def test_a_length_at_which_rotary_frequencies_jump_is_the_limit() -> None:
    """Keys in the cache were rotated with the old ones."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = tf.Phi3Config(**GQA, rope_parameters=rope, original_max_position_embeddings=32)
    assert HFTarget(tf.Phi3ForCausalLM(config).eval()).facts.max_positions == 32


def test_the_head_is_not_run_on_the_prompt() -> None:
    model, calls = build("Llama"), []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    verifier = TreeVerifier(HFTarget(model))
    state = verifier.begin(context(HFTarget(model), 1))
    verifier.extend(state, torch.tensor([[3, 4]]), torch.tensor([2]))
    assert not calls
    verifier.verify(state, root_only(torch.tensor([5])))
    assert calls == [1]


# ------------------------------------------------------------------------------------------------------------------ purity


def fingerprint(model: tf.PreTrainedModel) -> dict[str, Any]:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_backward_hooks")
    return copy.deepcopy({
        "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "config": model.config.to_dict(), "attention": model.config._attn_implementation, "generation": model.generation_config.to_dict(),
        "training": [module.training for module in model.modules()],
        "hooks": [[len(getattr(module, name)) for name in hooks] for module in model.modules()],
        "forward": [vars(module).get("forward") for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "grad": [parameter.requires_grad for parameter in model.parameters()], "grad_mode": torch.is_grad_enabled(),
    })  # fmt: skip


@contextmanager
def unchanged(model: tf.PreTrainedModel) -> Iterator[None]:
    before = fingerprint(model)
    yield
    after = fingerprint(model)
    for key, value in before.items():
        assert after[key] == value, key


@pytest.mark.parametrize("family", ["Llama", "GPT2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_is_left_as_it_was_also_after_an_error(family: str, attention: str) -> None:
    model = build(family, attention)
    model.config.use_cache = False  # an option that a pass must not follow, and must not overwrite either
    model.generation_config.temperature = 0.7
    with unchanged(model):
        target = HFTarget(model)
        verifier = TreeVerifier(target)
        state = verifier.begin(context(target, 2, (0, 2)))
        verifier.extend(state, torch.tensor([[3, 4, 5], [6, 0, 0]]), torch.tensor([3, 1]))
        tree = random_tree(2, 4, torch.Generator().manual_seed(0))
        before = verifier.verify(state, tree).logp

        def fail(*_: Any) -> None:
            raise IndexError("out of order")

        broken = model.get_output_embeddings().register_forward_hook(fail)
        with pytest.raises(IndexError, match="out of order"):
            verifier.verify(state, tree)
        broken.remove()
        with pytest.raises(RuntimeError):
            target.forward(torch.tensor([[1]]), torch.tensor([[0]]), None, target.new_cache(1), logits=True, layers=(1,))  # not opened
        with pytest.raises(RuntimeError, match="no verified tree"):
            verifier.commit(state, torch.tensor([[0], [0]]), torch.tensor([1, 1]))
        # A failed pass is a transaction that was not committed.
        assert torch.allclose(verifier.verify(state, tree).logp, before, rtol=0, atol=1e-5)


def test_training_mode_without_noise_is_honoured() -> None:
    model = build("Llama").train()
    with unchanged(model):
        verifier = TreeVerifier(HFTarget(model))
        logp = verifier.verify(verifier.begin(context(HFTarget(model), 1)), root_only(torch.tensor([3]))).logp
    assert torch.allclose(logp[0, 0], dense(model, [[3]])[0], rtol=0, atol=1e-5)
    assert not logp.requires_grad


# ---------------------------------------------------------------------------------------------------------------- refusals


REFUSED = {
    "T5": (tf.T5ForConditionalGeneration, {"vocab_size": V, "d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2}, "encoder"),
    "cross attention": (tf.GPT2LMHeadModel, {**SMALL, "add_cross_attention": True}, "encoder"),
    "no head": (tf.LlamaModel, GQA, "no language-model head.*AutoModelForCausalLM"),
    "Mamba": (tf.MambaForCausalLM, {"vocab_size": V, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}, "recurrent state"),
    "RWKV": (tf.RwkvForCausalLM, {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2}, "recurrent state"),
    "RecurrentGemma": (tf.RecurrentGemmaForCausalLM, {**GQA, "num_hidden_layers": 3, "lru_width": 32}, "recurrent state"),
    "Lfm2": (tf.Lfm2ForCausalLM, {**GQA, "layer_types": ["full_attention", "conv"]}, "LinearAttentionLayer in layer 1"),
    "Gemma2": (tf.Gemma2ForCausalLM, {**GQA, "pad_token_id": 0, "head_dim": 8}, "DynamicSlidingWindowLayer in layer 0"),
    "Mistral": (tf.MistralForCausalLM, {**GQA, "sliding_window": 4096}, "DynamicSlidingWindowLayer in layer 0"),
    "Qwen2": (tf.Qwen2ForCausalLM, {**GQA, "use_sliding_window": True, "max_window_layers": 1}, "DynamicSlidingWindowLayer in layer 1"),
    "Llama4": (tf.Llama4ForCausalLM, {**GQA, "num_local_experts": 2, "intermediate_size_mlp": 16}, "DynamicSlidingWindowLayer in layer 0"),
    "GPTNeo": (tf.GPTNeoForCausalLM, {"vocab_size": V, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "window_size": 4,
                                      "attention_types": [[["global", "local"], 1]]}, "window_size=4"),
    "Bloom": (tf.BloomForCausalLM, {"vocab_size": V, "hidden_size": 16, "n_layer": 1, "n_head": 2}, "takes no position_ids"),
    "MPT": (tf.MptForCausalLM, {"vocab_size": V, "d_model": 16, "n_layers": 1, "n_heads": 2}, "takes no position_ids"),
    "Falcon": (tf.FalconForCausalLM, {**SIZES, "alibi": True}, "ALiBi"),
    "RoBERTa": (tf.RobertaForCausalLM, {**SIZES, "pad_token_id": 0, "is_decoder": True}, "positions from its padding token"),
    "BERT": (tf.BertLMHeadModel, {**SIZES, "pad_token_id": 0}, "both directions.*is_decoder=True"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_an_architecture_that_cannot_verify_trees_is_refused(kind: str) -> None:
    cls, settings, reason = REFUSED[kind]
    model = cls(cls.config_class(**settings)).eval()
    with pytest.raises(ValueError, match=rf"^model: {cls.__name__} .*{reason}"):
        HFTarget(model)


def test_a_setting_that_cannot_verify_trees_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'flash_attention_2' attention.*attn_implementation=\"sdpa\""):
        HFTarget(build("Llama", "flash_attention_2"))
    noisy = tf.GPT2LMHeadModel(tf.GPT2Config(**SMALL, attn_pdrop=0.0, embd_pdrop=0.1, resid_pdrop=0.0)).train()
    with pytest.raises(ValueError, match=r"training mode with .*embd_pdrop=0.1.*model.eval\(\)"):
        HFTarget(noisy)
    assert noisy.training, "it is not ours to switch"
    adapted = build("Llama")
    adapted.lm_head.add_module("lora_dropout", nn.Dropout(0.2).train())
    with pytest.raises(ValueError, match=r"training mode with .*p=0.2.*model.eval\(\)"):
        HFTarget(adapted)
    recomputing = build("Llama").train()
    recomputing.model.gradient_checkpointing = True
    with pytest.raises(ValueError, match=r"gradient checkpointing.*model.eval\(\)"):
        HFTarget(recomputing)


def test_a_bert_trained_as_a_decoder_is_accepted_and_right() -> None:
    model = tf.BertLMHeadModel(tf.BertConfig(**{**SIZES, "pad_token_id": 0}, is_decoder=True)).double().eval()
    verifier = TreeVerifier(HFTarget(model))
    state = verifier.begin(context(HFTarget(model), 2))
    verifier.extend(state, torch.tensor([[3, 4, 5], [6, 0, 0]]), torch.tensor([3, 1]))
    tree = random_tree(2, 5, torch.Generator().manual_seed(0))
    assert_tree(model, verifier.verify(state, tree).logp, tree, [[3, 4, 5], [6]])
