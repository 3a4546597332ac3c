"""The inner optimizer's state on this machine's disk: saved beside training, read at a start."""
