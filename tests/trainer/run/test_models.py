"""Taking a model apart: what lies between hidden states and log-probs; refusing what is not understood."""

import pytest
import torch

from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rows.policy import check_head, head_of
from gspo_kernels.trainer.run.models import end_token_ids, load_model, padding_token_id
from tests.draws import shifted_seed
from tests.trainer.conftest import tiny_qwen3

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def build(name):
    import transformers

    torch.manual_seed(shifted_seed(0))
    if name == "GPT2":
        config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=32)
        return transformers.GPT2LMHeadModel(config).eval()
    extra = {
        "Llama": {},
        "Gemma2": {"head_dim": 16, "final_logit_softcapping": 0.05, "query_pre_attn_scalar": 16},
        "Granite": {"logits_scaling": 0.25},
        "Cohere": {"logit_scale": 4.0, "pad_token_id": 0},
        "Phi": {},  # its head has a bias
    }[name]
    config = getattr(transformers, f"{name}Config")(**SMALL, **extra)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_()
    return model


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Granite", "Cohere", "Phi", "GPT2"])
def test_the_heads_of_the_field_are_understood(name):
    check_head(build(name))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("Gemma2", "softcap", None),
        ("Granite", "logit_scale", 1.0),
        ("Cohere", "logit_scale", 1.0),
        ("Phi", "bias", None),
    ],
)
def test_a_head_that_is_not_understood_is_refused(monkeypatch, name, field, value):
    import dataclasses

    from gspo_kernels.trainer.rows import policy

    monkeypatch.setattr(
        policy, "head_of", lambda model: dataclasses.replace(head_of(model), **{field: value})
    )
    with pytest.raises(ModelError, match=f"{name}ForCausalLM does something"):
        check_head(build(name))


class Tokens:
    def __init__(self, eos, pad):
        self.eos_token_id, self.pad_token_id = eos, pad


def test_end_and_padding_tokens(tokenizer):
    model = tiny_qwen3(tokenizer)
    model.generation_config.eos_token_id = [3, 4]
    assert end_token_ids(model, Tokens(5, None)) == [3, 4, 5]
    assert padding_token_id(Tokens(5, None)) == 5
    assert padding_token_id(Tokens(5, 0)) == 0
    model.generation_config.eos_token_id = None
    with pytest.raises(ModelError, match="end-of-sequence"):
        end_token_ids(model, Tokens(None, 1))
    with pytest.raises(ModelError, match="padding"):
        padding_token_id(Tokens(None, None))


def test_a_directory_without_a_model(tmp_path):
    with pytest.raises(ModelError, match=str(tmp_path)):
        load_model(str(tmp_path))
