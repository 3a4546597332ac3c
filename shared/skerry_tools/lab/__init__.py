"""The lab: whole runs in one process, on a clock of their own, by the code of the real services."""
