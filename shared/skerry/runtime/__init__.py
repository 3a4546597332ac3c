"""The shell every service runs in: signals, drain, deadline, logs."""
