"""``dwindle trim``: a model with fewer tokens, and what that costs in bits per byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from dwindle.anatomy.anatomy import Anatomy, ParameterCount
from dwindle.core.notebook import Shown
from dwindle.core.quality import Quality, text_names
from dwindle.core.terminal import right, titled
from dwindle.data.pydoc_text import DEFAULT_TEXT
from dwindle.data.readers import read_documents
from dwindle.data.vocabulary import HeldOut, vocabulary_of
from dwindle.data.vocabulary_config import VocabularyConfig
from dwindle.evaluation.config import EvalConfig
from dwindle.evaluation.evaluate import EvalData, evaluate_model
from dwindle.evaluation.perplexity import TextData
from dwindle.export.huggingface import check_output, save_model
from dwindle.pruning.ledger import Event, first_events
from dwindle.run.prune import stored_dtype
from dwindle.run.start import trimmed
from dwindle.sources.loading import Loaded, load
from dwindle.sources.vocabulary import Vocabulary

_MEASURED_CHARS, _DOCUMENT_CHARS = 16_000, 2_000
"""Characters of the text that source and result are measured on, and of one of its documents."""
_NO_TEXT = f"{DEFAULT_TEXT}:valid"


@dataclass(slots=True, repr=False)
class Trimmed(Shown):
    """A model with a smaller vocabulary, its tokenizer, and the ids of the source that it kept."""

    model: Any
    tokenizer: Any
    source: str
    vocabulary: Vocabulary
    before: ParameterCount
    after: ParameterCount
    ledger: list[Event]
    quality: Quality | None = None
    """Bits per byte of source and result; None if they were not measured."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))

    def __repr__(self) -> str:
        return f"<Trimmed {self.source}: {self.vocabulary.num_rows:,} → {len(self.vocabulary.kept):,} tokens>"

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "tokens": {"before": self.vocabulary.num_rows, "after": len(self.vocabulary.kept)},
            "parameters": {"before": self.before.total, "after": self.after.total},
            "quality": None if self.quality is None else self.quality.to_json(),
        }

    def render(self, out: str | PathLike[str] | None = None) -> Group:
        """The result as a table, then what it costs."""
        title = self.source if out is None else f"{self.source} → {out}"
        table = Table(*right("", "tokens", "parameters", "embedding"))
        sizes = (self.vocabulary.num_rows, len(self.vocabulary.kept))
        for name, tokens, count in zip(("before", "after"), sizes, (self.before, self.after), strict=True):
            table.add_row(name, f"{tokens:,}", f"{count.total:,}", f"{count.embedding:,}")
        found = self.quality
        cost = "" if found is None else f"{found.bits()} (on {found.measured_on('bytes')})"
        return Group(titled(title, table), *filter(None, [cost]))

    def save(self, out: str | PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the model directory."""
        check_output(out, overwrite=overwrite, sources=[self.source])
        return save_model(
            self.model,
            self.tokenizer,
            out,
            structure=Anatomy.of(self.model).source,
            source=self.source,
            ledger=self.ledger,
            quality=self.quality,
            overwrite=overwrite,
        )


def trim(
    source: str | PathLike[str],
    vocab: str | int,
    *,
    text: Sequence[str] = (),
    out: str | PathLike[str] | None = None,
    data: Sequence[str] = (),
    measure: bool = True,
    overwrite: bool = False,
) -> Trimmed:
    """Remove the rows and tokens of a model that ``vocab`` leaves no room for, and write it to ``out`` if given.

    A BPE keeps its first merges, a unigram tokenizer its highest scores, or either the most frequent tokens of
    ``text``. Bytes, special and chat tokens stay, so every text can still be written; a removed token becomes the
    tokens that it was made of. ``measure`` compares source and result in bits per byte: on the beginning of ``data``,
    else on passages of ``text`` that are then not counted, without either on CPython's documentation.
    """
    if out is not None:
        check_output(out, overwrite=overwrite, sources=[fspath(source), *text, *data])
    config = VocabularyConfig(size=vocab, text=list(text))
    held_out = HeldOut(_MEASURED_CHARS) if measure and text and set(data) <= set(text) else None
    vocabulary = vocabulary_of(source, config, key="--vocab", option="--text", held_out=held_out)
    assert vocabulary is not None
    loaded = load(source)
    smaller = trimmed(loaded, vocabulary)
    before, after = (Anatomy.of(model) for model in (loaded.model, smaller.model))
    options = {"vocabulary": config.model_dump()}
    result = Trimmed(
        model=smaller.model,
        tokenizer=smaller.tokenizer,
        source=loaded.source,
        vocabulary=vocabulary,
        before=before.count(before.source),
        after=after.count(after.source),
        ledger=first_events(loaded.source, after, options, vocabulary),
        quality=_measured(loaded, smaller, data or text or [_NO_TEXT], held_out) if measure else None,
    )
    result.model.to(stored_dtype(loaded))
    if out is not None:
        result.save(out, overwrite=overwrite)
    return result


def _measured(source: Loaded, result: Loaded, data: Sequence[str], held_out: HeldOut | None) -> Quality:
    """Bits per byte of both on the same documents: what is held out, if anything, else the beginning."""
    passages = [] if held_out is None else held_out.passages
    texts = passages or list(_beginning(data))
    scored = EvalData(texts=[TextData("text", "the beginning of each document", texts, texts)])
    before, after = (
        evaluate_model(one.model, one.tokenizer, scored, config=EvalConfig(), name="").texts[0]
        for one in (source, result)
    )
    return Quality(
        text_names(data),
        tokens=after.num_tokens,
        held_out=held_out is None or bool(passages),
        bytes=after.num_bytes,
        source_bits=before.bits_per_byte,
        result_bits=after.bits_per_byte,
    )


def _beginning(data: Sequence[str]) -> Iterator[str]:
    left = _MEASURED_CHARS
    for name in data:
        for document in read_documents(name, option="--data"):
            yield document[: min(left, _DOCUMENT_CHARS)]
            left -= min(left, _DOCUMENT_CHARS, len(document))
            if left <= 0:
                return
