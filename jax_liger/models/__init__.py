"""Decoders of the LLaMA family in Flax nnx, from and to Hugging Face checkpoints."""

from jax_liger.models.cache import Cache as Cache
from jax_liger.models.checkpoint import from_pretrained as from_pretrained
from jax_liger.models.checkpoint import parameter_shapes as parameter_shapes
from jax_liger.models.checkpoint import save_pretrained as save_pretrained
from jax_liger.models.config import Config as Config
from jax_liger.models.decoder import CausalLM as CausalLM
from jax_liger.models.generate import generate as generate
from jax_liger.models.lora import LoRAParam as LoRAParam
from jax_liger.models.lora import add_lora as add_lora
from jax_liger.models.lora import merge_lora as merge_lora
from jax_liger.models.loss import count_items as count_items
from jax_liger.models.loss import loss_fn as loss_fn
from jax_liger.models.peft_format import load_adapters as load_adapters
from jax_liger.models.peft_format import save_adapters as save_adapters
from jax_liger.models.sharding import batch_sharding as batch_sharding
from jax_liger.models.sharding import make_mesh as make_mesh
from jax_liger.models.sharding import rules_for as rules_for
from jax_liger.models.sharding import shard as shard
