"""Training text: corpora, the held-out split, and each learner's own disjoint stream."""
