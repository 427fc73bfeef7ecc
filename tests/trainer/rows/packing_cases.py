"""Tiny models of several families, and the plain padded computation that other layouts are held against."""

import copy
from contextlib import contextmanager

import pytest
import torch

from tests.accuracy import Spread, assert_as_exact, differences
from tests.draws import shifted_seed

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES = {
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Llama": {},
    "Mistral": {"head_dim": 8, "sliding_window": 4},
    # Soft-capped attention (eager), one layer with a window and one without.
    "Gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    # Its masks in transformers 5.23 know nothing of positions that restart.
    "GptOss": {"head_dim": 8, "sliding_window": 4, "num_local_experts": 4},
    # Learned positions.
    "GPT2": {},
}
PROMPTS, COMPLETIONS = [5, 1, 9, 3], [4, 6, 1, 8]


def build(family, **changes):
    import transformers

    torch.manual_seed(shifted_seed(0))
    if family == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = getattr(transformers, f"{family}Config")(**(SMALL | FAMILIES[family] | changes))
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform attention
            parameter.normal_(std=0.3)
    if family in ("Qwen3Moe", "GptOss"):
        model.set_experts_implementation("eager")  # the grouped product has no fp64
    return model.eval()


def sequences(prompts=PROMPTS, completions=COMPLETIONS):
    generator = torch.Generator().manual_seed(shifted_seed(1))
    return [
        [torch.randint(1, 64, (length,), generator=generator) for length in lengths]
        for lengths in (prompts, completions)
    ]


def padded(model, prompts, completions):
    """Every sequence behind its own prompt in a row of its own, padded on the right; hidden states packed.

    Causal attention sees nothing of the padding, so there is no mask.
    """
    rows = [torch.cat(pair) for pair in zip(prompts, completions, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat(
        [
            hidden[i, len(p) - 1 : len(p) + len(c) - 1]
            for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
        ]
    )


def values_and_gradients(model, run):
    """Hidden states of ``run(model)``, and the gradient of a random weighted sum of them, by parameter."""
    model.zero_grad()
    hidden = run(model)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(shifted_seed(2)))
    (hidden * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden states": hidden.detach()} | gradients


@contextmanager
def nothing_in_single_precision():
    """What goes to fp32 in a model of any dtype (norms, routers, eager softmax) goes to fp64."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("float", "float32"):
            patch.setattr(torch, name, torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def neighbour(model, draw):
    """The model with weights moved by up to a part in 128: the same sizes, with roundings of their own."""
    moved = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(shifted_seed(draw))
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1 + (torch.rand(parameter.shape, generator=generator) - 0.5) / 64)
    return moved


def assert_as_exact_as_padding(model, run, reference, draws=8):
    """In fp32 as exact as padding is; in fp64 within that, scaled to fp64's eps."""
    kinds = [], [], [], []
    for draw in range(draws):
        drawn = neighbour(model, draw)
        plain, ours = values_and_gradients(drawn, reference), values_and_gradients(drawn, run)
        with nothing_in_single_precision():
            double = copy.deepcopy(drawn).double()
            truth, in_double = values_and_gradients(double, reference), values_and_gradients(double, run)
        assert ours.keys() == plain.keys() == truth.keys()
        for kind, one in zip(kinds, (truth, plain, ours, in_double), strict=True):
            kind.append(one)
    finer = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    eps = torch.finfo(torch.float32).eps
    for name in kinds[0][0]:
        exact, plain, ours, in_double = ([each[name] for each in kind] for kind in kinds)
        assert all(each.norm() > 0 for each in exact), name
        errors, by_row = differences(plain, exact), exact[0].ndim > 1
        assert_as_exact(name, differences(ours, exact), Spread.of(errors, by_row=by_row), exact, eps)
        # In fp64 both sides have rounded: three times, where one side may have twice the other's.
        spread = Spread.of([error * finer for error in errors], by_row=by_row)
        assert_as_exact(f"{name} in fp64", differences(in_double, exact), spread, exact, 2 * eps * finer, 3.0)
