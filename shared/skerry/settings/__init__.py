"""Settings: every table, their defaults and bounds, and how they are read."""
