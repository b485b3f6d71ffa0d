"""A linear layer with a low-rank adapter (LoRA): the base product plus the two small ones."""
