"""Rotary position embedding: rotating queries and keys, and the angles."""
