"""The schema of a family's table: units of axes, and what else differs between families.

A row gives, for one tensor, the unit of every axis:

    vocab    tokens (never pruned)
    hidden   hidden channels, shared by the whole model
    query    query heads x head size
    kv       key/value heads x head size
    head     query heads, one entry each (attention sinks)
    ffn      intermediate channels of this layer
    dim      the head size itself, and whatever else is kept whole (never pruned)

``a+b`` means that the axis is a concatenation (fused projections). Rows for tensors that a given model does not have
(biases, an untied head) are ignored; a tensor without a row is an error, so that no tensor is missed when groups are
pruned. Our own tables (``families.py``) and tables from outside (``family_files.py``) are instances of one class.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

from pydantic import Field, model_validator

from dwindle.anatomy.structure import ALL_KINDS, UNIT_OF, Block, Kind
from dwindle.core.config import Config

CUSTOM_PREFIX = "dwindle_"
CODE_FILES = ("configuration_dwindle.py", "modeling_dwindle.py")
"""Saved with the weights of models that no stock class can express."""
"""Prefix of the model types that dwindle writes: ``dwindle_llama`` has the tensors of ``llama``."""
UNITS = ("vocab", "hidden", "query", "kv", "head", "ffn", "dim")
_NOT_SET_BY_TABLES = (
    "architectures",
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "per_layer_config",
    "quantization_config",
)
"""Configuration keys that name code, or that make another model of it."""


class Family(Config):
    """One table: tensors outside the layers, and tensors of a layer (names below ``model.layers.N.``)."""

    stem: dict[str, str]
    """Tensors outside the layers: the units of their axes, by name."""
    layer: dict[str, str]
    """Tensors of a layer, by the name below ``model.layers.N.``."""
    gain_in_float32: bool = False
    """Whether RMSNorm multiplies by its gain before casting back (OLMo 2) or after (Llama)."""
    gain_offset: float = 0.0
    """RMSNorm multiplies by ``gain_offset + weight`` (1 in Gemma)."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the hidden size (Gemma)."""
    norm_before: dict[str, str] = Field(
        default_factory=lambda: {"self_attn": "input_layernorm", "mlp": "post_attention_layernorm"}
    )
    """The norm in front of the projections of each block; empty where they read the residual stream itself."""
    norm_after: dict[str, str] = Field(default_factory=dict)
    """The norm of each block's output, in families that have one."""
    interleaved_rotation: bool = False
    """Whether channels 2i and 2i + 1 of a head rotate together, not i and i + d/2."""
    head_norms: bool = False
    """Whether the outputs of ``q_proj`` and ``k_proj`` are normed (per head or over all heads)."""
    groups: list[Kind] = Field(default_factory=lambda: list(ALL_KINDS))
    """Kinds of group that can be pruned; axes that no group removes are kept whole."""
    output_bias_keys: list[str] = Field(default_factory=list)
    """Configuration keys that together give ``o`` and ``down`` a bias (method flap); empty where no keys do."""
    ffn_key: str = "intermediate_size"
    """Key of the configuration that holds the number of FFN channels."""
    written: dict[str, Any] = Field(default_factory=dict)
    """Configuration keys that every pruned model gets, such as ones that would change sizes on loading."""
    tiny: dict[str, Any] = Field(default_factory=dict)
    """Configuration keys of the tiny model that ``dwindle check-family`` builds, for sizes of the family's own."""

    @model_validator(mode="after")
    def _check_rows(self) -> Family:
        rows = {f"{table}.{name}": axes for table in ("stem", "layer") for name, axes in getattr(self, table).items()}
        used: set[str] = set()
        for name, axes in rows.items():
            units = [unit for axis in axes.split() for unit in axis.split("+")]
            if unknown := [unit for unit in units if unit not in UNITS]:
                raise ValueError(f'{name}: "{axes}" has the unit {unknown[0]!r}: choose among {", ".join(UNITS)}')
            if not units:
                raise ValueError(f'{name}: names no unit: give one for every axis, such as "ffn hidden"')
            if name.startswith("stem.") and (inner := {*units} - {"vocab", "hidden", "dim"}):
                raise ValueError(f'{name}: "{axes}": {min(inner)} belongs to a layer: move the row to [layer]')
            for axis in axes.split():
                if "+" in axis and {*axis.split("+")} & {"vocab", "dim"}:
                    raise ValueError(f'{name}: "{axis}": vocab and dim cannot be part of a concatenation')
            used |= {*units}
        if "ffn" not in used:
            raise ValueError("layer: no row has the unit 'ffn': name the FFN channels; without ffn in groups they stay")
        for table in ("written", "tiny"):
            for key, value in getattr(self, table).items():
                if key.startswith("_") or key in _NOT_SET_BY_TABLES or value is None:
                    raise ValueError(f"{table}.{key}: cannot be set by a table: remove it")
        for kind in self.groups:
            if (unit := UNIT_OF.get(kind, "ffn")) not in used:  # layers have an FFN
                raise ValueError(f"groups: {kind}: no row has the unit {unit!r}: add the rows, or remove it")
        self._check_blocks()
        return self

    def changed(self, **values: Any) -> Self:
        """A table with other values, checked like any other; ``model_copy`` would keep what follows from the old."""
        return type(self).model_validate(self.model_dump(exclude_unset=True) | values)

    @cached_property
    def blocks(self) -> dict[str, Block | None]:
        """The block of every module of a layer, by its name; None for a norm of no block or of several."""
        ffn = {name.partition(".")[0] for name, axes in self.layer.items() if "ffn" in axes.replace("+", " ").split()}
        norms = [(norm, part) for table in (self.norm_before, self.norm_after) for part, norm in table.items()]
        found: dict[str, Block | None] = {}
        inner = {name.partition(".")[0] for name in self.layer if name.count(".") > 1}  # modules that hold modules
        for module in dict.fromkeys(name.partition(".")[0] for name in self.layer):
            parts = [part for norm, part in norms if norm == module] or [module]
            owners: set[Block] = {"mlp" if part in ffn else "attn" for part in parts}
            is_loose = parts == [module] and module not in inner
            found[module] = None if is_loose or len(owners) > 1 else owners.pop()
        return found

    def _check_blocks(self) -> None:
        """Whole blocks can be removed only where every tensor of a layer belongs to one."""
        loose = [module for module, block in self.blocks.items() if block is None]
        if loose and "layer" in self.groups:
            if "groups" in self.model_fields_set:
                raise ValueError(
                    f"groups: layer: {loose[0]} is not a block's norm: name it in norm_before or norm_after, or drop it"
                )
            self.groups.remove("layer")


class FamilyFile(Family):
    """A family's table with the model type that it describes."""

    model_type: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """``model_type`` of the configurations (``config.json``) that it describes."""
