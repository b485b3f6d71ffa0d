"""SwiGLU and GeGLU in plain jax.numpy: the CPU path, the base and the judge's yardstick."""

import jax
import jax.numpy as jnp


def gated(gate: jax.Array, up: jax.Array | None, activation: str) -> jax.Array:
    if up is None:
        gate, up = jnp.split(gate, 2, axis=-1)
    # In float32 and rounded once, as PyTorch's activations are.
    g = gate.astype(jnp.promote_types(gate.dtype, jnp.float32))
    if activation == "silu":
        activated = jax.nn.silu(g)
    else:
        activated = jax.nn.gelu(g, approximate=activation == "gelu_tanh")
    return activated.astype(gate.dtype) * up
