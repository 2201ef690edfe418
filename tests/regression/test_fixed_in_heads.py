"""Faults of heads, checkpoints and training that were found and mended."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
import transformers
from eagle_heads import config, filled
from safetensors.torch import load_file, save_file

import specdec
from specdec import EagleDrafter, NullDrafter
from specdec.cache import causal_target, output_rows
from specdec.checkpoints import load_head, save_head
from specdec.cli import main
from specdec.drafters.optimal import best_choices
from specdec.heads import EagleConfig, usual_layers
from specdec.models.tiny import TinyTarget
from specdec.training import ModelLesson, Reader, Template, Wanted, fresh_head, fresh_mtp, write_corpus

TARGET = TinyTarget(11, seed=3)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def model(kind: str, **given):
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**SIZES, pad_token_id=None, **given))
    for weight in made.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return made.eval()


@pytest.mark.parametrize("kind, given, known", [
    ("Llama", {}, True), ("Cohere", {"logit_scale": 0.25}, True), ("Granite", {"logits_scaling": 8.0}, True),
    ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 16, "layer_types": ["full_attention"] * 2}, False), ("Phi", {}, False),
])  # fmt: skip
def test_what_the_model_does_to_its_logits_is_part_of_the_law_that_is_taught(kind, given, known):
    """A scale is; a cap or a bias is refused."""
    target = causal_target(model(kind, **given))
    rows, lent = output_rows(target, target.lend()), target.lend()
    assert (rows is not None) == known
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    cache = target.new_cache(1)
    cache.open(5)
    with torch.no_grad():
        logits, hidden = target.forward(tokens, torch.arange(5)[None], None, cache, logits=True, layers=(2,))
    if rows is not None and hidden is not None and logits is not None:
        law = (lent.norm(hidden).detach() @ rows.T).softmax(-1)
        assert 0.5 * float((law - logits.softmax(-1)).abs().sum(-1).max()) < 1e-3


@pytest.mark.parametrize("kind", ["GPT2", "Phi", "Cohere", "Phi3"])
def test_a_fresh_head_of_a_target_that_is_not_like_llama_says_so(kind):
    gpt = transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2)
    target = causal_target(transformers.GPT2LMHeadModel(gpt).eval() if kind == "GPT2" else model(kind))
    ids = torch.arange(9)
    if kind == "GPT2":
        with pytest.raises(ValueError, match="target: its config does not say .*intermediate_size"):
            fresh_head(target.lend(), target.facts, (0, 1, 2), torch.zeros(40, 32), ids)
        return
    with pytest.warns(UserWarning, match="random weights"):
        fresh_head(target.lend(), target.facts, (0, 1, 2), torch.zeros(40, 32), ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_that_shares_the_output_head_may_be_of_another_precision(dtype):
    head = filled(config(1, TARGET), dtype=dtype)
    plain = specdec.generate(TARGET, [[1, 2, 3]], drafter=NullDrafter(), max_new_tokens=12)
    assert specdec.generate(TARGET, [[1, 2, 3]], drafter=EagleDrafter(head, TARGET), max_new_tokens=12).sequences.equal(plain.sequences)


def test_a_checkpoint_of_mixed_precision_is_read_in_that_of_most_numbers(tmp_path):
    save_head(filled(config(3, TARGET, layers=(1, 2)), dtype=torch.bfloat16), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: part.float() if "norm" in name else part for name, part in tensors.items()}, tmp_path / "model.safetensors")
    drafter = EagleDrafter.from_pretrained(tmp_path, TARGET)
    assert {weight.dtype for weight in drafter.head.parameters()} == {torch.bfloat16}
    specdec.generate(TARGET, [[1, 2, 3]], drafter=drafter, max_new_tokens=4)


def test_a_call_for_another_target_is_refused():
    drafter = EagleDrafter(filled(config(3, TARGET)), TARGET)
    for other in (TinyTarget(12), TinyTarget(11, hidden_size=16)):
        with pytest.raises(ValueError, match="trained for another target"):
            specdec.generate(other, [[1, 2, 3]], drafter=drafter, max_new_tokens=4)


@pytest.mark.parametrize("change", [
    {"head_dim": "8"}, {"head_dim": -8}, {"hidden_size": True}, {"rms_norm_eps": float("nan")}, {"draft_vocab_size": [1]},
    {"target_hidden_size": [3]}, {"eagle_config": [1]}, {"rope_scaling": [1]}, {"layer_types": 3}, {"draft_vocab_size": -3},
    {"rope_scaling": {"rope_type": "linear"}}, {"rope_scaling": {"rope_type": "linear", "factor": 0}},
    {"rope_scaling": {"rope_type": "llama3", "factor": "x"}}, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
], ids=str)  # fmt: skip
def test_a_config_of_wrong_kinds_is_a_value_error(tmp_path, change):
    save_head(filled(config(3, TARGET, layers=(1, 2))), tmp_path, layout="eagle")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError):
        load_head(tmp_path, TARGET.facts)


@pytest.mark.parametrize("index", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_a_value_error(tmp_path, index):
    save_head(filled(config(3, TARGET, layers=(1, 2))), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError):
        load_head(tmp_path, TARGET.facts)


def test_the_word_with_two_meanings_can_be_settled(tmp_path):
    save_head(filled(config(3, TARGET, layers=(1, 2))), tmp_path, layout="eagle")
    file = tmp_path / "config.json"
    for said in (True, False):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"norm_output": said}))
        for meant in (True, False):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert load_head(tmp_path, TARGET.facts, norm_output=meant).config.norm_output == meant


def test_usual_layers_of_a_small_target_are_refused():
    assert usual_layers(30) == (2, 15, 27)
    for count in (None, 2, 3, 4, 5):
        with pytest.raises(ValueError, match="layers: not given"):
            usual_layers(count)
    with pytest.raises(ValueError, match="layers: got"):
        EagleConfig(3, (2, 2, 1), 8, 8, 8, 2, 2, 4, 11, 11)


def test_a_tree_may_be_deep_and_costs_are_numbers():
    deep = best_choices([1.0], 60)
    assert deep[-1] == (0,) * 60
    with pytest.raises(ValueError, match="verify_cost"):
        best_choices([0.5], 4, verify_cost=lambda nodes: float("nan"))


TEMPLATE = Template([1], [2], [2, 3], lambda words: [4 + len(words) % 3])


def test_other_prompts_do_not_go_on_with_a_folder(tmp_path):
    small = Wanted(60, rows=2, length=20)
    write_corpus(TARGET, TEMPLATE, tmp_path, small, [["a"], ["bb"]], source="one")
    write_corpus(TARGET, TEMPLATE, tmp_path, small, [["a"], ["bb"]], source="one")
    for prompts, source in (([["a"], ["b"]], "one"), ([["a"], ["bb"]], "two")):
        with pytest.raises(ValueError, match="was begun otherwise"):
            write_corpus(TARGET, TEMPLATE, tmp_path, small, prompts, source=source)


def test_dialogues_are_no_longer_than_the_target_s_positions(tmp_path):
    short = TinyTarget(11, seed=3, max_positions=24)
    found = write_corpus(short, TEMPLATE, tmp_path, Wanted(60, rows=2, length=256))
    assert next(iter(found)).tokens.shape[1] == 24


@pytest.mark.parametrize("argv, said", [
    (["eagle3", "--draft-layers", "2"], "--draft-layers"), (["draft", "--layers", "1,2"], "--layers"), (["mtp", "--heads", "2"], "--heads"),
    (["medusa", "--unroll", "2"], "--unroll"), (["eagle3", "--dtype", "float16", "--device", "cpu"], "--dtype"),
    (["eagle3", "--data", "x", "--prompts", "y"], "--prompts"), (["eagle3", "--data", "x", "--tokens", "9"], "--tokens"),
])  # fmt: skip
def test_an_option_that_would_not_be_used_is_refused(tmp_path, capsys, argv, said):
    assert main(["train", *argv, "--out", str(tmp_path)]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--passes", "0"], ["--layers", "a,b"], ["--room", "-1"], ["--batch-tokens", "0"], ["--vocab", "0"]])
def test_an_option_out_of_range_is_named(tmp_path, capsys, argv):
    with pytest.raises(SystemExit):
        main(["train", "eagle3", "--out", str(tmp_path), *argv])
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["demo", "--head", "x"], ["generate", "--prompt", "a", "--drafter", "ngram", "--head", "x"]])
@pytest.mark.real
def test_a_head_that_would_not_be_used_is_refused(capsys, argv):
    assert main(argv) == 1
    assert "--head" in capsys.readouterr().err


@pytest.mark.parametrize("kind, given", [("Llama", {}), ("Cohere", {"logit_scale": 0.25}), ("Granite", {"logits_scaling": 8.0})])
def test_a_whole_copy_has_nothing_to_learn(kind, given):
    """The loss of `train draft` is the entropy of the target's own law where the learner is the target."""
    made = model(kind, **given)
    target = causal_target(made)
    lent, rows = target.lend(), output_rows(target, target.lend())
    weight = made.get_output_embeddings().weight.detach()
    lesson = ModelLesson(copy.deepcopy(made), rows, float((rows * weight).sum() / (weight * weight).sum()))
    tokens = torch.arange(24).view(2, 12) % 40
    seen = Reader(target, lent, ())(tokens, torch.ones_like(tokens, dtype=torch.bool))
    law = made(tokens).logits[:, :-1].detach()
    assert float(lesson(seen).detach()) == pytest.approx(float(-(law.softmax(-1) * law.log_softmax(-1)).sum()), rel=1e-3)


def test_a_fresh_module_of_an_odd_target():
    gpt = causal_target(transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2)).eval())
    with pytest.raises(ValueError, match="target: its config does not say"):
        fresh_mtp(gpt.lend(), gpt.facts, torch.arange(4))
    made = model("Llama")
    made.model.norm.weight.data[3] = 0
    target = causal_target(made)
    assert all(bool(weight.isfinite().all()) for weight in fresh_mtp(target.lend(), target.facts, torch.arange(4)).parameters())
