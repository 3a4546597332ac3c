"""Models: the built-in transformer, and the protocol for bringing your own."""
