"""Measurements of speed and memory, always beside a baseline of the same run."""
