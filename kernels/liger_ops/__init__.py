"""The fused operations behind jax_liger and torch_liger, one folder an operation.

Each folder holds the operation's float64 oracle, its named cases, and its implementations:
`pallas_kernel` and `xla` for JAX, `triton_kernel` and `eager` for PyTorch. Importing this package
imports neither framework.
"""
