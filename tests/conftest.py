"""What all tests share. The shape annotations of the library are executed here, which costs its users nothing."""

from __future__ import annotations

import os

import jaxtyping

# Before anything of the library is imported: its annotations are checked at every call from here on.
jaxtyping.install_import_hook("specdec", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

torch.set_num_threads(1)  # sums come out the same on every machine, and a busy one is no slower than it must be

SLOW_DATA = [HealthCheck.too_slow, HealthCheck.data_too_large]  # drawing a tree is slow beside the shapes' checks; no test is timed
settings.register_profile("fast", max_examples=20, deadline=None, derandomize=True, suppress_health_check=SLOW_DATA)
settings.register_profile("ci", parent=settings.get_profile("fast"), max_examples=30)
settings.load_profile("ci" if os.environ.get("CI") else "fast")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write into the report which tests need the real model, so that the CI script can see that they ran."""
    for item in items:
        if item.get_closest_marker("real"):
            item.user_properties.append(("real", "yes"))


@pytest.fixture(autouse=True)
def steady(request: pytest.FixtureRequest) -> None:
    """A fixed seed; one thread for tiny models, to whom more are a burden, all cores for the real one."""
    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1 if request.node.get_closest_marker("real") else 1)


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 and its tokenizer. A machine that can't load it fails these tests; none is skipped."""
    from specdec.models import load

    return load("smollm2-135m", dtype=torch.float32)


@pytest.fixture(scope="session")
def chat(smollm2):
    """`chat("question")` is the question as a prompt of the real model, [1, L]."""
    _, tokenizer = smollm2

    def prompt(text: str) -> torch.Tensor:
        messages = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)["input_ids"]

    return prompt


def _byte_tokenizer(alphabet: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that most characters are split; id 256 is special."""
    return _byte_tokenizer(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="session")
def letter_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter from a to z; id 26 is special."""
    return _byte_tokenizer(list("abcdefghijklmnopqrstuvwxyz"))
