"""What the monitor knows of a run, and what it makes of it: no HTTP, no exporters."""
