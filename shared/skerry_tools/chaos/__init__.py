"""Faults on purpose: what they are, when they come, and how they are put into a running cluster."""
