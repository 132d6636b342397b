"""Model families as data: which axis of which tensor counts heads, FFN channels, hidden indices or tokens."""
