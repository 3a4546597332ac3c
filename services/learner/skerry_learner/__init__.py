"""The learner: one island that trains and meets the others only through the log."""
