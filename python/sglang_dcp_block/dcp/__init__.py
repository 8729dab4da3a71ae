"""Decode context parallelism in blocks: the layout, and the planners that stand on it."""
