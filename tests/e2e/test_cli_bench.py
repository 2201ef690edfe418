"""`specdec bench` as a user calls it, on a tiny model that reads and writes letters."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec.bench.methods import METHODS, Decoded, Setup, make_methods
from specdec.cli import main
from specdec.stats import PHASES

pytestmark = pytest.mark.slow

TEXTS = [("one", "abcabcabc"), ("two", "xyzxyz"), ("two", "hello")]
NEW = 12
END = 10
"""The letter at which texts end."""
QUICK = ("--max-new-tokens", str(NEW), "--warm-up", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, letter_tokenizer) -> str:
    """A model whose greedy texts end early, each at a place of its own: a letter that it often says is its end token."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=27, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=END, pad_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    letter_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def prompts(tmp_path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"category": category, "turns": [text]}) + "\n" for category, text in TEXTS))
    return str(file)


@pytest.fixture
def bench(folder, prompts, capsys):
    """Run the command; its exit status, standard output and standard error."""

    def run(*argv: str, file: str = prompts) -> tuple[int, str, str]:
        capsys.readouterr()
        return main(["bench", "--model", folder, "--prompts", file, *QUICK, *argv]), *capsys.readouterr()

    return run


def answer(result: tuple[int, str, str]) -> dict:
    status, out, err = result
    assert status == 0, err
    assert out.count("\n") == 1 and err == ""
    return json.loads(out)


def test_json(bench) -> None:
    got = answer(bench("--methods", "hf-plain,ngram,hf-lookup", "--ignore-eos", "--json"))
    assert got.keys() == {"machine", "settings", "methods"}
    assert got["machine"].keys() >= {"torch", "transformers", "threads", "cpu", "device", "dtype"}
    assert got["settings"] | {"methods": 0, "batch": 1, "ignore_eos": True, "prompts_read": 3} == got["settings"] | {"methods": 0}
    assert list(got["methods"]) == got["settings"]["methods"] == ["plain", "hf-plain", "ngram", "hf-lookup"]
    base = got["methods"]["hf-plain"]["tokens_per_s"]
    for name, one in got["methods"].items():
        assert one["tokens"] == 3 * NEW and one["tokens_per_s"] == pytest.approx(one["tokens"] / one["seconds_total"])
        assert one["seconds"].keys() == {*PHASES, "outside"}
        assert one["speedup"]["total"] == pytest.approx(one["tokens_per_s"] / got["methods"]["plain"]["tokens_per_s"])
        assert one["speedup"]["low"] <= one["speedup"]["total"] <= one["speedup"]["high"]
        assert list(one["speedup"]["by_category"]) == list(one["tokens_per_round_by_category"]) == ["one", "two"]
        assert one["vs_hf_plain"] == pytest.approx(one["tokens_per_s"] / base) and one["vs_hf_lookup"] > 0
        assert one["equal_to_plain"] == {"equal": 3, "near_tie": 0, "different": 0}
        assert one["tokens_per_round"] == pytest.approx(one["tokens"] / one["rounds"])
        assert (one["tokens_per_round"] == 1) == (name in ("plain", "hf-plain"))
    for name in ("plain", "ngram"):
        seconds = got["methods"][name]["seconds"]
        assert sum(seconds.values()) == pytest.approx(got["methods"][name]["seconds_total"])
        assert all(value > 0 for value in seconds.values())
    assert set(got["methods"]["hf-plain"]["seconds"].values()) == {None}


def test_plain_always_runs_and_transformers_only_if_asked(bench) -> None:
    got = answer(bench("--methods", "ngram", "--limit", "2", "--json"))["methods"]
    assert list(got) == ["plain", "ngram"]
    assert got["ngram"]["vs_hf_plain"] is got["ngram"]["vs_hf_lookup"] is got["ngram"]["vs_hf_plain_interval"] is None
    assert sum(got["ngram"]["equal_to_plain"].values()) == 2


def test_texts_end_early_unless_told_not_to(bench) -> None:
    methods = ("--methods", "hf-plain,hf-lookup,ngram", "--json")
    early, whole = (answer(bench(*methods, *more))["methods"] for more in ((), ("--ignore-eos",)))
    assert {one["tokens"] for one in whole.values()} == {3 * NEW}
    assert len({one["tokens"] for one in early.values()}) == 1 and early["plain"]["tokens"] < 3 * NEW
    for one in (*early.values(), *whole.values()):
        assert one["equal_to_plain"]["equal"] == 3


@pytest.mark.parametrize("more", [(), ("--ignore-eos",)])
def test_batches(bench, more) -> None:
    alone, together = (answer(bench("--methods", "hf-plain,ngram", "--batch", n, *more, "--json"))["methods"] for n in ("1", "2"))
    for name, one in together.items():
        assert one["tokens"] == alone[name]["tokens"] and one["equal_to_plain"]["equal"] == 3
        assert list(one["speedup"]["by_category"]) == ["mixed", "two"]
    assert together["hf-plain"]["rounds"] is None and together["ngram"]["rounds"] == alone["ngram"]["rounds"]


def test_sampling(bench) -> None:
    sampled = ("--methods", "hf-plain,hf-lookup,ngram", "--temperature", "1", "--limit", "2", "--json")
    first, again, other = (answer(bench(*sampled, *seed)) for seed in ((), ("--seed", "0"), ("--seed", "1")))
    tokens = [{name: (one["tokens"], one["rounds"]) for name, one in got["methods"].items()} for got in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert first["settings"]["seed"] == 0 and other["settings"]["seed"] == 1
    assert all(one["equal_to_plain"] is None for one in first["methods"].values())
    whole = answer(bench(*sampled, "--ignore-eos", "--top-p", "0.9"))["methods"]
    assert {one["tokens"] for one in whole.values()} == {2 * NEW}
    assert answer(bench("--temperature", "0", "--json"))["methods"]["ngram"]["equal_to_plain"]["equal"] == 3


def test_a_draft_model(bench, folder) -> None:
    one = answer(bench("--methods", "draft", "--draft-model", folder, "--num-draft", "3", "--ignore-eos", "--json"))["methods"]["draft"]
    assert one["equal_to_plain"]["equal"] == 3 and one["rounds"] == 3 * NEW / 4  # the target itself is never wrong


def test_a_method_of_transformers_leaves_no_trace(folder) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": NEW, "eos_token_id": None}
    decode = make_methods(["hf-plain"], Setup(model, sampling))["hf-plain"]
    before, config = torch.get_rng_state(), model.generation_config.to_dict()
    texts = [decode([[1, 2, 3]], [seed]).texts for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0][0]) == NEW
    assert torch.equal(torch.get_rng_state(), before)
    assert not model._forward_hooks and model.generation_config.to_dict() == config


def test_for_people(bench) -> None:
    status, out, err = bench("--methods", "hf-plain,ngram", "--warm-up", "1")
    assert status == 0 and "3/3" in err
    head, table = out.split("\n\n")[:2]
    assert "3 prompts" in head and "greedy" in head
    assert [line.split()[0] for line in table.splitlines()] == ["method", "plain", "hf-plain", "ngram"]
    assert all(line.endswith("3/0/0") for line in table.splitlines()[1:])
    assert [line.split()[0] for line in out.split("\n\n")[2].splitlines()] == ["speed-up", "one", "two"]
    assert "sampled" in bench("--temperature", "0.5")[1]


# -------------------------------------------------------------------------------------------------------------------- failures


def with_texts(change):
    """The n-gram method, its texts changed."""

    def make(setup: Setup):
        decode = METHODS["plain"](setup)
        return lambda prompts, seeds: Decoded([change(text) for text in decode(prompts, seeds).texts])

    return make


def test_a_text_that_differs_fails_in_float32_alone(bench, monkeypatch) -> None:
    monkeypatch.setitem(METHODS, "ngram", with_texts(lambda text: [*text[:2], (text[2] + 1) % 26, *text[3:]]))
    status, out, err = bench("--ignore-eos", "--json")
    assert status == 1 and err == "specdec bench: texts that differ from plain decoding: 3 by ngram\n"
    assert json.loads(out)["methods"]["ngram"]["equal_to_plain"] == {"equal": 0, "near_tie": 0, "different": 3}
    got = answer(bench("--ignore-eos", "--json", "--dtype", "bfloat16"))
    assert got["methods"]["ngram"]["equal_to_plain"]["different"] > 0 and got["machine"]["dtype"] == "bfloat16"


def test_a_method_that_ends_early_all_the_same(bench, monkeypatch) -> None:
    monkeypatch.setitem(METHODS, "ngram", with_texts(lambda text: text[:5]))
    status, out, err = bench("--ignore-eos", "--temperature", "1", "--json")
    assert status == 1 and out == "" and "--ignore-eos: ngram ended before --max-new-tokens" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--methods", "plain,ngrams"], "methods: 'ngrams' unknown; allowed are plain, hf-plain, hf-lookup, ngram, draft"),
        (["--methods", "hf-lookup", "--batch", "2"], "hf-lookup: transformers' prompt lookup decodes one prompt at a time, not 2"),
        (["--methods", "draft"], "--draft-model"),
        (["--draft-model", "small"], "'small' would not be used"),
        (["--batch", "0"], "--batch: got 0"),
        (["--limit", "0"], "--limit: got 0"),
        (["--max-new-tokens", "0"], "--max-new-tokens: got 0"),
        (["--seed", "1"], "--seed: 1 would have no effect without --temperature"),
        (["--top-p", "0.5"], "--top-p: 0.5 would have no effect"),
        (["--temperature", "-1"], "--temperature: got -1.0; give a number above 0"),
        (["--max-new-tokens", "250"], "prompt 1 has 9 tokens, and with 250 more it passes the 256"),
    ],
)
def test_errors_take_one_line(bench, argv, said) -> None:
    status, out, err = bench(*argv)
    assert status == 1 and out == "" and err.count("\n") == 1
    assert err.startswith("specdec bench: ") and said in err


def test_a_broken_line_is_named(bench, tmp_path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"turns": ["abc"]}\n{"turns": \n')
    status, out, err = bench("--json", file=str(file))
    assert status == 1 and out == "" and "broken.jsonl, line 2: " in err
    assert answer(bench("--limit", "1", "--json", file=str(file)))["methods"]["plain"]["tokens"] > 0


@pytest.mark.real
def test_bench_on_the_real_model(tmp_path, capsys) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["Repeat: one two three one two three"]}\n{"turns": ["Name three rivers."]}\n')
    flags = ["--methods", "hf-plain,hf-lookup,ngram", "--max-new-tokens", "8", "--ignore-eos", "--json"]
    assert main(["bench", "--prompts", str(file), *flags]) == 0
    for one in json.loads(capsys.readouterr().out)["methods"].values():
        assert one["tokens"] == 16 and sum(one["equal_to_plain"].values()) == 2 and one["equal_to_plain"]["different"] == 0
