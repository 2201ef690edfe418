"""A model of its own made of another one's first layers."""

from __future__ import annotations

import copy
import re

import torch
from transformers import PreTrainedModel

__all__ = ["shortened"]


def shortened(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A copy with the first decoder layers alone, in float32, for training. The model is left as it is.

    Raises:
        ValueError: the model has fewer layers.
    """
    config = copy.deepcopy(model.config)
    text = config.get_text_config(decoder=True)
    if not 1 <= layers <= text.num_hidden_layers:
        raise ValueError(f"layers: got {layers}; {type(model).__name__} has 1 to {text.num_hidden_layers} to choose from")
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    with torch.random.fork_rng([]):  # its first weights are drawn, and then replaced
        short = type(model)._from_config(config, dtype=torch.float32)
    own = short.state_dict()
    short.load_state_dict({name: weight for name, weight in model.state_dict().items() if name in own}, strict=True)
    extra = [name for name in model.state_dict() if name not in own and not re.search(r"\.\d+\.", name)]
    if extra:
        raise ValueError(f"model: {type(model).__name__} has weights outside its layers that a shortened one lacks: {', '.join(extra)}")
    short.to(device=model.device)  # type: ignore[arg-type]
    return short.eval()
