"""Metrics, spans, and where they go."""
