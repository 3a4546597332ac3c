"""What tests need and users may too: a real nats-server, hypothesis strategies."""
