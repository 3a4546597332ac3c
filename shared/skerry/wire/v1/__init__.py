"""Generated from proto/skerry/wire/v1 by proto/generate.py: do not edit."""
