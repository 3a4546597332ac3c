"""The health monitor: who is alive, how fast, how much useful work."""
