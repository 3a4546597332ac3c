"""A whole cluster on this machine: the broker, the services, and one stop for all of them."""
