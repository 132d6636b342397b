"""The typed recipe of a run: one view of the configurations that the components own."""
