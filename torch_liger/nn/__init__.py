"""PyTorch modules on the fused functions."""

from torch_liger.nn.losses import CrossEntropyOutput as CrossEntropyOutput
from torch_liger.nn.losses import LigerCrossEntropyLoss as LigerCrossEntropyLoss
from torch_liger.nn.losses import (
    LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss,
)
from torch_liger.nn.mlps import LigerGEGLUMLP as LigerGEGLUMLP
from torch_liger.nn.mlps import LigerPhi3SwiGLUMLP as LigerPhi3SwiGLUMLP
from torch_liger.nn.mlps import LigerSwiGLUMLP as LigerSwiGLUMLP
from torch_liger.nn.norms import LigerLayerNorm as LigerLayerNorm
from torch_liger.nn.norms import LigerRMSNorm as LigerRMSNorm
