"""The card's figure: what was kept of every layer, as an SVG written by hand, so that no package is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NAME = "architecture.svg"

_WIDTH, _LEFT, _AREA, _GAP = 720, 64, 96, 22
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#5d5a54}.kept{fill:#2563c9}.ffn{fill:#c2570a}"
    ".gone{fill:none;stroke:#a8a49b;stroke-width:.7}.lost{fill:#e4e1db}"
    "@media(prefers-color-scheme:dark){text{fill:#b4afa5}.kept{fill:#79a8ff}.ffn{fill:#ffa05c}.lost{fill:#3a3834}}"
)


def architecture_svg(structure: Mapping[str, Any], ledger: Sequence[Mapping[str, Any]]) -> str | None:
    """Heads as squares and FFN widths as bars, a column per layer; None if nothing was removed from a layer."""
    layers = structure.get("layers") or []
    gone_heads, gone_ffn = (_removed(ledger, kind, len(layers)) for kind in ("attn", "ffn"))
    blocks = _removed(ledger, "layer", len(layers))
    if not layers or not any(map(len, [*gone_heads, *gone_ffn, *blocks])):
        return None
    pitch = min((_WIDTH - _LEFT) / len(layers), 60.0)
    heads = [sorted({*layer["query_heads"], *gone}) for layer, gone in zip(layers, gone_heads, strict=True)]
    ffn = [len(layer["ffn"]) + len(gone) for layer, gone in zip(layers, gone_ffn, strict=True)]
    for place, gone in enumerate(blocks):  # drawn as large as the largest
        if 0 in gone:
            heads[place] = max(heads, key=len)
            gone_heads[place] = {*heads[place]}
        if 1 in gone:
            ffn[place] = max(ffn)
    parts = [*_text(0, 20, "heads"), *_text(0, 20 + _AREA + _GAP, "FFN")]
    for place, layer in enumerate(layers):
        left = _LEFT + place * pitch
        parts += _heads(left, pitch, heads[place], gone_heads[place], max(map(len, heads)))
        parts += _bar(left, pitch, ffn[place], len(layer["ffn"]), max(ffn))
        if place % max(1, round(len(layers) / 6)) == 0:
            parts += _text(left, 2 * _AREA + _GAP + 26, str(place))
    parts += _text(0, 2 * _AREA + _GAP + 26, "layer")
    height = 2 * _AREA + _GAP + 34
    width = round(_LEFT + pitch * len(layers))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="heads and FFN channels kept in each layer"><style>{_STYLE}</style>'
        f"{''.join(parts)}</svg>\n"
    )


def _removed(ledger: Sequence[Mapping[str, Any]], kind: str, num_layers: int) -> list[set[int]]:
    gone: list[set[int]] = [set() for _ in range(num_layers)]
    for event in ledger:
        if event.get("event") == "prune" and event.get("type") == kind:
            for layer, indices in zip(gone, event["indices"], strict=False):
                layer.update(indices)
    return gone


def _heads(left: float, pitch: float, heads: Sequence[int], gone: set[int], most: int) -> list[str]:
    side = _AREA / max(most, 1)
    return [
        f'<rect class="{"gone" if head in gone else "kept"}" x="{left + 1:.1f}" y="{10 + row * side:.1f}" '
        f'width="{max(pitch - 2, 1):.1f}" height="{max(side - 1.5, 0.5):.1f}" rx="1"/>'
        for row, head in enumerate(heads)
    ]


def _bar(left: float, pitch: float, before: int, after: int, most: int) -> list[str]:
    """Bars from the bottom up: what is kept, in front of the source's."""
    floor = 2 * _AREA + _GAP + 10
    return [
        f'<rect class="{name}" x="{left + 1:.1f}" y="{floor - _AREA * count / max(most, 1):.1f}" '
        f'width="{max(pitch - 2, 1):.1f}" height="{_AREA * count / max(most, 1):.1f}"/>'
        for name, count in (("lost", before), ("ffn", after))
    ]


def _text(x: float, y: float, words: str) -> list[str]:
    return [f'<text x="{x:.1f}" y="{y}">{words}</text>']
