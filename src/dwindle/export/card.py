"""The model card (``README.md``) of a model directory: what the model is, how it was made, how it scored.

Everything comes from the ledger, the structure and the recipe. Local paths are shortened to file names, because cards
are published.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dwindle import __version__
from dwindle.core.reading import parse_toml
from dwindle.core.run_directory import LEDGER, STRUCTURE
from dwindle.core.sizes import format_count, format_range
from dwindle.sources.aliases import alias_of

KINDS = {"attn": "attention heads", "ffn": "FFN channels", "stem": "hidden channels"}

SETTINGS = (
    "method", "selection", "metric", "attention", "compare", "groups", "fisher", "smoothing", "second_order", "rounds",
    "interleaves", "amplitude", "distance", "balance",
)  # fmt: skip
"""Of what a ledger records: the settings that a reader of the card may want; a method records only its own."""

REPLAYED = "It was rebuilt from a ledger with the source's weights, without training."

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_ABSOLUTE_PATH = re.compile(r"(?<![\w:/.])(?:[A-Za-z]:)?[/\\~](?:[^\"'\s,\]]*[/\\])?([^\"'\s,\]/\\]+)")
_QUOTED_OR_COMMENT = re.compile(r"""("(?:[^"\\\n]|\\.)*"|'[^'\n]*')|\#[^\n]*|[^"'#]+""")
_STARTS_ABSOLUTE = re.compile(r"(?:[A-Za-z]:)?[/\\~]")
_META_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """The source model: its name, and its hub id and licence if known."""

    name: str
    hub_id: str | None = None
    licence: str | None = None


def origin_of(source: str, card: Path | None = None) -> Origin:
    """What is known about a source from its name or, if it is local, from its model card; never from the network.

    ``card`` is that of a model made from the source, which says the same of it.
    """
    if (alias := alias_of(source)) is not None:
        return Origin(source, alias.hub_id, alias.licence)
    path = Path(source).expanduser()
    if path.exists():
        facts = _card_facts((path if path.is_dir() else path.parent) / "README.md")
        return Origin(path.resolve().name, facts.get("base_model"), facts.get("license"))
    if _HUB_ID.fullmatch(source):
        return Origin(source, source)
    facts = {} if card is None else _card_facts(card)
    name = re.split(r"[/\\]", source.rstrip("/\\"))[-1] or source
    return Origin(name, facts.get("base_model"), facts.get("license"))


def model_card(
    *,
    name: str,
    source: str,
    structure: Mapping[str, Any],
    ledger: Sequence[Mapping[str, Any]],
    num_parameters: int | None = None,
    recipe: str | None = None,
    results: Mapping[str, float | int | str] | None = None,
    custom_code: bool = False,
    model_type: str = "",
    source_card: Path | None = None,
) -> str:
    """The model card as Markdown with Hugging Face metadata.

    ``structure`` is the content of ``structure.json``, ``results`` are names and values to print, ``custom_code`` says
    that loading needs the modelling file beside the weights, ``model_type`` is that of the configuration, and
    ``source_card`` is the card of a model made from the same source.
    """
    origin = origin_of(source, source_card)
    prunes = [event for event in ledger if event.get("event") == "prune"]
    before = next((event.get("parameters") for event in ledger if event.get("event") == "source"), None)
    after = num_parameters or (prunes[-1].get("parameters") if prunes else before)
    replayed = any(event.get("replayed") for event in ledger)
    parts = [
        _metadata(origin, custom_code, trained=recipe is not None),
        f"# {_line(name)}",
        _introduction(origin, before, after, prunes, replayed=replayed),
        _how_to_load(structure if custom_code else None),
        _architecture(structure, ledger, prunes),
        _stored_as(model_type, structure),
        _how_made(ledger, prunes, recipe, origin.name, replayed=replayed),
        _results(results),
        _licence(origin),
        f"Made with dwindle {__version__}. `{STRUCTURE}` lists the indices that were kept, `{LEDGER}` what was "
        "removed and when; both use the source model's indices.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(origin: Origin, custom_code: bool, *, trained: bool) -> str:
    """The YAML header; JSON strings are valid YAML, so ``json`` does the quoting."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if origin.licence:
        lines.append(f"license: {json.dumps(origin.licence)}")
    if origin.hub_id:
        lines += [f"base_model: {json.dumps(origin.hub_id)}", "base_model_relation: finetune"]
    tags = ["dwindle", "pruned", *(["pruning-aware-pretraining"] if trained else []), *(["custom_code"] * custom_code)]
    return "\n".join([*lines, "tags:", *(f"- {tag}" for tag in tags), "---"])


def _introduction(
    origin: Origin, before: Any, after: Any, prunes: Sequence[Mapping[str, Any]], *, replayed: bool
) -> str:
    linked = (
        f"[{origin.hub_id}](https://huggingface.co/{origin.hub_id})" if origin.hub_id else f"`{_line(origin.name)}`"
    )
    if not isinstance(before, int) or not isinstance(after, int) or not prunes:
        size = f", {format_count(after)} parameters" if isinstance(after, int) else ""
        return f"A model derived from {linked}{size}." + (f" {REPLAYED}" if replayed else "")
    if replayed:
        return (
            f"{linked}, pruned from {format_count(before)} to {format_count(after)} parameters "
            f"({after / before:.1%}) by {len(prunes):,} prune events of a ledger. {REPLAYED}"
        )
    tokens = prunes[-1].get("tokens")
    while_training = " during continued pretraining" if tokens else " after calibration, without training"
    return (
        f"{linked}, pruned from {format_count(before)} to {format_count(after)} parameters "
        f"({after / before:.1%}) in {len(prunes):,} prune events{while_training}."
    )


def _how_to_load(custom: Mapping[str, Any] | None) -> str:
    """``custom`` is the structure of a model that needs the modelling file."""
    extra = note = ""
    if custom is not None:
        extra = ", trust_remote_code=True"
        note = f"\n\n{_not_stock(custom)}, so its code is in `modeling_dwindle.py` in this directory."
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/directory"{extra})
tokenizer = AutoTokenizer.from_pretrained("path/to/this/directory")
```{note}"""


def _not_stock(structure: Mapping[str, Any]) -> str:
    """Why transformers' own classes cannot load the model."""
    layers = structure.get("layers") or []
    groups = [Counter(la["kv_of_query"]) for la in layers]
    found = (
        ["query groups of different sizes within a layer"] if any(len(set(of.values())) > 1 for of in groups) else []
    )
    heads = {(len(la["query_heads"]), len(la["kv_heads"])) for la in layers if la["query_heads"]}
    different = [*(["heads"] * (len(heads) > 1)), *(["FFN channels"] * (len({len(la["ffn"]) for la in layers}) > 1))]
    found += [f"layers with different numbers of {' and '.join(different)}"] if different else []
    return f"The model has {' and '.join(found)}" if found else "No stock configuration supports its sizes"


def _architecture(
    structure: Mapping[str, Any], ledger: Sequence[Mapping[str, Any]], prunes: Sequence[Mapping[str, Any]]
) -> str:
    layers = structure.get("layers") or []
    if not layers:
        return ""
    gone = dict.fromkeys(KINDS, 0)
    for event in prunes:
        if event.get("type") in gone:
            gone[event["type"]] += sum(map(len, event.get("indices", ())))
    heads, ffn = [len(la["query_heads"]) for la in layers], [len(la["ffn"]) for la in layers]
    num_with_heads = sum(map(bool, heads))
    hidden, num, kv = len(structure["hidden"]), len(layers), [len(la["kv_heads"]) for la in layers]
    rows = [
        ("hidden channels", _was(hidden + gone["stem"]), f"{hidden:,}"),
        ("query heads per layer", _was((sum(heads) + gone["attn"]) / max(num_with_heads, 1)), format_range(heads)),
        ("key/value heads per layer", _kv_before(kv, ledger, gone["attn"]), format_range(kv)),
        ("FFN channels per layer", _was((sum(ffn) + gone["ffn"]) / num), format_range(ffn)),
        ("layers", f"{num}", f"{num}"),
    ]
    table = "\n".join(f"| {name} | {before} | {after} |" for name, before, after in rows)
    return f"## Architecture\n\n| | before | after |\n|---|---|---|\n{table}"


def _stored_as(model_type: str, structure: Mapping[str, Any]) -> str:
    layers = structure.get("layers") or []
    return mistral_note(model_type, len(structure["hidden"]), len(layers[0]["query_heads"])) if layers else ""


def mistral_note(model_type: str, hidden: int, heads: int) -> str:
    """Why a pruned Llama is stored as a Mistral; empty if it is not (no other Mistral has such sizes)."""
    if model_type != "mistral" or hidden % heads == 0:
        return ""
    return (
        f"It is stored as a Mistral, because Llama's configuration requires a hidden size (here {hidden:,}) that is a "
        f"multiple of the heads ({heads:,}); a Mistral without sliding window computes the same as a Llama without "
        "biases."
    )


def _kv_before(now: Sequence[int], ledger: Sequence[Mapping[str, Any]], heads_gone: int) -> str:
    """Key/value heads of the source; old ledgers do not record them, but without pruned heads they are unchanged."""
    source = next((event for event in ledger if event.get("event") == "source"), {})
    before = source.get("layer_kv_heads") or (None if heads_gone else now)
    return format_range(before) if before else "–"


def _how_made(
    ledger: Sequence[Mapping[str, Any]],
    prunes: Sequence[Mapping[str, Any]],
    recipe: str | None,
    source: str,
    *,
    replayed: bool,
) -> str:
    """Settings and recipe; for a replay only the settings of the selection, as no training or repair took place."""
    options = next((event.get("options") for event in ledger if event.get("event") == "source"), None)
    options = options if isinstance(options, Mapping) else {}
    chosen = {key: options[key] for key in SETTINGS if key in options}
    if replayed:
        chosen.pop("second_order", None)
    lines = [f"- {key}: {_line(_words(value))}" for key, value in chosen.items()]
    if prunes and prunes[-1].get("tokens") and not replayed:
        lines.append(f"- last group removed after {format_count(prunes[-1]['tokens'])} tokens")
    if teacher := _teacher(recipe or "", source):
        lines.append(f"- {_line(teacher)}")
    if replayed and lines:
        lines = ["Settings of the run that wrote the ledger:", "", *lines]
    text = "## How it was made\n\n" + "\n".join(lines) if lines else ""
    if recipe:
        shown = without_paths(recipe).rstrip()
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", shown)), default=0))
        text += f"\n\n{fence}toml\n{shown}\n{fence}" if text else f"## How it was made\n\n{fence}toml\n{shown}\n{fence}"
    return text


def _teacher(recipe: str, source: str) -> str:
    """Teacher and distillation settings; empty without a teacher."""
    try:
        sections = parse_toml(recipe)
    except ValueError:
        return ""
    settings, trained = sections.get("distill"), sections.get("source")
    if not isinstance(settings, dict) or not settings.get("weight"):
        return ""
    own = trained.get("model") if isinstance(trained, dict) else None  # a padded export names its input as source
    named = settings.get("teacher")
    who = origin_of(str(named or own or source)).name + ("" if named else " (the unpruned source)")
    few = f", {settings['top_k']} likeliest tokens" if settings.get("top_k") else ""
    return (
        f"distilled from {who}, weight {_words(settings['weight'])}, "
        f"temperature {_words(settings.get('temperature', 1.0))}{few}"
    )


def without_paths(text: str) -> str:
    """Absolute paths shortened to their last part, so that a published card does not expose its author's machine."""
    return _QUOTED_OR_COMMENT.sub(lambda part: _quoted(part[0]) if part[1] else _unquoted(part[0]), text)


def _unquoted(text: str) -> str:
    return _ABSOLUTE_PATH.sub(r"\1", text)


def _quoted(text: str) -> str:
    """A TOML string with a path shortened; the path ends at the closing quote and may hold spaces."""
    try:
        value = str(parse_toml(f"value = {text}")["value"])
    except ValueError:
        value = text[1:-1]
    if not _STARTS_ABSOLUTE.match(value):
        return _unquoted(text)
    last = re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    if not last:
        return text
    return f"'{last}'" if text[0] == "'" else json.dumps(last, ensure_ascii=False)


def _results(results: Mapping[str, float | int | str] | None) -> str:
    if not results:
        return ""
    rows = "\n".join(f"| {_line(str(name))} | {_words(value)} |" for name, value in results.items())
    return f"## Results\n\n| | |\n|---|---|\n{rows}"


def _licence(origin: Origin) -> str:
    if origin.licence:
        return ""
    return "The source model's licence, which also applies here, is not recorded: add it before publishing."


def _was(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def _words(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _line(text: str) -> str:
    """One line that cannot close a table cell, heading or code span, nor start HTML."""
    flat = " ".join(text.split()).replace("`", "'").replace("|", "/")
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _card_facts(path: Path) -> dict[str, str]:
    """``license`` and ``base_model`` from a card's metadata, if they are plain strings."""
    try:
        with path.open("rb") as file:
            text = file.read(_META_LIMIT_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return {}
    match = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    found = re.findall(
        r"^(license|base_model):[ \t]*[\"']?([\w./-]+)[\"']?[ \t]*$", match[1] if match else "", re.MULTILINE
    )
    return dict(found)
