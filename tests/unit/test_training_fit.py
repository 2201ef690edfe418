"""A head that is fitted learns, and a run that was killed ends with the same weights."""

from __future__ import annotations

import random

import pytest
import torch

from specdec.models.tiny import TinyTarget
from specdec.training import Corpus, HeadLesson, Reader, Recipe, Shard, corpus_shards, fit, fresh_head
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


def lesson():
    lent = TARGET.lend()
    ids = torch.arange(14)
    return HeadLesson(fresh_head(lent, TARGET.facts, LAYERS, ids), lent.head.weight[ids], steps=2)


def run(shards, recipe, folder, show=lambda progress: None, room=0):
    own = lesson()
    done = fit(own, Reader(TARGET, TARGET.lend(), LAYERS, room), *shards, recipe, folder, show)
    return done, {name: weight.detach().clone() for name, weight in own.learner.named_parameters()}


RECIPE = Recipe(passes=6, batch_tokens=60, rate=3e-3, warmup=3, steps=2, keep_every=7, window=2)


def test_it_learns(shards, tmp_path):
    seen = []
    done, _ = run(shards, RECIPE, tmp_path, seen.append)
    assert done.step == done.of == len(seen) and done.tokens == 6 * 7 * (20 + 21 + 22)
    assert done.loss < 0.7 * seen[0].loss and done.accepted[0] > 2 * seen[7].accepted[0] > 0


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_a_random_step_and_resumed_it_ends_the_same(shards, tmp_path, seed):
    whole, weights = run(shards, RECIPE, tmp_path / "whole")

    class Killed(Exception):
        pass

    at = random.Random(seed).randrange(1, whole.of)

    def kill(progress):
        if progress.step == at:
            raise Killed

    with pytest.raises(Killed):
        run(shards, RECIPE, tmp_path / "broken", kill)
    first = []
    done, again = run(shards, RECIPE, tmp_path / "broken", first.append)
    assert (done.step, done.tokens, done.accepted) == (whole.step, whole.tokens, whole.accepted)
    assert len(first) == whole.of or first[0].step % RECIPE.keep_every == 1
    for name, weight in weights.items():
        assert weight.equal(again[name]), name


def test_what_is_kept_of_the_target_changes_nothing(shards, tmp_path):
    _, without = run(shards, RECIPE, tmp_path / "a")
    _, kept = run(shards, RECIPE, tmp_path / "b", room=10**9)
    assert all(weight.equal(kept[name]) for name, weight in without.items())


def test_a_folder_of_another_recipe_is_refused(shards, tmp_path):
    short = Recipe(batch_tokens=60, keep_every=1, steps=2)
    run(shards, short, tmp_path)
    with pytest.raises(ValueError, match="was begun with .* give an empty folder"):
        run(shards, RECIPE, tmp_path)


def test_rows_held_out_are_in_no_batch_and_all_others_in_one_of_each_pass():
    sizes = [(10, 8), (5, 12), (7, 6)]
    recipe = Recipe(passes=2, batch_tokens=20, held_out=0.2, window=2)
    plan = _plan(sizes, recipe)
    for number, (rows, _) in enumerate(sizes):
        seen = sorted(row for batch in plan if batch.shard == number for row in batch.rows)
        left = max(1, round(rows * 0.2))
        assert seen == sorted([*range(rows - left)] * 2)
    assert plan == _plan(sizes, recipe) != _plan(sizes, Recipe(passes=2, batch_tokens=20, held_out=0.2, window=2, seed=1))


def test_a_folder_of_another_learner_is_refused(shards, tmp_path):
    run(shards, Recipe(batch_tokens=60, keep_every=1, steps=2), tmp_path)
    lent, ids = TARGET.lend(), torch.arange(9)
    other = HeadLesson(fresh_head(lent, TARGET.facts, LAYERS, ids), lent.head.weight[ids], steps=2)
    with pytest.raises(ValueError, match="begun with another learner: .*lm_head.* give an empty folder"):
        fit(other, Reader(TARGET, lent, LAYERS), *shards, Recipe(batch_tokens=60, keep_every=1, steps=2), tmp_path)
