"""`specdec audit`: what a real model's texts and numbers have to satisfy, prompt by prompt."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from tqdm import tqdm

from ..base import Acceptor, Drafter
from ..bench.workloads import Prompt, chat_ids, read_prompts
from ..drafters import EarlyExitDrafter, ModelDrafter, NGramDrafter, NullDrafter
from ..generation import default_acceptor, generate
from ..loop import compatible
from ..models import load
from ..rng import derive_seeds
from ..testing.audit import Comparison, Echoes, audit_coupled, audit_greedy, coupled_texts, reference_draft, sampled_rounds
from ..testing.eprocess import pooled, visible
from ..testing.numerics import Drift, chain_worth, drift, kernel_defects
from ..types import Kind, Round
from .command import Failed
from .parts import ACCEPTORS, part
from .text import DRAFTERS, DTYPES, HEAD_HELP, count, named

__all__ = ["CHECKS", "arguments", "run"]

NUM_DRAFT = 8
KERNEL = 1e-7
"""Largest difference of the two sides of the kernel's identity; float32 was found to be off by 3e-8 at most."""
VERDICTS = ("equal", "near_tie", "different")
REFERENCE = "reference"


def arguments(parser: argparse.ArgumentParser) -> None:
    """A file of prompts, how many at a time, and what is looked at."""
    parser.add_argument("--prompts", required=True, metavar="FILE.jsonl", help="one JSON object a line with 'turns', as in Spec-Bench")
    parser.add_argument("--checks", default="greedy", metavar="A,B,...",
                        help=f"of {', '.join(CHECKS)}; or all (default: %(default)s)")  # fmt: skip
    parser.add_argument("--limit", type=count, metavar="N", help="the first N prompts only")
    parser.add_argument("--model", default="smollm2-135m", help="packaged model, local folder or hub name (default: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32",
                        help="of the weights; ties looks at float32 and bfloat16 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--head", metavar="NAME", help=HEAD_HELP)
    parser.add_argument("--drafter", choices=[*DRAFTERS, REFERENCE],
                        help="what guesses; reference is the model itself with noise on its weights (default: ngram for greedy, several "
                             "for coupled, else reference)")  # fmt: skip
    parser.add_argument("--acceptor", metavar="X", help="the rule that eprocess tests: a name of the library or module:Class (default: the "
                        "one that generate takes)")  # fmt: skip
    parser.add_argument("--max-new-tokens", type=count, default=64, metavar="N", help="of a text (default: %(default)s)")
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="prompts decoded at once (default: %(default)s)")
    parser.add_argument("--tokens", type=count, default=256, metavar="N",
                        help="emitted tokens that kernel, eprocess and rules look at (default: %(default)s)")  # fmt: skip
    parser.add_argument("--alpha", type=float, default=1e-6, metavar="P",
                        help="probability at most with which eprocess rejects a rule that is exact (default: %(default)s)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of all that is sampled (default: %(default)s)")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Fails where a check does; every one is made all the same."""
    names = _names(args.checks)
    for name in ("batch", "max_new_tokens", "tokens", "limit"):
        if getattr(args, name) == 0:
            raise ValueError(f"--{name.replace('_', '-')}: got 0, allowed is at least 1")
    if not 0 < args.alpha < 1:
        raise ValueError(f"--alpha: got {args.alpha}; give a probability between 0 and 1")
    prompts = read_prompts(args.prompts, args.limit)
    model, tokenizer = load(args.model, dtype=DTYPES[args.dtype])
    case = _Case(args, prompts, model, [chat_ids(tokenizer, prompt.turns[0]) for prompt in prompts])
    result: dict[str, Any] = {"prompts": len(prompts), "batch": args.batch}
    failures = []
    for name in names:
        found, failure = CHECKS[name](case)
        result |= found if name == "greedy" else {name: found}
        failures += [] if failure is None else [failure]
    if failures:
        raise Failed("; ".join(failures), result)
    return result


def _names(text: str) -> list[str]:
    names = list(CHECKS) if text == "all" else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in CHECKS]
    if unknown:
        raise ValueError(f"--checks: {', '.join(unknown)} unknown; allowed are {', '.join(CHECKS)}, or all")
    return list(dict.fromkeys(names))


@dataclass(frozen=True)
class _Case:
    """What all checks share."""

    args: argparse.Namespace
    prompts: Sequence[Prompt]
    model: Any
    ids: Sequence[list[int]]

    @cached_property
    def reference(self) -> Drafter:
        return ModelDrafter(reference_draft(self.model, seed=self.args.seed))

    def drafter(self, default: str) -> Drafter:
        name = self.args.drafter or default
        return self.reference if name == REFERENCE else named(name, self.model, self.args.head)

    def bar(self, items: Iterable[Any], name: str, total: int) -> Iterator[Any]:
        return iter(tqdm(items, desc=name, total=total, unit="prompt", disable=self.args.json))

    def rounds(self, name: str, drafter: Drafter, acceptor: Any) -> Iterator[Round]:
        """Sampled rounds with all their laws, until they have emitted `--tokens`."""
        args, seen = self.args, 0
        with tqdm(desc=name, total=args.tokens, unit="token", disable=args.json) as bar:
            for done in sampled_rounds(self.model, self.ids, drafter, acceptor, max_new_tokens=args.max_new_tokens, batch=args.batch,
                                       num_draft=NUM_DRAFT, seed=args.seed):  # fmt: skip
                new = sum(map(len, done.emitted))
                seen += new
                bar.update(new)
                yield done
                if seen >= args.tokens:
                    return


Found = tuple[dict[str, Any], str | None]
"""What a check adds to the result, and why it failed, if it did."""


def _greedy(case: _Case) -> Found:
    """Greedy text with drafts against transformers' own."""
    args = case.args
    compared = audit_greedy(case.model, case.ids, case.drafter("ngram"), max_new_tokens=args.max_new_tokens, batch=args.batch)
    found = list(tqdm(compared, total=len(case.ids), unit="prompt", disable=args.json))
    verdicts, others = Counter(one.verdict for one in found), _others(case.prompts, found)
    equal, near, different = (verdicts[v] for v in VERDICTS)
    args.say(f"{len(found)} texts in {args.dtype}: {equal} equal, {near} near-ties, {different} different\n")
    for one in others:
        args.say(f"  prompt {one['prompt']}: {one['verdict']} at new token {one['position']}, gap {one['gap']}\n")
    failure = f"{different} texts differ from plain decoding" if different else None
    return {**{v: verdicts[v] for v in VERDICTS}, "others": others}, failure


def _others(prompts: Sequence[Prompt], found: Sequence[Comparison]) -> list[dict[str, Any]]:
    return [{"prompt": prompt.id, **asdict(one)} for prompt, one in zip(prompts, found, strict=True) if one.verdict != "equal"]


def _kernel(case: _Case) -> Found:
    """The kernel's identity on the model's own rows, with coins flipped at once (a = 1) and kept (a < 1)."""
    drafter, groups = case.drafter(REFERENCE), {"a = 1": [], "a < 1": []}
    for done in case.rounds("kernel", drafter, default_acceptor(drafter, False)):
        for one in kernel_defects(done):
            groups["a = 1" if one.budget == 1 else "a < 1"].append(one)
    table: dict[str, Any] = {
        name: {"draws": len(own), "defect": max(one.defect for one in own), "tv": max(one.total for one in own)}
        for name, own in groups.items()
        if own
    }
    case.args.say(
        f"kernel   both sides of the identity, at most {KERNEL:g} apart\n{'':<9}{'budget':<8}{'draws':>8}{'defect':>10}{'tv':>10}\n"
    )
    for name, row in table.items():
        case.args.say(f"{'':<9}{name:<8}{row['draws']:>8}{row['defect']:>10.1e}{row['tv']:>10.1e}\n")
    found = {"draws": sum(row["draws"] for row in table.values()), "tolerance": KERNEL, "budgets": table}
    if not table:
        return found, "kernel: nothing was drafted, so nothing was checked"
    worst = max(row["defect"] for row in table.values())
    return found, None if worst <= KERNEL else f"kernel: the identity is off by {worst:.1e}"


def _coupled(case: _Case) -> Found:
    """Position-bound noise: the text belongs to the seed, whoever drafts."""
    args, seeds = case.args, derive_seeds(case.args.seed, len(case.ids))
    drafters: Mapping[str, Callable[[], Drafter]] = {
        "ngram": NGramDrafter, "early exit": lambda: EarlyExitDrafter(case.model, max(1, _layers(case.model) // 2)),
        REFERENCE: lambda: case.reference, "tree": Echoes,
    }  # fmt: skip
    if args.drafter:
        drafters = {args.drafter: lambda: case.drafter(REFERENCE)}
    texts = coupled_texts(case.model, case.ids, NullDrafter(), seeds, max_new_tokens=args.max_new_tokens)
    plain = list(case.bar(texts, "coupled: plain", len(case.ids)))
    args.say(
        f"coupled  against plain decoding of the same seeds, batch {args.batch}\n{'':<9}{'drafter':<12}{'equal':>8}{'near':>6}{'diff':>6}\n"
    )
    rows, different = [], 0
    for name, make in drafters.items():
        compared = audit_coupled(case.model, case.ids, make(), seeds, plain, max_new_tokens=args.max_new_tokens, batch=args.batch,
                                 num_draft=NUM_DRAFT)  # fmt: skip
        found = list(case.bar(compared, f"coupled: {name}", len(case.ids)))
        verdicts = Counter(one.verdict for one in found)
        different += verdicts["different"]
        rows.append({"drafter": name, **{v: verdicts[v] for v in VERDICTS}, "others": _others(case.prompts, found)})
        args.say(f"{'':<9}{name:<12}{verdicts['equal']:>8}{verdicts['near_tie']:>6}{verdicts['different']:>6}\n")
    return {"drafters": rows}, f"coupled: {different} texts are not those of their seeds" if different else None


def _layers(model: Any) -> int:
    return model.config.get_text_config().num_hidden_layers


def _eprocess(case: _Case) -> Found:
    """A bet against the law of the emitted tokens."""
    args, drafter = case.args, case.drafter(REFERENCE)
    acceptor = part(args.acceptor, ACCEPTORS, Acceptor, "--acceptor") if args.acceptor else default_acceptor(drafter, False)
    compatible(drafter, acceptor, False)
    *_, state = pooled(case.rounds("eprocess", drafter, acceptor), args.alpha, args.tokens)
    rejected, tokens, highest = bool(state.rejected[0]), int(state.tokens[0]), float(state.highest[0])
    name = type(acceptor).__name__
    bias = visible(tokens, args.alpha)
    found = {
        "acceptor": name, "verdict": "rejected" if rejected else "not rejected", "tokens": tokens, "alpha": args.alpha,
        "log_e": float(state.log_e[0]) if math.isfinite(highest) else None, "log_e_max": highest if math.isfinite(highest) else None,
        "impossible_token": not math.isfinite(highest), "visible_tv": bias,
    }  # fmt: skip
    args.say(
        f"eprocess {name}: {found['verdict']} after {tokens} tokens at alpha {args.alpha:g}; largest log e {highest:.2f} of "
        f"{-math.log(args.alpha):.2f} needed\n"
        f"{'':<9}no bet could be sure to show less than {bias:.3f} total variation a token (root mean square)\n"
    )
    return found, f"eprocess: the text of {name} does not follow the target's law (alpha {args.alpha:g})" if rejected else None


def _ties(case: _Case) -> Found:
    """Passes over one token against passes over several, on the same greedy texts."""
    args, rows, failures = case.args, [], 0
    texts = [
        generate(case.model, [ids], drafter=NullDrafter(), max_new_tokens=args.max_new_tokens, do_sample=False).new_tokens[0].tolist()
        for ids in case.bar(case.ids, "ties: texts", len(case.ids))
    ]
    args.say(f"ties     passes over 1 and over {NUM_DRAFT + 1} tokens of the same text\n")
    heads = ("tokens", "logits", "tv mean", "tv max", "flips", "gap", "tie", "beyond")
    args.say(f"{'':<9}{'dtype':<10}" + "".join(f"{head:>9}" for head in heads) + "\n")
    for dtype in ("float32", "bfloat16"):
        model = case.model if dtype == args.dtype else load(args.model, dtype=DTYPES[dtype])[0]
        each: list[Drift] = list(case.bar(drift(model, case.ids, texts, NUM_DRAFT + 1), f"ties: {dtype}", len(texts)))
        flips = [flip for one in each for flip in one.flips]
        tokens = sum(one.positions for one in each)
        row = {
            "dtype": dtype, "positions": tokens, "logits_max": max(one.logits for one in each),
            "tv_mean": sum(one.tv_mean * one.positions for one in each) / tokens, "tv_max": max(one.tv_max for one in each),
            "flips": [{"gap": gap, "tie_width": width} for gap, width in flips], "beyond_tie": sum(one.beyond for one in each),
        }  # fmt: skip
        rows.append(row)
        failures += row["beyond_tie"]
        gap, width = max(flips) if flips else (float("nan"), float("nan"))
        args.say(
            f"{'':<9}{dtype:<10}{tokens:>9}{row['logits_max']:>9.1e}{row['tv_mean']:>9.1e}{row['tv_max']:>9.1e}"
            f"{len(flips):>9}{gap:>9.1e}{width:>9.1e}{row['beyond_tie']:>9}\n"
        )
    return {"width": NUM_DRAFT + 1, "dtypes": rows}, f"ties: {failures} argmax flips are wider than a tie" if failures else None


def _rules(case: _Case) -> Found:
    """What block verification gains over token rejection on the same sampled chains, coin by coin."""
    drafter, pairs = case.drafter(REFERENCE), []
    if Kind.IID not in drafter.draws or not drafter.chains:
        raise ValueError("--drafter: rules compares two rules for sampled chains; choose reference")
    for done in case.rounds("rules", drafter, ACCEPTORS["BlockAcceptor"]()):
        token, block = chain_worth(done.tree.to(done.verification.scores.device), done.verification)
        full = (done.tree.parents >= 0).sum(-1) == NUM_DRAFT  # where the room for a text ran out, chains are shorter
        pairs += [pair for pair, whole in zip(torch.stack([token, block], 1).tolist(), full.tolist(), strict=True) if whole]
    if len(pairs) < 2:
        raise ValueError(f"--tokens, --max-new-tokens: they leave room for {len(pairs)} chains of {NUM_DRAFT}; give more")
    values = torch.tensor(pairs, dtype=torch.float64)
    gain = values[:, 1] - values[:, 0]
    half = 1.96 * float(gain.std()) / math.sqrt(len(gain))
    token, block = values.mean(0).tolist()
    found = {"rounds": len(pairs), "chain": NUM_DRAFT, "token": token, "block": block, "difference": block - token, "interval": half}
    case.args.say(
        f"rules    E[tokens | chain of {NUM_DRAFT}], {len(pairs)} rounds: token {token:.3f}, block {block:.3f}, "
        f"difference {block - token:.3f} +- {half:.3f} (95 %)\n"
    )
    return found, None


CHECKS: dict[str, Callable[[_Case], Found]] = {
    "greedy": _greedy, "kernel": _kernel, "coupled": _coupled, "eprocess": _eprocess, "ties": _ties, "rules": _rules,
}  # fmt: skip
