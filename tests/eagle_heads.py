"""Heads for a tiny target: of random weights, and some that were taught for a moment and really predict."""

from __future__ import annotations

import math
from typing import Any

import torch

import specdec
from specdec.heads import EagleConfig, EagleHead, LayerHead, MedusaConfig, MedusaHeads, MTPConfig, MTPHead, attend
from specdec.models.tiny import TinyTarget

DRAFTED = (0, 2, 3, 5, 6, 8, 10)
"""The tokens that a head of version 3 drafts."""


def config(version: int, target: TinyTarget, **given: Any) -> EagleConfig:
    vocab_size, width, layers = target.facts.vocab_size, target.facts.hidden_size, target.facts.num_layers
    few = len([token for token in DRAFTED if token < vocab_size])
    usual = {"layers": (layers,), "draft_vocab_size": vocab_size} if version == 1 else {"layers": (0, 1, layers), "draft_vocab_size": few}
    return EagleConfig(version, hidden_size=width, target_hidden_size=width, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=6,
                       vocab_size=vocab_size, **{**usual, **given})  # fmt: skip


def filled(given: EagleConfig, seed: int = 1, dtype: torch.dtype = torch.float64) -> EagleHead:
    """Random weights, and the draft vocabulary `DRAFTED` if it is a part of the target's."""
    return fill(EagleHead(given), seed, dtype)


def fill(head: Any, seed: int = 1, dtype: torch.dtype = torch.float64) -> Any:
    """The head with random weights, and the draft vocabulary `DRAFTED` if it is a part of the target's."""
    head, noise = head.to(dtype), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=noise, dtype=torch.float64) / math.sqrt(weight.shape[-1]) + (weight.ndim == 1))
    if head.config.draft_vocab_size < head.config.vocab_size:
        size = head.config.draft_vocab_size
        head.offsets.copy_(torch.tensor(DRAFTED[:size]) - torch.arange(size))
    return head.requires_grad_(False)


def mtp(target: TinyTarget, seed: int = 1, **given: Any) -> MTPHead:
    """A module for multi-token prediction, random."""
    facts = target.facts
    usual = {
        "layers": (facts.num_layers,), "hidden_size": facts.hidden_size, "intermediate_size": 24, "num_heads": 4, "num_kv_heads": 2,
        "head_dim": 6, "vocab_size": facts.vocab_size, "draft_vocab_size": len([t for t in DRAFTED if t < facts.vocab_size]),
    }  # fmt: skip
    return fill(MTPHead(MTPConfig(**{**usual, **given})), seed)


def medusa(target: TinyTarget, seed: int = 1, **given: Any) -> MedusaHeads:
    """Medusa's heads, random."""
    facts = target.facts
    usual = {
        "layers": (facts.num_layers,), "heads": 3, "blocks": 1, "hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size,
        "draft_vocab_size": len([t for t in DRAFTED if t < facts.vocab_size]),
    }  # fmt: skip
    return fill(MedusaHeads(MedusaConfig(**{**usual, **given})), seed)


def features(target: TinyTarget, ids: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    """The target's hidden states of whole rows, without a cache."""
    length = ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    with torch.no_grad():
        states = target.net.hidden(ids, torch.arange(length).expand(len(ids), -1), mask, None)
    return torch.cat([states[layer] for layer in layers], -1)


def said(head: LayerHead, target: TinyTarget, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """What the layer says of whole rows of pairs, without a cache."""
    length = tokens.shape[1]
    positions = torch.arange(length).expand(len(tokens), -1)
    embedded = (head.embed_tokens if head.config.own_embedding else target.net.embed)(tokens).to(head.weight)
    residual, query, key, value = head.project(embedded, hidden, positions)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return head.finish(residual, attend(query, key, value, mask.expand(len(tokens), 1, -1, -1)))


def taught(target: TinyTarget, kind: str = "eagle3", *, steps: int = 150, rows: int = 24, length: int = 40) -> Any:
    """A head that learned the target's laws from texts that the target wrote, with true features alone to read."""
    layers, every = (target.facts.num_layers - 1, target.facts.num_layers), target.facts.vocab_size
    made = {
        "eagle3": lambda: filled(config(3, target, layers=layers, draft_vocab_size=every)),
        "mtp": lambda: mtp(target, draft_vocab_size=every),
        "medusa": lambda: medusa(target, draft_vocab_size=every, heads=2),
    }  # fmt: skip
    head = made[kind]().requires_grad_(True)
    texts = specdec.generate(target, [[i % every] for i in range(rows)], drafter=specdec.NullDrafter(), do_sample=True,
                             seed=1, max_new_tokens=length).sequences  # fmt: skip
    found, last = features(target, texts, head.config.layers), features(target, texts, layers[1:])
    with torch.no_grad():
        laws = target.net.logits(last).softmax(-1)
        found = target.net.norm(found) if head.config.normed else found
    with torch.enable_grad():
        fitted = torch.optim.Adam(head.parameters(), lr=5e-3)
        for _ in range(steps):
            if kind == "medusa":
                scores = [head.rank(n, found[:, : -1 - n], target.net.head) for n in range(2)]
            else:
                scores = [head.rank(said(head, target, texts[:, 1:], head.fuse(found[:, :-1])), target.net.head)]
            loss = sum(-(laws[:, 1 + n :] * part.log_softmax(-1)).sum(-1).mean() for n, part in enumerate(scores))
            fitted.zero_grad()
            loss.backward()
            fitted.step()
    return head.requires_grad_(False)
