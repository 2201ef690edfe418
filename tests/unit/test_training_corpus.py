"""Dialogues that a target writes: they say what plain decoding would say, and a folder can be gone on with."""

from __future__ import annotations

import random

import pytest
import torch

from specdec.models.tiny import TinyTarget
from specdec.training.corpus import Corpus, Shard, Wanted, corpus_shards, write_corpus
from specdec.training.script import Say, Speak, Template, dialogue
from specdec.training.tasks import long, short
from specdec.training.write import write

END = 15
TEMPLATE = Template([1, 2, 3], [END, 4, 5], [END, 2, 3], lambda words: [6 + ord(letter) % 8 for letter in words])
TARGET = TinyTarget(16, sharpness=2.0)
SMALL = Wanted(tokens=1500, rows=4, length=80, long_rows=2, long_length=160)


def plain(tokens):
    """The most likely next token, by dense attention."""
    return int(TARGET(torch.tensor([tokens])).argmax())


def test_greedy_words_are_the_target_s_and_all_others_are_given():
    scripts = [dialogue(TEMPLATE, [[7, 8]], (), temperature=0.0, answer=6, question=4) for _ in range(2)]
    tokens, own = write(TARGET, scripts, 40, END, seed=0)
    assert tokens.shape == own.shape == (2, 40) and tokens[0, :5].tolist() == [1, 2, 3, 7, 8]
    answer = own[0, 8:].tolist().index(False) + 8  # own words begin behind the template
    assert not own[0, :8].any() and answer - 8 <= 7
    for at in range(8, answer):
        assert int(tokens[0, at]) == plain(tokens[0, :at].tolist())
    assert len(set(map(tuple, own.tolist()))) == 1 or not tokens[0].equal(tokens[1])


@pytest.mark.parametrize("limit", (1, 3))
def test_a_turn_ends_with_its_end_token_or_at_its_limit(limit):
    def script():
        spoken = yield Say([1])
        while True:
            spoken = yield Speak(1.0, limit)
            assert len(spoken) <= limit and END not in spoken
            yield Say([END, 2])

    tokens, own = write(TARGET, [script() for _ in range(8)], 60, END, seed=1)
    for row, mine in zip(tokens.tolist(), own.tolist(), strict=True):
        ends = [i for i, token in enumerate(row) if token == END]
        assert all(row[i + 1] == 2 and not mine[i + 1] for i in ends if i + 1 < len(row))
        assert all(b - a - 1 <= limit + 1 for a, b in zip(ends, ends[1:], strict=False))


def test_a_text_is_read_chunk_by_chunk(monkeypatch):
    scripts = lambda: [dialogue(TEMPLATE, [[7] * 30], (), temperature=0.0, answer=9, question=4) for _ in range(3)]  # noqa: E731
    whole = write(TARGET, scripts(), 60, END, seed=0)
    monkeypatch.setattr("specdec.training.write._CHUNK", 12)
    assert all(a.equal(b) for a, b in zip(whole, write(TARGET, scripts(), 60, END, seed=0), strict=True))


@pytest.mark.slow
def test_a_folder_that_was_begun_is_gone_on_with(tmp_path):
    whole = write_corpus(TARGET, TEMPLATE, tmp_path / "whole", SMALL)
    broken = tmp_path / "broken"

    class Killed(Exception):
        pass

    seen = [0]

    def kill(tokens):
        seen[0] += tokens
        if seen[0] > 700:
            raise Killed

    with pytest.raises(Killed):
        write_corpus(TARGET, TEMPLATE, broken, SMALL, show=kill)
    assert 0 < len(Corpus(broken).paths) < len(whole.paths)
    again = write_corpus(TARGET, TEMPLATE, broken, SMALL)
    assert again.tokens == whole.tokens >= SMALL.tokens
    for a, b in zip(whole, again, strict=True):
        assert a.tokens.equal(b.tokens) and a.own.equal(b.own)
    with pytest.raises(ValueError, match="folder: .* was begun otherwise .* give an empty folder"):
        write_corpus(TARGET, TEMPLATE, broken, Wanted(tokens=10, seed=1))


@pytest.mark.slow
def test_prompts_are_used_up_once(tmp_path):
    prompts = [("ab", "c"), ("d",), ("efgh",), ("i",), ("jk",)]
    corpus = write_corpus(TARGET, TEMPLATE, tmp_path, Wanted(tokens=10**9, rows=2), prompts)
    assert sum(len(shard.tokens) for shard in corpus) == len(prompts)
    opening = {tuple(row[3 : 3 + len(turns[0])]) for shard in corpus for row in shard.tokens.tolist() for turns in prompts}
    assert {tuple(TEMPLATE.encode(turns[0])) for turns in prompts} <= opening


def test_shards_are_known_without_being_read(tmp_path):
    corpus = Corpus(tmp_path)
    corpus.add(Shard(torch.arange(6).view(2, 3), torch.tensor([[True, False, True]] * 2)))
    get, sizes = corpus_shards([corpus, corpus])
    assert sizes == [(2, 3)] * 2 and corpus.tokens == 6 and get[1]().tokens.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.slow
def test_every_kind_of_task_can_be_written():
    rng, passages = random.Random(0), [[7] * 90, [8] * 70]
    scripts = [short(TEMPLATE, rng, passages) for _ in range(40)] + [long(TEMPLATE, rng, passages, 100) for _ in range(8)]
    tokens, own = write(TARGET, scripts, 300, END, seed=2)
    assert int(tokens.max()) < 16 and bool(own.any(1).all())
    assert {bool(row[:90].any()) for row in own} == {True, False}  # questions of its own, and given texts
