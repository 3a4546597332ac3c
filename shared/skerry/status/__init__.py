"""The one read model of a run: page, top, status, metrics and alerts are made from it."""
