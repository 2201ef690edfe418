"""What was written is read back, bit by bit, in every layout that has words for it."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.checkpoints import load_head, load_medusa, load_mtp, save_head, save_medusa, save_mtp
from specdec.heads import EagleConfig, EagleHead, MedusaConfig, MedusaHeads, MTPConfig, MTPHead
from specdec.types import TargetFacts

SCALINGS = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BEYOND = {"speculators": ("bias",), "eagle": ("norm_output", "norm_before_residual")}


@st.composite
def heads(draw, layout: str) -> tuple[dict[str, Any], torch.dtype, list[int], int]:
    """A head that the layout can express: its fields, its precision and what it can draft; and how many layers its target has."""
    version = draw(st.sampled_from([1, 3] if layout == "eagle" else [3]))
    count = draw(st.integers(3, 12))
    pairs = draw(st.sampled_from([1, 2]))
    vocab = draw(st.integers(4, 20))
    drafted = vocab if version == 1 else draw(st.integers(2, vocab))
    width = draw(st.sampled_from([4, 6]))
    ids = st.lists(st.integers(layout == "eagle", count), min_size=1, max_size=4, unique=True)
    layers = (count,) if version == 1 else tuple(sorted(draw(ids)))
    flags = {}
    if version == 3:
        usable = {"norm_before_residual", "norm_output", "fc_norm", "norm_before_fc"} - set(BEYOND[layout])
        flags = {name: draw(st.booleans()) for name in sorted(usable)}
        flags["fc_norm"] = flags["fc_norm"] and not flags["norm_before_fc"]
    given = flags | {
        "version": version,
        "layers": layers,
        "hidden_size": width,
        "target_hidden_size": width if version == 1 else draw(st.sampled_from([4, 6, 8])),
        "intermediate_size": draw(st.integers(1, 9)),
        "num_heads": pairs * draw(st.integers(1, 3)),
        "num_kv_heads": pairs,
        "head_dim": draw(st.sampled_from([2, 4])),
        "vocab_size": vocab,
        "draft_vocab_size": drafted,
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6, 0.013])),
        "rope_theta": draw(st.sampled_from([100.0, 10000.0, 1e6])),
        "rope_scaling": draw(st.sampled_from(SCALINGS)),
        "max_positions": draw(st.integers(64, 4096)),
        "bias": layout == "eagle" and draw(st.booleans()),
        "own_embedding": draw(st.booleans()),
    }
    dtype = draw(st.sampled_from(DTYPES))
    return given, dtype, sorted(draw(st.permutations(range(vocab)))[:drafted]), count


@pytest.mark.parametrize("layout", ["speculators", "eagle"])
@given(data=st.data())
def test_a_head_survives_the_disk(layout, data):
    fields, dtype, ids, count = data.draw(heads(layout))
    head = EagleHead(EagleConfig(**fields)).to(dtype)
    head.offsets.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    facts = TargetFacts(head.config.vocab_size, hidden_size=head.config.target_hidden_size, num_layers=count)
    with tempfile.TemporaryDirectory() as folder:
        save_head(head, folder, layout=layout, verifier_name="some/target", verifier_architectures=["LlamaForCausalLM"])
        back = load_head(folder, facts)
    assert_same(head, back)


@pytest.mark.parametrize("layout", ["vllm", "medusa"])
@given(data=st.data())
def test_heads_of_medusa_survive_the_disk(layout, data):
    draw, vllm = data.draw, layout == "vllm"
    vocab, count = draw(st.integers(4, 20)), draw(st.integers(1, 12))
    drafted = draw(st.integers(1, vocab)) if vllm else vocab
    ids = list(range(vocab)) if drafted == vocab else draw(st.permutations(range(vocab)))[:drafted]
    config = MedusaConfig(
        (count,), draw(st.integers(1, 12)), draw(st.integers(1, 3)), draw(st.integers(1, 6)), vocab, drafted, draw(st.booleans()),
        not vllm or draw(st.booleans()),
    )  # fmt: skip
    heads = noisy(MedusaHeads(config), draw(st.sampled_from(DTYPES)), ids)
    with tempfile.TemporaryDirectory() as folder:
        save_medusa(heads, folder, layout=layout, base_model="some/target")
        back = load_medusa(folder, TargetFacts(vocab, hidden_size=config.hidden_size, num_layers=count))
    assert_same(heads, back)


@given(data=st.data())
def test_a_module_for_multi_token_prediction_survives_the_disk(data):
    draw = data.draw
    vocab, count, pairs = draw(st.integers(4, 20)), draw(st.integers(1, 12)), draw(st.sampled_from([1, 2]))
    ids = sorted(draw(st.permutations(range(vocab)))[: draw(st.integers(1, vocab))])
    config = MTPConfig(
        (count,), draw(st.integers(1, 8)), draw(st.integers(1, 9)), pairs * draw(st.integers(1, 3)), pairs, draw(st.sampled_from([2, 4])),
        vocab, len(ids), draw(st.sampled_from([1e-5, 1e-6, 0.013])), draw(st.sampled_from([100.0, 10000.0, 1e6])),
        draw(st.sampled_from(SCALINGS)), draw(st.integers(64, 4096)),
    )  # fmt: skip
    head = noisy(MTPHead(config), draw(st.sampled_from(DTYPES)), ids)
    with tempfile.TemporaryDirectory() as folder:
        save_mtp(head, folder, verifier_name="some/target", verifier_architectures=["LlamaForCausalLM"])
        back = load_mtp(folder, TargetFacts(vocab, hidden_size=config.hidden_size, num_layers=count))
    assert_same(head, back)


def noisy(head: Any, dtype: torch.dtype, ids: list[int]) -> Any:
    """Fresh heads have zeros and ones, which could change places unseen."""
    with torch.no_grad():
        for part in head.parameters():
            part.normal_()
    head = head.to(dtype)
    head.offsets.copy_(torch.tensor(ids) - torch.arange(len(ids)))
    return head


def assert_same(head: Any, back: Any) -> None:
    assert back.config == head.config
    before, after = head.state_dict(), back.state_dict()
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
