"""Tiny random causal language models that cover all kinds of heads."""

import pytest
import torch

from tests.trainer.conftest import tiny_model

# Each model's name, its family, and the options that it adds to the configuration.
MODELS = {
    "Qwen3": ("qwen3", {}),
    "Qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "Llama": ("llama", {}),
    "Gemma2, softcap": (
        "gemma2",
        {"final_logit_softcapping": 0.7, "query_pre_attn_scalar": 16, "sliding_window": 4},
    ),
    "Granite, divides": ("granite", {"logits_scaling": 0.25}),
    "Cohere, multiplies": ("cohere", {"logit_scale": 4.0}),
    "HyperCLOVA X, multiplies": ("hyperclovax", {"logits_scaling": 3.0}),
    "Phi, bias": ("phi", {}),
    "Qwen3-MoE": ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
}


def tiny(name="Qwen3", **options):
    """Return a model of ``MODELS`` in fp32 and eval mode, with weights large enough for logits to differ."""
    import transformers

    family, extra = MODELS.get(name, (name, {}))
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = tiny_model(family, **{"vocab_size": 96, "num_key_value_heads": 2, **extra, **options})
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
