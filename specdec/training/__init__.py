"""Draft heads and draft models that learn from the target's own words."""

from .corpus import Corpus, Shard, Wanted, corpus_shards, write_corpus
from .draft import ModelLesson
from .fit import Progress, Recipe, fit
from .fresh import fresh_head, fresh_medusa, fresh_mtp
from .lesson import HeadLesson, Lesson, MedusaLesson, PairLesson, Reader, Seen, frequent
from .script import Template

__all__ = [
    "Corpus", "HeadLesson", "Lesson", "MedusaLesson", "ModelLesson", "PairLesson", "Progress", "Reader", "Recipe", "Seen", "Shard",
    "Template", "Wanted", "corpus_shards", "fit", "fresh_head", "fresh_medusa", "fresh_mtp", "frequent", "write_corpus",
]  # fmt: skip
