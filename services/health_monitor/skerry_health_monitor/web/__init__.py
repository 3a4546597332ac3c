"""The HTTP side: JSON, the page and its stream of events, faults on purpose."""
