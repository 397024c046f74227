"""Batches of different lengths without padding."""
