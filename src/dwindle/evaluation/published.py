"""Published results, as reference rows in tables; not measured here.

Average of the seven commonsense tasks, zero-shot, with lm-evaluation-harness 0.4.3; MMLU with Lighteval 0.7.0, whose
prompt differs from the harness's, so that column is not directly comparable. From EfficientLLM (arXiv 2502.06663) and
its discussion.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Published:
    """One row; sizes and tokens as the paper writes them, averages in percent."""

    model: str
    parameters: str
    tokens: str
    average: float
    mmlu: float


PUBLISHED = (
    Published("SmolLM-135M", "135M", "600B", 49.87, 30.05),
    Published("EfficientLLM-A from SmolLM-360M", "134M", "500B", 50.54, 30.54),
    Published("SmolLM-360M", "360M", "600B", 54.48, 33.89),
    Published("Qwen2.5-0.5B", "0.5B", "17T", 53.20, 33.37),
    Published("EfficientLLM-A from SmolLM-1.7B", "469M", "50B", 54.77, 33.09),
    Published("EfficientLLM-A from SmolLM-1.7B", "469M", "500B", 57.35, 34.54),
    Published("EfficientLLM-A from SmolLM-1.7B", "1.1B", "50B", 59.03, 36.71),
    Published("EfficientLLM-A from SmolLM-1.7B", "1.1B", "320B", 60.75, 37.71),
    Published("Llama3.2-1B", "1B", "–", 56.69, 36.31),
    Published("OLMo-1B", "1B", "2T", 55.66, 32.03),
    Published("Sheared-1.3B", "1.3B", "50B", 54.00, 31.51),
)
