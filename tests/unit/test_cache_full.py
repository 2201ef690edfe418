"""The cache against a list of rows of lists, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.cache.full import FullCache


def kv(batch: int, nodes: int, heads: int = 2, sizes: tuple[int, int] = (4, 4), dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(batch, heads, nodes, size).to(dtype) for size in sizes]


def filled(lengths: list[int]) -> tuple[FullCache, list[torch.Tensor]]:
    """A cache whose rows have these lengths, and the keys and values that were written."""
    cache, new = FullCache(len(lengths)), kv(len(lengths), max(lengths))
    cache.open(max(lengths))
    cache.write(0, *new)
    cache.commit(torch.arange(max(lengths)).expand(len(lengths), -1), torch.tensor(lengths))
    return cache, new


def keys_after(cache: FullCache, nodes: int = 1) -> torch.Tensor:
    """All keys of layer 0 that a pass over `nodes` more tokens attends over; the pass is not committed."""
    cache.open(nodes)
    return cache.write(0, *kv(len(cache.lengths), nodes))[0]


@st.composite
def scripts(draw: st.DrawFn) -> list[dict]:
    """Rounds of (nodes, kept nodes per row, whether to write twice before the commit, rows to go on with)."""
    rows, rounds = draw(st.integers(1, 4)), []
    for _ in range(draw(st.integers(1, 8))):
        nodes = draw(st.integers(1, 5))
        kept = [sorted(draw(st.sets(st.integers(0, nodes - 1)))) for _ in range(rows)]
        which = draw(st.none() | st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
        rounds.append({"nodes": nodes, "kept": kept, "again": draw(st.booleans()), "select": which, "rows": rows})
        rows = rows if which is None else len(which)
    return rounds


@given(scripts())
def test_any_rounds_leave_what_a_list_would_hold(script: list[dict]) -> None:
    cache = FullCache(script[0]["rows"])
    layers = {0: (2, (4, 4)), 3: (1, (6, 2))}  # other heads, and values of another size than keys
    expected = {layer: [[[] for _ in range(script[0]["rows"])] for _ in range(2)] for layer in layers}
    for step in script:
        for _ in range(1 + step["again"]):  # the first pass is dropped by the second
            cache.open(step["nodes"])
            new = {layer: kv(step["rows"], step["nodes"], *shape) for layer, shape in layers.items()}
            seen = {layer: cache.write(layer, *pair) for layer, pair in new.items()}
        for layer, pair in new.items():
            for view, lists, written in zip(seen[layer], expected[layer], pair, strict=True):
                assert view.shape[2] == cache.start + step["nodes"]
                assert torch.equal(view[:, :, cache.start :], written)
                for row, items in enumerate(lists):
                    assert torch.equal(view[row, :, : len(items)], torch.stack(items, 1) if items else view[row, :, :0])
                    items += [written[row, :, node] for node in step["kept"][row]]
        path = torch.tensor([[*kept, *[-1] * (step["nodes"] - len(kept))] for kept in step["kept"]])
        cache.commit(path, torch.tensor([len(kept) for kept in step["kept"]]))
        if step["select"] is not None:
            cache = cache.select(step["select"])
            expected = {layer: [[list(lists[row]) for row in step["select"]] for lists in pair] for layer, pair in expected.items()}
        assert cache.lengths == [len(items) for items in expected[0][0]]


def test_mask_shows_own_committed_slots_and_the_tree() -> None:
    cache, _ = filled([3, 1])
    cache.open(2)
    tree = torch.tensor([[[True, False], [True, True]], [[True, False], [False, True]]])
    assert cache.mask(tree)[:, 0].int().tolist() == [[[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]], [[1, 0, 0, 1, 0], [1, 0, 0, 0, 1]]]


def test_a_chain_that_lies_in_place_is_not_touched() -> None:
    cache, _ = filled([5])
    keys = keys_after(cache, 4)
    version = keys._version
    cache.commit(torch.tensor([[0, 1, 2, -1]]), torch.tensor([3]))
    assert keys._version == version
    keys = keys_after(cache, 2)
    version = keys._version
    cache.commit(torch.tensor([[1, -1]]), torch.tensor([1]))
    assert keys._version > version, "the counter would not have shown a write"


def test_buffers_grow_by_doubling_and_stale_slots_are_used_again() -> None:
    cache = FullCache(2)
    homes, capacity = set(), 0
    for round in range(300):
        keys = keys_after(cache, 8)
        homes.add(keys.data_ptr())
        capacity = max(capacity, keys.untyped_storage().nbytes() // (2 * 2 * 4 * 4))
        cache.commit(torch.tensor([[0, -1], [0, 3]]), torch.tensor([1, round % 2]))
    assert cache.lengths == [300, 150]
    assert len(homes) <= 4, "64, 128, 256, 512"
    assert capacity == 512


def test_new_slots_hold_no_nan() -> None:
    """Softmax gives a hidden slot the weight zero, and zero times NaN is NaN."""
    torch.use_deterministic_algorithms(True)  # fills memory that was not initialised with NaN
    try:
        assert torch.empty(8).isnan().all()
        cache, _ = filled([1])
        keys = keys_after(cache, 100)
    finally:
        torch.use_deterministic_algorithms(False)
    whole = torch.empty(0).set_(keys.untyped_storage())
    assert whole.numel() > keys.numel()
    assert whole.isfinite().all()


def test_select_without_the_longest_row_moves_the_scratch_back() -> None:
    cache, new = filled([2, 90, 3])
    cache = cache.select([2, 0])
    assert cache.start == 3
    assert not cache.aligned
    keys = keys_after(cache)
    assert torch.equal(keys[0, :, :3], new[0][2, :, :3])
    assert torch.equal(keys[1, :, :2], new[0][0, :, :2])


def test_dtype_is_that_of_the_first_write() -> None:
    cache = FullCache(1)
    cache.open(2)
    keys, values = cache.write(0, *kv(1, 2, dtype=torch.bfloat16))
    assert keys.dtype == values.dtype == torch.bfloat16


@pytest.mark.parametrize("reorder", [False, True])
@pytest.mark.parametrize("inside", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_cache_outlives_the_grad_mode_it_began_in(inside, reorder: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    cache = FullCache(2)
    with inside():
        cache.open(3)
        cache.write(0, *[x * weight for x in kv(2, 3)])
        cache.commit(torch.tensor([[0, 2], [1, 2]]), torch.tensor([2, 2]))
    with inside():
        cache = cache.select([1, 0]) if reorder else cache
    cache.open(4)  # no more than fits: the buffer that was made inside is written to
    keys, _ = cache.write(0, *[x * weight for x in kv(2, 4)])
    cache.commit(torch.tensor([[3], [2]]), torch.tensor([1, 1]))
    assert cache.lengths == [3, 3]
    assert not keys.requires_grad, "a cache must not keep the graphs of all passes alive"


def test_misuse_is_refused() -> None:
    cache, _ = filled([2, 1])
    count = torch.tensor([1, 1])
    with pytest.raises(RuntimeError, match="no transaction is open"):
        cache.write(0, *kv(2, 1))
    with pytest.raises(RuntimeError, match="no transaction is open"):
        cache.commit(torch.tensor([[0], [0]]), count)
    with pytest.raises(ValueError, match="at least one token"):
        cache.open(0)
    cache.open(3)
    with pytest.raises(ValueError, match=r"layer 0 wrote 2 tokens for 2 rows, but open\(3\)"):
        cache.write(0, *kv(2, 2))
    with pytest.raises(ValueError, match="cache of 2 rows"):
        cache.write(0, *kv(1, 3))
    cache.write(0, *kv(2, 3))
    for bad in ([0, 3], [2, 1], [1, 1], [-1, 0]):
        with pytest.raises(ValueError, match="row 1 keeps nodes"):
            cache.commit(torch.tensor([[0, 1], bad]), torch.tensor([2, 2]))
    assert cache.lengths == [2, 1], "a refused commit changes nothing"
    cache.commit(torch.tensor([[0, 1], [0, 2]]), torch.tensor([2, 2]))
    with pytest.raises(RuntimeError, match="no transaction is open"):
        cache.commit(torch.tensor([[0], [0]]), count)
