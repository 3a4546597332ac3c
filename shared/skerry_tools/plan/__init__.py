"""Plan and simulate: what a run needs, how long it takes and what it costs, before it is begun."""
