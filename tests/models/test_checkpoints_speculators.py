"""A checkpoint that the package `speculators` wrote, and what its own network said on it. How it was made stands in docs/checkpoints.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.checkpoints import load_head, save_head
from specdec.heads import EagleHead, attend
from specdec.types import TargetFacts

FOLDER = Path(__file__).parent / "data" / "eagle3_speculators"
FACTS = TargetFacts(40, hidden_size=16, num_layers=9)


def said_by(head: EagleHead, features: torch.Tensor, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    """Logits `[steps, 1, T, Vd]` as in training: in step i, what was said at t - 1 + i is read with token t + i, over the true features up
    to t and over the row's own earlier steps."""
    count = tokens.shape[1]
    hidden, keys, values, said = head.fuse(features), [], [], []
    for step in range(steps):
        shifted = torch.cat([tokens[:, step:], tokens.new_zeros(1, step)], 1)
        residual, query, key, value = head.project(head.embed_tokens(shifted), hidden, torch.arange(count)[None] + step)
        keys, values = [*keys, key], [*values, value]
        mask = torch.cat([torch.ones(count, count, dtype=torch.bool).tril(), *[torch.eye(count, dtype=torch.bool)] * step], 1)
        hidden = head.finish(residual, attend(query, torch.cat(keys, 2), torch.cat(values, 2), mask[None, None]))
        said.append(head.lm_head(head.final(hidden)))
    return torch.stack(said)


def test_their_head_says_here_what_it_says_there():
    told = load_file(FOLDER / "said.safetensors")
    head = load_head(FOLDER, FACTS)
    assert head.config.layers == (2, 4, 6) and head.config.norm_before_residual and head.config.fc_norm and head.config.norm_output
    assert head.ids.tolist() == [token for token in range(40) if token % 5 < 3]
    with torch.no_grad():
        said = said_by(head, told["features"], told["tokens"], len(told["logits"]))
    torch.testing.assert_close(said, told["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("flag", ["norm_before_residual", "norm_output"])
def test_their_words_are_heard(flag, tmp_path):
    """The same weights under the opposite flag say something else."""
    told = load_file(FOLDER / "said.safetensors")
    config = json.loads((FOLDER / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, flag: False}))
    (tmp_path / "model.safetensors").write_bytes((FOLDER / "model.safetensors").read_bytes())
    with torch.no_grad():
        said = said_by(load_head(tmp_path, FACTS), told["features"], told["tokens"], len(told["logits"]))
    assert (said - told["logits"]).abs().max() > 0.1


def test_their_files_are_written_back_as_they_were(tmp_path):
    save_head(load_head(FOLDER, FACTS), tmp_path, verifier_name="tiny-target", verifier_architectures=["LlamaForCausalLM"])
    theirs, ours = load_file(FOLDER / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert theirs.keys() == ours.keys() and all(
        torch.equal(theirs[name], ours[name]) and theirs[name].dtype == ours[name].dtype for name in ours
    )
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (FOLDER, tmp_path))
    layers = [config.pop("transformer_layer_config") for config in (before, after)]
    assert layers[0]["rope_parameters"] == layers[1]["rope_parameters"]
    for mine, theirs in ((after, before), (layers[1], layers[0])):
        common = mine.keys() & theirs.keys() - {"architectures", "speculators_config", "target_hidden_size"}
        assert {name: mine[name] for name in common} == {name: theirs[name] for name in common}
    assert before["speculators_config"].keys() == after["speculators_config"].keys()
    assert before["speculators_config"]["verifier"] == after["speculators_config"]["verifier"]
    assert {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "speculators_version"} <= after.keys()
