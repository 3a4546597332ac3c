"""Reads a run's whole log and says whether it keeps its promises; replays it."""
