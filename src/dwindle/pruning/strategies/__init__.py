"""What is removed next: coupled groups, the global mixture, layer-adaptive sizes."""
