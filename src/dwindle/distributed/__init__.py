"""Processes: who takes part, what each holds, and how tensors move between them."""
