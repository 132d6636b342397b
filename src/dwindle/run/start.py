"""Where a run starts: the source of its recipe, cut to the tokens of [vocabulary]."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from dwindle.anatomy.anatomy import Anatomy
from dwindle.anatomy.build import aligned
from dwindle.anatomy.vocabulary import kept_rows, with_vocabulary
from dwindle.core.reading import MAX_STATE_BYTES, read_json
from dwindle.core.run_directory import RunDirectory
from dwindle.data.vocabulary import vocabulary_of
from dwindle.distributed.lazy_weights import Fetch, source_tensors
from dwindle.distributed.world import World
from dwindle.export.gguf_size import FileSize
from dwindle.pruning.target import FileSizes
from dwindle.recipe.recipe import Recipe
from dwindle.sources.loading import Loaded, load, load_config, load_generation, load_tokenizer, needed_tokenizer
from dwindle.sources.vocabulary import Vocabulary, trimmed_config, trimmed_generation, trimmed_tokenizer


@dataclass(frozen=True, slots=True)
class Start:
    """A source whose vocabulary may be trimmed; everything is read on request."""

    source: str
    vocabulary: Vocabulary | None = None

    def like(self, source: str) -> Start:
        """Another source with the same tokenizer, such as the teacher, cut to the same tokens.

        Its logits are then those of the kept tokens: their softmax is the distribution of the whole model, restricted
        to them and renormalised.
        """
        return replace(self, source=source)

    def config(self) -> Any:
        config = load_config(self.source)
        return config if self.vocabulary is None else trimmed_config(config, self.vocabulary)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer: Any = load_tokenizer(self.source)
        if self.vocabulary is not None:
            tokenizer = trimmed_tokenizer(tokenizer, self.vocabulary, f"source {self.source}")
        return cast(PreTrainedTokenizerBase, tokenizer)

    def generation(self) -> GenerationConfig:
        generation = load_generation(self.source)
        return generation if self.vocabulary is None else trimmed_generation(generation, self.vocabulary)

    def model(self, dtype: torch.dtype | str = torch.float32, device: str = "cpu") -> nn.Module:
        model = aligned(load(self.source, dtype=dtype, device=device).model)
        return model if self.vocabulary is None else _trimmed_model(model, self.vocabulary)

    def record(self) -> str:
        """The chosen tokens, for the run directory: the text that they were counted on may change or disappear."""
        return "" if self.vocabulary is None else json.dumps(self.vocabulary.to_json()) + "\n"

    def tensors(self, dtype: torch.dtype, world: World) -> Fetch:
        """Weights by name, one at a time, for an engine that shards the model."""
        fetch, vocabulary = source_tensors(self.source, dtype, world), self.vocabulary
        if vocabulary is None:
            return fetch
        anatomy = Anatomy.of_config(load_config(self.source))

        def rows(name: str) -> Tensor:
            return kept_rows(anatomy[name], fetch(name), vocabulary.kept)

        return rows


def start_of(recipe: Recipe, run: RunDirectory | None = None) -> Start:
    """The start of a recipe; of a ``run`` that has begun, with the tokens that were chosen then."""
    source = recipe.source.model
    if recipe.vocabulary.size is not None and run is not None and run.vocabulary.is_file():
        found = read_json(run.vocabulary, limit=MAX_STATE_BYTES)
        return Start(source, Vocabulary.from_json(found, str(run.vocabulary)))
    return Start(source, vocabulary_of(source, recipe.vocabulary))


def file_sizes(start: Start, option: str) -> FileSizes:
    """Sizes of GGUF files of smaller versions of a start; ``option`` names the target in messages."""
    return lambda type_: FileSize(start.config(), start.tokenizer(), type_, option)


def trimmed(loaded: Loaded, vocabulary: Vocabulary) -> Loaded:
    """A loaded model and its tokenizer, cut to the kept tokens."""
    tokenizer = needed_tokenizer(loaded.tokenizer, loaded.source)
    smaller = trimmed_tokenizer(tokenizer, vocabulary, f"source {loaded.source}")
    return replace(loaded, model=_trimmed_model(loaded.model, vocabulary), tokenizer=smaller)


def _trimmed_model(model: Any, vocabulary: Vocabulary) -> Any:
    smaller: Any = with_vocabulary(model, trimmed_config(model.config, vocabulary), vocabulary.kept)
    if getattr(model, "generation_config", None) is not None:
        smaller.generation_config = trimmed_generation(model.generation_config, vocabulary)
    return smaller
