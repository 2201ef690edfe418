"""How the user's turns begin when the target writes them itself: everyday tasks, so that a head learns what it will be used for.

A line is the beginning of a user's turn, which the target finishes. Texts to work on are answers to `PASSAGES`, written earlier.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .script import Script, Template, Words, dialogue

__all__ = ["long", "short"]

PASSAGES = (
    "Write a news article about", "Write a short news report about a man who", "Write a short news report about a woman who",
    "Write an encyclopedia article about the history of", "Write an encyclopedia article about the singer", "Write a short biography of",
    "Write a paragraph about the football club", "Write an article about the city of", "Write a paragraph about the TV series",
    "Write a short article about the President of", "Write a story about", "Write a report about a court case in which",
    "Write about the plot of the film", "Write a paragraph about how the government of", "Write a short article on the science of",
)  # fmt: skip
QUESTIONS = (
    "Who", "Who played", "Who sings", "Who wrote", "Who was the first", "When did", "When was", "When is", "Where is", "Where was",
    "Where does", "What is", "What is the name of", "What was", "What does", "How many", "How long", "Which", "How does", "Why did",
    "who won the", "when does the", "where did the", "what year did", "who is the", "how many episodes of", "what is the meaning of",
)  # fmt: skip
SUMS = (
    "A store sells", "A farmer has", "A train travels at", "A class has", "Tom has", "Mary buys", "John has", "Sarah earns $",
    "There are", "If a", "Mike is", "A bakery makes", "Lisa reads", "Each day,", "Emma and her brother", "A box contains",
    "James runs", "A recipe calls for", "Anna has twice as many", "The price of a", "In a garden there are", "Calculate",
)  # fmt: skip
GERMAN = (
    "Der", "Die", "Das", "Ein", "Eine", "Es ist", "Ich", "Wir", "Sie", "Er", "Am", "In der", "Im", "Nach", "Mit", "Für", "Bei", "Auch",
    "Aber", "Wenn", "Die Polizei", "Der Präsident", "Seit", "Das Unternehmen", "Zwei", "Viele", "Vor", "Auf", "Als", "\"", "Dabei",
)  # fmt: skip
ODD_JOBS = (
    "Write", "Explain", "Describe", "Give me", "Imagine you are", "Compose", "Compare", "Suggest", "Can you", "How do I", "Tell me",
    "What are the main", "Write an email to", "Write a poem about", "Write a blog post about", "Pretend to be", "Give an example of",
    "List", "Write a Python function", "Write a program that", "Fix the following code:", "Extract the", "Discuss", "Help me",
    "Provide", "Solve", "Find", "Describe the difference between", "Create a", "Explain to a child", "What if", "I want to",
)  # fmt: skip
_HEATS = (0.0, 0.0, 0.0, 0.8)
SUMMARISE = ("Summarize: {}", "Summarize: {}", "Summarize the following text: {}", "{}\n\nSummarize this in three sentences.")


def short(template: Template, rng: random.Random, passages: Sequence[Words]) -> Script:
    """A dialogue of a few hundred tokens."""
    how = {"temperature": rng.choice(_HEATS), "answer": 128, "question": 64}
    kind = rng.choices(("passage", "question", "sum", "german", "job", "translate", "summary"), (8, 8, 8, 7, 10, 3, 6))[0]
    passage = rng.choice(passages) if passages else ()
    if passage and kind == "translate":
        start = rng.randrange(max(1, len(passage) - 40))
        to = rng.choice(("German", "English", "French"))
        return dialogue(template, [[*template.encode(f"Translate to {to}: "), *passage[start : start + 40]]], (), **how)
    if passage and kind == "summary":
        return dialogue(template, [_around(template, rng.choice(SUMMARISE), passage[:192])], (), **how)
    starts = {"question": QUESTIONS, "sum": SUMS, "german": [f"Translate German to English: {word}" for word in GERMAN], "job": ODD_JOBS}
    if kind not in starts:
        return dialogue(
            template, [], template.encode(rng.choice(PASSAGES)), temperature=rng.choice((0.0, 0.7, 0.7)), answer=200, question=24
        )
    return dialogue(template, [], template.encode(rng.choice(starts[kind])), **how)


def long(template: Template, rng: random.Random, passages: Sequence[Words], tokens: int) -> Script:
    """A dialogue about texts of `tokens` tokens together: a summary of them, or a question about them."""
    text: list[int] = []
    while len(text) < tokens:
        text += [*rng.choice(passages), *template.encode("\n" if rng.random() < 0.5 else " ")]
    text = text[:tokens]
    how = {"temperature": rng.choice(_HEATS), "answer": 128, "question": 32}
    if rng.random() < 0.5:
        return dialogue(template, [_around(template, rng.choice(SUMMARISE), text)], (), **how)
    return dialogue(template, [], [*text, *template.encode("\n" + rng.choice(QUESTIONS))], **how)


def _around(template: Template, words: str, text: Words) -> list[int]:
    before, after = words.split("{}")
    return [*template.encode(before), *text, *template.encode(after)]
