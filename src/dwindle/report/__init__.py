"""Figures and one self-contained page of a run, from its ledger, metrics and structure files alone; never torch."""
