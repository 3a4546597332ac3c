"""The algorithm as pure functions: no clock, no I/O, no environment, no logger."""
