"""The log on NATS JetStream."""
