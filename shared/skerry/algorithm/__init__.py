"""The algorithm as pure functions: fragments, schedule, codec arithmetic, merge, outer step."""
