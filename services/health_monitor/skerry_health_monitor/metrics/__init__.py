"""The same in numbers: Prometheus, OTLP, rows for files and experiment trackers."""
