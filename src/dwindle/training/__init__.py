"""Continued pretraining: data, loop, optimizer, checkpoints, metrics."""
