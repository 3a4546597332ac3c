"""Models: the built-in decoder, and the protocol for bringing your own."""
