"""Targets that accelerate has dispatched: weights on disk or in another memory, brought in for the moment in which a module runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import specdec
from specdec import ContextDrafter, FixedPlanner, NGramDrafter, NullDrafter, Session
from specdec.base import Drafter
from specdec.drafters import EarlyExitDrafter, ModelDrafter
from specdec.models.hf import HFTarget
from specdec.testing.tolerances import TREE_PASS
from specdec.tree import root_only
from specdec.types import DraftTree, Features

pytestmark = pytest.mark.slow

V = 40
PROMPTS = [[5, 6, 7, 5, 6], [9, 3]]
NEW = {"max_new_tokens": 8, "planner": FixedPlanner(4)}
CLOSE = TREE_PASS[torch.float32]


def build(seed: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, pad_token_id=None, bos_token_id=1, eos_token_id=None,
    ))  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15)  # the usual 0.02 makes every law uniform
    return model.eval()


def spread(first: str, middle: str, last: str) -> dict[str, str]:
    """A device map."""
    return {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first, "model.layers.1": middle,
            "model.layers.2": middle, "model.norm": last, "lm_head": last}  # fmt: skip


def dispatched(places: dict[str, str]) -> Callable[[LlamaForCausalLM, Path], LlamaForCausalLM]:
    return lambda model, folder: dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


def loaded(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    model.save_pretrained(folder / "model")
    return LlamaForCausalLM.from_pretrained(folder / "model", device_map=spread("cpu", "disk", "cpu"), offload_folder=folder).eval()


CPU = torch.device("cpu")
WAYS: dict[str, Callable[[LlamaForCausalLM, Path], LlamaForCausalLM]] = {
    "layers on disk": dispatched(spread("cpu", "disk", "cpu")),
    "embeddings on disk": dispatched(spread("disk", "cpu", "cpu")),
    "from_pretrained": loaded,
    "cpu_offload": lambda model, folder: cpu_offload(model, CPU),
    "disk_offload": lambda model, folder: disk_offload(model, folder, CPU, preload_module_classes=["LlamaModel"]),
}


@pytest.fixture(params=WAYS)
def away(request: pytest.FixtureRequest, tmp_path: Path) -> LlamaForCausalLM:
    return WAYS[request.param](build(), tmp_path)


def offloaded(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]


class Fork(ContextDrafter):
    """Trees in which the right text is one of two branches."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts

    def guess(self, ids: list[Tensor], budget: Any) -> DraftTree:
        tokens, parents = [], []
        for row, deepest in zip(ids, budget.depth.tolist(), strict=True):
            text = next(text for text in self.texts if text[: len(row)] == row.tolist())
            right = [*text[len(row) : len(row) + 2], 0, 0][:2]
            shape = [-1, 0, 0, 2, 2][: {0: 1, 1: 3}.get(deepest, 5)]
            words = [int(row[-1]), (right[0] + 1) % V, right[0], right[1], (right[1] + 1) % V][: len(shape)]
            tokens.append(words + [0] * (5 - len(words)))
            parents.append(shape + [-2] * (5 - len(shape)))
        return DraftTree(torch.tensor(tokens), torch.tensor(parents))


DRAFTERS: dict[str, Callable[[LlamaForCausalLM], Drafter]] = {
    "null": lambda model: NullDrafter(), "ngram": lambda model: NGramDrafter(),
    "draft model": ModelDrafter, "first layers": lambda model: EarlyExitDrafter(model, 2),
}  # fmt: skip
SAMPLED = {"do_sample": True, "top_k": 0, "seed": 5}


@cache
def expected(drafter: str, sampled: bool = False) -> specdec.Generation:
    """With the model in one place."""
    here = build()
    return specdec.generate(here, PROMPTS, drafter=DRAFTERS[drafter](here), **NEW, **(SAMPLED if sampled else {}))


def look(model: LlamaForCausalLM) -> dict[str, Any]:
    return {
        "offloaded": offloaded(model), "config": model.config.to_dict(), "attention": model.config._attn_implementation,
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "forwards": [(id(vars(module).get("forward")), id(vars(module).get("_old_forward"))) for module in model.modules()],
        "hooks": [id(vars(module).get("_hf_hook")) for module in model.modules()],
        "torch hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "modules": [id(module) for module in model.modules()], "classes": [type(module) for module in model.modules()],
    }  # fmt: skip


@contextmanager
def unchanged(model: LlamaForCausalLM) -> Iterator[None]:
    before = look(model)
    assert before["offloaded"], "or nothing is tested"
    yield
    after = look(model)
    for key, value in before.items():
        assert after[key] == value, key


@pytest.mark.parametrize(("drafter", "sampled"), [("null", False), ("ngram", False), ("draft model", True), ("first layers", True)])
def test_the_text_is_that_of_the_model_in_one_place(away, drafter, sampled):
    """The draft model, where there is one, is the dispatched target itself, or its first layers."""
    wanted = expected(drafter, sampled)
    with unchanged(away):
        found = specdec.generate(away, PROMPTS, drafter=DRAFTERS[drafter](away), **NEW, **(SAMPLED if sampled else {}))
    assert found.sequences.equal(wanted.sequences) and found.sequences.device == CPU
    assert found.stats.accepted == wanted.stats.accepted and found.stats.drafted == wanted.stats.drafted
    for a, b in zip(found.logprobs, wanted.logprobs, strict=True):
        torch.testing.assert_close(a, b, atol=CLOSE, rtol=0)


def test_trees(away):
    texts = expected("null")
    rows = [row[:n].tolist() for row, n in zip(texts.sequences, texts.lengths.tolist(), strict=True)]
    found = specdec.generate(away, PROMPTS, drafter=Fork(rows), **NEW)
    assert found.sequences.equal(texts.sequences) and found.stats.tokens_per_round > 2


def test_it_drafts_for_a_model_in_one_place(away):
    here = build(seed=2)
    wanted = specdec.generate(here, PROMPTS, drafter=ModelDrafter(build()), **NEW, **SAMPLED)
    found = specdec.generate(here, PROMPTS, drafter=ModelDrafter(away), **NEW, **SAMPLED)
    assert found.sequences.equal(wanted.sequences) and found.stats.accepted == wanted.stats.accepted < found.stats.drafted


def test_custom_generate(away):
    ids, mask = torch.tensor([PROMPTS[0], [0, 0, 0, *PROMPTS[1]]]), torch.tensor([[1] * 5, [0, 0, 0, 1, 1]])
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 1.2}
    plain = build().generate(ids, **options)
    assert away.generate(ids, custom_generate=specdec.custom_generate(drafter=ModelDrafter(away)), **options).equal(plain)


def test_a_second_turn(away):
    texts = []
    for model in (build(), away):
        drafter, session = ModelDrafter(model), Session()
        first = specdec.generate(model, PROMPTS, drafter=drafter, session=session, **NEW)
        talk = [[*row[:n].tolist(), 8, 9] for row, n in zip(first.sequences, first.lengths.tolist(), strict=True)]
        second = specdec.generate(model, talk, drafter=drafter, session=session, **NEW)
        assert second.stats.prefilled < sum(map(len, talk)) - len(talk), "the first turn is not read again"
        texts.append([row.tolist() for row in first.new_tokens + second.new_tokens])
    assert texts[0] == texts[1]


class Probe(Drafter):
    """Reads features and drafts nothing."""

    needs = Features((0, 2, 3))

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def begin(self, ctx): ...

    def propose(self, state, pending, budget, source):
        return root_only(pending)

    def observe(self, state, commit, round=None):
        self.seen.append(commit.features[0, : int(commit.count)])

    def select(self, state, rows): ...


def test_features(away):
    probe = Probe()
    with unchanged(away):
        found = specdec.generate(away, PROMPTS[:1], drafter=probe, **NEW)
    with torch.no_grad():
        states = build().model(found.sequences[:, :-1], output_hidden_states=True).hidden_states
    got = torch.cat(probe.seen).split(32, -1)
    torch.testing.assert_close(got[0], states[0][0], atol=CLOSE, rtol=0)
    torch.testing.assert_close(got[1], states[2][0], atol=CLOSE, rtol=0)
    torch.testing.assert_close(build().model.norm(got[2]), states[3][0], atol=CLOSE, rtol=0)


def test_where_it_is_said_to_be(away):
    """`model.device` is where the first weight lies, and no token can be sent to the meta device."""
    facts = HFTarget(away).facts
    assert facts.device == CPU and facts.dtype == torch.float32


def test_hooks_in_a_row(tmp_path):
    """accelerate chains a second hook behind the first."""
    model = disk_offload(build(), tmp_path, CPU)
    for module in (model, model.model.embed_tokens):
        add_hook_to_module(module, AlignDevicesHook(), append=True)
    found = specdec.generate(model, PROMPTS, drafter=EarlyExitDrafter(model, 1), **NEW)
    assert found.sequences.equal(expected("null").sequences)


def test_a_model_without_weights_is_refused():
    with pytest.raises(ValueError, match="no weights.*meta"):
        HFTarget(build().to("meta"))


def test_first_layers_of_a_model_with_a_forward_of_its_own():
    """What was bound to a module is bound to its copy; what can't be is refused, and only where it goes through all layers."""
    model = build()
    alone = specdec.generate(model, PROMPTS, drafter=EarlyExitDrafter(model, 1), **NEW)
    model.model.forward = type(model.model).forward.__get__(model.model)
    mlp = model.model.layers[0].mlp
    inner = mlp.forward
    mlp.forward = lambda x: inner(x)
    patched = specdec.generate(model, PROMPTS, drafter=EarlyExitDrafter(model, 1), **NEW)
    assert patched.sequences.equal(alone.sequences) and patched.stats.accepted == alone.stats.accepted
    outer = model.model.forward
    model.model.forward = wraps(outer)(lambda *args, **kwargs: outer(*args, **kwargs))
    with pytest.raises(ValueError, match="model: LlamaModel.forward was replaced by .*undo that"):
        EarlyExitDrafter(model, 1)
    assert specdec.generate(model, PROMPTS, drafter=NullDrafter(), **NEW).sequences.equal(alone.sequences)
