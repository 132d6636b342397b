"""Quantization to 8- or 4-bit weights and 8-bit activations, simulated exactly with torch modules."""
