"""Medusa's heads: the files of FasterDecoding, alone or inside a whole model, and those of vLLM."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from statistics import mode
from typing import Any

import torch
from torch import Tensor, nn

from ..heads import MedusaConfig, MedusaHeads
from ..types import Float, Int64, TargetFacts
from .build import check_weights, fill, fresh, write
from .llama import last_layer
from .maps import check_ids
from .strict import WEIGHTS, folder_of, read_config, read_flag, read_tensors, understood

__all__ = ["load_medusa", "save_medusa"]

_ALONE = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
_INSIDE = "medusa_head."
"""Before the names of heads that are stored with their target."""


def load_medusa(path: str | Path, facts: TargetFacts) -> MedusaHeads:
    """The heads of a checkpoint: made by FasterDecoding's code, for vLLM, or by `save_medusa`. See docs/checkpoints.md.

    Weights keep the precision in which they are stored, and are put where the target is. Of a file that holds the target too nothing but
    the heads is read.

    Args:
        path: a folder, or a name on the Hugging Face hub.
        facts: of the target that will verify what the heads draft.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape (all are named); the config is of another number of heads
            (FasterDecoding's may say fewer than there are, which is a warning); the heads were made for another target, or ask for what is
            not computed here; their vocabulary map is no map; the weights are a pickle that holds more than tensors.
    """
    folder = folder_of(path)
    file, raw = folder / "config.json", read_config(folder)
    files = (*WEIGHTS, *_ALONE) if raw.get("model_type") == "medusa" else (*_ALONE, *WEIGHTS)
    tensors = read_tensors(folder, files, _heads)
    if any(re.match(r"(medusa_heads\.)?(blocks|lm_heads?)\.", name) for name in tensors):
        with understood(file):
            return _read_vllm(raw, tensors, facts, folder, file)
    with understood(file):
        return _read_theirs(raw, tensors, facts, folder, file)


def save_medusa(heads: MedusaHeads, path: str | Path, *, layout: str = "vllm", base_model: str | None = None,
                output: Float[Tensor, "V d"] | None = None) -> None:  # fmt: skip
    """Write heads so that `load_medusa` and the readers of the layout find them. Each file appears whole or not at all, the config last.

    Args:
        layout: "vllm", which says everything, in `model.safetensors`; or "medusa" for FasterDecoding's names, in
            `medusa_lm_head.safetensors`.
        base_model: where the target is found.
        output: the target's output head, for "vllm" and heads that share it: vLLM does not take it from the target, so the rows that the
            heads need are written with them. Such a file is read back as heads with an output head of their own.

    Raises:
        ValueError: the layout is unknown or cannot express the heads (a smaller vocabulary, blocks without bias); `output` has another
            shape, or the heads or the layout have no use for it; nothing was written.
    """
    config, folder = heads.config, Path(path).expanduser()
    check_ids(heads.ids, config.vocab_size, "offsets", Path("heads"), "they hold target id minus draft id")
    if output is not None and not (config.shared and layout == "vllm"):
        raise ValueError(f"output: given with shared={config.shared} and layout {layout!r}; only shared heads in 'vllm' have use for it")
    if output is not None and output.shape != (config.vocab_size, config.hidden_size):
        raise ValueError(f"output: got shape {list(output.shape)}; the target's output head has {[config.vocab_size, config.hidden_size]}")
    stored = {"base_model_name_or_path": base_model, "torch_dtype": str(heads.weight.dtype).removeprefix("torch.")}
    if layout == "vllm":
        tensors, described = _write_vllm(heads, output)
        write(folder, tensors, described | stored)
    elif layout == "medusa":
        write(folder, _write_theirs(heads), _describe_theirs(config) | stored, _ALONE[0])
    else:
        raise ValueError(f"layout: got {layout!r}; allowed are 'vllm' and 'medusa'")


def _heads(names: AbstractSet[str]) -> AbstractSet[str]:
    """Not the target, where the heads lie among its tensors."""
    return {name for name in names if name.startswith(_INSIDE)} or names


# ------------------------------------------------------------------------------------------------------------ FasterDecoding


def _their_names(config: MedusaConfig) -> dict[str, str]:
    return _block_names(config, "{0}.{1}.linear.") | (
        {} if config.shared else {f"{i}.{config.blocks}.weight": f"lm_heads.{i}.weight" for i in range(config.heads)}
    )


def _read_theirs(raw: Mapping[str, Any], tensors: dict[str, Tensor], facts: TargetFacts, folder: Path, file: Path) -> MedusaHeads:
    tensors = {name.removeprefix(_INSIDE): tensor for name, tensor in tensors.items()}
    count, stated = _count(tensors, r"(\d+)\.", folder), _number(raw, "medusa_num_heads", None, file)
    blocks = _number(raw, "medusa_num_layers", 1, file)
    if stated is not None and stated > count:
        raise ValueError(f"{file}: medusa_num_heads is {stated}, but {folder} holds {count} heads: some are lost")
    if stated is not None and stated < count:
        warnings.warn(f"{file}: medusa_num_heads is {stated}, but {folder} holds {count} heads; the file counts", stacklevel=3)
    hidden = [tensor.shape[-1] for name, tensor in tensors.items() if name.endswith(".linear.weight") and tensor.ndim == 2]
    output = [tensor.shape[0] for name, tensor in tensors.items() if re.fullmatch(rf"\d+\.{blocks}\.weight", name) and tensor.ndim == 2]
    if not hidden:
        raise ValueError(f"{folder}: no residual blocks; they are named 0.0.linear.weight and so on. Found: {sorted(tensors)}")
    vocab = mode(output) if output else facts.vocab_size
    config = MedusaConfig(
        (last_layer(facts, file, "these heads read"),), count, blocks, mode(hidden), vocab, vocab,
        shared=str(raw["version"]) == "2" if raw.get("version") is not None else not output,
    )  # fmt: skip
    head, names = fresh(MedusaHeads, config, facts, folder), _their_names(config)
    check_weights(head, names, tensors, folder)
    return fill(head, names, tensors, torch.zeros(vocab, dtype=torch.int64), facts)


def _describe_theirs(config: MedusaConfig) -> dict[str, Any]:
    said = {"medusa_num_heads": config.heads, "medusa_num_layers": config.blocks}
    return {**said, "version": "2"} if config.shared else said


def _write_theirs(heads: MedusaHeads) -> dict[str, Tensor]:
    config, state = heads.config, heads.state_dict()
    if not config.bias:
        raise ValueError("layout: 'medusa' cannot express bias=False, since its readers have a bias in every block; use 'vllm'")
    if config.draft_vocab_size != config.vocab_size or bool(heads.offsets.any()):
        raise ValueError(
            f"layout: 'medusa' cannot express draft_vocab_size={config.draft_vocab_size} of {config.vocab_size} tokens, nor another order "
            "of them; use 'vllm'"
        )
    return {theirs: state[mine] for theirs, mine in _their_names(config).items()}


# ---------------------------------------------------------------------------------------------------------------------- vLLM


def _vllm_names(config: MedusaConfig) -> dict[str, str]:
    names = _block_names(config, "blocks.{0}.layers.{1}.")
    return names if config.shared else names | {f"lm_heads.{i}.weight": f"lm_heads.{i}.weight" for i in range(config.heads)}


def _read_vllm(raw: Mapping[str, Any], tensors: dict[str, Tensor], facts: TargetFacts, folder: Path, file: Path) -> MedusaHeads:
    tensors = {name.replace("medusa_heads.", ""): tensor for name, tensor in tensors.items()}
    count = _count(tensors, r"blocks\.(\d+)\.", folder)
    stated = _number(raw, "num_heads", _number(raw, "medusa_num_heads", count, file), file)
    if stated != count:
        raise ValueError(f"{file}: num_heads is {stated}, but {folder} holds {count} heads: one of them is another's")
    if raw.get("logit_scale", 1.0) != 1.0:
        raise ValueError(f"{file}: logit_scale: got {raw['logit_scale']}; heads are computed with 1.0 only")
    vocab = _number(raw, "vocab_size", 32001, file)
    drafted = _number(raw, "truncated_vocab_size", vocab, file)
    if drafted > vocab:
        raise ValueError(f"{file}: truncated_vocab_size is {drafted} of {vocab}; allowed are 1 to {vocab}")
    one = read_flag(raw, "original_lm_head", False, file)
    config = MedusaConfig(
        (last_layer(facts, file, "these heads read"),), count,
        _number(raw, "num_hidden_layers", _number(raw, "medusa_num_layers", 1, file), file),
        _number(raw, "hidden_size", 4096, file), vocab, drafted, bias=read_flag(raw, "medusa_fc_bias", False, file),
        shared=one and not any(name.startswith("lm_head") for name in tensors),
    )  # fmt: skip
    head, names = fresh(MedusaHeads, config, facts, folder), _vllm_names(config)
    mapped, offsets = tensors.pop("token_map", None), torch.zeros(drafted, dtype=torch.int64)
    if drafted < vocab:  # else vLLM passes over the map
        if mapped is None:
            raise ValueError(f"{folder}: truncated_vocab_size is {drafted} of {vocab}, but no token_map says which tokens these are")
        offsets = _offsets(mapped, config, folder)
        whole = [name for name in tensors if name.startswith("lm_head") and tensors[name].shape[:1] == (vocab,)]
        tensors |= {name: tensors[name][mapped.long()] for name in whole}
    if one and not config.shared:
        head.lm_heads = nn.ModuleList([head.lm_heads[0]] * count)
        tensors = _every_head(tensors, count, folder)
    check_weights(head, names, tensors, folder)
    return fill(head, names, tensors, offsets, facts)


def _every_head(tensors: Mapping[str, Tensor], count: int, folder: Path) -> dict[str, Tensor]:
    """The one output head under the name of each."""
    outputs = {name: tensor for name, tensor in tensors.items() if name.startswith("lm_head")}
    first = next(iter(outputs.values()))
    differ = [name for name, tensor in outputs.items() if not torch.equal(tensor, first)]
    if differ:
        raise ValueError(f"{folder}: original_lm_head says that there is one output head, but {differ} differ from {next(iter(outputs))}")
    own = {name: tensor for name, tensor in tensors.items() if name not in outputs}
    known = {"lm_head.weight", *(f"lm_heads.{i}.weight" for i in range(count))}
    return own | {f"lm_heads.{i}.weight": first for i in range(count)} | {name: outputs[name] for name in outputs.keys() - known}


def _offsets(mapped: Tensor, config: MedusaConfig, folder: Path) -> Int64[Tensor, " Vd"]:
    if mapped.is_floating_point() or mapped.dtype == torch.bool or mapped.shape != (config.draft_vocab_size,):
        raise ValueError(
            f"{folder}: token_map is {mapped.dtype} {list(mapped.shape)}; it holds the ids of {config.draft_vocab_size} tokens, which "
            "truncated_vocab_size says"
        )
    mapped = mapped.long()
    check_ids(mapped, config.vocab_size, "token_map", folder, "it holds ids of the target")
    return mapped - torch.arange(len(mapped))


def _write_vllm(heads: MedusaHeads, output: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    config, state = heads.config, heads.state_dict()
    tensors = {theirs: state[mine] for theirs, mine in _vllm_names(config).items()}
    one = config.shared or (config.heads > 1 and all(part.weight is heads.lm_heads[0].weight for part in heads.lm_heads))
    if one:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_heads.")}
        rows = None if output is None else output.detach()[heads.ids.to(output.device)].to(heads.weight.dtype)
        if rows is None and not config.shared:
            rows = state["lm_heads.0.weight"]
        tensors |= {} if rows is None else {"lm_head.weight": rows}
    if config.draft_vocab_size < config.vocab_size:
        tensors["token_map"] = heads.ids
    elif bool(heads.offsets.any()):
        raise ValueError("layout: 'vllm' cannot express another order of tokens, since its readers pass over a map of all of them")
    return tensors, {
        "architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": config.heads, "num_hidden_layers": config.blocks,
        "hidden_size": config.hidden_size, "vocab_size": config.vocab_size, "truncated_vocab_size": config.draft_vocab_size,
        "medusa_fc_bias": config.bias, "original_lm_head": one,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------- both


def _block_names(config: MedusaConfig, block: str) -> dict[str, str]:
    return {
        f"{block.format(i, j)}{part}": f"blocks.{i}.{j}.linear.{part}"
        for i in range(config.heads) for j in range(config.blocks) for part in (("weight", "bias") if config.bias else ("weight",))
    }  # fmt: skip


def _count(tensors: Mapping[str, Tensor], pattern: str, folder: Path) -> int:
    """How many heads there are, by the names."""
    numbers = sorted({int(found[1]) for found in (re.match(pattern, name) for name in tensors) if found})
    if not numbers:
        raise ValueError(f"{folder}: no heads of Medusa; the tensors are {sorted(tensors)}")
    lost = sorted(set(range(numbers[-1] + 1)) - set(numbers))
    if lost:
        raise ValueError(f"{folder}: the heads are numbered {numbers}; {lost} are missing, and heads guess one token after another")
    return len(numbers)


def _number(raw: Mapping[str, Any], name: str, default: Any, file: Path) -> Any:
    value = raw.get(name)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{file}: {name}: got {value!r}; allowed are whole numbers of at least 1")
    return default if value is None else value
