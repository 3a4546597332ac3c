"""What Skerry tells of itself: metrics, spans, and where they go."""
