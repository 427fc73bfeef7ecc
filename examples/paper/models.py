"""The two starting points: a tiny dense and a tiny mixture-of-experts Qwen3, warmed up on right answers."""

import torch

from gspo_kernels.trainer import demo

MODELS = ("dense", "moe")
EXPERTS, EXPERTS_PER_TOKEN = 8, 2


def make_moe(tokenizer, seed):
    """Return a Qwen3-MoE of 3 layers and width 96: 2 of 8 experts per token and layer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        moe_intermediate_size=128,
        num_experts=EXPERTS,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3MoeForCausalLM(config)


def make_start(kind, rows, *, seed, warm_up_steps):
    """Return (model, tokenizer) of one kind after the short supervised run that both kinds get."""
    tokenizer = demo.make_tokenizer()
    model = {"dense": demo.make_model, "moe": make_moe}[kind](tokenizer, seed)
    demo.warm_up(model, tokenizer, rows, steps=warm_up_steps, seed=seed)
    return model, tokenizer


def routers(model):
    """Return the modules that choose experts, none for a dense model."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
