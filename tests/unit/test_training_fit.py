"""A head that is fitted learns, and a run that was killed ends with the same weights."""

from __future__ import annotations

import random

import pytest
import torch

from specdec.models.tiny import TinyTarget
from specdec.training import (
    Corpus,
    MedusaLesson,
    PairLesson,
    Reader,
    Recipe,
    Shard,
    corpus_shards,
    fit,
    fresh_head,
    fresh_medusa,
    fresh_mtp,
)  # fmt: skip
from specdec.training import lesson as lesson_module
from specdec.training.fit import _plan

TARGET = TinyTarget(16, num_layers=3, dtype=torch.float32)
LAYERS = (0, 1, 2)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three shards of greedy text."""
    corpus = Corpus(tmp_path_factory.mktemp("corpus"))
    for seed in range(3):
        tokens = torch.randint(16, (8, 4), generator=torch.Generator().manual_seed(seed))
        while tokens.shape[1] < 20 + seed:
            tokens = torch.cat([tokens, TARGET(tokens).argmax(-1, keepdim=True)], 1)
        own = torch.arange(tokens.shape[1]).expand_as(tokens) >= 4
        corpus.add(Shard(tokens, own.contiguous()))
    return corpus_shards([corpus])


def lesson(kind="eagle3", drafted=14):
    lent, ids = TARGET.lend(), torch.arange(drafted)
    rows = lent.head.weight.detach()
    if kind == "medusa":
        return MedusaLesson(fresh_medusa(TARGET.facts, ids, 2), rows[ids], 2)
    if kind == "mtp":
        return PairLesson(fresh_mtp(lent, TARGET.facts, ids), rows[ids], 2)
    return PairLesson(fresh_head(lent, TARGET.facts, LAYERS, rows, ids), rows[ids], 2)


def run(shards, recipe, folder, show=lambda progress: None, room=0, kind="eagle3"):
    own = lesson(kind)
    done = fit(own, Reader(TARGET, TARGET.lend(), LAYERS if kind == "eagle3" else (), room), *shards, recipe, folder, show)
    return done, {name: weight.detach().clone() for name, weight in own.learner.named_parameters()}


RECIPE = Recipe(passes=6, batch_tokens=60, rate=3e-3, warmup=3, keep_every=7, window=2)


@pytest.mark.parametrize("kind", ("eagle3", "mtp", "medusa"))
def test_it_learns(shards, tmp_path, kind):
    seen = []
    done, _ = run(shards, RECIPE, tmp_path, seen.append, kind=kind)
    assert done.step == done.of == len(seen) and done.tokens == 6 * 7 * (20 + 21 + 22)
    assert done.loss < (0.7 if kind == "eagle3" else 0.95) * seen[0].loss and done.accepted[0] > 0
    assert kind != "eagle3" or done.accepted[0] > 2 * seen[7].accepted[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed, kind", list(enumerate(["eagle3", "mtp", "medusa"])))
def test_killed_at_a_random_step_and_resumed_it_ends_the_same(shards, tmp_path, seed, kind):
    whole, weights = run(shards, RECIPE, tmp_path / "whole", kind=kind)

    class Killed(Exception):
        pass

    at = random.Random(seed).randrange(1, whole.of)

    def kill(progress):
        if progress.step == at:
            raise Killed

    with pytest.raises(Killed):
        run(shards, RECIPE, tmp_path / "broken", kill, kind=kind)
    first = []
    done, again = run(shards, RECIPE, tmp_path / "broken", first.append, kind=kind)
    assert (done.step, done.tokens, done.accepted) == (whole.step, whole.tokens, whole.accepted)
    assert len(first) == whole.of or first[0].step % RECIPE.keep_every == 1
    for name, weight in weights.items():
        assert weight.equal(again[name]), name


@pytest.mark.slow
def test_what_is_kept_of_the_target_is_not_read_again_and_changes_nothing(shards, tmp_path, monkeypatch):
    reads = []
    one = lesson_module.read
    monkeypatch.setattr(lesson_module, "read", lambda *args, **given: reads.append(None) or one(*args, **given))
    _, without = run(shards, RECIPE, tmp_path / "a")
    every = len(reads)
    _, kept = run(shards, RECIPE, tmp_path / "b", room=10**9)
    assert all(weight.equal(kept[name]) for name, weight in without.items())
    assert len(reads) - every < every / 2


def test_a_folder_of_another_run_is_refused(shards, tmp_path):
    """Another recipe, vocabulary, kind, target, or other shards."""
    short = Recipe(batch_tokens=60, keep_every=1)
    run(shards, short, tmp_path)
    with pytest.raises(ValueError, match="another run .*passes.* give an empty folder"):
        run(shards, RECIPE, tmp_path)
    reader = Reader(TARGET, TARGET.lend(), LAYERS)
    with pytest.raises(ValueError, match="another run .*ids"):
        fit(lesson(drafted=9), reader, *shards, short, tmp_path)
    with pytest.raises(ValueError, match="another run .*head"):
        fit(lesson("medusa"), reader, *shards, short, tmp_path)
    other = lesson()
    other.rows.add_(1)
    with pytest.raises(ValueError, match="another run .*teacher"):
        fit(other, reader, *shards, short, tmp_path)
    with pytest.raises(ValueError, match="another run .*shards"):
        fit(lesson(), reader, shards[0][:2], shards[1][:2], short, tmp_path)
    fit(lesson(), reader, *shards, short, tmp_path)


def test_a_damaged_state_is_named(shards, tmp_path):
    (tmp_path / "state.safetensors").write_bytes(b"half of it")
    with pytest.raises(ValueError, match="state.safetensors can't be read .* remove it"):
        run(shards, RECIPE, tmp_path)


def test_a_shard_of_one_row_holds_out_nobody(tmp_path):
    corpus = Corpus(tmp_path / "one")
    corpus.add(Shard(torch.arange(12)[None] % 16, torch.ones(1, 12, dtype=torch.bool)))
    done, _ = run(corpus_shards([corpus]), Recipe(keep_every=1), tmp_path)
    assert done.step == done.of == 1 and done.accepted == (0.0, 0.0)


def test_rows_held_out_are_in_no_batch_and_all_others_in_one_of_each_pass():
    sizes = [(10, 8), (5, 12), (7, 6)]
    recipe = Recipe(passes=2, batch_tokens=20, held_out=0.2, window=2)
    plan = _plan(sizes, recipe)
    for number, (rows, _) in enumerate(sizes):
        seen = sorted(row for batch in plan if batch.shard == number for row in batch.rows)
        left = max(1, round(rows * 0.2))
        assert seen == sorted([*range(rows - left)] * 2)
    assert plan == _plan(sizes, recipe) != _plan(sizes, Recipe(passes=2, batch_tokens=20, held_out=0.2, window=2, seed=1))
