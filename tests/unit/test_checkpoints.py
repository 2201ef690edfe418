"""Checkpoints that were made by others: which words mean what, and what is refused."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.checkpoints import load_head, save_head
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.types import TargetFacts

FACTS = TargetFacts(12, hidden_size=8, num_layers=10)
THIRD = EagleConfig(3, (2, 5, 7), 8, 8, 6, 2, 1, 4, 12, 7)
FIRST = EagleConfig(1, (10,), 8, 8, 6, 2, 1, 4, 12, 12, bias=True)
LAYOUTS = [("speculators", THIRD), ("eagle", THIRD), ("eagle", FIRST)]


def made(config: EagleConfig) -> EagleHead:
    head = EagleHead(config)
    if config.draft_vocab_size == 7:
        head.offsets.copy_(torch.tensor([0, 2, 4, 5, 9, 10, 11]) - torch.arange(7))
    return head


class Checkpoint:
    """A folder whose config and weights can be tampered with."""

    def __init__(self, folder: Path, config: EagleConfig = THIRD, layout: str = "eagle") -> None:
        self.folder = folder
        save_head(made(config), folder, layout=layout)

    def config(self, **changes) -> Checkpoint:
        file = self.folder / "config.json"
        found = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({name: value for name, value in found.items() if value != "gone"}))
        return self

    def weights(self, **changes) -> Checkpoint:
        file = self.folder / "model.safetensors"
        found = load_file(file) | {name.replace("__", "."): value for name, value in changes.items()}
        save_file({name: value for name, value in found.items() if value is not None}, file)
        return self

    def load(self, facts: TargetFacts = FACTS) -> EagleHead:
        return load_head(self.folder, facts)


@pytest.fixture
def eagle(tmp_path) -> Checkpoint:
    return Checkpoint(tmp_path)


@pytest.fixture
def theirs(tmp_path) -> Checkpoint:
    return Checkpoint(tmp_path, layout="speculators")


# ------------------------------------------------------------------------------------------------------------ which layers


def test_inside_eagle_config_the_outputs_of_layers_are_counted(eagle):
    assert json.loads((eagle.folder / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert eagle.load().config.layers == (2, 5, 7)


def test_at_the_top_the_inputs_of_layers_are_counted(eagle, tmp_path):
    assert eagle.config(eagle_config="gone", eagle_aux_hidden_state_layer_ids=[1, 4, 6]).load().config.layers == (1, 4, 6)
    assert Checkpoint(tmp_path / "b", layout="speculators").load().config.layers == (2, 5, 7)


def test_two_places_that_disagree_are_refused(eagle):
    assert eagle.config(eagle_aux_hidden_state_layer_ids=[2, 5, 7]).load().config.layers == (2, 5, 7)
    with pytest.raises(ValueError, match="remove one"):
        eagle.config(eagle_aux_hidden_state_layer_ids=[1, 4, 6]).load()


def test_without_ids_the_usual_layers_are_read(eagle):
    eagle.config(eagle_config="gone")
    assert eagle.load().config.layers == (2, 5, 7)
    assert eagle.load(replace(FACTS, num_layers=30)).config.layers == (2, 15, 27)
    for count in (None, 5):
        with pytest.raises(ValueError, match="add eagle_aux_hidden_state_layer_ids"):
            eagle.load(replace(FACTS, num_layers=count))


@pytest.mark.parametrize("ids", [[], "2", [1.5], [True], {"a": 1}])
def test_ids_are_a_list_of_numbers(theirs, ids):
    with pytest.raises(ValueError, match="give a list of layer ids"):
        theirs.config(eagle_aux_hidden_state_layer_ids=ids).load()


def test_eagle_1_reads_what_enters_the_final_norm(tmp_path):
    checkpoint = Checkpoint(tmp_path, FIRST)
    assert checkpoint.load().config == FIRST
    assert checkpoint.load(replace(FACTS, num_layers=4)).config.layers == (4,)
    with pytest.raises(ValueError, match="num_layers"):
        checkpoint.load(replace(FACTS, num_layers=None))


# ------------------------------------------------------------------------------------------------------------- words and names


def test_a_silent_config_of_speculators_norms_after_the_residual(theirs):
    assert not theirs.config(norm_before_residual="gone", norm_output="gone").load().config.norm_before_residual


def test_norm_output_means_two_things(eagle, tmp_path):
    with pytest.warns(UserWarning, match="norm_output=True is read as a norm before the output head"):
        assert not eagle.config(norm_output=True).load().config.norm_output
    with pytest.raises(ValueError, match="norm_output: got False"):
        eagle.config(norm_output=False).load()
    assert Checkpoint(tmp_path / "b", layout="speculators").config(norm_output=True).load().config.norm_output


def test_the_layer_may_be_called_layers_0(eagle):
    found = load_file(eagle.folder / "model.safetensors")
    save_file({name.replace("midlayer", "layers.0"): value for name, value in found.items()}, eagle.folder / "model.safetensors")
    assert eagle.load().config == THIRD


def test_an_embedding_is_kept(eagle):
    assert not eagle.load().config.own_embedding
    embedding = torch.randn(12, 8)
    assert torch.equal(eagle.weights(embed_tokens__weight=embedding).load().embed_tokens.weight, embedding)


def test_what_turns_positions_may_be_stored(eagle):
    eagle.weights(midlayer__self_attn__rotary_emb__inv_freq=torch.ones(2)).load()
    with pytest.raises(ValueError, match="unexpected: midlayer.self_attn.rotary_emb.scale"):
        eagle.weights(midlayer__self_attn__rotary_emb__scale=torch.ones(2)).load()


def test_old_words_for_scaling_are_read(tmp_path):
    scaling = {"type": "linear", "factor": 2.0}
    assert Checkpoint(tmp_path / "a", replace(THIRD, rope_scaling=scaling)).load().config.rope_scaling == scaling
    other = Checkpoint(tmp_path / "b", replace(THIRD, rope_scaling=scaling), "speculators")
    assert other.load().config.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_what_a_config_of_llama_leaves_out_has_llamas_default(theirs):
    layer = json.loads((theirs.folder / "config.json").read_text())["transformer_layer_config"]
    short = {name: value for name, value in layer.items() if name not in ("rms_norm_eps", "max_position_embeddings", "rope_parameters")}
    config = theirs.config(transformer_layer_config=short).load().config
    assert (config.rms_norm_eps, config.max_positions, config.rope_theta, config.rope_scaling) == (1e-6, 2048, 10000.0, None)


def test_files_in_parts_and_pickled_tensors_are_read(eagle):
    wanted, found = eagle.load().state_dict(), load_file(eagle.folder / "model.safetensors")
    (eagle.folder / "model.safetensors").unlink()
    for old in (True, False):
        torch.save(found, eagle.folder / "pytorch_model.bin", _use_new_zipfile_serialization=not old)
        assert all(torch.equal(a, b) for a, b in zip(eagle.load().state_dict().values(), wanted.values(), strict=True))
    names = sorted(found)
    save_file({name: found[name] for name in names[:4]}, eagle.folder / "a.safetensors")
    save_file({name: found[name] for name in names[4:]}, eagle.folder / "b.safetensors")
    index = {"weight_map": {name: "ab"[i >= 4] + ".safetensors" for i, name in enumerate(names)}}
    (eagle.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert all(torch.equal(a, b) for a, b in zip(eagle.load().state_dict().values(), wanted.values(), strict=True))
    index["weight_map"]["more"] = "a.safetensors"
    (eagle.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="not there: \\['more'\\]"):
        eagle.load()


# ----------------------------------------------------------------------------------------------------------------- what is refused


def test_every_wrong_tensor_is_named(eagle):
    eagle.weights(norm__weight=None, t2d=None, midlayer__self_attn__q_proj__weight=torch.ones(3, 16), other__weight=torch.ones(2))
    with pytest.raises(ValueError) as found:
        eagle.load()
    for line in ("missing: norm.weight [8]", "missing: t2d [12]", "unexpected: other.weight [2]",
                 "another shape: midlayer.self_attn.q_proj.weight is [3, 16], expected [8, 16]"):  # fmt: skip
        assert line in str(found.value)


@pytest.mark.parametrize(("layout", "config"), LAYOUTS)
@pytest.mark.parametrize(("facts", "words"), [
    (replace(FACTS, hidden_size=16), "hidden_size 8, this one 16"), (replace(FACTS, vocab_size=13), "vocab_size 12, this one 13"),
])  # fmt: skip
def test_a_head_of_another_target(tmp_path, layout, config, facts, words):
    with pytest.raises(ValueError, match=words):
        Checkpoint(tmp_path, config, layout).load(facts)


@pytest.mark.parametrize("layout", ["speculators", "eagle"])
def test_layers_that_the_target_does_not_have(tmp_path, layout):
    with pytest.raises(ValueError, match=r"\(2, 5, 7\).*0 to 6"):
        Checkpoint(tmp_path, THIRD, layout).load(replace(FACTS, num_layers=6))


def test_the_vocabulary_map_is_checked(eagle):
    good = load_file(eagle.folder / "model.safetensors")
    offsets, known = good["d2t"], good["t2d"]
    for d2t, t2d, words in [
        (offsets.index_fill(0, torch.tensor([6]), 6), known, "outside the target's vocabulary of 12, first 6 to 12"),
        (offsets.index_fill(0, torch.tensor([0]), -1), known, "first 0 to -1"),
        (torch.tensor([0, 0, 0, -1, 0, 0, 0]), known, r"more than one draft token to each of \[2\]"),
        (offsets, known.roll(1), "t2d and d2t disagree"),
        (offsets.double(), known, "d2t has type torch.float64"),
    ]:
        with pytest.raises(ValueError, match=words):
            eagle.weights(d2t=d2t, t2d=t2d).load()
    assert torch.equal(eagle.weights(d2t=offsets.int(), t2d=known.to(torch.uint8)).load().offsets, offsets)


def test_a_pickle_is_not_run(eagle, tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "boom",))

    (eagle.folder / "model.safetensors").unlink()
    file = eagle.folder / "pytorch_model.bin"
    torch.save({"fc.weight": Bomb()}, file)
    with pytest.raises(ValueError, match=r"pytorch_model.bin: holds more than tensors.*model.safetensors"):
        eagle.load()
    file.write_bytes(pickle.dumps(Bomb(), protocol=2))
    with pytest.raises(ValueError, match="pytorch_model.bin"):
        eagle.load()
    assert not (tmp_path / "boom").exists()
    torch.save({"state_dict": {}}, file)
    with pytest.raises(ValueError, match="no table of tensors"):
        eagle.load()


def test_damaged_folders_are_refused(eagle, tmp_path):
    (eagle.folder / "model.safetensors").write_bytes(b"abc")
    with pytest.raises(ValueError, match="damaged"):
        eagle.load()
    (eagle.folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no weights"):
        eagle.load()
    (eagle.folder / "config.json").write_text("[")
    with pytest.raises(ValueError, match="config.json"):
        eagle.load()
    with pytest.raises(ValueError, match="no such folder"):
        load_head(tmp_path / "not here", FACTS)


@pytest.mark.parametrize("change", [
    {"hidden_act": "gelu"}, {"num_hidden_layers": 2}, {"attention_bias": True}, {"model_type": "qwen3"}, {"tie_word_embeddings": True},
    {"layer_types": ["sliding_attention"]}, {"hidden_size": "8"}, {"num_attention_heads": 0},
    {"rope_scaling": {"type": "yarn", "factor": 2}},
    {"fc_norm": "yes"}, {"eagle_config": {"use_aux_hidden_state": False}},
])  # fmt: skip
def test_what_no_head_computes_is_refused(eagle, change):
    with pytest.raises(ValueError, match=next(iter(change)) if "eagle_config" not in change else "use_aux_hidden_state"):
        eagle.config(**change).load()


@pytest.mark.parametrize("change", [
    {"speculators_model_type": "dflash"}, {"transformer_layer_config": {"hidden_size": 8}}, {"transformer_layer_config": 3}, {"fc_norm": 2},
])  # fmt: skip
def test_other_kinds_are_refused(theirs, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        theirs.config(**change).load()


# -------------------------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize(("layout", "config", "word"), [
    ("speculators", FIRST, "version=1"), ("speculators", replace(THIRD, bias=True), "bias=True"),
    ("eagle", replace(THIRD, norm_output=True), "norm_output=True"), 
    ("eagle", replace(THIRD, norm_before_residual=True), "norm_before_residual=True"),
    ("eagle", replace(THIRD, layers=(0, 1, 2)), "layers"), ("eagle", replace(FIRST, layers=(1, 2)), "layers"),
    ("eagle", replace(THIRD, norm_before_fc=True, fc_norm=True), "norm_before_fc, fc_norm"), ("medusa", THIRD, "allowed are"),
])  # fmt: skip
def test_what_a_layout_cannot_say_is_not_written(tmp_path, layout, config, word):
    with pytest.raises(ValueError, match=word):
        save_head(made(config), tmp_path / "new", layout=layout)
    assert not (tmp_path / "new").exists()


def test_a_map_that_is_none_is_not_written(tmp_path):
    head = made(THIRD)
    head.offsets.fill_(100)
    with pytest.raises(ValueError, match="outside"):
        save_head(head, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_map_is_left_out_when_everything_can_be_drafted(tmp_path):
    for drafted in (7, 12):
        save_head(made(replace(THIRD, draft_vocab_size=drafted)), tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        assert ("d2t" in found) == ("t2d" in found) == (drafted == 7)
    assert {file.name for file in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_what_was_there_survives_a_failure(tmp_path, monkeypatch):
    save_head(made(THIRD), tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def full(tensors, file, metadata):
        Path(file).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("specdec.checkpoints.build.save_file", full)
    with pytest.raises(OSError, match="no space"):
        save_head(made(replace(THIRD, fc_norm=True)), tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
