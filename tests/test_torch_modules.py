"""The PyTorch feed-forward modules against Hugging Face's own."""

import pytest
import torch
from transformers import Gemma2Config, GemmaConfig, LlamaConfig
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.llama.modeling_llama import LlamaMLP

from torch_liger.nn import LigerGEGLUMLP, LigerSwiGLUMLP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"hidden_size": 32, "intermediate_size": 80}
FAMILIES = {
    "llama": (LlamaMLP, LigerSwiGLUMLP, LlamaConfig(**SIZES)),
    "llama-with-biases": (LlamaMLP, LigerSwiGLUMLP, LlamaConfig(**SIZES, mlp_bias=True)),
    "gemma": (GemmaMLP, LigerGEGLUMLP, GemmaConfig(**SIZES)),
    "gemma2": (Gemma2MLP, LigerGEGLUMLP, Gemma2Config(**SIZES)),
    "gelu": (Gemma2MLP, LigerGEGLUMLP, Gemma2Config(**SIZES, hidden_activation="gelu")),
}


@pytest.mark.parametrize("implementation", ["triton", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_hugging_face(family, implementation):
    theirs, ours, config = FAMILIES[family]
    torch.manual_seed(0)
    reference = theirs(config).to(DEVICE)
    for parameter in reference.parameters():  # biases too, which start at zero
        torch.nn.init.normal_(parameter, std=0.3)
    module = ours(config, implementation=implementation).to(DEVICE)
    module.load_state_dict(reference.state_dict())
    x = torch.randn(2, 5, 32, device=DEVICE)
    results = []
    for mlp in (module, reference):
        given = x.clone().requires_grad_()
        y = mlp(given)
        y.sin().sum().backward()
        results.append([y, given.grad, *(p.grad for p in mlp.parameters())])
    for a, e in zip(*results, strict=True):
        scale = e.detach().abs().max().item()
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize(
    "module, config, message",
    [
        (LigerSwiGLUMLP, LlamaConfig(**SIZES, hidden_act="gelu"),
         "hidden_act must be one of 'silu', 'swish' for LigerSwiGLUMLP; got 'gelu'"),
        (LigerGEGLUMLP, LlamaConfig(**SIZES),
         "hidden_act must be one of 'gelu_pytorch_tanh', 'gelu' for LigerGEGLUMLP; got 'silu'"),
    ],
)  # fmt: skip
def test_another_activation_is_refused(module, config, message):
    with pytest.raises(ValueError) as caught:
        module(config)
    assert str(caught.value) == message
