"""Skerry: train one model on many islands of compute over a durable NATS JetStream log."""
