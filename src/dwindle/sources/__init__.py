"""Loading models: Hugging Face directories and hub ids, GGUF files, llama2.c files, aliases."""

from dwindle.sources.aliases import ALIASES
from dwindle.sources.loading import (
    Loaded,
    check_source,
    load,
    load_config,
    load_tokenizer,
    model_of_run,
    needed_tokenizer,
)

__all__ = [
    "ALIASES",
    "Loaded",
    "check_source",
    "load",
    "load_config",
    "load_tokenizer",
    "model_of_run",
    "needed_tokenizer",
]
