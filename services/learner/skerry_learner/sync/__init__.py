"""How a learner meets the log: rounds answered, fragments adopted, and never a step that waits."""
