"""How a training loop meets the log: it answers rounds and adopts fragments, and never waits."""
