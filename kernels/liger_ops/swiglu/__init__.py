"""Gated activations, SwiGLU and GeGLU: an activation of one half times the other."""
