"""The PyTorch modules against Hugging Face's own."""

import pytest
import torch
import transformers.models.gemma.modeling_gemma as gemma
import transformers.models.llama.modeling_llama as llama
from transformers import Gemma2Config, GemmaConfig, LlamaConfig, Phi3Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2MLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from test_rms_norm_torch import randn
from torch_liger.nn import LigerGEGLUMLP, LigerPhi3SwiGLUMLP, LigerRMSNorm, LigerSwiGLUMLP

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"hidden_size": 32, "intermediate_size": 80}
FAMILIES = {
    "llama": (llama.LlamaMLP, LigerSwiGLUMLP, LlamaConfig(**SIZES)),
    "llama-with-biases": (llama.LlamaMLP, LigerSwiGLUMLP, LlamaConfig(**SIZES, mlp_bias=True)),
    "phi3": (Phi3MLP, LigerPhi3SwiGLUMLP, Phi3Config(**SIZES, pad_token_id=0)),
    "gemma": (gemma.GemmaMLP, LigerGEGLUMLP, GemmaConfig(**SIZES)),
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


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_rounds_where_hugging_face_does(family, weight_dtype):
    dim = 256
    if family == "llama":
        theirs = llama.LlamaRMSNorm(dim)
        ours = LigerRMSNorm(dim, implementation="triton")
    else:
        theirs = gemma.GemmaRMSNorm(dim)
        ours = LigerRMSNorm(
            dim, offset=1.0, casting_mode="gemma", init_fn="zeros", implementation="triton"
        )
    theirs.weight.data = (0.3 * torch.randn(dim) + (family == "llama")).to(weight_dtype)
    ours.load_state_dict(theirs.state_dict())
    ours = ours.to(DEVICE, weight_dtype)
    x = randn(64, dim, dtype=torch.bfloat16)
    with torch.no_grad():
        y, expected = ours(x), theirs(x.cpu()).to(DEVICE)
    assert y.dtype == expected.dtype
    # A wrong order of rounding changes about a quarter of them.
    assert (y != expected).float().mean() < 1e-3 or torch.allclose(y, expected, rtol=1e-6)


def test_module_is_a_stand_in():
    norm = LigerRMSNorm(64, eps=1e-5)
    assert list(norm.state_dict()) == ["weight"]
    assert repr(norm) == "LigerRMSNorm((64,), eps=1e-05, offset=0.0, casting_mode='llama')"
    assert norm.variance_epsilon == 1e-5
    assert LigerRMSNorm(64, elementwise_affine=False).weight is None
    assert not LigerRMSNorm(64, init_fn="zeros").weight.any()
    LigerRMSNorm(64, 1e-6, 1.0, "gemma", "zeros", False, None)  # as Liger-Kernel's is called
    with pytest.raises(ValueError, match="init_fn must be one of 'ones', 'zeros'; got 'one'"):
        LigerRMSNorm(64, init_fn="one")
