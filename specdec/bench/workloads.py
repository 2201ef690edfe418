"""Prompts from a file in Spec-Bench's format (Xia et al. 2024): one JSON object a line with `category` and `turns`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Prompt", "chat_ids", "read_prompts"]


@dataclass(frozen=True)
class Prompt:
    """One question."""

    id: str
    category: str
    turns: tuple[str, ...]


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a JSONL file.

    Raises:
        ValueError: a line is no JSON object with a non-empty list of strings `turns`; the message gives file and line.
    """
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            turns = record["turns"]
            if not (isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns)):
                raise TypeError("turns must be a non-empty list of strings")
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            what = f"key {error} is missing" if isinstance(error, KeyError) else error
            raise ValueError(f"{path}, line {number}: {what}; wanted is {{'category': ..., 'turns': ['...']}}") from None
        prompts.append(Prompt(str(record.get("question_id", number)), str(record.get("category", "all")), tuple(turns)))
        if len(prompts) == limit:
            break
    if not prompts:
        raise ValueError(f"{path}: it holds no prompt")
    return prompts


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a first user turn, in the tokenizer's chat template where it has one."""
    if not tokenizer.chat_template:
        return tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": text}]
    encoded: Callable[..., Any] = tokenizer.apply_chat_template
    return list(encoded(messages, add_generation_prompt=True, return_dict=True)["input_ids"])
