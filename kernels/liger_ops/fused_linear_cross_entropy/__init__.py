"""The language model's head and its cross-entropy in one, without holding the logits."""
