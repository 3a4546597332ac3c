"""The checkpointer: verified checkpoints of the global model, and their restoration."""
