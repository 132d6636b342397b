"""Where models come from: Hugging Face directories and hub ids, GGUF files, llama2.c files, short aliases."""

from dwindle.sources.loading import ALIASES, Loaded, load, load_config, load_tokenizer

__all__ = ["ALIASES", "Loaded", "load", "load_config", "load_tokenizer"]
