"""EAGLE heads for a tiny target: one of random weights, and one that was taught for a moment and really predicts."""

from __future__ import annotations

import math
from typing import Any

import torch

import specdec
from specdec.heads.eagle import EagleConfig, EagleHead, attend
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
    head, noise = EagleHead(given).to(dtype), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=noise, dtype=torch.float64) / math.sqrt(weight.shape[-1]) + (weight.ndim == 1))
    if given.draft_vocab_size < given.vocab_size:
        head.offsets.copy_(torch.tensor(DRAFTED[: given.draft_vocab_size]) - torch.arange(given.draft_vocab_size))
    return head.requires_grad_(False)


def features(target: TinyTarget, ids: torch.Tensor, layers: tuple[int, ...]) -> torch.Tensor:
    """The target's hidden states of whole rows, without a cache."""
    length = ids.shape[1]
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    with torch.no_grad():
        states = target.net.hidden(ids, torch.arange(length).expand(len(ids), -1), mask, None)
    return torch.cat([states[layer] for layer in layers], -1)


def said(head: EagleHead, target: TinyTarget, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """What the layer says of whole rows of pairs, without a cache."""
    length = tokens.shape[1]
    positions = torch.arange(length).expand(len(tokens), -1)
    embedded = (head.embed_tokens if head.config.own_embedding else target.net.embed)(tokens).to(head.fc.weight)
    residual, query, key, value = head.project(embedded, hidden, positions)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    return head.finish(residual, attend(query, key, value, mask.expand(len(tokens), 1, -1, -1)))


def taught(target: TinyTarget, *, steps: int = 150, rows: int = 24, length: int = 40) -> EagleHead:
    """A head of version 3 that learned the target's laws from texts that the target wrote, with true features alone to read."""
    layers = (target.facts.num_layers - 1, target.facts.num_layers)
    head = filled(config(3, target, layers=layers, draft_vocab_size=target.facts.vocab_size)).requires_grad_(True)
    texts = specdec.generate(target, [[i % target.facts.vocab_size] for i in range(rows)], drafter=specdec.NullDrafter(), do_sample=True,
                             seed=1, max_new_tokens=length).sequences  # fmt: skip
    found = features(target, texts, layers)
    with torch.no_grad():
        laws = target.net.logits(found[..., -target.facts.hidden_size :]).softmax(-1)
    with torch.enable_grad():
        fitted = torch.optim.Adam(head.parameters(), lr=5e-3)
        for _ in range(steps):
            out = said(head, target, texts[:, 1:], head.fuse(found[:, :-1]))
            loss = -(laws[:, 1:] * head.lm_head(head.final(out)).log_softmax(-1)).sum(-1).mean()
            fitted.zero_grad()
            loss.backward()
            fitted.step()
    return head.requires_grad_(False)
