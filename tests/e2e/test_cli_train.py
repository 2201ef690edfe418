"""`specdec train` as a user calls it, on a tiny model that reads and writes letters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import specdec
from specdec.cli import main

pytestmark = pytest.mark.slow

QUICK = ("--tokens", "3000", "--batch-tokens", "512", "--dtype", "float32")
OWN = {
    "eagle3": ("--vocab", "20", "--layers", "0,1,2", "--unroll", "2"), "mtp": ("--vocab", "20", "--unroll", "2"),
    "medusa": ("--vocab", "20", "--heads", "2"), "draft": (),
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ 'u' if m['role'] == 'user' else 'a' }}{{ m['content'] }}z{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, letter_tokenizer) -> str:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=27, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=1024, bos_token_id=None, eos_token_id=25, pad_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    letter_tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return str(path)


@pytest.fixture
def train(folder, capsys):
    def run(kind: str, *argv: str) -> dict:
        capsys.readouterr()
        status = main(["train", kind, "--target", folder, "--json", *QUICK, *OWN[kind], *argv])
        out, err = capsys.readouterr()
        assert status == 0, err
        assert out.count("\n") == 1
        return json.loads(out)

    return run


def test_a_head_is_trained_and_drafts(train, folder, tmp_path):
    told = train("eagle3", "--out", str(tmp_path))
    assert told["tokens"] >= 3000 and told["steps"] > 0 and len(told["accepted"]) == 2 and all(0 <= a <= 1 for a in told["accepted"])
    model = AutoModelForCausalLM.from_pretrained(folder)
    drafter = specdec.EagleDrafter.from_pretrained(told["path"], model)
    ids = torch.tensor([[1, 2, 3]])
    done = specdec.generate(model, ids, drafter=drafter, max_new_tokens=16)
    assert done.new_tokens[0].equal(specdec.generate(model, ids, drafter=specdec.NullDrafter(), max_new_tokens=16).new_tokens[0])
    assert done.stats.drafted > 0


@pytest.mark.parametrize("kind, make", [("mtp", specdec.MTPDrafter), ("medusa", specdec.MedusaDrafter)])
def test_other_heads_are_trained_and_draft(train, folder, tmp_path, kind, make):
    told = train(kind, "--out", str(tmp_path))
    assert told["steps"] > 0 and len(told["accepted"]) == 2
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([[1, 2, 3]])
    done = specdec.generate(model, ids, drafter=make.from_pretrained(told["path"], model), max_new_tokens=16)
    assert done.new_tokens[0].equal(specdec.generate(model, ids, drafter=specdec.NullDrafter(), max_new_tokens=16).new_tokens[0])
    assert done.stats.drafted > 0


def test_a_second_call_finds_it_done_and_other_words_are_refused(train, folder, tmp_path, capsys):
    first = train("eagle3", "--out", str(tmp_path))
    weights = load_file(Path(first["path"]) / "model.safetensors")
    again = train("eagle3", "--out", str(tmp_path))
    assert again["steps"] == first["steps"] and again["tokens"] == first["tokens"]
    for name, weight in load_file(Path(again["path"]) / "model.safetensors").items():
        assert weight.equal(weights[name])
    assert main(["train", "eagle3", "--target", folder, *QUICK, *OWN["eagle3"], "--out", str(tmp_path), "--rate", "0.5"]) == 1
    assert "give an empty folder" in capsys.readouterr().err


def test_a_draft_model_is_trained_and_drafts(train, folder, tmp_path):
    told = train("draft", "--out", str(tmp_path), "--draft-layers", "1")
    draft, model = (AutoModelForCausalLM.from_pretrained(path) for path in (told["path"], folder))
    assert draft.config.num_hidden_layers == 1 and len(told["accepted"]) == 1
    ids = torch.tensor([[1, 2, 3]])
    done = specdec.generate(model, ids, drafter=specdec.ModelDrafter(draft), max_new_tokens=16)
    assert done.new_tokens[0].equal(specdec.generate(model, ids, drafter=specdec.NullDrafter(), max_new_tokens=16).new_tokens[0])


def test_prompts_of_a_file_are_answered(train, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [text, "more"]}) + "\n" for text in ("abc", "hello", "xyz")))
    told = train("eagle3", "--out", str(tmp_path / "out"), "--prompts", str(file), "--write-only")
    (shard,) = [load_file(path) for path in sorted((tmp_path / "out" / "data").glob("0*.safetensors"))]
    assert told["tokens"] == shard["tokens"].numel() and len(shard["tokens"]) == 3
    assert "steps" not in told


def test_two_processes_end_with_the_same_weights_as_one(train, folder, tmp_path):
    """Up to the order in which gradients are summed."""
    alone = train("eagle3", "--out", str(tmp_path / "one"))
    launch = ["--cpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    own = ["-m", "specdec", "train", "eagle3", "--target", folder, "--json", *QUICK, *OWN["eagle3"], "--out", str(tmp_path / "two")]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, "--main_process_port", "0", *own]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (load_file(tmp_path / name / "eagle3" / "model.safetensors") for name in ("one", "two"))
    assert alone["steps"] > 0 and one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(weight, two[name], rtol=1e-3, atol=1e-4)


def test_bad_requests_are_named(folder, tmp_path, capsys):
    for argv, words in (
        (["--data", str(tmp_path / "nothing")], "--tokens: nothing is written where --data"),
        (["--prompts", str(tmp_path / "lost.jsonl")], "lost.jsonl"),
        (["--layers", "0,1,9"], "layers"),
    ):
        assert main(["train", "eagle3", "--target", folder, *QUICK, *OWN["eagle3"], "--out", str(tmp_path / "out"), *argv]) == 1
        assert words in capsys.readouterr().err
    lost = ["--out", str(tmp_path), "--data", str(tmp_path / "nothing")]
    assert main(["train", "eagle3", "--target", folder, "--dtype", "float32", *lost]) == 1
    assert "--data: no dialogues in" in capsys.readouterr().err
