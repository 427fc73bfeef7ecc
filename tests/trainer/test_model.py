"""Models taken apart: what lies between hidden states and log-probs, end tokens, what is not understood."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import transformers

from gspo_kernels.trainer import model as model_module
from gspo_kernels.trainer.config import InputError
from gspo_kernels.trainer.model import check_head, end_token_ids, head_of, load_model, padding_token_id
from tests.draws import shifted_seed
from tests.trainer.conftest import tiny_qwen3

SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
EXTRA = {
    "Llama": {},
    "Granite": {"logits_scaling": 0.25},
    "Cohere": {"logit_scale": 4.0, "pad_token_id": 0},
    "Phi": {},  # its head has a bias
    "Gemma3": {"head_dim": 16, "final_logit_softcapping": 0.05},
}


def build(name):
    torch.manual_seed(shifted_seed(0))
    options = {"vocab_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 32}
    name_of_config = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, name_of_config)(**options, **SIZES, **EXTRA[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_()
    return model


@pytest.mark.parametrize("name", EXTRA)
def test_the_heads_of_the_field_are_understood(name):
    check_head(build(name))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("Gemma3", "softcap", None),
        ("Granite", "logit_scale", 1.0),
        ("Cohere", "logit_scale", 1.0),
        ("Phi", "bias", None),
    ],
)
def test_a_head_that_is_not_understood_is_refused(monkeypatch, name, field, value):
    wrong = lambda model: dataclasses.replace(head_of(model), **{field: value})  # noqa: E731
    monkeypatch.setattr(model_module, "head_of", wrong)
    with pytest.raises(InputError, match=f"{name}ForCausalLM"):
        check_head(build(name))


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
