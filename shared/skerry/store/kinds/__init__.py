"""Stores for URLs: each module here is named like its scheme, and has ``open_store``."""
