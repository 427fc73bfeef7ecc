"""Parts of models: the head between hidden states and log-probs, end tokens, and heads that are refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AttentionInterface, FalconConfig, FalconForCausalLM

from gspo_kernels.trainer.config import InputError, TrainConfig
from gspo_kernels.trainer.model import (
    Policy,
    end_token_ids,
    load_model,
    make_policies,
    padding_token_id,
)
from tests.trainer.conftest import make_accelerator, tiny_qwen3


def test_a_model_whose_forward_fails_is_named():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    falcon = FalconForCausalLM(FalconConfig(alibi=True, **sizes)).eval()
    with pytest.raises(InputError, match=r"FalconForCausalLM cannot be trained: .* raised ValueError"):
        Policy(falcon, temperature=1.0).check()


def test_a_model_is_tried_in_the_runs_precision(tokenizer):
    """Flash-attention runs in 16 bit only."""

    def flash(module, query, key, value, attention_mask, scaling, cu_seq_lens_q=None, **options):
        assert torch.is_autocast_enabled("cpu") or query.dtype == torch.bfloat16, "only fp16 and bf16"
        lengths = [query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.diff().tolist()
        parts = zip(*(x.bfloat16().split(lengths, 2) for x in (query, key, value)), strict=True)
        shared = {"is_causal": True, "scale": scaling, "enable_gqa": True}
        out = [torch.nn.functional.scaled_dot_product_attention(*part, **shared) for part in parts]
        return torch.cat(out, 2).transpose(1, 2), None

    def make(precision):
        model, config = tiny_qwen3(tokenizer), TrainConfig(update={"precision": precision})
        model.config._attn_implementation = "a_flash"
        make_policies(model, tokenizer, config, make_accelerator(precision), needs_reference=False)

    AttentionInterface.register("a_flash", flash)
    make("bf16")
    with pytest.raises(InputError, match=r"cannot be trained: .*only fp16 and bf16"):
        make("fp32")


def test_a_leak_is_found_in_16_bit_too(tokenizer):
    model = tiny_qwen3(tokenizer)
    model.model.layers[0].register_forward_hook(lambda m, args, output: output + output.roll(1, dims=1))
    model.config._attn_implementation = "sdpa"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match="differ from those"):
        Policy(model, temperature=1.0).check()


def test_end_and_padding_tokens(tokenizer, tmp_path):
    def tokens(eos, pad):
        return SimpleNamespace(eos_token_id=eos, pad_token_id=pad)

    model = tiny_qwen3(tokenizer)
    model.generation_config.eos_token_id = [3, 4]
    assert end_token_ids(model, tokens(5, None)) == [3, 4, 5]
    assert padding_token_id(tokens(5, None)) == 5 and padding_token_id(tokens(5, 0)) == 0
    model.generation_config.eos_token_id = None
    with pytest.raises(InputError, match="end token"):
        end_token_ids(model, tokens(None, 1))
    with pytest.raises(InputError, match="padding"):
        padding_token_id(tokens(None, None))
    with pytest.raises(InputError, match=str(tmp_path)):
        load_model(str(tmp_path))


def test_an_error_of_loading_keeps_all_its_lines(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(InputError, match=r"cannot be loaded: .*`unheard_of`.*You can update Transformers"):
        load_model(str(tmp_path))
