"""The durable log of a run: the port, its adapters, and what is read from and written to it."""
