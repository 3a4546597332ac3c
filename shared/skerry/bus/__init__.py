"""The log as a port, its NATS and memory adapters, and the protocols on top of it."""
