"""The ``[source]`` table of a recipe."""

from __future__ import annotations

from typing import Literal

from dwindle.core.config import Config


class ModelConfig(Config):
    """Where training starts."""

    model: str
    """Model to prune: a Hugging Face directory or hub id, a .gguf or llama2.c file, or smollm2-135m."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto takes a GPU if there is one."""
    random_init: bool = False
    """Use only the model's shape, with random weights drawn from training.seed: training from scratch."""
