"""Medusa's heads as others store them: what each layout's file says, written here name by name, and what is refused."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from specdec.checkpoints import load_medusa, save_medusa
from specdec.heads import MedusaConfig, MedusaHeads
from specdec.types import TargetFacts

FACTS = TargetFacts(12, hidden_size=8, num_layers=10)
OWN = MedusaConfig((10,), 3, 2, 8, 12, 7)
IDS = [11, 0, 4, 2, 9, 5, 10]
"""In no order: vLLM asks for none."""


NOISE = torch.Generator().manual_seed(7)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=NOISE)


def theirs(heads: int = 5, blocks: int = 1, shared: bool = False, prefix: str = "") -> dict[str, torch.Tensor]:
    """As FasterDecoding's `nn.Sequential`s name them."""
    tensors = {}
    for i in range(heads):
        for j in range(blocks):
            tensors[f"{prefix}{i}.{j}.linear.weight"] = noise(8, 8)
            tensors[f"{prefix}{i}.{j}.linear.bias"] = noise(8)
        if not shared:
            tensors[f"{prefix}{i}.{blocks}.weight"] = noise(12, 8)
    return tensors


def vllm(heads: int = 3, blocks: int = 2, rows: int = 7, bias: bool = False) -> dict[str, torch.Tensor]:
    tensors = {"token_map": torch.tensor(IDS)} if rows == 7 else {}
    for i in range(heads):
        tensors[f"lm_heads.{i}.weight"] = noise(rows, 8)
        for j in range(blocks):
            tensors[f"blocks.{i}.layers.{j}.weight"] = noise(8, 8)
            if bias:
                tensors[f"blocks.{i}.layers.{j}.bias"] = noise(8)
    return tensors


OLD = {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "some/target"}
NEW = {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 12, "truncated_vocab_size": 7}


def put(folder: Path, config: dict, tensors: dict[str, Any], name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (torch.save if name.endswith((".pt", ".bin")) else save_file)(tensors, folder / name)
    return folder


def said(heads: MedusaHeads, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Scores of every head; those that share have the identity as the target's output head."""
    with torch.no_grad():
        return [heads.rank(i, hidden, lambda x: x) for i in range(heads.config.heads)]


def by_hand(hidden: torch.Tensor, blocks: list[tuple[torch.Tensor, torch.Tensor | float]], output: torch.Tensor | None) -> torch.Tensor:
    for weight, bias in blocks:
        hidden = hidden + silu(hidden @ weight.T + bias)
    return hidden if output is None else hidden @ output.T


def made(config: MedusaConfig) -> MedusaHeads:
    heads = MedusaHeads(config)
    with torch.no_grad():
        for part in heads.parameters():
            part.copy_(noise(*part.shape))
    if config.draft_vocab_size == 7:
        heads.offsets.copy_(torch.tensor(IDS) - torch.arange(7))
    return heads


# -------------------------------------------------------------------------------------------------------------- FasterDecoding


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(("blocks", "shared"), [(1, False), (2, False), (1, True)])
def test_files_of_version_0_say_what_they_hold(tmp_path, name, blocks, shared):
    tensors, hidden = theirs(blocks=blocks, shared=shared), noise(4, 8)
    config = OLD | {"medusa_num_layers": blocks} | ({"version": "2"} if shared else {})
    heads = load_medusa(put(tmp_path, config, tensors, name), FACTS)
    assert heads.config == MedusaConfig((10,), 5, blocks, 8, 12, 12, shared)
    assert heads.ids.tolist() == list(range(12))
    for i, scores in enumerate(said(heads, hidden)):
        parts = [(tensors[f"{i}.{j}.linear.weight"], tensors[f"{i}.{j}.linear.bias"]) for j in range(blocks)]
        torch.testing.assert_close(scores, by_hand(hidden, parts, tensors.get(f"{i}.{blocks}.weight")))


def test_a_silent_version_leaves_it_to_the_file_whether_the_output_head_is_shared(tmp_path):
    assert load_medusa(put(tmp_path, OLD, theirs(shared=True)), FACTS).config.shared
    with pytest.raises(ValueError, match=r"missing: 4.1.weight \[12, 8\]"):
        load_medusa(put(tmp_path, OLD | {"version": "1"}, theirs(shared=True)), FACTS)
    with pytest.raises(ValueError, match=r"unexpected: 4.1.weight \[12, 8\]"):
        load_medusa(put(tmp_path, OLD | {"version": "2"}, theirs()), FACTS)


def test_the_published_fault_two_heads_stated_and_five_stored(tmp_path):
    put(tmp_path, OLD | {"medusa_num_heads": 2}, theirs(), "medusa_lm_head.pt")
    with pytest.warns(UserWarning, match="medusa_num_heads is 2, but .* holds 5 heads; the file counts"):
        assert load_medusa(tmp_path, FACTS).config.heads == 5
    put(tmp_path, OLD | {"medusa_num_heads": 6}, theirs(), "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="medusa_num_heads is 6, but .* holds 5 heads"):
        load_medusa(tmp_path, FACTS)
    put(tmp_path, {"base_model_name_or_path": "some/target"}, theirs(), "medusa_lm_head.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_medusa(tmp_path, FACTS).config.heads == 5


@pytest.mark.parametrize("lost", [0, 2])
def test_heads_without_one_between(tmp_path, lost):
    tensors = {name: tensor for name, tensor in theirs(4).items() if not name.startswith(f"{lost}.")}
    with pytest.raises(ValueError, match=rf"\[{lost}\] are missing"):
        load_medusa(put(tmp_path, OLD | {"medusa_num_heads": 3}, tensors), FACTS)
    other = {name: tensor for name, tensor in vllm(4).items() if not name.startswith(f"blocks.{lost}.")}
    with pytest.raises(ValueError, match=rf"\[{lost}\] are missing"):
        load_medusa(put(tmp_path, NEW, other), FACTS)


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_of_a_whole_model_the_heads_alone_are_read(tmp_path, ending):
    """The other part is no file at all: whoever opens it fails."""
    heads, name = theirs(prefix="medusa_head."), {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[ending]
    first = {name: tensor for name, tensor in heads.items() if name < "medusa_head.2"} | {"model.norm.weight": noise(8)}
    second = {name: tensor for name, tensor in heads.items() if name >= "medusa_head.2"} | {"lm_head.weight": noise(12, 8)}
    put(tmp_path, {"model_type": "llama", **OLD}, first, f"a.{ending}")
    put(tmp_path, {"model_type": "llama", **OLD}, second, f"b.{ending}")
    (tmp_path / f"c.{ending}").write_bytes(b"the target")
    where = (
        dict.fromkeys(first, f"a.{ending}") | dict.fromkeys(second, f"b.{ending}") | {"model.layers.0.mlp.up_proj.weight": f"c.{ending}"}
    )
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": where}))
    loaded = load_medusa(tmp_path, FACTS)
    assert loaded.config == MedusaConfig((10,), 5, 1, 8, 12, 12)
    hidden = noise(4, 8)
    for i, scores in enumerate(said(loaded, hidden)):
        block = (heads[f"medusa_head.{i}.0.linear.weight"], heads[f"medusa_head.{i}.0.linear.bias"])
        torch.testing.assert_close(scores, by_hand(hidden, [block], heads[f"medusa_head.{i}.1.weight"]))
    where["medusa_head.4.0.linear.bias"] = f"a.{ending}"
    (tmp_path / f"{name}.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(ValueError, match=r"not there: \['medusa_head.4.0.linear.bias'\]"):
        load_medusa(tmp_path, FACTS)


def test_the_same_in_one_file(tmp_path):
    whole = theirs(prefix="medusa_head.") | {"lm_head.weight": noise(12, 8), "model.layers.0.self_attn.q_proj.weight": noise(3, 3)}
    for name in ("model.safetensors", "pytorch_model.bin"):
        assert load_medusa(put(tmp_path / f"in {name}", {"model_type": "llama", **OLD}, whole, name), FACTS).config.heads == 5
    whole["medusa_head.4.0.linear.other"] = noise(1)
    with pytest.raises(ValueError, match="unexpected: 4.0.linear.other"):
        load_medusa(put(tmp_path, OLD, whole), FACTS)


# ------------------------------------------------------------------------------------------------------------------------ vLLM


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [7, 12])
@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
def test_files_of_vllm_say_what_they_hold(tmp_path, bias, rows, prefix):
    tensors, hidden = vllm(rows=rows, bias=bias), noise(4, 8)
    config = NEW | {"truncated_vocab_size": None if rows == 12 else 7} | ({"medusa_fc_bias": True} if bias else {})
    heads = load_medusa(put(tmp_path, config, {prefix + name: tensor for name, tensor in tensors.items()}), FACTS)
    assert heads.config == replace(OWN, draft_vocab_size=rows, bias=bias)
    assert heads.ids.tolist() == (IDS if rows == 7 else list(range(12)))
    for i, scores in enumerate(said(heads, hidden)):
        parts = [(tensors[f"blocks.{i}.layers.{j}.weight"], tensors.get(f"blocks.{i}.layers.{j}.bias", 0.0)) for j in range(2)]
        torch.testing.assert_close(scores, by_hand(hidden, parts, tensors[f"lm_heads.{i}.weight"]))


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight", "every"])
@pytest.mark.parametrize("rows", [7, 12])
def test_one_output_head_may_serve_all_heads(tmp_path, name, rows):
    """Under either name; of its rows the map takes those that can be drafted, unless they are those already."""
    output = noise(rows, 8)
    tensors = {known: tensor for known, tensor in vllm().items() if not known.startswith("lm_heads.")}
    tensors |= {f"lm_heads.{i}.weight": output.clone() for i in range(3)} if name == "every" else {name: output}
    heads = load_medusa(put(tmp_path, NEW | {"original_lm_head": True}, tensors), FACTS)
    assert heads.config == replace(OWN, bias=False)
    assert len({part.weight.data_ptr() for part in heads.lm_heads}) == 1
    for part in heads.lm_heads:
        assert torch.equal(part.weight, output if rows == 7 else output[IDS])
    save_medusa(heads, tmp_path / "again")
    again = load_medusa(tmp_path / "again", FACTS)
    assert "lm_head.weight" in load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(a, b) for a, b in zip(heads.state_dict().values(), again.state_dict().values(), strict=True))


def test_one_output_head_is_one(tmp_path):
    with pytest.raises(ValueError, match=r"\['lm_heads.1.weight', 'lm_heads.2.weight'\] differ from lm_heads.0.weight"):
        load_medusa(put(tmp_path, NEW | {"original_lm_head": True}, vllm()), FACTS)
    tensors = {name: tensor for name, tensor in vllm().items() if not name.startswith("lm_heads.")} | {"lm_head.weight": noise(7, 8)}
    with pytest.raises(ValueError, match="unexpected: lm_head.weight"):
        load_medusa(put(tmp_path, NEW, tensors), FACTS)


def test_whole_output_heads_are_cut_to_the_map(tmp_path):
    tensors = vllm() | {f"lm_heads.{i}.weight": noise(12, 8) for i in range(3)}
    heads = load_medusa(put(tmp_path, NEW, tensors), FACTS)
    assert all(torch.equal(part.weight, tensors[f"lm_heads.{i}.weight"][IDS]) for i, part in enumerate(heads.lm_heads))


def test_a_map_of_everything_is_passed_over_as_vllm_does(tmp_path):
    tensors = vllm(rows=12) | {"token_map": torch.arange(12).flip(0)}
    heads = load_medusa(put(tmp_path, NEW | {"truncated_vocab_size": 12}, tensors), FACTS)
    assert heads.ids.tolist() == list(range(12)) and torch.equal(heads.lm_heads[1].weight, tensors["lm_heads.1.weight"])


@pytest.mark.parametrize(("mapped", "words"), [
    (None, "no token_map says"), (torch.tensor(IDS[:6]), r"token_map is torch.int64 \[6\]"), (torch.ones(7), "token_map is torch.float32"),
    (torch.tensor([*IDS[:6], 12]), "token_map sends 1 draft tokens outside the target's vocabulary of 12, first 6 to 12"),
    (torch.tensor([*IDS[:6], 11]), r"token_map sends more than one draft token to each of \[11\]"),
])  # fmt: skip
def test_a_map_that_is_none(tmp_path, mapped, words):
    tensors = {name: tensor for name, tensor in vllm().items() if name != "token_map"} | ({} if mapped is None else {"token_map": mapped})
    with pytest.raises(ValueError, match=words):
        load_medusa(put(tmp_path, NEW, tensors), FACTS)


@pytest.mark.parametrize(("change", "words"), [
    ({"num_heads": 2}, "num_heads is 2, but .* holds 3 heads"), ({"num_heads": 4}, "num_heads is 4, but .* holds 3 heads"),
    ({"num_heads": "3"}, "num_heads: got '3'"), ({"num_hidden_layers": 0}, "num_hidden_layers: got 0"),
    ({"truncated_vocab_size": 13}, "truncated_vocab_size is 13 of 12"),
    ({"logit_scale": 0.5}, "logit_scale: got 0.5"), ({"original_lm_head": "yes"}, "original_lm_head: got 'yes'"),
    ({"num_hidden_layers": 1}, r"unexpected: blocks.2.layers.1.weight \[8, 8\]"),
    ({"medusa_fc_bias": True}, r"missing: blocks.2.layers.1.bias \[8\]"),
])  # fmt: skip
def test_a_config_that_disagrees(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        load_medusa(put(tmp_path, NEW | change, vllm()), FACTS)


# ------------------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("facts", "words"), [
    (replace(FACTS, hidden_size=16), "hidden_size 8, this one 16"), (replace(FACTS, vocab_size=13), "vocab_size 12, this one 13"),
    (replace(FACTS, num_layers=None), "no num_layers"),
])  # fmt: skip
@pytest.mark.parametrize("layout", ["vllm", "medusa"])
def test_heads_of_another_target(tmp_path, facts, words, layout):
    save_medusa(made(replace(OWN, draft_vocab_size=12)), tmp_path, layout=layout)
    with pytest.raises(ValueError, match=words):
        load_medusa(tmp_path, facts)


def test_every_wrong_tensor_is_named(tmp_path):
    old = theirs() | {"0.0.linear.weight": noise(3, 8), "2.1.weight": noise(12, 9), "norm.weight": noise(8)}
    del old["1.0.linear.bias"]
    with pytest.raises(ValueError) as found:
        load_medusa(put(tmp_path, OLD, old), FACTS)
    for line in ("another shape: 0.0.linear.weight is [3, 8], expected [8, 8]", "another shape: 2.1.weight is [12, 9], expected [12, 8]",
                 "unexpected: norm.weight [8]", "missing: 1.0.linear.bias [8]"):  # fmt: skip
        assert line in str(found.value)
    new = vllm() | {"lm_heads.1.weight": noise(6, 8), "blocks.0.layers.0.scale": noise(1)}
    del new["lm_heads.2.weight"]
    with pytest.raises(ValueError) as found:
        load_medusa(put(tmp_path, NEW, new), FACTS)
    for line in ("another shape: lm_heads.1.weight is [6, 8], expected [7, 8]", "unexpected: blocks.0.layers.0.scale [1]",
                 "missing: lm_heads.2.weight [7, 8]"):  # fmt: skip
        assert line in str(found.value)


def test_no_heads_at_all(tmp_path):
    with pytest.raises(ValueError, match=r"no heads of Medusa; the tensors are \['norm.weight'\]"):
        load_medusa(put(tmp_path, OLD, {"norm.weight": noise(8)}), FACTS)
    with pytest.raises(ValueError, match="no residual blocks"):
        load_medusa(put(tmp_path, OLD | {"medusa_num_heads": 1}, {"0.1.weight": noise(12, 8)}), FACTS)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no weights; allowed are medusa_lm_head.safetensors and medusa_lm_head.pt"):
        load_medusa(tmp_path, FACTS)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantized_weights(tmp_path, dtype):
    tensors = theirs() | {"3.0.linear.weight": noise(8, 8).to(dtype)}
    with pytest.raises(ValueError, match="'3.0.linear.weight': 'torch.*quantized"):
        load_medusa(put(tmp_path, OLD, tensors), FACTS)


def test_a_pickle_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "boom",))

    put(tmp_path, OLD, theirs() | {"0.0.linear.bias": Bomb()}, "medusa_lm_head.pt")
    with pytest.raises(ValueError, match=r"medusa_lm_head.pt: holds more than tensors"):
        load_medusa(tmp_path, FACTS)
    assert not (tmp_path / "boom").exists()


# --------------------------------------------------------------------------------------------------------------------- writing


def test_what_is_written_bears_the_names_of_the_layout(tmp_path):
    heads = made(OWN)
    save_medusa(heads, tmp_path, base_model="some/target")
    config, found = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert NEW.items() <= config.items() and config["medusa_fc_bias"] and not config["original_lm_head"]
    assert config["base_model_name_or_path"] == "some/target"
    assert found.keys() == vllm(bias=True).keys() and found["token_map"].tolist() == IDS
    assert torch.equal(found["blocks.1.layers.0.bias"], heads.blocks[1][0].linear.bias)
    save_medusa(made(replace(OWN, draft_vocab_size=12)), tmp_path, layout="medusa", base_model="some/target")
    config, found = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "medusa_lm_head.safetensors")
    assert (OLD | {"medusa_num_heads": 3, "medusa_num_layers": 2}).items() <= config.items() and "version" not in config
    assert found.keys() == theirs(3, 2).keys()


def test_the_last_layout_written_into_a_folder_is_the_one_read(tmp_path):
    first, second = made(replace(OWN, draft_vocab_size=12)), made(replace(OWN, draft_vocab_size=12))
    for heads, layout in ((first, "medusa"), (second, "vllm"), (first, "medusa")):
        save_medusa(heads, tmp_path, layout=layout)
        assert torch.equal(load_medusa(tmp_path, FACTS).lm_heads[0].weight, heads.lm_heads[0].weight)


def test_vllm_is_given_the_targets_rows(tmp_path):
    heads, output = made(replace(OWN, shared=True)), noise(12, 8).double().requires_grad_()
    save_medusa(heads, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors") and load_medusa(tmp_path, FACTS).config == heads.config
    save_medusa(heads, tmp_path, output=output)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["lm_head.weight"], output[IDS].float())
    hidden, loaded = noise(4, 8), load_medusa(tmp_path, FACTS)
    assert not loaded.config.shared
    with torch.no_grad():
        wanted = [heads.said(i, hidden) @ output[IDS].float().T for i in range(3)]
    for mine, theirs in zip(said(loaded, hidden), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_heads_in_common_memory_are_written(tmp_path):
    heads = made(replace(OWN, draft_vocab_size=12))
    heads.blocks[0][1] = heads.blocks[0][0]  # as FasterDecoding makes them
    for layout in ("vllm", "medusa"):
        save_medusa(heads, tmp_path, layout=layout)
        loaded = load_medusa(tmp_path, FACTS)
        assert torch.equal(loaded.blocks[0][1].linear.weight, heads.blocks[0][0].linear.weight)


@pytest.mark.parametrize(("config", "arguments", "words"), [
    (OWN, {"layout": "medusa"}, "draft_vocab_size=7 of 12"),
    (replace(OWN, draft_vocab_size=12, bias=False), {"layout": "medusa"}, "bias=False"),
    (OWN, {"layout": "eagle"}, "allowed are 'vllm' and 'medusa'"),
    (OWN, {"output": torch.ones(12, 8)}, "only shared heads"),
    (replace(OWN, shared=True, draft_vocab_size=12), {"layout": "medusa", "output": torch.ones(12, 8)}, "only shared heads in 'vllm'"),
    (replace(OWN, shared=True), {"output": torch.ones(7, 8)}, r"output: got shape \[7, 8\]; the target's output head has \[12, 8\]"),
])  # fmt: skip
def test_what_a_layout_cannot_say_is_not_written(tmp_path, config, arguments, words):
    with pytest.raises(ValueError, match=words):
        save_medusa(made(config), tmp_path / "new", **arguments)
    assert not (tmp_path / "new").exists()


def test_another_order_of_all_tokens_is_not_written(tmp_path):
    heads = made(replace(OWN, draft_vocab_size=12))
    heads.offsets[0], heads.offsets[1] = 1, -1
    for layout in ("vllm", "medusa"):
        with pytest.raises(ValueError, match="another order"):
            save_medusa(heads, tmp_path / "new", layout=layout)
    heads.offsets[1] = 0
    with pytest.raises(ValueError, match=r"more than one draft token to each of \[1\]"):
        save_medusa(heads, tmp_path / "new")
    assert not (tmp_path / "new").exists()
