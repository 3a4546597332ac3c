"""The syncer: opens rounds, merges what arrived, commits."""
