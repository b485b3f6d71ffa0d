"""Cross-entropy over given logits, with what language models add to it."""
