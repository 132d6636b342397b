"""The card of a directory that ``dwindle quantize`` writes, in the format compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping

from dwindle import __version__
from dwindle.core.sizes import format_bytes
from dwindle.export.card import Card, link_to, metadata, one_line
from dwindle.export.card_running import PLACE, how_to_run

_ROWS = {"source": "source", "plain": "rounded only", "quantized": "this model"}


def quantised_card(
    *,
    name: str,
    source: str,
    scheme: str,
    num_bytes: tuple[int, int],
    perplexity: Mapping[str, float],
    chat: bool,
    custom_code: bool,
) -> str:
    """The card as Markdown; ``num_bytes`` are those of the weights before and after."""
    card = Card(name, source, {}, [], chat=chat, custom_code=custom_code, runtime="compressed-tensors")
    before, after = num_bytes
    sizes = {"source": format_bytes(before), "plain": format_bytes(after), "quantized": format_bytes(after)}
    first = perplexity.get("source")
    rows = []
    for key, title in _ROWS.items():
        value = perplexity.get(key)
        if key == "plain" and value is None:
            continue
        change = f"{value / first - 1:+.2%}" if value is not None and first and key != "source" else ""
        rows.append(f"| {title} | {sizes[key]} | {'' if value is None else f'{value:.3f}'} | {change} |")
    table = "| | weights | perplexity | change |\n|---|---:|---:|---:|\n" + "\n".join(rows)
    unmeasured = "" if perplexity else "\n\nPerplexity was not measured: `dwindle quantize --valid TEXT` does."
    return f"""{metadata(card)}

# {one_line(name)}

{link_to(card.origin)} with rounded weights ({one_line(scheme)}).

## What loads it

vLLM (`vllm serve {PLACE}{" --trust-remote-code" if custom_code else ""}`), transformers with the package
`compressed-tensors`, and `dwindle eval`. A quantised file for llama.cpp and Ollama is written from the unquantised
model: `dwindle export MODEL --to gguf --type q4_k_m --out model.gguf`.

{how_to_run("compressed-tensors", chat=chat, custom_code=custom_code)}

## Results

{table}{unmeasured}

Made with dwindle {__version__}.
"""
