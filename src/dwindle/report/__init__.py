"""The report of a run: figures, tables and an HTML page, from its log files alone and without torch."""
