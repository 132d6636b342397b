"""The same model in the terms of a family that more runtimes know."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import GraniteConfig

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import build, config_for
from dwindle.anatomy.family import CUSTOM_PREFIX

_FUSED, _DOWN = ".shared_mlp.input_linear.weight", ".shared_mlp.output_linear.weight"


def in_common_terms(model: Any) -> Any:
    """A dense Granite 4 as the Granite 3 that it is, with gate and up projections apart; other models unchanged.

    Granite 3 always rotates, so a model without rotation stays what it is.
    """
    config = model.config
    if config.model_type.removeprefix(CUSTOM_PREFIX) != "granitemoehybrid" or model.model.rotary_emb is None:
        return model
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if name.endswith(_FUSED):
            layer = name.removesuffix(_FUSED)
            gate, up = values.chunk(2)
            tensors |= {f"{layer}.mlp.gate_proj.weight": gate, f"{layer}.mlp.up_proj.weight": up}
        elif name.endswith(_DOWN):
            tensors[name.removesuffix(_DOWN) + ".mlp.down_proj.weight"] = values
        else:
            tensors[name] = values
    known = set(GraniteConfig().to_dict()) - {"architectures", "model_type", "dtype", "transformers_version"}
    values = {key: value for key, value in config.to_dict().items() if key in known}
    anatomy = Anatomy.of(model)
    return build(config_for(GraniteConfig(**values, head_dim=anatomy.head_dim), anatomy.source), tensors, model)
