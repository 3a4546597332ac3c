"""Where checkpoints live: the port and its adapters."""
