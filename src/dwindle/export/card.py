"""The model card (``README.md``) of a model directory: what the model is, how it was made, how it scored, how it runs.

Everything comes from the ledger, the structure, the recipe and the measured quality. Local paths are shortened to file
names, because cards are published.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from typing import Any

from dwindle import __version__
from dwindle.anatomy.family import CUSTOM_PREFIX
from dwindle.core.quality import Quality
from dwindle.core.reading import parse_toml
from dwindle.core.run_directory import LEDGER, STRUCTURE
from dwindle.core.sizes import format_count, format_range
from dwindle.export import card_figure
from dwindle.export.card_running import Runtime, how_to_run
from dwindle.export.card_structure import is_gone, kv_groups, served_by, stored_as, why_not_stock
from dwindle.export.origin import DEQUANTISED, Origin, origin_of, without_paths
from dwindle.export.other_readers import MLX_FAMILIES
from dwindle.pruning.ledger import vocabulary_in
from dwindle.pruning.methods import METHODS

SETTINGS = (
    "method", "selection", "metric", "attention", "compare", "groups", "fisher", "smoothing", "second_order", "rounds",
    "interleaves", "amplitude", "distance", "balance",
)  # fmt: skip
"""Settings of the ledger that a card shows; a method records only its own."""

REPLAYED = "It was rebuilt from a ledger with the source's weights, without training."

_RULES: dict[str, str] = {
    "global": "always the least salient group of any layer",
    "coupled": "always the least salient group of its type, one in every layer",
    **{name: method.card for name, method in METHODS.items() if method.card},
}
_LIBRARIES: Mapping[Runtime, str] = {
    "transformers": "transformers",
    "onnxruntime": "onnx",
    "transformers.js": "transformers.js",
    "compressed-tensors": "transformers",
    "vllm": "vllm",
}
_TRAINING_TOKENS = "training tokens"
_VALIDATION = "validation loss"
_SAMPLES_HEAD = "| beginning | source | this model |"


@dataclass(slots=True)
class Card:
    """What a card is made of.

    ``structure`` is the content of ``structure.json``, ``results`` are names and values to print, ``custom_code`` says
    that loading needs the modelling file beside the weights, ``model_type`` is that of the configuration, ``chat`` that
    the tokenizer has a chat template, ``runtime`` what loads the directory, and ``source_card`` is the card of a model
    made from the same source.
    """

    name: str
    source: str
    structure: Mapping[str, Any]
    ledger: Sequence[Mapping[str, Any]]
    recipe: str | None = None
    results: Mapping[str, float | int | str] | None = None
    quality: Quality | None = None
    custom_code: bool = False
    model_type: str = ""
    chat: bool = False
    tokenizer: bool = True
    runtime: Runtime = "transformers"
    source_card: Path | None = None
    origin: Origin = field(init=False)
    prunes: list[Mapping[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.origin = origin_of(self.source, self.source_card)
        self.prunes = [event for event in self.ledger if event.get("event") in ("prune", "rotate")]

    @property
    def first(self) -> Mapping[str, Any]:
        return next((event for event in self.ledger if event.get("event") == "source"), {})

    @property
    def options(self) -> Mapping[str, Any]:
        found = self.first.get("options")
        return found if isinstance(found, Mapping) else {}

    @property
    def before(self) -> int | None:
        found = self.first.get("parameters")
        return found if isinstance(found, int) and found > 0 else None

    @property
    def after(self) -> int | None:
        found = next((event["parameters"] for event in self.ledger[::-1] if "parameters" in event), None)
        return found if isinstance(found, int) else None

    @property
    def rotation(self) -> Mapping[str, Any] | None:
        """The event of slicegpt, after which hidden channels are not the source's."""
        return next((event for event in self.ledger if event.get("event") == "rotate"), None)

    @property
    def replayed(self) -> bool:
        return any(event.get("replayed") for event in self.ledger)

    @property
    def pruned_while_training(self) -> bool:
        return bool(self.prunes and self.prunes[-1].get("tokens") and not self.replayed)

    @property
    def trained(self) -> bool:
        return self.recipe is not None or self.pruned_while_training


def model_card(card: Card) -> str:
    """The card as Markdown with Hugging Face metadata."""
    parts = [
        metadata(card),
        f"# {one_line(card.name)}",
        _introduction(card),
        _section("How it was made", _how_made(card)),
        _section("Results", _results(card)),
        _section("Run it", _run_it(card)),
        _section("Architecture", _architecture(card), stored_as(card.model_type, card.structure)),
        _section("Limits", _limits(card)),
        _settings(card),
        _made_with(card),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _made_with(card: Card) -> str:
    made = f"Made with dwindle {__version__}."
    if card.rotation is not None:
        return f"{made} `{LEDGER}` records the rotation; hidden channels have no counterpart in the source."
    return (
        f"{made} `{STRUCTURE}` lists the indices that were kept, `{LEDGER}` what was removed and when; both use the "
        "source model's indices."
    )


def _section(title: str, *parts: str) -> str:
    text = "\n\n".join(part for part in parts if part)
    return f"## {title}\n\n{text}" if text else ""


def metadata(card: Card) -> str:
    """The card's YAML header; JSON strings are valid YAML, so ``json`` does the quoting."""
    origin, library = card.origin, _LIBRARIES[card.runtime]
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation"]
    if origin.licence:
        lines.append(f"license: {json.dumps(origin.licence)}")
    if origin.hub_id:
        lines += [f"base_model: {json.dumps(origin.hub_id)}", "base_model_relation: finetune"]
    quantised = card.runtime == "compressed-tensors"
    tags = {"pruning-aware-pretraining": card.recipe is not None, "custom_code": card.custom_code}
    tags |= {DEQUANTISED: bool(origin.dequantised), "compressed-tensors": quantised}
    made = "quantised" if quantised else "trimmed" if _trimmed(card) and not card.prunes else "pruned"
    shown = ["dwindle", made, *(tag for tag, holds in tags.items() if holds)]
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in shown), "---"])


# What it is and how it was made --------------------------------------------------------------------------------------


def link_to(origin: Origin) -> str:
    """The name of the source, as a link if it is known on the hub."""
    if origin.hub_id:
        return f"[{origin.hub_id}](https://huggingface.co/{origin.hub_id})"
    return f"`{one_line(origin.name)}`"


def _introduction(card: Card) -> str:
    before, after = card.before, card.after
    if before is None or after is None or not (card.prunes or _trimmed(card)):
        size = "" if after is None else f", {format_count(after)} parameters"
        text = f"A model derived from {link_to(card.origin)}{size}."
    else:
        text = (
            f"{link_to(card.origin)} made smaller: {format_count(after)} of {format_count(before)} parameters "
            f"({after / before:.1%})."
        )
    text += _trimmed(card)
    quality = card.quality
    if quality is None or quality.change is None:
        return text
    place = "above" if quality.change >= 0 else "below"
    cut = ", cut to the same tokens," if quality.source_bits is not None else ""
    loss = f"{abs(quality.change):.2f} nats per token {place} the source's{cut}"
    return f"{text} Its loss is {loss} {_measured_on(quality)}."


def _trimmed(card: Card) -> str:
    """One sentence if tokens were removed."""
    if (found := vocabulary_in(card.ledger, LEDGER)) is None:
        return ""
    return f" Its vocabulary was trimmed from {found.num_rows:,} to {len(found.kept):,} tokens."


def _measured_on(quality: Quality) -> str:
    kind = "held-out text" if quality.held_out else "the calibration text"
    names = f" ({one_line(', '.join(quality.text))})" if quality.text else ""
    return f"on {kind}{names}"


def _how_made(card: Card) -> str:
    """Two sentences: what was removed and how, and what happened to the rest."""
    rounded = f", dequantised from {card.origin.dequantised}" if card.origin.dequantised else ""
    before, after = card.before, card.after
    if before is None or after is None or not card.prunes:
        kept = f"The weights of {link_to(card.origin)}{rounded} were stored without pruning." if rounded else ""
        return f"{REPLAYED}" if card.replayed else kept
    source = f"{link_to(card.origin)} ({format_count(before)} parameters{rounded})"
    events = "one rotation" if card.rotation is not None else f"{len(card.prunes):,} prune events"
    if card.replayed:
        return f"{source} was pruned to {format_count(after)} by {events} of a ledger. {REPLAYED}"
    when = "during continued pretraining" if card.pruned_while_training else "after calibration, without training"
    return f"{source} was pruned to {format_count(after)} in {events} {when}{_rule(card)}. {_afterwards(card)}"


def _rule(card: Card) -> str:
    """The rule of selection and the metric; empty if the ledger does not record them."""
    method, metric = card.options.get("method"), card.options.get("metric")
    rule = _RULES.get(str(method)) or _RULES.get(str(card.options.get("selection")), "")
    by = f"by the metric `{one_line(str(metric))}`" if metric else ""
    words = " ".join(part for part in (rule, by) if part)
    return f": {words}" if rule else f" {by}" if by else ""


def _afterwards(card: Card) -> str:
    """What happened to the weights that were kept."""
    if not card.trained and card.rotation is not None:
        head = " and the head is not tied to the embedding any more" if card.rotation.get("head") == "untied" else ""
        return f"All gains of norms are folded into the weights{head}."
    if not card.trained:
        updated = "corrected by a second-order update" if card.options.get("second_order") else "not changed"
        if any(one.output_bias and card.options.get("method") == name for name, one in METHODS.items()):
            updated += "; new biases hold the mean of what the layers lost"
        return f"The weights that were kept were {updated}."
    tables = _tables(card.recipe or "")
    total = (card.results or {}).get(_TRAINING_TOKENS) or tables["training"].get("tokens")
    text = "It was trained" + (
        f" on {format_count(total) if isinstance(total, int) else total} tokens" if total else ""
    )
    if card.pruned_while_training:
        text += f" (pruning ended after {format_count(card.prunes[-1]['tokens'])})"
    weight = tables["distill"].get("weight")
    teacher = (
        f" with {one_line(_teacher(tables, card.origin.name))} as teacher (weight {_words(weight)})" if weight else ""
    )
    return f"{text}{teacher}."


def _tables(recipe: str) -> dict[str, dict[str, Any]]:
    """The tables of a recipe that a card reads; empty ones for what is missing or is not a recipe."""
    try:
        found = parse_toml(recipe)
    except ValueError:
        found = {}
    named = {name: found.get(name) for name in ("source", "training", "distill")}
    return {name: table if isinstance(table, dict) else {} for name, table in named.items()}


def _teacher(tables: Mapping[str, Mapping[str, Any]], source: str) -> str:
    own = tables["source"].get("model")  # a padded export names its input as source
    named = tables["distill"].get("teacher")
    return origin_of(str(named or own or source)).name + ("" if named else " (the unpruned source)")


def _distillation(recipe: str, source: str) -> str:
    """Teacher and distillation settings; empty without a teacher."""
    tables = _tables(recipe)
    settings = tables["distill"]
    if not settings.get("weight"):
        return ""
    few = f", {settings['top_k']} likeliest tokens" if settings.get("top_k") else ""
    return (
        f"distilled from {_teacher(tables, source)}, weight {_words(settings['weight'])}, "
        f"temperature {_words(settings.get('temperature', 1.0))}{few}"
    )


# Results and how to run it -------------------------------------------------------------------------------------------


def _results(card: Card) -> str:
    quality, rows = card.quality, []
    if card.before is not None and card.after is not None and card.prunes:
        share = f"{card.after / card.before:.1%}"
        rows.append(("parameters", format_count(card.before), format_count(card.after), share))
    if quality is not None and quality.change is not None:
        source, result = quality.source_loss or 0.0, quality.result_loss or 0.0
        name = f"{_VALIDATION} (nats per token)" if quality.held_out else "loss (nats per token)"
        rows.append((name, f"{source:.4f}", f"{result:.4f}", f"{quality.change:+.4f}"))
        if max(source, result) < 15:
            rows.append(("perplexity", f"{exp(source):.4g}", f"{exp(result):.4g}", f"× {exp(quality.change):.3g}"))
    if quality is not None and quality.source_bits is not None and quality.result_bits is not None:
        bits, ours = quality.source_bits, quality.result_bits
        rows.append(("bits per byte, each with its own tokenizer", f"{bits:.4f}", f"{ours:.4f}", f"{ours - bits:+.4f}"))
    measured = quality is not None and quality.change is not None
    for name, value in (card.results or {}).items():
        if not (measured and name.startswith(_VALIDATION)):
            rows.append((one_line(name), "", _words(value), ""))
    if not rows:
        return ""
    cells = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    table = f"| | source | this model | change |\n|---|---:|---:|---:|\n{cells}"
    return "\n\n".join(part for part in (table, _samples(quality)) if part)


def _samples(quality: Quality | None) -> str:
    """Source and result side by side, after the same held-out beginning."""
    shown = [] if quality is None else [s for s in quality.samples if s.source is not None and s.result is not None]
    if not shown:
        return ""
    rows = "\n".join(
        f"| {_plain(sample.prompt)} | {_plain(sample.source or '')} | {_plain(sample.result or '')} |"
        for sample in shown
    )
    table = f"{_SAMPLES_HEAD}\n|---|---|---|\n{rows}"
    return f"The likeliest continuation of the same beginnings, token by token:\n\n{table}"


def without_samples(card: str) -> str:
    """The text of a card without its table of samples, and the sentence above it."""
    return re.sub(r"(?m)^[^|\n]*\n\n" + re.escape(_SAMPLES_HEAD) + r"\n(?:\|.*(?:\n|$))*\n?", "", card)


def _run_it(card: Card) -> str:
    from dwindle.export import gguf_writer  # which imports torch

    family, groups = card.model_type.removeprefix(CUSTOM_PREFIX), kv_groups(card.structure)
    uneven = any(len(set(group.values())) > 1 for group in groups)
    layers = [la for la in card.structure.get("layers") or () if not is_gone(la)]
    differ = len({(len(la["kv_heads"]), len(la["ffn"])) for la in layers}) > 1
    custom = card.custom_code and card.runtime == "transformers"
    code = how_to_run(
        card.runtime,
        chat=card.chat,
        custom_code=custom,
        padded=uneven or (differ and not gguf_writer.has_unequal_layers(family)),
        tokenizer=card.tokenizer,
        gguf=not family or gguf_writer.is_known(family),
        mlx=family in MLX_FAMILIES,
    )
    if not custom:
        return code
    why = f"{why_not_stock(card.structure)}, so its code is in `modeling_dwindle.py` in this directory"
    return f"{why} (transformers 5.15 or newer).{served_by(card.structure)}\n\n{code}"


def _architecture(card: Card) -> str:
    structure, layers = card.structure, card.structure.get("layers") or []
    if not layers:
        return ""
    heads, kv = ([len(la[unit]) for la in layers if la[unit]] for unit in ("query_heads", "kv_heads"))
    kv_before = [len(set(of_query)) for of_query in card.first.get("layer_kv_of_query") or () if of_query]
    hidden, ffn = len(structure["hidden"]), [len(la["ffn"]) for la in layers if "mlp" not in la.get("absent", ())]
    blocks = Counter(block for la in layers for block in la.get("absent", ()))
    left = sum(not is_gone(la) for la in layers)
    gone = {kind: _gone_from(card, kind, block) for kind, block in (("attn", "attn"), ("ffn", "mlp"), ("stem", ""))}
    if card.rotation is not None:
        gone["stem"] = card.rotation.get("of", hidden) - hidden
    rows = [
        ("hidden channels", _was(hidden + gone["stem"]), f"{hidden:,}"),
        ("query heads per layer", _was((sum(heads) + gone["attn"]) / max(len(heads), 1)), format_range(heads or [0])),
        ("key/value heads per layer", format_range(kv_before) if kv_before else "–", format_range(kv or [0])),
        ("FFN channels per layer", _was((sum(ffn) + gone["ffn"]) / max(len(ffn), 1)), format_range(ffn or [0])),
        ("layers", f"{len(layers)}", f"{left}"),
    ]
    for block, name in (("attn", "layers with attention"), ("mlp", "layers with an FFN")):
        if len(layers) - blocks[block] != left:
            rows.append((name, f"{len(layers)}", f"{len(layers) - blocks[block]}"))
    table = "\n".join(f"| {name} | {before} | {after} |" for name, before, after in rows)
    drawn = card_figure.architecture_svg(structure, card.ledger) is not None
    figure = f"![Heads and FFN channels of every layer: filled is kept]({card_figure.NAME})\n\n" if drawn else ""
    return f"{figure}| | before | after |\n|---|---:|---:|\n{table}"


def _gone_from(card: Card, kind: str, block: str) -> int:
    """Heads or channels removed from the layers that still have the block."""
    layers, gone = card.structure["layers"], 0
    for event in card.prunes:
        if event.get("type") == kind:
            pairs = zip(layers, event.get("indices", ()), strict=False)  # of stem there is one list
            gone += sum(len(members) for layer, members in pairs if block not in layer.get("absent", ()))
    return gone


# Limits and settings -------------------------------------------------------------------------------------------------


def _limits(card: Card) -> str:
    quality, lines = card.quality, []
    if quality is not None and quality.needs_training and not card.trained:
        lines.append("It needs training: pruning alone has raised its loss; `dwindle pretrain` continues from here.")
    if quality is not None and quality.change is not None:
        lines.append(f"Losses are of {quality.tokens:,} tokens of the text named above; elsewhere more may be lost.")
    elif card.prunes:
        lines.append("How much pruning cost was not measured here: `dwindle eval` measures it.")
    if card.chat:
        lines.append("How well it still follows instructions, and what it refuses, was not measured.")
    if card.origin.dequantised:
        lines.append(f"Its source is {card.origin.dequantised}: what that rounding lost is lost here, too.")
    if not card.origin.licence:
        lines.append("The source model's licence, which also applies here, is not recorded: add it before publishing.")
    return "\n".join(f"- {text}" for text in lines)


def _settings(card: Card) -> str:
    """Settings and recipe, folded; for a replay only those of the selection, as no training or repair took place."""
    chosen = {key: card.options[key] for key in SETTINGS if key in card.options}
    if card.replayed:
        chosen.pop("second_order", None)
    lines = [f"- {key}: {one_line(_words(value))}" for key, value in chosen.items()]
    if distilled := _distillation(card.recipe or "", card.origin.name):
        lines.append(f"- {one_line(distilled)}")
    parts = ["\n".join(lines)]
    if card.recipe:
        shown = without_paths(card.recipe).rstrip()
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
        parts.append(f"{fence}toml\n{shown}\n{fence}")
    if not any(parts):
        return ""
    title = "Settings of the run that wrote the ledger" if card.replayed else "Settings"
    text = "\n\n".join(part for part in parts if part)
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def _was(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def one_line(text: str) -> str:
    """One line that cannot close a table cell, heading or code span, nor start HTML."""
    flat = " ".join(text.split()).replace("`", "'").replace("|", "/")
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _plain(text: str) -> str:
    """Generated text in a table cell, with all Markdown escaped."""
    return re.sub(r"([\\*_\[\]#~!$])", r"\\\1", one_line(text))
