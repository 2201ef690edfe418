"""Draft heads and draft models that learn from the target's own words."""

from .corpus import Corpus, Shard, Wanted, corpus_shards, write_corpus
from .draft import ModelLesson
from .fit import Progress, Recipe, fit
from .lesson import HeadLesson, Lesson, Reader, Seen, frequent, fresh_head
from .script import Template

__all__ = [
    "Corpus", "HeadLesson", "Lesson", "ModelLesson", "Progress", "Reader", "Recipe", "Seen", "Shard", "Template", "Wanted", "corpus_shards",
    "fit", "fresh_head", "frequent", "write_corpus",
]  # fmt: skip
