"""Where `fused_qkv` leaves a layer's norm and attention to be called as ever, and says so."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import torch_liger
from patching_models import DEVICE, assert_same, batch, made, results
from patching_qkv import fused as fused
from patching_qkv import other_operations_plain as other_operations_plain
from patching_qkv import pair
from torch_liger import apply_liger_kernel_to_llama
from torch_liger.patching.qkv import Projections

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, about PEFT


def adapted(model, **settings):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(3)
    model = peft.get_peft_model(model, config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("order", ["patch first", "adapter first"])
def test_attention_with_adapters_steps_aside(fused, order):
    plain, model = made("llama"), made("llama")
    if order == "patch first":
        apply_liger_kernel_to_llama(model, fused_qkv=True)
    plain, model = adapted(plain), adapted(model)
    if order == "adapter first":
        torch_liger.apply_liger_kernel(model, fused_qkv=True)
    report = torch_liger.report(model)
    assert "fused_qkv" not in report.applied
    assert report.left_out["fused_qkv"] == ("q_proj has an adapter (peft.tuners.lora.layer.Linear)")
    assert report.applied["fused_add_rms_norm"] == report.applied["rope"] == 2
    inputs = batch(length=4)
    assert_same(results(model, **inputs), results(plain, **inputs))
    assert not fused
    model, plain = (m.merge_and_unload().eval() for m in (model, plain))
    assert torch_liger.report(model).applied["fused_qkv"] == 2
    with torch.no_grad():
        ours, theirs = model(**inputs), plain(**inputs)
    assert_same({"logits": ours.logits}, {"logits": theirs.logits})
    assert len(fused) == 2


def test_adapters_elsewhere_change_nothing(fused):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["o_proj", "up_proj"], init_lora_weights=False)
    found = []
    for patch in (False, True):
        torch.manual_seed(0)
        model = made("llama")
        if patch:
            apply_liger_kernel_to_llama(model, fused_qkv=True)
        torch.manual_seed(1)
        found.append(results(peft.get_peft_model(model, config), **batch(length=4)))
    assert len(fused) == 4
    assert_same(*reversed(found))


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Wrapped(torch.Tensor):
    """As the weights of quantised layers are."""


def doubled(layer):
    old = layer.self_attn.k_proj
    layer.self_attn.k_proj = Doubled(64, 32, bias=True, device=DEVICE)
    layer.self_attn.k_proj.load_state_dict(old.state_dict())


def wrapped(layer):
    linear = layer.self_attn.v_proj
    linear.weight = torch.nn.Parameter(linear.weight.data.as_subclass(Wrapped))


def hook_on(name):
    def change(layer):
        layer.get_submodule(name).register_forward_hook(lambda module, args, y: 2 * y)

    return change


def before_attention(layer):
    def double(module, args, kwargs):
        return args, {**kwargs, "hidden_states": 2 * kwargs["hidden_states"]}

    layer.self_attn.register_forward_pre_hook(double, with_kwargs=True)


def replaced(layer):
    stock = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, hidden_states, **kwargs: stock(
        *args, hidden_states=2 * hidden_states, **kwargs
    )


def without_a_bias(layer):
    layer.self_attn.q_proj.bias = None


def mixed(layer):
    linear = layer.self_attn.k_proj
    linear.forward = lambda x: torch.nn.functional.linear(
        x, linear.weight.float(), linear.bias.float()
    )


CHANGES = {
    "k_proj is a Doubled": doubled,
    "v_proj has a weight that is a Wrapped": wrapped,
    "q_proj has hooks": hook_on("self_attn.q_proj"),
    "a norm before it is not ours alone": hook_on("input_layernorm"),
    "self_attn has hooks that see its input": before_attention,
    "self_attn has a forward that was replaced": replaced,
    "some of its projections have a bias, and others have none": without_a_bias,
    "k_proj has a forward that was replaced": mixed,
}


@pytest.mark.parametrize("reason", CHANGES)
def test_a_layer_that_does_more_steps_aside(fused, reason):
    plain, model = pair()
    for m in (plain, model):
        CHANGES[reason](m.model.layers[1])
    report = torch_liger.report(model)
    assert report.applied["fused_qkv"] == 1
    assert report.left_out["fused_qkv"] == f"1 of 2: {reason}"
    inputs = batch(length=4)
    assert_same(results(model, **inputs), results(plain, **inputs))
    assert len(fused) == 2  # the other layer


def test_norms_that_differ(fused):
    plain, model = pair("qwen3")
    for m in (plain, model):
        m.model.layers[0].self_attn.k_norm.variance_epsilon = 0.3
    assert "its norms differ in eps" in torch_liger.report(model).left_out["fused_qkv"]
    inputs = batch(length=4)
    assert_same(results(model, **inputs), results(plain, **inputs))
    assert len(fused) == 2


def test_hooks_on_attention_that_see_its_output_are_called(fused):
    plain, model = pair()
    for m in (plain, model):
        hook_on("self_attn.o_proj")(m.model.layers[0])
        m.model.layers[1].self_attn.register_forward_hook(lambda m, args, y: (3 * y[0], y[1]))
    inputs = batch(length=4)
    assert_same(results(model, **inputs), results(plain, **inputs))
    assert len(fused) == 4


def test_under_autocast_and_torch_compile_it_is_the_ordinary_path(fused):
    plain, model = pair()
    inputs = batch(length=4)
    with torch.autocast(DEVICE, torch.bfloat16):
        losses = [m(**inputs).loss for m in (model, plain)]
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)
    torch._dynamo.reset()
    loss = torch.compile(model, fullgraph=True, backend="eager")(**inputs).loss
    torch.testing.assert_close(loss, plain(**inputs).loss)
    assert not fused
    torch._dynamo.reset()


def test_a_forward_that_is_not_known_is_left_alone():
    def forward(self, hidden_states, position_embeddings, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.o_proj(q + k + v)

    def gated(self, hidden_states, position_embeddings, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.o_proj(q + k + v) * hidden_states

    def clipped(self, hidden_states, position_embeddings, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.q_proj(hidden_states).clamp(-1, 1).view(shape).transpose(1, 2)
        k = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        return self.o_proj(q + k + v)

    name, separate = "apply_rotary_pos_emb", Projections()
    assert separate.are_in(forward, name)
    assert not separate.are_in(gated, name)
    assert not separate.are_in(clipped, name)
    assert not separate.are_in(forward, "apply_rotary_emb")
    assert not Projections(("qkv_proj",)).are_in(forward, name)
    assert not Projections(norms=("q_norm", "k_norm")).are_in(forward, name)
