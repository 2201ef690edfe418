"""The loop as a whole on our own float64 transformer, against a decoder of a few lines that knows nothing of trees or caches."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import specdec
from specdec import Budget, ContextDrafter, FixedPlanner, NGramDrafter, NullDrafter
from specdec.models.tiny import TinyTarget
from specdec.types import Kind

V = 17
TARGET = TinyTarget(vocab_size=V, seed=3)
PROMPTS = [[1, 2, 3, 1, 2], [4], [5, 6, 5, 6, 5, 6, 5], [0, 0, 7]]


@functools.cache
def best(prefix: tuple[int, ...]) -> tuple[int, float]:
    """Plain greedy decoding of one token, by a dense pass."""
    score, token = TARGET(torch.tensor([prefix]))[0].log_softmax(-1).max(-1)
    return int(token), float(score)


def plain(prompt: list[int], new: int) -> tuple[list[int], list[float]]:
    ids, scores = tuple(prompt), []
    for _ in range(new):
        token, score = best(ids)
        ids, scores = (*ids, token), [*scores, score]
    return list(ids[len(prompt) :]), scores


class Oracle(ContextDrafter):
    """Drafts the target's own greedy text, spoilt at some offsets, so that any number of tokens can be accepted."""

    def __init__(self, spoil: int = 0) -> None:
        self.spoil = spoil

    def guess(self, ids: list[torch.Tensor], budget: Budget) -> list[list[int]]:
        out = []
        for row, k in zip(ids, budget.depth.tolist(), strict=True):
            draft = plain(row.tolist(), k)[0]
            out.append([(t + 1) % V if self.spoil and i == len(row) % self.spoil else t for i, t in enumerate(draft)])
        return out


class Bushy(ContextDrafter):
    """A tree: the right token and a wrong one at every node, with the right one first or second by turns."""

    def guess(self, ids: list[torch.Tensor], budget: Budget) -> specdec.DraftTree:
        rows = []
        for row, depth, nodes in zip(ids, budget.depth.tolist(), budget.nodes.tolist(), strict=True):
            tokens, parents, tip = [int(row[-1])], [-1], 0
            for i, token in enumerate(plain(row.tolist(), min(depth, nodes // 2, 4))[0]):
                pair = [token, (token + 5) % V] if i % 2 else [(token + 5) % V, token]
                parents += [tip, tip]
                tip = len(tokens) + pair.index(token)
                tokens += pair
            rows.append((tokens, parents))
        return specdec.tree.from_lists(rows)


DRAFTERS = {"null": NullDrafter(), "ngram": NGramDrafter(), "oracle": Oracle(), "spoilt": Oracle(3), "tree": Bushy()}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("k", [0, 3, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 8))])
def test_greedy_is_plain_greedy_in_any_batch(name: str, k: int) -> None:
    planner = FixedPlanner(k if name != "tree" else 2 * k, k)
    out = specdec.generate(TARGET, PROMPTS, drafter=DRAFTERS[name], planner=planner, max_new_tokens=20, eos_token_id=[])
    for row, prompt in enumerate(PROMPTS):
        ids, scores = plain(prompt, 20)
        assert out.new_tokens[row].tolist() == ids
        assert out.sequences[row, : out.lengths[row]].tolist() == prompt + ids
        torch.testing.assert_close(out.logprobs[row], torch.tensor(scores, dtype=torch.float64), rtol=0, atol=1e-12)
    assert out.finish_reason == ["length"] * 4


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("sampling", [{}, pytest.param({"do_sample": True, "temperature": 0.8, "top_k": 9}, marks=pytest.mark.slow)])
def test_a_row_does_not_depend_on_its_batch(name: str, sampling: dict) -> None:
    seeds = [5, 6, 7, 8]
    options = {"drafter": DRAFTERS[name], "max_new_tokens": 12, "eos_token_id": [0], **sampling}
    alone = [specdec.generate(TARGET, [p], seed=[s], **options) for p, s in zip(PROMPTS, seeds, strict=True)]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 2, 0]):
        batch = specdec.generate(TARGET, [PROMPTS[i] for i in order], seed=[seeds[i] for i in order], **options)
        for at, i in enumerate(order):
            assert batch.new_tokens[at].tolist() == alone[i].new_tokens[0].tolist()
            assert batch.finish_reason[at] == alone[i].finish_reason[0]
    longest = max(map(len, PROMPTS))
    for side in ("left", "right"):  # padded on either side
        pads = [[9] * (longest - len(p)) for p in PROMPTS]
        ids = torch.tensor([pad + p if side == "left" else p + pad for p, pad in zip(PROMPTS, pads, strict=True)])
        mask = torch.tensor([[0] * len(x) + [1] * len(p) if side == "left" else [1] * len(p) + [0] * len(x)
                             for p, x in zip(PROMPTS, pads, strict=True)])  # fmt: skip
        padded = specdec.generate(TARGET, ids, attention_mask=mask, seed=seeds, **options)
        assert [t.tolist() for t in padded.new_tokens] == [a.new_tokens[0].tolist() for a in alone]


class Moody:
    """A processor with a memory: it favours a token that depends on all it was shown before."""

    def __init__(self) -> None:
        self.mood = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.mood = (3 * self.mood + int(input_ids[0, -1]) + 1) % V
        return scores.index_add(1, torch.tensor([self.mood]), torch.full((len(scores), 1), 5.0, dtype=scores.dtype))


@pytest.mark.slow
def test_processors_see_each_nodes_own_history() -> None:
    """With and without memory, through rejections and rows that end: the cached tree pass against the oracle that caches nothing."""
    options = {"do_sample": True, "seed": [3, 1, 4, 1], "max_new_tokens": 14, "eos_token_id": [0], "repetition_penalty": 1.7}
    for name in ("spoilt", "tree"):
        for own in ([], [Moody()]):
            fast, slow = (
                specdec.generate(TARGET, PROMPTS, drafter=DRAFTERS[name], logits_processor=own, verifier=verifier, **options)
                for verifier in (None, specdec.SequentialVerifier(TARGET, V))
            )
            assert [t.tolist() for t in fast.new_tokens] == [t.tolist() for t in slow.new_tokens]
            for one, other in zip(fast.logprobs, slow.logprobs, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_coupled_text_depends_on_the_seed_alone() -> None:
    def text(drafter: specdec.Drafter, k: int, rows: slice) -> list[list[int]]:
        out = specdec.generate(TARGET, PROMPTS[rows], drafter=drafter, acceptor=specdec.CoupledAcceptor(), planner=FixedPlanner(k),
                               do_sample=True, temperature=2.0, max_new_tokens=25, seed=[1, 2, 3, 4][rows], eos_token_id=[])  # fmt: skip
        return [t.tolist() for t in out.new_tokens]

    reference = text(NullDrafter(), 0, slice(0, 4))
    assert len({tuple(t) for t in reference}) == 4
    for name in ("ngram", "oracle", "spoilt", "tree"):
        assert text(DRAFTERS[name], 8, slice(0, 4)) == reference
        assert text(DRAFTERS[name], 3, slice(1, 3)) == reference[1:3]


@pytest.mark.slow
@given(k=st.integers(0, 6), new=st.integers(0, 9), spoil=st.sampled_from([0, 2, 3]))
@settings(max_examples=20)
def test_identities_of_the_statistics(k: int, new: int, spoil: int) -> None:
    out = specdec.generate(
        TARGET, PROMPTS, drafter=Oracle(spoil), planner=FixedPlanner(k), max_new_tokens=new, return_rounds=True, eos_token_id=[]
    )
    s = out.stats
    assert s.emitted == sum(map(len, out.new_tokens)) == 4 * new
    assert s.emitted == s.accepted + s.rounds - s.truncated
    assert s.accepted <= s.drafted
    assert all(a <= t for a, t in zip(s.accepted_by_depth, s.attempted_by_depth, strict=True))
    assert list(s.attempted_by_depth) == sorted(s.attempted_by_depth, reverse=True)
    assert s.rounds == sum(len(r.rows) for r in out.rounds) and s.steps == len(out.rounds)
    if not spoil and k and new:
        assert s.acceptance_rate == 1 and s.attempted_by_depth == s.accepted_by_depth


def test_depths_behind_an_end_were_not_attempted() -> None:
    text = plain(PROMPTS[0], 10)[0]
    out = specdec.generate(TARGET, [PROMPTS[0]], drafter=Oracle(), planner=FixedPlanner(8), max_new_tokens=10, eos_token_id=[text[0]])
    assert out.stats.attempted_by_depth == out.stats.accepted_by_depth == (1,)


def test_rounds_hold_the_laws_of_what_they_emitted() -> None:
    out = specdec.generate(
        TARGET, PROMPTS, drafter=Oracle(2), planner=FixedPlanner(4), max_new_tokens=9, return_rounds=True, eos_token_id=[]
    )
    for done in out.rounds:
        for i, tokens in enumerate(done.emitted):
            for j, token in enumerate(tokens):
                assert done.verification.logp[i, j, token] == pytest.approx(done.logprobs[i][j], abs=0)
    everything = specdec.generate(
        TARGET, PROMPTS, drafter=Oracle(2), planner=FixedPlanner(4), max_new_tokens=9, return_rounds="all", eos_token_id=[]
    )
    assert all(r.verification.logp.shape[:2] == r.tree.tokens.shape for r in everything.rounds)


def test_stream_is_generate_in_pieces() -> None:
    options = {"drafter": Bushy(), "max_new_tokens": 15, "do_sample": True, "seed": 9, "eos_token_id": [0]}
    pieces: list[list[int]] = [[] for _ in PROMPTS]
    for done in specdec.stream(TARGET, PROMPTS, **options):
        for row, tokens in zip(done.rows, done.emitted, strict=True):
            pieces[row] += tokens
    assert pieces == [t.tolist() for t in specdec.generate(TARGET, PROMPTS, **options).new_tokens]


def test_gradients_stay_switched_on_between_rounds() -> None:
    for _ in specdec.stream(TARGET, PROMPTS, drafter=NullDrafter(), max_new_tokens=2):
        assert torch.is_grad_enabled()


class Recorder:
    def __init__(self) -> None:
        self.puts: list[torch.Tensor] = []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value)

    def end(self) -> None:
        self.ended = True


def test_streamer_gets_the_prompt_then_every_round() -> None:
    recorder = Recorder()
    out = specdec.generate(
        TARGET, [PROMPTS[0]], drafter=Oracle(), planner=FixedPlanner(3), max_new_tokens=10, streamer=recorder, eos_token_id=[]
    )
    assert recorder.ended and recorder.puts[0].tolist() == [PROMPTS[0]]
    assert torch.cat(recorder.puts[1:]).tolist() == out.new_tokens[0].tolist()
    assert len(recorder.puts) == 1 + out.stats.steps
    with pytest.raises(ValueError, match="the batch has 4 rows"):
        specdec.generate(TARGET, PROMPTS, drafter=Oracle(), streamer=recorder)


def test_bad_calls_are_refused() -> None:
    class TooDeep(ContextDrafter):
        def guess(self, ids: list[torch.Tensor], budget: Budget) -> specdec.DraftTree:
            return specdec.chain([[1] * (int(budget.depth.max()) + 1)] * len(ids), [int(row[-1]) for row in ids])

    class Sampler(NullDrafter):
        draws = frozenset({Kind.IID})

    class PointOnly(specdec.MatchAcceptor):
        takes = frozenset({Kind.POINT})

    with pytest.raises(ValueError, match="budget's nodes"):
        specdec.generate(TARGET, PROMPTS, drafter=TooDeep())
    with pytest.raises(ValueError, match="PointOnly treats point draws exactly, but Sampler may make iid ones"):
        specdec.generate(TARGET, PROMPTS, drafter=Sampler(), acceptor=PointOnly(), do_sample=True)
    with pytest.raises(ValueError, match="GreedyAcceptor is a greedy rule and needs do_sample=False"):
        specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), acceptor=specdec.GreedyAcceptor(), do_sample=True)
    with pytest.raises(ValueError, match="needs do_sample=True"):
        specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), acceptor=specdec.MatchAcceptor())
    with pytest.raises(ValueError, match="return_rounds"):
        specdec.generate(TARGET, PROMPTS, drafter=NullDrafter(), return_rounds="some")
    with pytest.raises(TypeError, match="a ContextDrafter defines guess alone"):
        type("Bad", (ContextDrafter,), {"observe": lambda self, *_: None})
    with pytest.raises(ValueError, match="one list of token ids for each of the 4 rows"):
        specdec.generate(TARGET, PROMPTS, drafter=type("Few", (ContextDrafter,), {"guess": lambda self, ids, budget: [[]]})())


def test_undeclared_draws_are_refused() -> None:
    class Liar(specdec.Drafter):
        def begin(self, ctx: specdec.Context) -> None: ...
        def observe(self, state: None, commit: specdec.Commit, round: specdec.Round | None = None) -> None: ...
        def select(self, state: None, rows: list[int]) -> None: ...
        def propose(self, state: None, pending: torch.Tensor, budget: Budget, source: object) -> specdec.DraftTree:
            laws = torch.full((len(pending), 1, V), 1 / V, dtype=torch.float64)
            return specdec.chain([[1]] * len(pending), pending, laws) if int(budget.depth.min()) else specdec.tree.root_only(pending)

    with pytest.raises(ValueError, match="Liar.draws declares point, but its tree holds iid draws"):
        specdec.generate(TARGET, PROMPTS, drafter=Liar(), do_sample=True)
