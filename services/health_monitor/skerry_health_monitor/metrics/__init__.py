"""What the monitor knows, in numbers: Prometheus, OTLP, rows for files and trackers."""
