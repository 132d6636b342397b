"""The source of a model as its card names it: without local paths, because cards are published."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from dwindle.core.errors import UserError
from dwindle.core.reading import open_regular, parse_toml
from dwindle.sources.aliases import alias_of
from dwindle.sources.gguf_file import open_gguf

DEQUANTISED = "dequantised"
"""Tag of a card whose model, or a source of it, had quantised weights."""

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
    dequantised: str = ""
    """Where its weights were rounded before, such as ``a Q4_1 GGUF file``; empty if they were not."""


def origin_of(source: str, card: Path | None = None) -> Origin:
    """What is known about a source from its name or, if it is local, from its model card; never from the network.

    ``card`` is that of a model made from the source, which holds the same facts.
    """
    if (alias := alias_of(source)) is not None:
        kind = Path(alias.file).stem.rpartition(".")[2]
        return Origin(source, alias.hub_id, alias.licence, f"a {kind} GGUF file")
    path = Path(source).expanduser()
    if path.exists():
        facts = _card_facts((path if path.is_dir() else path.parent) / "README.md")
        return _from_card(path.resolve().name, facts, _quantised_file(path))
    facts = {} if card is None else _card_facts(card)
    if _HUB_ID.fullmatch(source):
        return _from_card(source, facts | {"base_model": source})
    return _from_card(re.split(r"[/\\]", source.rstrip("/\\"))[-1] or source, facts)


def _from_card(name: str, facts: dict[str, str], dequantised: str = "") -> Origin:
    rounded = dequantised or ("a quantised model" if DEQUANTISED in facts else "")
    return Origin(name, facts.get("base_model"), facts.get("license"), rounded)


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


def _card_facts(path: Path) -> dict[str, str]:
    """``license`` and ``base_model`` from a card's metadata, if they are plain strings, and our tag."""
    try:
        with open_regular(path) as file:
            text = file.read(_META_LIMIT_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return {}
    match = re.match(r"---\r?\n(.*?)\r?\n---", text, re.DOTALL)
    found = re.findall(
        r"^(license|base_model):[ \t]*[\"']?([\w./-]+)[\"']?[ \t]*$", match[1] if match else "", re.MULTILINE
    )
    tagged = re.search(rf"^- {DEQUANTISED}$", match[1] if match else "", re.MULTILINE)
    return dict(found) | ({DEQUANTISED: "yes"} if tagged else {})


def _quantised_file(path: Path) -> str:
    """``a quantised GGUF file`` if a tensor of it is stored in blocks; empty for other files and for floats."""
    files = (
        [path] if path.suffix == ".gguf" else [] if (path / "config.json").is_file() else sorted(path.glob("*.gguf"))
    )
    if len(files) != 1:
        return ""
    try:
        return "a quantised GGUF file" if open_gguf(files[0]).is_quantised else ""
    except (UserError, OSError):
        return ""
