"""The figures of a benchmark, worked out by hand, and the fairness of its order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from specdec.bench import report
from specdec.bench.measure import Group, Sample, groups_of, measure, warm_up
from specdec.bench.methods import METHODS, Decoded, Setup, make_methods, read_names
from specdec.bench.report import by_category, interval, ratio, summary
from specdec.stats import Stats
from specdec.testing.audit import compare, tie_width

FAST, SLOW = [(30, 1.0), (10, 1.0)], [(20, 2.0), (20, 3.0)]


def test_the_ratio_is_of_sums_and_no_mean_of_ratios() -> None:
    assert ratio(FAST, SLOW) == pytest.approx((40 / 2) / (40 / 5))  # 2.5; the mean of the two ratios, 3 and 1.5, is 2.25
    assert ratio(SLOW, SLOW) == 1


def test_the_interval_of_two_prompts_is_known() -> None:
    # the first alone or the second alone each come up in a quarter of the draws
    assert interval(FAST, SLOW) == pytest.approx((1.5, 3.0))
    assert interval(FAST[:1], SLOW[:1]) == pytest.approx((3.0, 3.0))


def test_the_interval_pairs_prompts() -> None:
    # the machine is a hundred times slower for the second half: both sides suffer, and the ratio is as certain as before
    noise = [1.0, 1.0, 1.0, 100.0, 100.0, 100.0]
    fast, slow = [(10, 1.0 * n) for n in noise], [(10, 2.0 * n) for n in noise]
    assert interval(fast, slow) == pytest.approx((2.0, 2.0))
    with pytest.raises(ValueError, match="6 and 5"):
        interval(fast, slow[:5])


def test_the_interval_covers_what_it_says() -> None:
    draw = torch.Generator().manual_seed(1)
    hits = 0
    for seed in range(200):
        seconds = (1 + torch.rand(40, generator=draw)).tolist()
        low, high = interval([(10, s) for s in seconds], [(10, 1.0)] * 40, seed)
        hits += low <= 1 / 1.5 <= high
    assert 178 <= hits <= 199  # 95 % of 200 is 190; the interval of a mean over 40 is slightly too short
    assert interval(FAST, SLOW, seed=5) == interval(FAST, SLOW, seed=5)


def test_categories_are_compared_within_themselves() -> None:
    fast, slow = [(30, 1.0), (10, 1.0), (10, 2.0)], [(20, 2.0), (20, 3.0), (20, 2.0)]
    assert by_category(["b", "a", "b"], fast, slow) == pytest.approx({"b": (40 / 3) / (40 / 4), "a": 10 / (20 / 3)})


def sample(tokens: int, seconds: float, category: str = "a", rounds: int | None = None, phases=None) -> Sample:
    stats = None if phases is None else Stats(seconds=phases, attempted_by_depth=(4, 2), accepted_by_depth=(2, 1))
    return Sample(category, seconds, Decoded([[0] * tokens], rounds, stats))


def test_summary() -> None:
    samples = {
        "plain": [sample(4, 2.0, "a", 4, {"prefill": 0.5, "verify": 1.0}), sample(6, 2.0, "b", 6, {"verify": 1.5})],
        "hf-plain": [sample(4, 1.0, "a"), sample(6, 3.0, "b")],
        "x": [sample(4, 1.0, "a", 2, {"draft": 0.25}), sample(6, 1.0, "b", 3, {"draft": 0.5, "other": 0.125})],
    }
    counts = {"equal": 1, "near_tie": 1, "different": 0}
    got = summary(samples, {"plain": counts, "hf-plain": None, "x": counts})
    assert list(got) == ["plain", "hf-plain", "x"]
    x = got["x"]
    assert (x["tokens"], x["rounds"], x["tokens_per_round"], x["tokens_per_s"], x["seconds_total"]) == (10, 5, 2.0, 5.0, 2.0)
    assert x["seconds"] == {"prefill": 0, "draft": 0.75, "verify": 0, "accept": 0, "commit": 0, "other": 0.125, "outside": 1.125}
    assert x["acceptance_by_depth"] == [0.5, 0.5]
    assert x["speedup"]["total"] == 2.0 and x["speedup"]["by_category"] == {"a": 2.0, "b": 2.0}
    assert (x["speedup"]["low"], x["speedup"]["high"]) == pytest.approx((2.0, 2.0))
    assert x["vs_hf_plain"] == 2.0 and x["vs_hf_plain_by_category"] == {"a": 1.0, "b": 3.0}
    assert x["vs_hf_plain_interval"] == pytest.approx((1.0, 3.0))
    assert [x[key] for key in ("vs_hf_lookup", "vs_hf_lookup_interval", "vs_hf_lookup_by_category")] == [None] * 3
    assert x["tokens_per_round_by_category"] == {"a": 2.0, "b": 2.0} and x["equal_to_plain"] == counts
    assert got["plain"]["speedup"] == {"total": 1.0, "low": 1.0, "high": 1.0, "by_category": {"a": 1.0, "b": 1.0}}
    theirs = got["hf-plain"]
    assert (theirs["rounds"], theirs["tokens_per_round"], theirs["equal_to_plain"]) == (None, None, None)
    assert set(theirs["seconds"].values()) == {None} and theirs["seconds"].keys() == x["seconds"].keys()


def test_groups_keep_the_order_and_say_when_they_mix() -> None:
    groups = groups_of([[1], [2], [3], [4], [5]], ["a", "a", "a", "b", "b"], [10, 20, 30, 40, 50], 2)
    assert groups == [Group([[1], [2]], [10, 20], "a"), Group([[3], [4]], [30, 40], "mixed"), Group([[5]], [50], "b")]


def test_the_order_is_rotated_and_everyone_gets_the_same() -> None:
    calls = []

    def method(name: str):
        def decode(prompts, seeds):
            calls.append((name, prompts, seeds))
            return Decoded([[len(calls)] * prompts[0][0]])

        return decode

    methods, groups = {name: method(name) for name in "abc"}, groups_of([[1], [2], [3], [4]], ["x", "y", "x", "y"], [5, 6, 7, 8], 1)
    samples = measure(methods, groups)
    assert "".join(name for name, *_ in calls) == "abcbcacababc"
    assert all(calls[3 * i + j][1:] == (group.prompts, group.seeds) for i, group in enumerate(groups) for j in range(3))
    assert [[one.tokens for one in own] for own in samples.values()] == [[1, 2, 3, 4]] * 3
    assert [one.decoded.texts[0][0] for one in samples["b"]] == [2, 4, 9, 11]
    assert [one.category for one in samples["a"]] == ["x", "y", "x", "y"]
    calls.clear()
    warm_up(methods, Group([[1, 2], [3]], [5, 6], "x"), 2)
    assert calls == [(name, [[2, 1], [3]], [5, 6]) for name in "abcabc"]


def test_a_call_is_timed_as_a_whole(monkeypatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("specdec.bench.measure.perf_counter", lambda: clock[0])

    def slow(prompts, seeds):
        clock[0] += prompts[0][0]
        return Decoded([[1]])

    samples = measure({"slow": slow, "slower": slow}, groups_of([[3], [4]], ["a", "a"], [0, 0], 1))
    assert [[one.seconds for one in own] for own in samples.values()] == [[3.0, 4.0]] * 2


# ------------------------------------------------------------------------------------------------------------------- methods


def test_names_of_methods() -> None:
    assert read_names("ngram, hf-plain,ngram") == ["plain", "ngram", "hf-plain"]
    assert read_names("hf-lookup,plain") == ["plain", "hf-lookup"]
    for wrong in ("ngrams", "", "plain,,ngram"):
        with pytest.raises(ValueError, match="allowed are plain, hf-plain, hf-lookup, ngram, draft"):
            read_names(wrong)


def test_methods_say_what_they_lack() -> None:
    setup = Setup(SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=1, pad_token_id=None)), {"do_sample": False}, batch=2)
    assert list(make_methods(["plain", "hf-plain", "ngram"], setup)) == ["plain", "hf-plain", "ngram"]
    with pytest.raises(ValueError, match="one prompt at a time, not 2"):
        make_methods(["hf-lookup"], setup)
    with pytest.raises(ValueError, match="--draft-model"):
        make_methods(["draft"], setup)
    with pytest.raises(ValueError, match="'small' would not be used"):
        make_methods(["plain"], Setup(None, {}, draft_model="small"))
    assert report.BASELINES.items() >= {("vs_hf_plain", "hf-plain"), ("vs_hf_lookup", "hf-lookup")}
    assert set(report.BASELINES.values()) <= METHODS.keys()


# ---------------------------------------------------------------------------------------------------------------- near-ties


def test_the_width_of_a_tie_follows_the_grid_of_the_dtype() -> None:
    assert tie_width(torch.float32, 20.0) == tie_width(torch.float64, 20.0) == 1e-4
    grid = (torch.nextafter(torch.tensor(20.0, dtype=torch.bfloat16), torch.tensor(99.0, dtype=torch.bfloat16)) - 20).item()
    assert tie_width(torch.bfloat16, 20.0) == tie_width(torch.bfloat16, -31.9) == 5 * grid
    assert tie_width(torch.bfloat16, 32.0) == 10 * grid
    assert tie_width(torch.float16, 20.0) == pytest.approx(5 * grid / 8)


@pytest.mark.parametrize(("dtype", "gap", "verdict"), [
    (torch.bfloat16, 0.5, "near_tie"), (torch.bfloat16, 0.75, "different"), (torch.float32, 0.5, "different"),
    (torch.float32, 5e-5, "near_tie"),
])  # fmt: skip
def test_compare_takes_the_width_of_the_model(dtype, gap, verdict) -> None:
    class Fixed:
        device = torch.device("cpu")

        def __call__(self, input_ids):
            logits = torch.zeros(1, input_ids.shape[1], 4, dtype=torch.float64)
            logits[..., 1], logits[..., 2] = 20.0, 20.0 - gap
            return SimpleNamespace(logits=logits)

    model = Fixed()
    model.dtype = dtype
    found = compare(model, [3], [1, 1], [1, 2])
    assert (found.verdict, found.position) == (verdict, 1) and found.gap == pytest.approx(gap)
    assert compare(model, [3], [1, 1], [1, 2], near_tie=1.0).verdict == "near_tie"
