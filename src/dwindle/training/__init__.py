"""Continued pretraining: the loop, callbacks, loss, distillation, optimizer, checkpoints, metrics."""
