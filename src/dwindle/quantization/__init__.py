"""Quantization to 8- or 4-bit weights and 8-bit activations, simulated exactly with torch modules.

from dwindle.quantization import load, quantize
result = quantize("smollm2-135m", "w8a8", out="smollm2-w8a8", valid=["wiki.txt"])
model, tokenizer = load("smollm2-w8a8")
"""

from dwindle.quantization.quantize import SCHEMES, Quantized, load, quantize

__all__ = ["SCHEMES", "Quantized", "load", "quantize"]
