"""Generated from proto/skerry/protocol/v1 by proto/generate.py: do not edit."""
