"""What each family supports, according to the code that does it: pruning, stock output, GGUF, ONNX, serving."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import has_stock_config
from dwindle.anatomy.families import FAMILIES
from dwindle.anatomy.family import Family
from dwindle.anatomy.shrink import HEAD_DIM, random_model, tiny_config
from dwindle.anatomy.structure import Structure
from dwindle.core.errors import UserError
from dwindle.export import gguf_writer, onnx_graph
from dwindle.export.equivalents import in_common_terms
from dwindle.sources.common import quiet_transformers

COLUMNS = ("family", "groups", "stock output", "GGUF", "ONNX", "vLLM")
NONE = "–"
EXAMPLES: dict[str, dict[str, Any]] = {
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 32},
    "gemma3_text": {"query_pre_attn_scalar": HEAD_DIM},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 32,
        "position_embedding_type": "rope",
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
}
"""What the smallest published model sets where the defaults of its configuration class differ."""


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """One family; ``–`` where something is not possible."""

    family: str
    groups: str
    stock: str
    """Sizes at which the result is a stock model, all layers being equal."""
    gguf: str
    """Architectures in llama.cpp: of equal layers, of unequal ones."""
    onnx: str
    vllm: str
    """Whether the class declares pluggable attention, which vLLM's Transformers backend requires."""


def family_rows() -> list[FamilyRow]:
    """Every built-in family, by name."""
    with quiet_transformers():
        return [_row(family) for family in sorted(FAMILIES)]


def markdown() -> str:
    """The rows as a Markdown table."""
    cells = [COLUMNS, ["---"] * len(COLUMNS)]
    for row in family_rows():
        first, *others = asdict(row).values()
        cells.append([f"`{first}`", *others])
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def keys_markdown() -> str:
    """What a table can set besides its rows, as a Markdown table."""
    lines = ["| key | default | meaning |\n| --- | --- | --- |\n"]
    for name, field in Family.model_fields.items():
        if name not in ("stem", "layer"):
            default = json.dumps(field.get_default(call_default_factory=True))
            meaning = " ".join((field.description or "").replace("``", "`").split())
            lines.append(f"| `{name}` | `{default}` | {meaning} |\n")
    return "".join(lines)


def render() -> Table:
    """The rows as a table for the terminal."""
    table = Table(*COLUMNS, box=None, padding=(0, 1, 0, 0))
    for column in (0, 1, 3):  # so that only the longest sizes are wrapped at 80 columns
        table.columns[column].no_wrap = True
    for row in family_rows():
        table.add_row(*asdict(row).values())
    return table


def _row(family: str) -> FamilyRow:
    config = tiny_config(CONFIG_MAPPING[family](**EXAMPLES.get(family, {})))
    if hasattr(config, "no_rope_layers"):  # by the number of the layer, as a model of this many layers has it
        config.no_rope_layers = CONFIG_MAPPING[family](num_hidden_layers=config.num_hidden_layers).no_rope_layers
    model = random_model(config)
    return FamilyRow(
        family=family,
        groups=", ".join(FAMILIES[family].groups),
        stock=_stock_sizes(config, Anatomy.of(model).source),
        gguf=_gguf(in_common_terms(model)),
        onnx="yes" if onnx_graph.unsupported(in_common_terms(model)) is None else NONE,
        vllm="yes" if getattr(type(model), "_supports_attention_backend", False) else NONE,
    )


def _stock_sizes(config: Any, structure: Structure) -> str:
    """The least restriction on the hidden size under which transformers accepts the result."""
    hidden, heads = len(structure.hidden), max(len(structure.with_heads.query_heads), 1)
    for removed, text in ((1, "any size"), (heads, "hidden a multiple of the heads")):
        if has_stock_config(config, replace(structure, hidden=tuple(range(hidden - removed)))):
            return text
    return "hidden = heads × head size"


def _gguf(model: Any) -> str:
    try:
        found = gguf_writer.architecture_of(model)
    except UserError:
        return NONE
    return f"{found}, deci" if gguf_writer.has_unequal_layers(model.config.model_type) else found
