"""Saliency, selection, surgery and the ledger; knows nothing of files, ranks or the command line."""
