"""The protocol without I/O: messages, frames, payload codec, and the rules of a run."""
