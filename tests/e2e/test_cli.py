"""The commands as a user calls them: what they print, for people and for machines, and their exit status."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import specdec
from specdec.acceptors import MatchAcceptor
from specdec.cli import COMMANDS, certify, main, text
from specdec.testing.battery import battery

pytestmark = pytest.mark.slow

KEYS = {"text", "tokens", "rounds", "tokens_per_round", "tokens_per_s", "plain_tokens_per_s", "equal_to_plain", "finish_reason"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, letter_tokenizer) -> str:
    """A tiny model that reads and writes letters."""
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(11)  # a text of mixed luck for n-grams, without an early end
    config = LlamaConfig(
        vocab_size=27, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=26, pad_token_id=26, initializer_range=0.5,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    letter_tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def call(folder, capsys):
    """Run a command on the tiny model; its exit status, standard output and standard error."""

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([*argv, "--model", folder] if argv[0] in ("demo", "generate") else list(argv))
        return status, *capsys.readouterr()

    return run


def answer(result: tuple[int, str, str]) -> dict:
    status, out, err = result
    assert status == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


GENERATE = ("generate", "--prompt", "abcabcabc", "--max-new-tokens", "40", "--json")


def test_json_of_generate(call, folder) -> None:
    got = answer(call(*GENERATE))
    assert got.keys() >= KEYS
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor([tokenizer("abcabcabc")["input_ids"]])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)[0, ids.shape[1] :].tolist()
    assert got["token_ids"] == theirs and got["tokens"] == len(theirs)
    assert got["text"] == tokenizer.decode(theirs, skip_special_tokens=True)
    assert got["tokens_per_round"] == pytest.approx(got["tokens"] / got["rounds"]) and got["tokens_per_s"] > 0
    assert (got["finish_reason"], got["plain_tokens_per_s"], got["equal_to_plain"]) == ("length", None, None)


def test_plain_and_drafted_texts_are_one(call) -> None:
    drafted, plain = answer(call(*GENERATE)), answer(call(*GENERATE, "--drafter", "none"))
    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["tokens_per_round"] == 1 and drafted["rounds"] < plain["rounds"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compare(call, dtype) -> None:
    got = answer(call(*GENERATE, "--compare", "--dtype", dtype))
    assert got["equal_to_plain"] is True and got["dtype"] == dtype
    assert got["speedup"] == pytest.approx(got["tokens_per_s"] / got["plain_tokens_per_s"])


def test_a_sampled_text_belongs_to_its_seed(call) -> None:
    texts = [answer(call(*GENERATE, "--temperature", "1", "--seed", seed, "--top-k", "0"))["token_ids"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert answer(call(*GENERATE, "--temperature", "1", "--compare"))["equal_to_plain"] is None
    assert answer(call(*GENERATE, "--temperature", "0"))["token_ids"] == answer(call(*GENERATE))["token_ids"]


def test_stop_strings_end_the_text(call) -> None:
    whole = answer(call(*GENERATE))["text"]
    stop = whole[10:12]
    got = answer(call(*GENERATE, "--stop", "never there", "--stop", stop))
    assert got["finish_reason"] == "stop" and got["text"] == whole[: whole.index(stop) + len(stop)]


def test_the_prompt_may_come_from_standard_input(call, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("abcabcabc"))
    piped = answer(call("generate", "--prompt", "-", "--max-new-tokens", "40", "--json"))
    assert piped["token_ids"] == answer(call(*GENERATE))["token_ids"]


def test_chat_or_no_chat(call, folder, monkeypatch) -> None:
    status, _, err = call(*GENERATE, "--chat")
    assert status == 1 and "--chat" in err
    model, tokenizer = text.load(folder)
    tokenizer.chat_template = "{% for m in messages %}x{{ m.content }}x{% endfor %}"
    monkeypatch.setattr(text, "load", lambda *args, **kwargs: (model, tokenizer))
    lengths = {flags: answer(call(*GENERATE, *flags))["prompt_tokens"] for flags in [(), ("--chat",), ("--no-chat",)]}
    assert lengths == {(): 11, ("--chat",): 11, ("--no-chat",): 9}


def test_nothing_may_be_asked_for(call) -> None:
    got = answer(call("generate", "--prompt", "abc", "--max-new-tokens", "0", "--compare", "--json"))
    assert (got["text"], got["tokens"], got["rounds"], got["finish_reason"], got["equal_to_plain"]) == ("", 0, 0, "length", True)


# ---------------------------------------------------------------------------------------------------------------- for people


def test_people_see_the_text_with_its_accepted_runs(call) -> None:
    wanted = answer(call(*GENERATE))
    status, out, err = call("demo", "--prompt", "abcabcabc", "--max-new-tokens", "40")
    assert status == 0 and err == ""
    assert wanted["text"] in out.replace("⟦", "").replace("⟧", "")
    assert out.count("⟦") == out.count("⟧") > 0
    assert f"{wanted['tokens']} tokens in {wanted['rounds']} rounds: {wanted['tokens_per_round']:.2f} tokens a round" in out
    assert out.endswith("equal to plain decoding in float32: yes\n")
    for figure in ("speculative", "plain", "ratio"):
        assert figure in out
    assert "in bfloat16" in call("demo", "--prompt", "abcabcabc", "--max-new-tokens", "5", "--dtype", "bfloat16")[1]


@pytest.mark.real
def test_demo_on_the_real_model(capsys) -> None:
    assert main(["demo", "--max-new-tokens", "48", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got.keys() >= KEYS
    assert got["equal_to_plain"] is True and (got["tokens"], got["finish_reason"]) == (48, "length")
    assert got["text"].startswith("Bees visit flowers to collect nectar and pollen.") and "would lose their food" in got["text"]
    assert got["tokens_per_round"] > 3


def test_a_text_that_differs_from_plain_decoding_fails(call, monkeypatch) -> None:
    honest = text.stream

    def tampering(*args, drafter, **kwargs):
        for done in honest(*args, drafter=drafter, **kwargs):
            yield replace(done, emitted=((7, *done.emitted[0][1:]),)) if isinstance(drafter, specdec.NGramDrafter) else done

    monkeypatch.setattr(text, "stream", tampering)
    status, out, err = call("demo", "--prompt", "abcabcabc", "--max-new-tokens", "9", "--json")
    assert status == 1 and json.loads(out)["equal_to_plain"] is False
    assert err.startswith("specdec demo: the text differs from plain decoding at new token 0: 7, plain ") and err.count("\n") == 1
    assert "equal to plain decoding in float32: no" in call("demo", "--prompt", "abcabcabc", "--max-new-tokens", "9")[1]


# ------------------------------------------------------------------------------------------------------------------- certify


class Biased(MatchAcceptor):
    """Claims to be lossless and never accepts the last node."""

    def accept(self, tree, verification, source):
        accepted = super().accept(tree, verification, source)
        return replace(accepted, next_token=torch.where(accepted.count > 1, torch.zeros_like(accepted.next_token), accepted.next_token))


@pytest.fixture
def few_cells(monkeypatch) -> None:
    monkeypatch.setattr(certify, "battery", lambda: [cell for cell in battery() if cell.shape == "level 2"])


def test_certify(call, few_cells) -> None:
    rows = answer(call("certify", "MatchAcceptor", "RejectionAcceptor", "--json"))
    assert {row["acceptor"] for row in rows} == {"MatchAcceptor", "RejectionAcceptor"} and len(rows) == 14
    wanted = {"acceptor", "drafter", "proposal", "shape", "lossless", "defect", "expected_tokens", "efficiency", "verdict"}
    assert all(row.keys() >= wanted and row["verdict"] == "pass" for row in rows)
    status, out, _ = call("certify", "MatchAcceptor")
    assert status == 0 and out.count("\n") == 8 and out.count("pass") == 7


def test_certify_fails_when_a_claim_does_not_hold(call, few_cells, monkeypatch) -> None:
    monkeypatch.setitem(certify.ACCEPTORS, "Biased", Biased)
    status, out, err = call("certify", "Biased", "--json")
    assert status == 1 and {row["verdict"] for row in json.loads(out) if row["defect"] is not None} == {"fail"}
    assert err.startswith("specdec certify: 4 claims of losslessness do not hold; first Biased on level 2") and err.count("\n") == 1


# -------------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["generate", "--prompt", ""], "--prompt: it is empty"),
        (["generate", "--prompt", "a", "--top-p", "0.9"], "--top-p: 0.9 would have no effect without --temperature"),
        (["generate", "--prompt", "a", "--seed", "3"], "--seed: 3 would have no effect"),
        (["generate", "--prompt", "a", "--temperature", "-1"], "temperature"),
        (["generate", "--prompt", "a" * 300], "256"),
        (["certify", "NoAcceptor"], "ACCEPTOR: NoAcceptor unknown; allowed are BlockAcceptor"),
    ],
)
def test_errors_take_one_line(call, argv, said) -> None:
    status, out, err = call(*argv)
    assert status == 1 and out == "" and err.count("\n") == 1
    assert err.startswith(f"specdec {argv[0]}: ") and said in err


def test_an_unknown_model_is_an_error_in_one_line(capsys) -> None:
    assert main(["demo", "--model", "/no/such/folder", "--json"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("specdec demo: name_or_path: cannot load '/no/such/folder'") and err.count("\n") == 1


def test_the_traceback_is_there_for_the_asking() -> None:
    with pytest.raises(OSError, match="cannot load"):
        main(["demo", "--model", "/no/such/folder", "--traceback"])


@pytest.mark.parametrize("argv", [[], ["decode"], ["generate"], ["demo", "--num-draft", "-1"], ["demo", "--max-new-tokens", "x"]])
def test_arguments_that_make_no_sense(argv, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2 and "usage: specdec" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_has_an_example(command, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command.name, "--help"])
    assert caught.value.code == 0
    assert command.example in capsys.readouterr().out and command.example.startswith(f"specdec {command.name} ")


def test_python_dash_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specdec", "--version"], capture_output=True, text=True, cwd=Path(specdec.__file__).parents[1], check=True
    )
    assert done.stdout == f"specdec {specdec.__version__}\n"
