"""The checks of a real model, on models that are small enough to be known."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.acceptors import BlockAcceptor, RejectionAcceptor
from specdec.acceptors.residual import failing
from specdec.cli import main
from specdec.drafters import ModelDrafter, NGramDrafter, NullDrafter
from specdec.generation import generate
from specdec.loop import decode
from specdec.planning import FixedPlanner
from specdec.rng import CounterRng
from specdec.testing import audit, numerics
from specdec.testing.audit import Echoes, audit_coupled, coupled_texts, reference_draft, sampled_rounds
from specdec.testing.drafters import TableDrafter
from specdec.testing.laws import endless, expected_tokens, one_round
from specdec.testing.numerics import drift, kernel_defects
from specdec.testing.tables import TableVerifier, law_pairs
from specdec.tree import chain
from specdec.types import Verification

pytestmark = pytest.mark.slow

PROMPTS = [[1, 2, 3, 1, 2], [4, 4, 5]]


def tiny(spread: float = 0.4) -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=27, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=26, pad_token_id=26, initializer_range=spread,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny()


PAIRS = law_pairs(3, 3)


def table_rounds(levels: tuple[str, ...], uneven: bool = False):
    drafter = TableDrafter(PAIRS.draft, levels, uneven=uneven)
    return decode(
        TableVerifier(PAIRS.target), [torch.tensor(prompt) for prompt in PAIRS.prompts], endless(PAIRS.prompts, False, 6),
        drafter=drafter, acceptor=RejectionAcceptor(), planner=FixedPlanner(14), rng=CounterRng(range(len(PAIRS.prompts))), keep_all=True,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- the kernel


@pytest.mark.parametrize("levels", [("i", "i", "i"), ("ww", "rp"), ("ii", "i"), ("p", "p")], ids=str)
def test_both_sides_of_the_kernel_agree(levels):
    found = [node for done in table_rounds(levels) for node in kernel_defects(done)]
    assert len(found) > 20 and max(node.defect for node in found) < 1e-14
    assert max(node.budget for node in found) == 1 > min(node.budget for node in found)


def test_the_kernel_is_computed_in_the_dtype_of_the_laws(model):
    draft = reference_draft(model, 0.3)
    rounds = sampled_rounds(model, PROMPTS, ModelDrafter(draft), BlockAcceptor(), max_new_tokens=12, batch=2)
    found = [node for _, done in zip(range(3), rounds, strict=False) for node in kernel_defects(done)]
    assert 1e-12 < max(node.defect for node in found) < 1e-6 and all(node.total <= 27 * node.defect for node in found)


@pytest.mark.parametrize("fault", ["budget", "residual"])
def test_a_faulty_kernel_shows(monkeypatch, fault):
    def faulty(budget, residual, law):
        less, rest = failing(budget, residual, law)
        return (budget, rest) if fault == "budget" else (less, residual)

    monkeypatch.setattr(numerics, "failing", faulty)
    assert max(node.defect for done in table_rounds(("i", "i", "i")) for node in kernel_defects(done)) > 0.05


# ---------------------------------------------------------------------------------------------------- what a rule is worth


@pytest.mark.parametrize("rule", [RejectionAcceptor(), BlockAcceptor()], ids=lambda rule: type(rule).__name__)
def test_the_worth_of_chains_adds_up_to_the_rules(rule):
    """The mean over all chains, each as often as it is drafted, is what the law of a round says."""
    depth = 3
    laws = one_round(TableDrafter(PAIRS.draft, ("i",) * depth), TableVerifier(PAIRS.target), rule, PAIRS.prompts, (depth, depth, 1))
    chains = list(product(range(3), repeat=depth))
    for prompt, law in laws.items():
        rows = [[*prompt, *one] for one in chains]
        window = PAIRS.draft.order
        at = torch.tensor([[([0] * window + row)[len(row[: 2 + d]) :][:window] for d in range(depth + 1)] for row in rows])
        p, q = (table.law(at.flatten(0, 1)).unflatten(0, (len(rows), depth + 1)) for table in (PAIRS.target, PAIRS.draft))
        chance = q[:, :-1].gather(2, torch.tensor(chains)[..., None])[..., 0].prod(1)
        drawn = chance > 0
        tree = chain([[prompt[-1], *one] for one in chains], laws=q[:, :-1])
        token, block = numerics.chain_worth(tree, Verification(p.log()))
        worth = token if isinstance(rule, RejectionAcceptor) else block
        assert float((chance * worth)[drawn].sum()) == pytest.approx(expected_tokens(law), abs=1e-12)


def test_of_an_empty_draft_one_token_is_expected():
    tree = chain([[1], [2]])
    for worth in numerics.chain_worth(tree, Verification(torch.full((2, 1, 4), 0.25).log())):
        assert worth.tolist() == [1, 1]


def test_shorter_chains_in_a_batch_are_worth_what_they_are_alone():
    seen = set()
    for done in table_rounds(("i", "i", "i"), uneven=True):
        alone, tree = [], done.tree
        for row in range(len(done.rows)):
            keep = int((tree.parents[row] >= 0).sum()) + 1
            seen.add((keep, tree.tokens.shape[1]))
            laws = None if tree.laws is None else tree.laws[row, None, : keep - 1]
            one = chain([tree.tokens[row, :keep].tolist()], laws=laws)
            alone.append(torch.stack(numerics.chain_worth(one, Verification(done.verification.logp[row, None, :keep]))))
        together = torch.stack(numerics.chain_worth(tree, done.verification))
        assert torch.cat(alone, 1).allclose(together, atol=1e-12)
    assert len({keep for keep, width in seen if keep < width}) > 1


# --------------------------------------------------------------------------------------------------------- shapes of passes


def test_passes_over_one_and_several_tokens_score_the_same_text(model):
    texts = [[5, 6, 7, 8, 9, 10, 11], [3, 2, 1]]
    for prompt, text in zip(PROMPTS, texts, strict=True):
        want = model(input_ids=torch.tensor([[*prompt, *text]])).logits[0, len(prompt) - 1 : -1]
        for size in (1, 3):
            assert numerics._scores(model, prompt, text, size).allclose(want, atol=1e-4)
    first, second = drift(model, PROMPTS, texts, 3)
    assert (first.positions, second.positions) == (7, 3) and first.logits < 1e-4 and first.tv_max < 1e-5 and first.beyond == 0
    assert first.tv_mean <= first.tv_max


def test_flips_are_measured_against_the_width_of_a_tie(model, monkeypatch):
    honest = numerics._scores

    def shifted(model, prompt, text, size):
        """The second best at place 1 wins by a hundredth where several tokens are passed."""
        found = honest(model, prompt, text, size)
        second = int(found[1].topk(2).indices[1])
        found[1, second] += 0.0 if size == 1 else gap + 0.01
        return found

    text = [5, 6, 7]
    top = honest(model, PROMPTS[0], text, 1)[1].topk(2).values
    gap = float(top[0] - top[1])
    assert gap > audit.NEAR_TIE
    monkeypatch.setattr(numerics, "_scores", shifted)
    (found,) = drift(model, PROMPTS[:1], [text], 2)
    assert found.logits == pytest.approx(gap + 0.01, abs=1e-4)
    assert found.flips == ((pytest.approx(gap, abs=1e-4), audit.NEAR_TIE),) and found.beyond == 1


def test_half_precision_drifts_within_its_ties():
    half = tiny(0.15).to(torch.bfloat16)
    text = generate(half, PROMPTS[:1], drafter=NullDrafter(), max_new_tokens=24, do_sample=False, eos_token_id=None).new_tokens[0].tolist()
    (found,) = drift(half, PROMPTS[:1], [text], 4)
    assert found.positions == 24 and 0 < found.tv_max < 0.2 and found.beyond == 0


# ------------------------------------------------------------------------------------------------------ position-bound noise


@pytest.mark.parametrize("batch", [1, 2])
def test_coupled_texts_belong_to_their_seeds(model, batch):
    seeds = [11, 12]
    plain = list(coupled_texts(model, PROMPTS, NullDrafter(), seeds, max_new_tokens=12))
    assert [len(text) for text in plain] == [12, 12] and plain[0] != plain[1]
    for drafter in (NGramDrafter(), Echoes(), ModelDrafter(reference_draft(model, 0.3))):
        found = audit_coupled(model, PROMPTS, drafter, seeds, plain, max_new_tokens=12, batch=batch, num_draft=4)
        assert [one.verdict for one in found] == ["equal"] * 2


def test_a_text_of_another_seed_is_told_from_a_tie(model, monkeypatch):
    plain = list(coupled_texts(model, PROMPTS, NullDrafter(), [1, 2], max_new_tokens=12))
    found = list(audit_coupled(model, PROMPTS, NGramDrafter(), [3, 4], plain, max_new_tokens=12))
    assert [one.verdict for one in found] == ["different"] * 2 and all(1e-3 < one.gap < 64 for one in found)
    monkeypatch.setattr(audit, "tie_width", lambda dtype, best: max(one.gap for one in found))
    assert [one.verdict for one in audit_coupled(model, PROMPTS, NGramDrafter(), [3, 4], plain, max_new_tokens=12)] == ["near_tie"] * 2
    short = [text[:5] for text in coupled_texts(model, PROMPTS, NullDrafter(), [3, 4], max_new_tokens=12)]
    cut = list(audit_coupled(model, PROMPTS, NGramDrafter(), [3, 4], short, max_new_tokens=12))
    assert [(one.verdict, one.position) for one in cut] == [("different", 5)] * 2


def test_echoes_draft_trees(model):
    tree = Echoes(2)._tree([1, 2, 3, 1, 4, 1], nodes=6, depth=2, width=3)
    assert tree == ([1, 4, 1, 2, 3], [-1, 0, 1, 0, 3])
    assert Echoes()._tree([1, 2], nodes=6, depth=2, width=3) == ([2], [-1])
    found = generate(model, [[1, 2, 1, 3, 1]], drafter=Echoes(), max_new_tokens=30, do_sample=True, seed=1, return_rounds=True)
    assert max(int((done.tree.parents == 0).sum()) for done in found.rounds or ()) > 1


def test_sampled_rounds_go_on_with_fresh_texts(model):
    rounds = sampled_rounds(model, PROMPTS, NGramDrafter(), BlockAcceptor(), max_new_tokens=5, batch=1, seed=7)
    texts, own = [], []
    for done in rounds:
        own += done.emitted[0]
        if done.finished[0]:
            texts.append(own)
            own = []
        if len(texts) == 6:
            break
    assert {len(text) for text in texts} == {5} and len(set(map(tuple, texts))) == 6


def test_the_reference_draft_is_a_copy_with_noise(model):
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    one, same, other = reference_draft(model), reference_draft(model), reference_draft(model, seed=1)
    for (name, weight), a, b, c in zip(before.items(), one.parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(dict(model.named_parameters())[name], weight) and torch.equal(a, b)
        assert torch.equal(a, weight) == torch.equal(a, c) == (weight.ndim == 1)
        if weight.ndim > 1:
            assert float(((a - weight).std() / weight.std()).detach()) == pytest.approx(0.075, rel=0.15)


# --------------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def files(tmp_path_factory, letter_tokenizer, model) -> tuple[str, str]:
    path = tmp_path_factory.mktemp("audited")
    model.save_pretrained(path)
    letter_tokenizer.save_pretrained(path)
    prompts = path / "prompts.jsonl"
    lines = [{"question_id": i, "category": "x", "turns": [turn]} for i, turn in enumerate(["abcabcab", "zzyx"], 1)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    return str(path), str(prompts)


@pytest.fixture
def call(files, capsys):
    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["audit", "--model", files[0], "--prompts", files[1], *argv])
        return status, *capsys.readouterr()

    return run


def test_an_old_command_line_prints_what_it_printed(call):
    status, out, _ = call("--max-new-tokens", "9")
    assert (status, out) == (0, "2 texts in float32: 2 equal, 0 near-ties, 0 different\n")
    status, out, err = call("--max-new-tokens", "9", "--batch", "2", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {"prompts": 2, "batch": 2, "equal": 2, "near_tie": 0, "different": 0, "others": []}


@pytest.mark.slow
def test_all_checks(call, monkeypatch):
    monkeypatch.setattr("specdec.cli.audit.reference_draft", lambda model, seed: reference_draft(model, 0.05, seed))
    status, out, err = call("--checks", "all", "--tokens", "90", "--max-new-tokens", "40", "--batch", "2", "--json")
    assert (status, err) == (0, "")
    got = json.loads(out)
    assert got.keys() == {"prompts", "batch", "equal", "near_tie", "different", "others", "kernel", "coupled", "eprocess", "ties", "rules"}
    assert got["kernel"]["budgets"].keys() == {"a = 1", "a < 1"} and got["kernel"]["draws"] > 20
    assert [row["equal"] for row in got["coupled"]["drafters"]] == [2, 2, 2, 2]
    assert got["eprocess"]["verdict"] == "not rejected" and got["eprocess"]["tokens"] >= 90
    assert [row["positions"] for row in got["ties"]["dtypes"]] == [got["ties"]["dtypes"][0]["positions"]] * 2
    assert got["rules"]["block"] - got["rules"]["token"] == pytest.approx(got["rules"]["difference"])
    assert got["rules"]["difference"] > got["rules"]["interval"] > 0


def test_a_lossy_rule_is_found(call):
    with pytest.warns(UserWarning, match="lossy"):
        status, out, err = call(
            "--checks", "eprocess", "--acceptor", "TypicalAcceptor", "--tokens", "400", "--max-new-tokens", "80", "--drafter", "ngram",
            "--batch", "2", "--alpha", "0.001", "--json",
        )  # fmt: skip
    got = json.loads(out)["eprocess"]
    assert status == 1 and got["verdict"] == "rejected" and got["tokens"] < 400 and got["acceptor"] == "TypicalAcceptor"
    assert err == "specdec audit: eprocess: the text of TypicalAcceptor does not follow the target's law (alpha 0.001)\n"


def test_every_check_is_made_and_every_failure_named(call, monkeypatch):
    monkeypatch.setattr("specdec.cli.audit.KERNEL", 0.0)
    honest = audit._same_race
    monkeypatch.setattr(audit, "_same_race", lambda *args: replace(honest(*args), verdict="different", position=0))
    status, out, err = call("--checks", "kernel,coupled,ties", "--tokens", "10", "--max-new-tokens", "10", "--drafter", "ngram")
    assert status == 1 and "kernel: the identity is off by" in err and "coupled: 2 texts are not those of their seeds" in err
    assert all(f"\n{name}" in f"\n{out}" for name in ("kernel", "coupled", "ties"))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--checks", "kernel,none"], "--checks: none unknown; allowed are greedy, kernel"),
        (["--alpha", "2"], "--alpha: got 2.0; give a probability between 0 and 1"),
        (["--batch", "0"], "--batch: got 0"),
        (["--checks", "rules", "--drafter", "ngram"], "--drafter: rules compares two rules for sampled chains"),
        (["--checks", "kernel", "--drafter", "none", "--tokens", "3"], "kernel: nothing was drafted"),
        (["--checks", "eprocess", "--drafter", "reference", "--acceptor", "KSeqAcceptor", "--tokens", "0"], "--tokens: got 0"),
    ],
)
def test_what_makes_no_sense_is_said(call, argv, said):
    status, _, err = call(*argv)
    assert status == 1 and said in err
