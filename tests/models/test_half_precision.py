"""Targets in half precision, and the quicker view of a model that decoding runs in place of the model itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

import specdec
from specdec import ContextDrafter, FixedPlanner, NGramDrafter, NullDrafter
from specdec.base import Context
from specdec.drafters import ModelDrafter
from specdec.models.hf import HFTarget, _quick
from specdec.models.view import RowLinear, view
from specdec.testing.audit import compare
from specdec.testing.tolerances import TREE_PASS
from specdec.tree import root_only
from specdec.types import PAD, DraftTree
from specdec.verifiers import TreeVerifier
from specdec.warp import Warper

pytestmark = pytest.mark.slow

V = 64
SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 128, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": None}  # fmt: skip
GPT = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": None}
FAMILIES: dict[str, Callable[[], tf.PreTrainedModel]] = {
    "Llama, shared heads": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, num_key_value_heads=2)),
    "Llama, one head of keys": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, num_key_value_heads=1)),
    "Llama, own heads": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES, num_key_value_heads=4)),
    "Qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES, num_key_value_heads=2)),
    "Qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)),
    "GPT2": lambda: tf.GPT2LMHeadModel(tf.GPT2Config(**GPT)),
    "GPTNeoX": lambda: tf.GPTNeoXForCausalLM(tf.GPTNeoXConfig(**SIZES)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = DTYPES[1:]
PROMPTS = [[5, 6, 7, 5, 6], [9], [11, 12, 11, 12, 11, 12, 11]]
NEW = {"max_new_tokens": 12, "planner": FixedPlanner(5)}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def build(family: str = "Llama, shared heads", dtype: torch.dtype = torch.float32, seed: int = 1) -> tf.PreTrainedModel:
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15) if parameter.ndim > 1 else parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


class Twigs(ContextDrafter):
    """A tree of tokens that occur in the prompts, some of them twice."""

    def guess(self, ids: list[Tensor], budget: Any) -> DraftTree:
        tokens = torch.stack([row[[-1, -1, 0, 0, len(row) // 2, -1]] for row in ids])
        parents, depth = torch.tensor([-1, 0, 0, 1, 1, 2]), torch.tensor([0, 1, 1, 2, 2, 2])
        return DraftTree(tokens, torch.where(depth <= budget.depth[:, None], parents, PAD))


DRAFTERS: dict[str, Callable[[tf.PreTrainedModel], Any]] = {
    "ngram": lambda model: NGramDrafter(), "tree": lambda model: Twigs(), "itself": ModelDrafter,
    "in float32": lambda model: ModelDrafter(build()), "in bfloat16": lambda model: ModelDrafter(build(dtype=torch.bfloat16)),
    "in float16": lambda model: ModelDrafter(build(dtype=torch.float16)),
}  # fmt: skip


@cache
def plain(dtype: torch.dtype) -> list[list[int]]:
    """Each row decoded alone."""
    model = build(dtype=dtype)
    return [specdec.generate(model, [prompt], drafter=NullDrafter(), **NEW).new_tokens[0].tolist() for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_greedy_text_is_plain_text_up_to_near_ties(dtype, drafter):
    """Against rows decoded alone, where every product has another shape, so that half precision has ties to show."""
    model = build(dtype=dtype)
    found = specdec.generate(model, PROMPTS, drafter=DRAFTERS[drafter](model), **NEW)
    assert found.stats.drafted > 20
    for prompt, text, new, scores in zip(PROMPTS, plain(dtype), found.new_tokens, found.logprobs, strict=True):
        verdict = compare(model, prompt, text, new.tolist())
        assert verdict.verdict != "different" and (dtype != torch.float32 or verdict.verdict == "equal"), verdict
        assert scores.isfinite().all() and (scores <= 0).all()
    if drafter == "itself" or drafter == f"in {name(dtype)}":
        assert found.stats.accepted > 0.8 * found.stats.drafted


@pytest.mark.parametrize("drafter", ["tree", "itself", "in float32", "in bfloat16"])
@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_sampling(dtype, drafter):
    model = build(dtype=dtype)
    options = {"do_sample": True, "top_k": 0, "top_p": 0.95, "temperature": 0.9, "seed": [1, 2, 3], **NEW}
    found = specdec.generate(model, PROMPTS, drafter=DRAFTERS[drafter](model), return_rounds="all", **options)
    for done in found.rounds or ():
        assert done.verification.logp.dtype == torch.float32 and not done.verification.logp.isnan().any()
        assert done.tree.laws is None or (done.tree.laws.dtype == torch.float32 and done.tree.laws.isfinite().all())
    assert all(len(new) == 12 and scores.isfinite().all() for new, scores in zip(found.new_tokens, found.logprobs, strict=True))
    again = specdec.generate(model, PROMPTS, drafter=DRAFTERS[drafter](model), **options)
    assert again.sequences.equal(found.sequences)
    if drafter == "itself":
        assert found.stats.accepted > 0.8 * found.stats.drafted


# ------------------------------------------------------------------------------------------------------------- the quicker view

ULPS = 4
"""Of the largest logit: two orders of summation of a pass of two layers, each rounding its states to the same grid several times."""


def width(logits: Tensor, dtype: torch.dtype) -> float:
    eps = torch.finfo(dtype).eps
    return TREE_PASS[dtype] if dtype == torch.float32 else ULPS * eps * 2.0 ** float(logits.abs().max().log2().floor())


def trees(nodes: int) -> DraftTree:
    generator = torch.Generator().manual_seed(nodes)
    tokens = torch.randint(0, V, (3, nodes), generator=generator)
    parents = torch.tensor([[-1, *[int(torch.randint(0, i, (), generator=generator)) for i in range(1, nodes)]] for _ in range(3)])
    real = torch.arange(nodes) < (nodes - torch.arange(3)[:, None]).clamp_min(1)
    return DraftTree(tokens, torch.where(real, parents, PAD))


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ragged", [True, False], ids=["ragged", "aligned"])
def test_the_view_computes_what_the_model_does(family, dtype, ragged):
    """After the same prompts in the same cache: trees, chains and single tokens, with a mask and without one."""
    model = build(family, dtype)
    quick, slow = HFTarget(model), HFTarget(model, quick=False)
    assert _quick(model, model.config) is not None
    context = Context(3, quick.facts, Warper([], batch=3), False, 64)
    prompts = [row[:n] for row, n in zip(([5, 6, 7, 5, 6], [9] * 5, [11, 12, 13, 14, 15]), (5, 1, 3) if ragged else (5, 5, 5), strict=True)]
    tokens = torch.tensor([[*row, *[0] * (5 - len(row))] for row in prompts])
    for nodes in (1, 2, 7):
        tree, found = root_only(torch.tensor([3, 4, 5])) if nodes == 1 else trees(nodes), []
        for target in (quick, slow):
            verifier = TreeVerifier(target)
            state = verifier.begin(context)
            # the prompt is read by the one model in both cases: what is compared is one pass
            TreeVerifier(slow).extend(state, tokens, torch.tensor([len(row) for row in prompts]))
            found.append(verifier.verify(state, tree).logits)
        real = tree.parents != PAD
        assert found[0].dtype == dtype and found[0].isfinite().all()
        off = (found[0][real] - found[1][real]).abs().max()
        assert off <= width(found[1][real], dtype), f"{nodes} nodes: {float(off)}"
        assert not torch.allclose(found[0][0], found[0][1], atol=0.05), "or every law is the same"


@pytest.mark.parametrize("batch", [1, 3])
def test_one_token_without_a_mask(batch):
    for family in FAMILIES:
        model, found = build(family), []
        tokens = torch.arange(4 * batch).view(batch, 4)
        for quick in (True, False):
            target = HFTarget(model, quick=quick)
            cache = target.new_cache(batch)
            for at in range(4):
                cache.open(1)
                logits, _ = target.forward(tokens[:, at : at + 1], torch.full((batch, 1), at), None, cache, logits=True)
                cache.commit(torch.zeros(batch, 1, dtype=torch.int64), torch.ones(batch, dtype=torch.int64))
            found.append(logits)
        torch.testing.assert_close(*found, atol=TREE_PASS[torch.float32], rtol=0)
        with torch.no_grad():
            torch.testing.assert_close(found[0][:, 0], model(tokens).logits[:, -1], atol=TREE_PASS[torch.float32], rtol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", HALF, ids=name)
def test_a_row_through_a_linear_layer(dtype, bias):
    layer = nn.Linear(48, 80, bias=bias).to(dtype)
    quick = nn.Linear(48, 80, bias=bias).to(dtype)
    quick.__class__ = RowLinear
    quick.load_state_dict(layer.state_dict())
    for shape in ((48,), (1, 48), (1, 1, 48), (1, 1, 1, 48), (2, 48), (1, 3, 48), (0, 48), (2, 1, 48)):
        x = torch.randn(shape, dtype=dtype)
        with torch.no_grad():
            got, expected = quick(x), layer(x)
            exact = layer.double()(x.double())
            layer.to(dtype)
        assert got.shape == expected.shape and got.dtype == dtype
        # one rounding of a sum kept in float32, and one more where the bias is added behind it
        bound = 2 * torch.finfo(dtype).eps * max(1.0, float(exact.abs().max()) if exact.numel() else 1.0)
        assert not exact.numel() or (got - exact).abs().max() <= bound
        assert not exact.numel() or (got - expected).abs().max() <= 2 * bound
    strided = torch.randn(48, 2, dtype=dtype)[None, :, 1]
    with torch.no_grad():
        assert torch.allclose(quick(strided), layer(strided), atol=0.05)


# --------------------------------------------------------------------------------------- what is left alone, and what is shared


def linears(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules() if isinstance(module, nn.Linear)]


class Adapter(nn.Linear):
    """A layer of somebody else's, as PEFT's are: a linear one, and more."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 1.5


def test_a_layer_of_another_class_is_left_alone():
    model = build(dtype=torch.bfloat16)
    tokens = torch.tensor([[3, 4, 5]])
    alone = specdec.generate(model, tokens, drafter=NullDrafter(), **NEW)
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Adapter
    quick = _quick(model, model.config)
    kinds = linears(quick)
    assert kinds.count(Adapter) == 2 and set(kinds) == {Adapter, RowLinear}
    found = specdec.generate(model, tokens, drafter=NGramDrafter(), **NEW)
    theirs = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False)
    assert not found.sequences.equal(alone.sequences), "or the adapter changes nothing"
    assert compare(model, tokens[0].tolist(), theirs[0, 3:].tolist(), found.new_tokens[0].tolist()).verdict != "different"


@pytest.mark.parametrize("where", ["model", "model.layers.1.self_attn", "lm_head"])
def test_a_patched_model_is_run_as_it_is(where):
    model = build()
    tokens = torch.tensor([[3, 4, 5]])
    module, calls = model.get_submodule(where), []
    original = module.forward

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    expected = specdec.generate(model, tokens, drafter=NullDrafter(), **NEW)
    module.forward = forward
    assert _quick(model, model.config) is None
    found = specdec.generate(model, tokens, drafter=NGramDrafter(), **NEW)
    assert found.sequences.equal(expected.sequences) and len(calls) >= found.stats.steps
    assert vars(module)["forward"] is forward


def test_only_scaled_dot_product_attention_is_replaced():
    model = build()
    model.set_attn_implementation("eager")
    assert _quick(model, model.config) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_a_view_shares_what_the_model_knows(dtype):
    model = build(dtype=dtype)
    classes, config = [type(module) for module in model.modules()], model.config.to_dict()
    held = [(id(module), sorted(vars(module))) for module in model.modules()]
    target = HFTarget(model)
    quick = _quick(model, model.config)
    assert all(a is b for a, b in zip(model.parameters(), quick.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), quick.buffers(), strict=True))
    assert quick.config is not model.config and quick.config._attn_implementation != "sdpa" == model.config._attn_implementation
    assert RowLinear in linears(quick) if dtype != torch.float32 else set(linears(quick)) == {nn.Linear}

    verifier, root = TreeVerifier(target), root_only(torch.tensor([3]))
    context = Context(1, target.facts, Warper([], batch=1), False, 64)
    before = verifier.verify(verifier.begin(context), root).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
        fresh = model(torch.tensor([[3]])).logits
    after = verifier.verify(verifier.begin(context), root).logits
    assert (after - fresh).abs().max() <= width(fresh, dtype)
    assert (after - before).abs().max() > 0.1
    # another tensor in the parameter's place shows too
    model.lm_head.weight = nn.Parameter(torch.zeros_like(model.lm_head.weight))
    assert not verifier.verify(verifier.begin(context), root).logits.any()

    assert [type(module) for module in model.modules()] == classes and model.config.to_dict() == config
    assert [(id(module), sorted(vars(module))) for module in model.modules()] == held
    assert model.config._attn_implementation == "sdpa"


def test_hooks_of_the_user_fire():
    model, tokens = build(dtype=torch.bfloat16), torch.tensor([[3, 4, 5]])
    alone = specdec.generate(model, tokens, drafter=NullDrafter(), **NEW)
    seen: list[str] = []
    names = {module: path for path, module in model.named_modules()}
    handles = [
        model.register_forward_hook(lambda *_: seen.append("model")),
        model.model.norm.register_forward_hook(lambda module, *_: seen.append(names[module])),
        model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *_: seen.append("inside")),
        model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append("before")),
        model.lm_head.register_forward_hook(lambda module, args, output: output.flip(-1)),
    ]
    found = specdec.generate(model, tokens, drafter=NullDrafter(), **NEW)
    assert seen.count("model") == found.stats.steps == 12 and seen.count("inside") == seen.count("before") == 13, "with the prompt"
    assert seen.count("model.norm") == 13, "a hook is called with the module that it was set on"
    assert found.new_tokens[0][0] == V - 1 - alone.new_tokens[0][0], "what a hook returns stands"
    for handle in handles:
        handle.remove()
    assert specdec.generate(model, tokens, drafter=NullDrafter(), **NEW).sequences.equal(alone.sequences)
    # one that comes after the view was made
    target = HFTarget(model)
    verifier = TreeVerifier(target)
    model.lm_head.register_forward_hook(lambda *_: seen.append("late"))
    verifier.verify(verifier.begin(Context(1, target.facts, Warper([], batch=1), False, 64)), root_only(torch.tensor([3])))
    assert seen[-1] == "late"


def test_modules_that_stand_in_two_places_are_one_in_a_view():
    shared = nn.Linear(3, 3)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ReLU()), nn.Identity())
    model.register_module("nothing", None)
    changed: list[nn.Module] = []
    twin = view(model, changed.append)
    assert twin[0] is twin[1][0] is not shared and len(changed) == 5 and changed[-1] is twin
    assert model[0] is model[1][0] is shared
    twin[1][1] = nn.Identity()
    twin.extra = 3
    assert type(model[1][1]) is nn.ReLU and not hasattr(model, "extra")


def test_what_was_bound_to_a_module_is_bound_to_its_copy():
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0
            self.act = self.twice
            self.outside = [].append

        def twice(self, x: Tensor) -> Tensor:
            return self.scale * x

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x)

    model = nn.Sequential(Layer())

    def change(module: nn.Module) -> None:
        if type(module) is Layer:
            module.scale = 5.0

    twin = view(model, change)
    one = torch.ones(1)
    assert (float(twin(one)), float(model(one))) == (5.0, 2.0)
    assert twin[0].outside is model[0].outside


def test_what_a_call_leaves_can_be_trained_on():
    """A pass may run in inference mode; no tensor of that kind comes out of it, nor stays in the model or in a session."""
    model = build()
    out = specdec.generate(model, [[5, 6, 7]], drafter=specdec.NGramDrafter(), max_new_tokens=6, eos_token_id=[], return_rounds="all")
    for done in out.rounds:
        assert not any(x.is_inference() for x in (done.verification.scores, done.verification.logits, done.acceptance.path))
    cache = out.session._states[0].cache
    assert not any(x.is_inference() for pair in cache._layers.values() for x in pair)
    assert not any(x.is_inference() for x in (*model.parameters(), *model.buffers()))
    with torch.enable_grad():
        model(torch.tensor([[5, 6, 7]])).logits.sum().backward()
        (out.rounds[0].verification.scores * nn.Parameter(torch.ones(V))).sum().backward()
