"""Tiny random causal language models that cover all kinds of heads."""

import pytest
import torch

from tests.draws import shifted_seed

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
# Each model's name, its family, and the options that it adds to the configuration.
MODELS = {
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "Llama": ("Llama", {}),
    "Gemma2, softcap": (
        "Gemma2",
        {"head_dim": 16, "final_logit_softcapping": 0.7, "query_pre_attn_scalar": 16, "sliding_window": 4},
    ),
    "Granite, divides": ("Granite", {"logits_scaling": 0.25}),
    "Cohere, multiplies": ("Cohere", {"logit_scale": 4.0}),
    "HyperCLOVA X, multiplies": ("HyperCLOVAX", {"logits_scaling": 3.0}),
    "Phi, bias": ("Phi", {}),
    "Qwen3-MoE": ("Qwen3Moe", {**MOE, "output_router_logits": True, "router_aux_loss_coef": 0.1}),
}


def tiny(name="Qwen3", *, attention=None, **options):
    """Return a model of ``MODELS`` in fp32 and eval mode, with weights large enough for logits to differ."""
    import transformers

    family, extra = MODELS.get(name, (name, {}))
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config = getattr(transformers, f"{family}Config")(**{**SMALL, **extra, **options})
    torch.manual_seed(shifted_seed(0))
    chosen = {} if attention is None else {"attn_implementation": attention}
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, **chosen).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
        bias = model.get_output_embeddings().bias
        if bias is not None:
            bias.normal_()
    return model


def largest_allocation(function):
    """Run a function; return the bytes of the largest block that an operator allocated."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        function()
    return max(event.self_cpu_memory_usage for event in run.events())
