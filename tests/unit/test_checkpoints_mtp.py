"""Modules for multi-token prediction as files have them: what each name means, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from specdec.checkpoints import load_head, load_mtp, save_mtp
from specdec.heads import EagleConfig, EagleHead, MTPConfig, MTPHead
from specdec.types import TargetFacts

FACTS = TargetFacts(12, hidden_size=8, num_layers=5)
CONFIG = MTPConfig((5,), 8, 6, 2, 1, 4, 12, 7)
IDS = [0, 2, 4, 5, 9, 10, 11]
LAYER = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 5, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 12, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "max_position_embeddings": 2048,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
NOISE = torch.Generator().manual_seed(3)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=NOISE) * 0.5 + (len(shape) == 1)


def made(config: MTPConfig = CONFIG) -> MTPHead:
    head = MTPHead(config)
    with torch.no_grad():
        for part in head.parameters():
            part.copy_(noise(*part.shape))
    if config.draft_vocab_size == 7:
        head.offsets.copy_(torch.tensor(IDS) - torch.arange(7))
    return head


def layer(prefix: str, enorm: str, hnorm: str, proj: str, norm: str) -> dict[str, torch.Tensor]:
    """A module's tensors under the names of a layout."""
    shapes = {
        f"{enorm}.weight": (8,), f"{hnorm}.weight": (8,), f"{proj}.weight": (8, 16), f"{norm}.weight": (8,), "input_layernorm.weight": (8,),
        "post_attention_layernorm.weight": (8,), "self_attn.q_proj.weight": (8, 8), "self_attn.k_proj.weight": (4, 8),
        "self_attn.v_proj.weight": (4, 8), "self_attn.o_proj.weight": (8, 8), "mlp.gate_proj.weight": (6, 8), "mlp.up_proj.weight": (6, 8),
        "mlp.down_proj.weight": (8, 6),
    }  # fmt: skip
    return {prefix + name: noise(*shape) for name, shape in shapes.items()}


def deepseek(number: int = 5) -> dict[str, torch.Tensor]:
    return layer(f"model.layers.{number}.", "enorm", "hnorm", "eh_proj", "shared_head.norm")


def speculators() -> dict[str, torch.Tensor]:
    return layer("mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


WRAPPED = {"speculators_model_type": "mtp", "transformer_layer_config": LAYER, "num_nextn_predict_layers": 1}
LAYOUTS = {
    "speculators": (WRAPPED, speculators, ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"), "mtp_layers.0."),
    "deepseek": (LAYER, deepseek, ("enorm", "hnorm", "eh_proj", "shared_head.norm"), "model.layers.5."),
}


def put(folder: Path, config: dict, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def by_hand(tensors: dict[str, torch.Tensor], embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """What transformers' own Llama layer says, between the norms and the projection that the report of DeepSeek-V3 has around it.

    Args:
        tensors: under the names of DeepSeek, without what is before them.
    """
    config = LlamaConfig(**{name: LAYER[name] for name in LAYER if name not in ("model_type", "rope_theta")},
                         rope_parameters={"rope_type": "default", "rope_theta": 500.0}, attn_implementation="eager")  # fmt: skip
    block = LlamaDecoderLayer(config, 0)
    block.load_state_dict({name: tensor for name, tensor in tensors.items() if not name.startswith(("enorm", "hnorm", "eh_", "shared_"))})

    def normed(name: str, x: torch.Tensor) -> torch.Tensor:
        norm = LlamaRMSNorm(8, 1e-5)
        norm.load_state_dict({"weight": tensors[f"{name}.weight"]})
        return norm(x)

    count = hidden.shape[1]
    joined = torch.cat([normed("enorm", embedded), normed("hnorm", hidden)], -1) @ tensors["eh_proj.weight"].T
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    turns = LlamaRotaryEmbedding(config)(joined, torch.arange(count)[None])
    found = block(joined, attention_mask=mask, position_ids=torch.arange(count)[None], position_embeddings=turns)
    return normed("shared_head.norm", found[0] if isinstance(found, tuple) else found)


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_file_says_what_it_holds(tmp_path, layout):
    config, tensors, called, prefix = LAYOUTS[layout]
    tensors = tensors()
    head = load_mtp(put(tmp_path, config, tensors), FACTS)
    assert head.config == replace(CONFIG, draft_vocab_size=12, rope_theta=500.0)
    embedded, hidden = noise(1, 6, 8), noise(1, 6, 8)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    said = head(embedded, head.fuse(hidden), torch.arange(6)[None], mask, lambda number, key, value: (key, value))
    plain = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    for mine, theirs in zip(("enorm", "hnorm", "eh_proj", "shared_head.norm"), called, strict=True):
        plain[f"{mine}.weight"] = plain.pop(f"{theirs}.weight")
    torch.testing.assert_close(said, by_hand(plain, embedded, hidden), rtol=1e-5, atol=1e-5)


def test_of_a_whole_model_the_first_module_alone_is_read(tmp_path):
    """The other part is no file at all: whoever opens it fails. What the module has of the target's a second time is passed over."""
    first, more = deepseek(), deepseek(6)
    more |= {"model.layers.5.embed_tokens.weight": noise(12, 8), "model.layers.5.shared_head.head.weight": noise(12, 8)}
    more |= {"model.layers.5.self_attn.rotary_emb.inv_freq": noise(2), "model.norm.weight": noise(8), "lm_head.weight": noise(12, 8)}
    put(tmp_path, LAYER | {"num_nextn_predict_layers": 2}, first | more)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"the target")
    where = dict.fromkeys(first | more, "a.safetensors") | {"model.layers.4.mlp.up_proj.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    head = load_mtp(tmp_path, FACTS)
    assert torch.equal(head.eh_proj.weight, first["model.layers.5.eh_proj.weight"])


def test_embedding_and_output_head_are_the_targets(tmp_path):
    tensors = speculators()
    more = tensors | {"embed_tokens.weight": noise(12, 8), "lm_head.weight": noise(12, 8)}
    assert torch.equal(load_mtp(put(tmp_path, WRAPPED, more), FACTS).norm.weight, tensors["mtp_layers.0.final_layernorm.weight"])


# ------------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("names", "words"), [
    (["self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"],
     r"\(MLA\) \(self_attn.kv_a_proj_with_mqa, self_attn.q_a_proj\).*MTPDrafter.from_target"),
    (["mlp.experts.0.up_proj.weight"], r"a mixture of experts \(mlp.experts.0\).*MTPDrafter.from_target"),
    (["mlp.shared_experts.up_proj.weight"], "a mixture of experts"), (["mlp.gate.weight"], "a mixture of experts"),
    (["self_attn.q_norm.weight", "self_attn.k_norm.weight"], "norms of queries and keys"),
])  # fmt: skip
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_no_module_here_computes_is_refused_by_name(tmp_path, layout, names, words):
    config, tensors, _, prefix = LAYOUTS[layout]
    with pytest.raises(ValueError, match=words):
        load_mtp(put(tmp_path, config, tensors() | {prefix + name: noise(2) for name in names}), FACTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_wrong_tensor_is_named(tmp_path, layout):
    config, tensors, called, prefix = LAYOUTS[layout]
    tensors = tensors() | {prefix + "self_attn.q_proj.bias": noise(8), prefix + "mlp.up_proj.weight": noise(5, 8)}
    del tensors[f"{prefix}{called[1]}.weight"]
    with pytest.raises(ValueError) as found:
        load_mtp(put(tmp_path, config, tensors), FACTS)
    for line in (f"missing: {prefix}{called[1]}.weight [8]", f"unexpected: {prefix}self_attn.q_proj.bias [8]",
                 f"another shape: {prefix}mlp.up_proj.weight is [5, 8], expected [6, 8]"):  # fmt: skip
        assert line in str(found.value)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("facts", "words"), [
    (replace(FACTS, hidden_size=16), "hidden_size 8, this one 16"), (replace(FACTS, vocab_size=13), "vocab_size 12, this one 13"),
    (replace(FACTS, num_layers=4), "num_hidden_layers, the target's, is 5, but this one has 4"),
    (replace(FACTS, num_layers=None), "no num_layers"),
])  # fmt: skip
def test_a_module_of_another_target(tmp_path, layout, facts, words):
    config, tensors, *_ = LAYOUTS[layout]
    with pytest.raises(ValueError, match=words):
        load_mtp(put(tmp_path, config, tensors()), facts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", [
    {"hidden_act": "gelu"}, {"attention_bias": True}, {"model_type": "qwen3"}, {"rope_scaling": {"type": "yarn", "factor": 2}},
    {"quantization_config": {"quant_method": "fp8"}}, {"partial_rotary_factor": 0.5},
])  # fmt: skip
def test_what_no_layer_here_computes_is_refused(tmp_path, layout, change):
    config, tensors, *_ = LAYOUTS[layout]
    config = {**config, **change} if layout == "deepseek" else {**config, "transformer_layer_config": {**LAYER, **change}}
    with pytest.raises(ValueError, match=next(iter(change))):
        load_mtp(put(tmp_path, config, tensors()), FACTS)


@pytest.mark.parametrize(("change", "words"), [
    ({"speculators_model_type": "eagle3"}, "speculators_model_type: got 'eagle3'; allowed is 'mtp'"),
    ({"transformer_layer_config": {"hidden_size": 8}}, "no model_type, which means qwen2"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: got 2"), ({"draft_vocab_size": 13}, "draft_vocab_size: got 13"),
    ({"draft_vocab_size": 7}, r"missing: d2t \[7\]"),
])  # fmt: skip
def test_other_kinds_are_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        load_mtp(put(tmp_path, WRAPPED | change, speculators()), FACTS)


def test_a_target_without_a_module(tmp_path):
    tensors = {"model.layers.4.input_layernorm.weight": noise(8), "model.norm.weight": noise(8)}
    with pytest.raises(ValueError, match="no module for multi-token prediction: .* begin with model.layers.5."):
        load_mtp(put(tmp_path, LAYER, tensors), FACTS)
    with pytest.raises(ValueError, match="no module for multi-token prediction: .* begin with mtp_layers.0."):
        load_mtp(put(tmp_path, WRAPPED, tensors), FACTS)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights(tmp_path, dtype):
    tensors = deepseek() | {"model.layers.5.mlp.up_proj.weight": noise(6, 8).to(dtype)}
    with pytest.raises(ValueError, match="'model.layers.5.mlp.up_proj.weight': 'torch.*quantized"):
        load_mtp(put(tmp_path, LAYER, tensors), FACTS)


def test_the_vocabulary_map_is_checked(tmp_path):
    save_mtp(made(), tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    assert load_mtp(tmp_path, FACTS).ids.tolist() == IDS
    for change, words in [
        ({"d2t": good["d2t"].index_fill(0, torch.tensor([6]), 6)}, "outside the target's vocabulary of 12, first 6 to 12"),
        ({"t2d": good["t2d"].roll(1)}, "t2d and d2t disagree"), ({"d2t": good["d2t"].double()}, "d2t has type torch.float64"),
    ]:  # fmt: skip
        save_file(good | change, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=words):
            load_mtp(tmp_path, FACTS)


# --------------------------------------------------------------------------------------------------------------------- writing


def test_what_is_written_bears_the_names_of_speculators(tmp_path):
    head = made()
    save_mtp(head, tmp_path, verifier_name="some/target", verifier_architectures=["LlamaForCausalLM"])
    config, found = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert found.keys() == speculators().keys() | {"d2t", "t2d"}
    assert torch.equal(found["mtp_layers.0.token_layernorm.weight"], head.enorm.weight)
    assert torch.equal(found["mtp_layers.0.hidden_layernorm.weight"], head.hnorm.weight)
    assert found["t2d"].nonzero().flatten().tolist() == IDS
    assert config["speculators_model_type"] == "mtp" and config["speculators_config"]["algorithm"] == "mtp"
    assert config["speculators_config"]["verifier"] == {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]}
    assert config["transformer_layer_config"]["model_type"] == "llama" and config["transformer_layer_config"]["num_hidden_layers"] == 5
    save_mtp(made(replace(CONFIG, draft_vocab_size=12)), tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == speculators().keys()


def test_what_is_no_module_is_not_written(tmp_path):
    with pytest.raises(TypeError, match="head: got EagleHead; give a specdec.heads.MTPHead"):
        save_mtp(EagleHead(EagleConfig(3, (2, 5, 7), 8, 8, 6, 2, 1, 4, 12, 7)), tmp_path / "new")
    head = made()
    head.offsets.fill_(100)
    with pytest.raises(ValueError, match="outside"):
        save_mtp(head, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_module_is_no_eagle_head(tmp_path):
    save_mtp(made(), tmp_path)
    with pytest.raises(ValueError, match="speculators_model_type: got 'mtp'; allowed is 'eagle3'"):
        load_head(tmp_path, FACTS)
