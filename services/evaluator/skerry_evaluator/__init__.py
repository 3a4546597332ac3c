"""What a checkpoint is worth: its loss on held-out text, and what it writes."""
