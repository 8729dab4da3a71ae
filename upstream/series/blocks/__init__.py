"""Blocks of tokens for decode context parallelism; the first commit stands alone."""
