"""Training data: readers, tokenizing, token files, mixtures, batches; the position in the data is one integer."""
