"""Training text in a folder: shards of dialogues, each of which depends on the seed, its number and the shards before it alone."""

from __future__ import annotations

import json
import os
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..cache import CausalTarget
from ..types import Bool, Int64
from .script import Script, Template, Words, dialogue
from .tasks import long, short
from .write import write

__all__ = ["Corpus", "Shard", "Wanted", "corpus_shards", "write_corpus"]

_PASSAGE = 64
"""Tokens that a target's own words must have to be worked on as a text."""


@dataclass(frozen=True)
class Wanted:
    """What is to be written.

    Args:
        tokens: of all dialogues, whole shards being written until there are so many.
        rows, length: dialogues of a shard, and tokens of each.
        long_rows, long_length: the same of shards about longer texts, which is every fourth once there are texts.
    """

    tokens: int
    seed: int = 0
    rows: int = 192
    length: int = 256
    long_rows: int = 48
    long_length: int = 832


@dataclass(frozen=True)
class Shard:
    """Dialogues of one length."""

    tokens: Int64[Tensor, "B T"]
    own: Bool[Tensor, "B T"]
    """Which of them the target found itself; the others were put into its mouth."""

    def passages(self) -> Iterator[Words]:
        """Texts that the target wrote in one go."""
        for tokens, own in zip(self.tokens.tolist(), self.own.tolist(), strict=True):
            for mine, run in groupby(zip(tokens, own, strict=True), key=lambda pair: pair[1]):
                words = [token for token, _ in run][:-1]
                if mine and len(words) >= _PASSAGE:
                    yield words


class Corpus:
    """The shards of a folder, in order."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def paths(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]*.safetensors"))

    @property
    def tokens(self) -> int:
        """Of all dialogues."""
        return sum(rows * length for rows, length in corpus_shards([self])[1])

    def __iter__(self) -> Iterator[Shard]:
        return map(_load, self.paths)

    def add(self, shard: Shard) -> None:
        """Behind the others; a reader meets it whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{len(self.paths):05d}.safetensors"
        save_file({"tokens": shard.tokens.int(), "own": shard.own}, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


def _load(path: Path) -> Shard:
    try:
        held = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"data: {path} can't be read ({error}); remove it, and the shards behind it") from error
    return Shard(held["tokens"].long(), held["own"])


def corpus_shards(corpora: Sequence[Corpus]) -> tuple[list[Callable[[], Shard]], list[tuple[int, int]]]:
    """All shards of several corpora: how to get each, and its rows and tokens a row."""
    paths = [path for corpus in corpora for path in corpus.paths]
    sizes = []
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                rows, length = file.get_slice("tokens").get_shape()
        except SafetensorError as error:
            raise ValueError(f"data: {path} can't be read ({error}); remove it, and the shards behind it") from error
        sizes.append((rows, length))
    return [partial(_load, path) for path in paths], sizes


def write_corpus(target: CausalTarget, template: Template, folder: str | Path, wanted: Wanted, prompts: Sequence[Sequence[str]] = (),
                 show: Callable[[int], None] = lambda tokens: None, source: str = "") -> Corpus:  # fmt: skip
    """Write what is wanting; a folder that was begun is gone on with, and is in the end as if it had been written at once.

    Args:
        prompts: the user's turns of each dialogue. Left out, the target writes them too.
        show: told how many tokens are new.
        source: name of the target, so that no other one goes on with its folder.

    Raises:
        ValueError: the folder holds what was written otherwise.
    """
    corpus, card = Corpus(folder), Path(folder) / "wanted.json"
    longest = target.facts.max_positions or wanted.long_length
    wanted = replace(wanted, length=min(wanted.length, longest), long_length=min(wanted.long_length, longest))
    words = [[template.encode(turn) for turn in turns] for turns in prompts]
    given = zlib.crc32(json.dumps([words, list(template.answer), list(template.again)]).encode())
    asked = {**asdict(wanted), "prompts": len(prompts), "source": source, "words": given}
    asked.pop("tokens")  # more of the same may be added later
    _check_card(card, asked)
    corpus.folder.mkdir(parents=True, exist_ok=True)
    card.with_suffix(".part").write_text(json.dumps(asked))
    os.replace(card.with_suffix(".part"), card)
    passages = [words for shard in corpus for words in shard.passages()]
    total, groups = corpus.tokens, _by_length(words, wanted)
    show(total)
    while total < wanted.tokens and (not prompts or len(corpus.paths) < len(groups)):
        number = len(corpus.paths)
        rng = random.Random(f"{wanted.seed}:{number}")
        if prompts:
            scripts, length = [dialogue(template, turns, (), temperature=0.0, answer=128, question=48) for turns in groups[number]], 0
            length = min(wanted.long_length, 160 + max(sum(map(len, turns)) for turns in groups[number]))
        else:
            scripts, length = _task(template, rng, passages, number, wanted)
        shard = Shard(*write(target, scripts, length, template.end, rng.getrandbits(62), show))
        corpus.add(shard)
        passages += shard.passages()
        total += shard.tokens.numel()
    return corpus


def _task(template: Template, rng: random.Random, passages: Sequence[Words], number: int, wanted: Wanted) -> tuple[list[Script], int]:
    if number % 4 == 3 and passages:
        tokens = rng.randrange(wanted.long_length // 4, max(1 + wanted.long_length // 4, wanted.long_length - 200))
        return [long(template, rng, passages, tokens) for _ in range(wanted.long_rows)], min(wanted.long_length, tokens + 200)
    return [short(template, rng, passages) for _ in range(wanted.rows)], wanted.length


def _check_card(card: Path, asked: dict[str, Any]) -> None:
    """ValueError unless the folder was begun with the same."""
    if not card.exists():
        return
    try:
        before = json.loads(card.read_text())
    except ValueError as error:
        raise ValueError(f"folder: {card} can't be read ({error}); give an empty folder") from error
    if before != asked:
        differ = {name: (before.get(name), value) for name, value in asked.items() if before.get(name) != value}
        raise ValueError(f"folder: {card.parent} was begun otherwise (then, now): {differ}; give an empty folder")


def _by_length(words: list[list[list[int]]], wanted: Wanted) -> list[list[list[list[int]]]]:
    """The prompts' tokens, those of about one length in one shard."""
    turns = sorted(words, key=lambda turns: sum(map(len, turns)))
    return [turns[i : i + wanted.rows] for i in range(0, len(turns), wanted.rows)]
