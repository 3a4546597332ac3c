"""What every service shares: its shell, its connections, logging and telemetry."""
