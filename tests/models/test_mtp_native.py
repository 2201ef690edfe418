"""Modules for multi-token prediction that come inside a Hugging Face target, against transformers' own way of running them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

import specdec
from specdec import NullDrafter
from specdec.cache import FullCache
from specdec.drafters.grow import chain, dynamic, mixed, points, without_replacement
from specdec.drafters.mtp import MTPDrafter
from specdec.models import HFTarget
from specdec.models.mtp import NativeModule
from specdec.models.tiny import TinyTarget
from specdec.testing import parametrize_with_checks
from specdec.tree import ancestors
from specdec.verifiers import TreeVerifier

V = 11
SIZES = {"vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2,
         "num_attention_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1, "max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": None,
         "eos_token_id": None}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
FAMILIES: dict[str, Callable[..., tf.PreTrainedModel]] = {
    "DeepseekV3": lambda **given: tf.DeepseekV3ForCausalLM(tf.DeepseekV3Config(**{**SIZES, **LATENT, **given})),
    "Glm4Moe": lambda **given: tf.Glm4MoeForCausalLM(tf.Glm4MoeConfig(**{**SIZES, "num_key_value_heads": 2, "head_dim": 8, **given})),
}
PROMPTS = [[1, 2, 3, 1, 2, 7, 9], [4, 8], [5, 6, 5, 6, 5]]
SHAPES = [chain(), points(3, 2), dynamic(6, depth=3)]
# Rotary embeddings, norms, routers and softmax stay in float32 inside a Hugging Face model in float64.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4}


def fill(module: torch.nn.Module, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            drawn = torch.randn(weight.shape, generator=noise, dtype=torch.float64)
            weight.copy_(1 + 0.3 * drawn if weight.ndim == 1 else drawn / math.sqrt(weight.shape[-1]))


def build(family: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa", seed: int = 1, **given: Any) -> tf.PreTrainedModel:
    model = FAMILIES[family](**given)
    fill(model, seed)
    with torch.no_grad():
        model.lm_head.weight *= 3
    model.config._attn_implementation = attention
    model.config._experts_implementation = "eager"  # the usual one does not know float64
    return model.to(dtype).eval()


def modules(model: tf.PreTrainedModel, seed: int = 2) -> MtpModel:
    """One random module beside the model, which stays as it is."""
    made = MtpModel(model, 1)
    fill(made.layers, seed)
    made.layers.to(model.dtype).eval()
    return made


def features(model: tf.PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model.base_model(input_ids=ids).last_hidden_state


@torch.no_grad()
def theirs(made: MtpModel, tokens: Tensor, hidden: Tensor, at: int, cache: MtpCache) -> tuple[Tensor, Tensor]:
    """What transformers' first module says of tokens `at`, at + 1, ... of one row, [1, T, d], and the logits behind the last, [1, V]."""
    said: list[Tensor] = []
    handle = made.layers[0].register_forward_hook(lambda module, args, output: said.append(output))
    positions = torch.arange(at, at + tokens.shape[1])[None]
    _, logits, _ = made(input_ids=tokens, last_hidden_states=hidden, attention_mask=torch.ones_like(tokens), position_ids=positions,
                        mtp_cache=cache)  # fmt: skip
    handle.remove()
    return said[0], logits[:, 0]


def slow_chain(model: tf.PreTrainedModel, made: MtpModel, text: list[int], length: int, hidden: Tensor) -> list[int]:
    """Greedy tokens behind the text by transformers alone: its module again and again, of true features [1, L - 1, d] first."""
    cache, tokens, at, drafted = MtpCache(config=model.config.get_mtp_config()), torch.tensor([text])[:, 1:], 1, list[int]()
    for _ in range(length):
        said, logits = theirs(made, tokens, hidden, at, cache)
        drafted.append(int(logits.argmax()))
        at, tokens, hidden = at + tokens.shape[1], torch.tensor([drafted[-1:]]), said[:, -1:]
    return drafted


# ----------------------------------------------------------------------------------------------------------- what it says


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_says_what_transformers_says(family: str, attention: str, dtype: torch.dtype) -> None:
    """Of rows of their own lengths, read in two parts; then of a tree, each node against its path alone."""
    model = build(family, dtype, attention)
    made = modules(model)
    head, near = NativeModule(made, model), {"rtol": 0, "atol": TOLERANCE[dtype]}
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [3, 3, 9, 1, 2, 8, 0, 0, 0, 0]])
    lengths, cache, hidden = [9, 5], FullCache(2), features(model, ids)[:, :-1]
    embed, expected, got = model.get_input_embeddings(), [], [[], []]
    for row, n in enumerate(lengths):
        expected.append(theirs(made, ids[row : row + 1, 1 : n + 1], hidden[row : row + 1, :n], 1, MtpCache(config=made.config))[0][0])
    for begin, counts in (([0, 0], [4, 3]), ([4, 3], [5, 2])):
        width = max(counts)
        at = torch.tensor(begin)[:, None] + torch.arange(width)
        part = at.clamp_max(8)
        cache.open(width)
        mask = cache.mask(torch.ones(width, width, dtype=torch.bool).tril().expand(2, -1, -1))
        with torch.no_grad():
            said = head(embed(ids.gather(1, part + 1)), hidden.gather(1, part[..., None].expand(-1, -1, 32)), at, mask, cache.write)
        cache.commit(torch.arange(width).expand(2, -1), torch.tensor(counts))
        for row, n in enumerate(counts):
            got[row] += said[row, :n]
    for row in range(2):
        torch.testing.assert_close(torch.stack(got[row]), expected[row], **near)

    parents = torch.tensor([[-1, -1, 0, 0, 2, 1]]).expand(2, -1)
    tokens = torch.tensor([[4, 7, 1, 6, 2, 1], [2, 5, 8, 9, 1, 3]])
    given = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    seen = ancestors(parents)
    cache.open(6)
    with torch.no_grad():
        positions = torch.tensor(lengths)[:, None] - 1 + seen.sum(-1)
        said = head(embed(tokens), given, positions, cache.mask(seen), cache.write)
    for row, n in enumerate(lengths):
        for node in range(6):
            path = seen[row, node].nonzero()[:, 0]
            whole = torch.cat([ids[row, 1 : n + 1], tokens[row, path]])[None], torch.cat([hidden[row, :n], given[row, path]])[None]
            alone, logits = theirs(made, *whole, 1, MtpCache(config=made.config))
            torch.testing.assert_close(said[row, node], alone[0, -1], **near)
            torch.testing.assert_close(head.rank(said[row, node], model.lm_head), logits[0], rtol=0, atol=30 * TOLERANCE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_chain_is_that_of_transformers(family: str) -> None:
    """In every round; what is read wrongly, in one of the ways in which it could be, is another chain."""
    model = build(family)
    made = modules(model)
    drafter = MTPDrafter(NativeModule(made, model), model, grow=chain())
    assert drafter.needs.layers == (2,)
    done = specdec.generate(model, PROMPTS[:1], drafter=drafter, max_new_tokens=14, return_rounds="all").rounds
    with torch.no_grad():
        swapped = modules(model)
        swapped.layers[0].eh_proj.weight.copy_(made.layers[0].eh_proj.weight.roll(32, 1))
    text, wrong = PROMPTS[0][:-1], {"raw": 0, "shifted": 0, "swapped": 0, "late": 0}
    for one in done:
        root, *drafted = one.tree.tokens[0].tolist()
        if drafted:
            whole = [*text, root]
            hidden = features(model, torch.tensor([whole]))[:, :-1]
            with torch.no_grad():
                raw = model.base_model(input_ids=torch.tensor([whole]), output_hidden_states=True).hidden_states
            assert torch.equal(raw[-1][:, :-1], hidden)
            assert drafted == slow_chain(model, made, whole, len(drafted), hidden), f"behind {whole}"
            others = {"raw": (made, whole, raw[-2][:, :-1]), "shifted": (made, [0, *whole[:-1]], hidden),
                      "swapped": (swapped, whole, hidden), "late": (made, whole, hidden.roll(1, 1))}  # fmt: skip
            for name, (of, read, given) in others.items():
                wrong[name] += drafted != slow_chain(model, of, read, len(drafted), given)
        text += one.commit.tokens[0, : int(one.commit.count[0])].tolist()
    assert all(wrong.values()), wrong


def test_a_pair_is_placed_at_its_token() -> None:
    """As in transformers. Distances are all that rotary attention sees, so that no text would tell."""
    model, seen = build("DeepseekV3"), list[list[int]]()
    head = NativeModule(modules(model), model)
    head.module.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs["position_ids"][0].tolist()), with_kwargs=True)
    specdec.generate(model, PROMPTS[:1], drafter=MTPDrafter(head, model, grow=chain()), max_new_tokens=4)
    assert seen[:2] == [[1, 2, 3, 4, 5], [6]] and head.config.max_positions == 23


# ------------------------------------------------------------------------------------------------------------ the text


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_that_of_plain_decoding(family: str) -> None:
    """Up to the target's last position, for rows of their own lengths."""
    model = build(family)
    plain = specdec.generate(model, PROMPTS, drafter=NullDrafter(), max_new_tokens=17)
    assert plain.sequences.shape[1] == 24
    for shape in SHAPES:
        drafter = MTPDrafter(NativeModule(modules(model), model), model, grow=shape)
        drafted = specdec.generate(model, PROMPTS, drafter=drafter, max_new_tokens=17)
        assert torch.equal(drafted.sequences, plain.sequences), f"{shape}"
        assert drafted.stats.accepted > 0


def exact() -> NativeModule:
    """Float64 throughout, as transformers' norms and routers are not, so that laws can be compared to ten digits."""
    model = build("DeepseekV3", vocab_size=4)
    made = modules(model)
    layer = made.layers[0]
    layer.mtp_block.mlp = model.model.layers[0].mlp
    for parent in list(layer.modules()):
        for name, norm in parent.named_children():
            if "norm" in name:
                setattr(parent, name, torch.nn.RMSNorm(len(norm.weight), eps=1e-6, dtype=torch.float64))
    return NativeModule(made, model)


TREES = [mixed(2, 1), without_replacement(2), dynamic(2)]


@pytest.mark.slow
@parametrize_with_checks(
    [MTPDrafter(exact(), TinyTarget(4, seed=3), grow=shape) for shape in TREES],
    verifier=TreeVerifier(TinyTarget(4, seed=3)), plans=[(3, 2, 2)],
)  # fmt: skip
def test_the_law_of_the_text(check: Callable[[], None]) -> None:
    """Beside another target, whose laws are as exact, and for which the module is as good as any."""
    check()


# ------------------------------------------------------------------------------------------------------ from a checkpoint


def checkpoint(family: str, folder: Path, number: int) -> MtpModel:
    """Write a model of as many layers as the released one has, with a module beside them; returns the like of that in memory."""
    model = build(family, torch.float32, num_hidden_layers=number, first_k_dense_replace=number - 1)
    made = modules(model)
    made.layers[0].mtp_block.load_state_dict({name: 2 * part for name, part in model.base_model.layers[-1].state_dict().items()})
    model.save_pretrained(folder)
    last, own, file = f"model.layers.{number - 1}.", f"model.layers.{number}.", folder / "model.safetensors"
    saved = load_file(file)
    more = {own + name.removeprefix(last): 2 * part for name, part in saved.items() if name.startswith(last)}
    first = made.layers[0]
    for name, part in {"enorm": first.enorm, "hnorm": first.hnorm, "eh_proj": first.eh_proj, "shared_head.norm": first.post_norm}.items():
        more[f"{own}{name}.weight"] = part.weight.detach()
    for name, part in {"embed_tokens": model.get_input_embeddings(), "shared_head.head": model.lm_head}.items():
        more[f"{own}{name}.weight"] = part.weight.detach().clone()
    save_file({**saved, **more}, file, metadata={"format": "pt"})
    return made


@pytest.mark.slow
@pytest.mark.parametrize("family, number", [("DeepseekV3", 61), ("Glm4Moe", 46)])
def test_the_modules_of_a_checkpoint(family: str, number: int, tmp_path: Path) -> None:
    made = checkpoint(family, tmp_path, number)
    model = tf.AutoModelForCausalLM.from_pretrained(tmp_path)
    before = {name: part.clone() for name, part in model.state_dict().items()}
    grads = [weight.requires_grad for weight in model.parameters()]
    model.train()  # it has no dropout, so it may be a target, and stays as it is
    drafter = MTPDrafter.from_target(model, grow=chain())
    head = drafter.head
    assert isinstance(head, NativeModule) and not head.module.training and not any(p.requires_grad for p in head.parameters())
    assert head.config.layers == (number,)
    for name, part in made.layers[0].state_dict().items():
        assert torch.equal(head.module.state_dict()[name], part), name
    assert not set(map(id, head.parameters())) & set(map(id, model.parameters()))
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(part, after[name]) for name, part in before.items())
    assert grads == [weight.requires_grad for weight in model.parameters()] and all(part.training for part in model.modules())

    prompt = torch.tensor([PROMPTS[0]])
    settings = tf.GenerationConfig(do_sample=False)
    with torch.no_grad():
        output = model(input_ids=prompt, output_hidden_states=True)
        ids = torch.cat([prompt, output.logits[:, -1:].argmax(-1)], 1)
        given = {"position_ids": torch.arange(ids.shape[1])[None], "attention_mask": torch.ones_like(ids)}
        candidates, _ = MTPCandidateGenerator(model, settings, {}).get_candidates(ids, given, output, False, 0)
    one = specdec.generate(model, ids, drafter=drafter, max_new_tokens=4, return_rounds="all").rounds[0]
    assert one.tree.tokens[0, :2].tolist() == candidates[0, -2:].tolist()


# ---------------------------------------------------------------------------------------------------- what is refused


def llama() -> tf.PreTrainedModel:
    return tf.LlamaForCausalLM(tf.LlamaConfig(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2))


def test_a_target_without_modules() -> None:
    none = "has no modules for multi-token prediction"
    for model in (llama(), build("DeepseekV3", num_mtp_layers=0)):
        with pytest.raises(ValueError, match=rf"target: .*ForCausalLM {none} \(config.num_mtp_layers\).*specdec train mtp"):
            MTPDrafter.from_target(model.eval())
    with pytest.raises(TypeError, match=f"TinyTarget {none}"):
        MTPDrafter.from_target(TinyTarget(V))


def test_modules_that_can_not_be_read(tmp_path: Path) -> None:
    model = build("DeepseekV3")
    with pytest.raises(ValueError, match="came from no checkpoint.*NativeModule"):
        HFTarget(model).multi_token()
    model.save_pretrained(tmp_path)  # which leaves modules out
    with pytest.raises(ValueError, match=r"num_mtp_layers=1\), but they can't be read from .*use a checkpoint that has them.*enorm"):
        HFTarget(tf.AutoModelForCausalLM.from_pretrained(tmp_path)).multi_token()
    model.hf_quantizer = SimpleNamespace(pre_quantized=True)
    with pytest.raises(ValueError, match="is quantised"):
        HFTarget(model).multi_token()


def test_an_old_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["transformers.modeling_layers"], "MtpModel")
    with pytest.raises(ValueError, match="transformers 5.17 and newer"):
        HFTarget(build("DeepseekV3")).multi_token()


@pytest.mark.parametrize("given, message", [
    ({"layer_types": ["full_attention"] * 2, "mtp_layer_types": ["sliding_attention"], "sliding_window": 8}, "DynamicSlidingWindowLayer"),
    ({"layer_types": ["full_attention"] * 2, "mtp_layer_types": ["linear_attention"]}, "LinearAttentionLayer.*specdec train mtp"),
    ({"chain_hidden_post_norm": True}, "chain_hidden_post_norm=True"),
    ({"mtp_hidden_states_first": True}, "mtp_hidden_states_first=True"),
    ({"logits_mup_width_multiplier": 2.0}, "logits_mup_width_multiplier=2.0"),
])  # fmt: skip
def test_modules_that_can_not_be_run_over_a_tree(given: dict[str, Any], message: str) -> None:
    model = build("DeepseekV3")
    vars(model.config).update(given)
    with pytest.raises(ValueError, match=f"target: the modules .*{message}"):
        HFTarget(model).multi_token()


def test_other_attention_and_no_rotary_positions() -> None:
    model = build("DeepseekV3")
    made = modules(model)
    made.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match="'flex_attention' attention.*sdpa"):
        NativeModule(made, model)
    made, model.model.rotary_emb = modules(model), None
    with pytest.raises(ValueError, match="rotary"):
        NativeModule(made, model)


def test_a_target_with_a_recurrent_state() -> None:
    config = tf.Qwen3NextConfig(vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                                num_key_value_heads=2, num_experts=2, layer_types=["linear_attention", "full_attention"])  # fmt: skip
    with pytest.raises(ValueError, match="recurrent state"):
        MTPDrafter.from_target(tf.Qwen3NextForCausalLM(config).eval())
