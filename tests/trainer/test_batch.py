"""Rows of several sequences against each sequence alone; who sees whom; what is refused; micro-batches."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from gspo_kernels.trainer.batch import (
    RowMask,
    Segment,
    check_rows_of,
    packed_hidden_states,
    shared_prefix_hidden_states,
    token_budget_batches,
)
from gspo_kernels.trainer.config import InputError
from tests.draws import shifted_seed
from tests.trainer.conftest import nothing_in_single_precision, tiny_model

LAYOUTS = {"packed": packed_hidden_states, "shared prefix": shared_prefix_hidden_states}


def build(family):
    model = tiny_model(family, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    with torch.no_grad():
        for parameter in model.parameters():  # far from uniform attention
            parameter.normal_(std=0.3)
    if family == "qwen3_moe":
        model.set_experts_implementation("eager")  # the grouped product has no fp64
    return model


def sequences(layout="packed"):
    """Lists of prompts and completions, copies of a prompt one after the other where they share it."""
    generator = torch.Generator().manual_seed(shifted_seed(1))
    # some of one length side by side, which attend as a batch, some of one token, some beyond a window
    shapes = ([5, 3, 9, 3], [4, 6, 1, 8]) if layout == "packed" else ([9, 1, 4], [7, 7, 1, 4, 6, 1])
    prompts, completions = (
        [torch.randint(1, 64, (n,), generator=generator) for n in each] for each in shapes
    )
    if layout != "packed":
        prompts = [prompts[group] for group in (0, 0, 0, 1, 1, 2)]
    return prompts, completions


def alone(model, prompts, completions):
    """Hidden states that predict completions, by a plain forward pass of each sequence."""
    hidden = []
    for prompt, completion in zip(prompts, completions, strict=True):
        output = model.base_model(input_ids=torch.cat([prompt, completion])[None], use_cache=False)
        hidden.append(output.last_hidden_state[0, len(prompt) - 1 : -1])
    return torch.cat(hidden)


def values_and_gradients(model, run):
    """Hidden states of ``run(model)``, and the gradient of a random weighted sum of them, by parameter."""
    model.zero_grad()
    hidden = run(model)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(shifted_seed(2)))
    (hidden * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden states": hidden.detach()} | gradients


def assert_as_exact(model, run, reference):
    """Equal in fp64; in fp32 as near to that as the reference is."""
    plain, ours = values_and_gradients(model, reference), values_and_gradients(model, run)
    with nothing_in_single_precision():
        double = copy.deepcopy(model).double()
        exact, in_double = values_and_gradients(double, reference), values_and_gradients(double, run)
    assert ours.keys() == plain.keys() == exact.keys()
    for name, value in exact.items():
        assert value.norm() > 0, name
        assert (in_double[name] - value).norm() <= 1e-13 * value.norm(), name
        budget = 3 * (plain[name] - value).norm() + 4 * torch.finfo(torch.float32).eps * value.norm()
        assert (ours[name] - value).norm() <= budget, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "mistral", "gemma3_text", "gpt2"])
def test_values_and_gradients_are_those_of_each_sequence_alone(family, layout):
    prompts, completions = sequences(layout)
    model, run = build(family), LAYOUTS[layout]
    check_rows_of(model, shared_prefix=layout != "packed")
    assert_as_exact(
        model, lambda m: run(m, prompts, completions).hidden, lambda m: alone(m, prompts, completions)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_through_a_lora_adapter_with_gradient_checkpointing(layout):
    peft = pytest.importorskip("peft")
    prompts, completions = sequences(layout)
    model = peft.get_peft_model(build("qwen3"), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    base = model.get_base_model()
    base.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    calls, run = [], LAYOUTS[layout]
    handle = base.model.layers[0].input_layernorm.register_forward_hook(lambda *args: calls.append(1))
    values_and_gradients(model, lambda m: run(m, prompts, completions).hidden)
    assert len(calls) == 2
    handle.remove()
    assert_as_exact(
        model,
        lambda m: run(m, prompts, completions).hidden,
        lambda m: alone(m.get_base_model(), prompts, completions),
    )


def test_the_row_has_no_padding_and_the_call_goes_through_the_model_itself():
    prompts, completions = sequences()
    model, seen, logits = build("qwen3"), [], []
    model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    model.lm_head.register_forward_hook(lambda m, args, output: logits.append(output.shape))
    packed = packed_hidden_states(model, prompts, completions)
    (kwargs,) = seen
    assert kwargs["input_ids"].shape == (1, sum(map(len, prompts + completions)) - 4)
    assert kwargs["use_cache"] is False and logits == [(1, 1, 64)]
    assert packed.hidden.shape == (19, 32) and torch.equal(packed.labels, torch.cat(completions))
    assert packed.cu_seqlens.tolist() == [0, 4, 10, 11, 19] and packed.cu_seqlens.dtype == torch.int32
    prompts, completions = sequences("shared prefix")
    shared_prefix_hidden_states(model, prompts, completions)
    assert seen[1]["input_ids"].shape == (1, 9 + 1 + 4 + sum(len(c) - 1 for c in completions))


def test_completions_that_branch_are_a_tree():
    """Turns that several completions share go through the model once, at any depth, and count for each."""
    a, b, c, d, e = (torch.arange(first, first + 3) for first in (3, 10, 17, 24, 31))
    prompts = [a, a, a, a, a[:2], b]
    completions = [torch.cat(parts) for parts in ((b, c, d), (b, c, e), (b, e), (b, c, d), (e,), (a,))]
    model, seen = build("qwen3"), []
    handle = model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    shared_prefix_hidden_states(model, prompts, completions)
    handle.remove()
    # a b c d, without its last; e behind c, behind b and behind a[:2]; b a
    assert seen[0]["input_ids"].numel() == 11 + 2 + 2 + 2 + 5
    assert_as_exact(
        model,
        lambda m: shared_prefix_hidden_states(m, prompts, completions).hidden,
        lambda m: alone(m, prompts, completions),
    )


def flash_stand_in(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """What flash-attention computes from its offsets, one sequence after the other."""
    assert attention_mask is None
    assert torch.equal(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    bounds = kwargs["cu_seq_lens_q"].tolist()
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == max(b - a for a, b in pairwise(bounds))
    options = {"is_causal": True, "scale": scaling, "enable_gqa": True}
    parts = [
        scaled_dot_product_attention(*(x[:, :, a:b] for x in (query, key, value)), **options)
        for a, b in pairwise(bounds)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def test_flash_attention_gets_the_offsets_and_no_mask(monkeypatch):
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_stand_in", flash_stand_in)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "flash_stand_in", flash_attention_mask)
    prompts, completions = sequences()
    model = build("qwen3").double()
    reference = packed_hidden_states(model, prompts, completions).hidden
    model.config._attn_implementation = "flash_stand_in"
    ours = packed_hidden_states(model, prompts, completions).hidden
    bound = 16 * torch.finfo(torch.float64).eps * reference.abs().max().item()
    assert (ours - reference).abs().max().item() <= bound
    with pytest.raises(InputError, match=r"update.shared_prefix: flash_stand_in takes no mask.*sdpa"):
        check_rows_of(model, shared_prefix=True)


ROWS = {
    "packed": [Segment(-1, length) for length in (3, 1, 6, 6)],
    "shared": [Segment(*each) for each in ((-1, 4), (0, 2), (0, 5), (0, 5), (-1, 1), (4, 3), (-1, 2))],
    "tree": [Segment(*each) for each in ((-1, 2), (0, 3), (1, 4), (1, 4), (0, 1), (3, 2), (-1, 5), (5, 1))],
}


def dense_mask(segments, window):
    """[T, T] bool by the definition: a token sees its path from the root, at most window back."""
    paths, first = [], 0
    for parent, length in segments:
        path = [] if parent < 0 else paths[sum(s.length for s in segments[: parent + 1]) - 1]
        for place in range(first, first + length):
            path = [*path, place]
            paths.append(path)
        first += length
    dense = torch.zeros(first, first, dtype=torch.bool)
    for place, path in enumerate(paths):
        dense[place, path[-window:] if window else path] = True
    return dense


@pytest.mark.parametrize("segments", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [None, 3])
def test_a_row_mask_is_the_dense_mask(segments, window):
    mask, dense = RowMask(segments, window, torch.device("cpu")), dense_mask(segments, window)
    assert mask.shape[-2:] == dense.shape and mask.dtype == torch.bool
    generator = torch.Generator().manual_seed(shifted_seed(0))
    qkv = torch.randn(3, 1, 2, len(dense), 4, generator=generator, dtype=torch.float64, requires_grad=True)
    results = []
    for each in (mask, dense):
        output = scaled_dot_product_attention(*qkv, attn_mask=each, scale=0.7)
        (gradient,) = torch.autograd.grad(output.square().sum(), qkv)
        results.append(torch.cat([output.detach().flatten(), gradient.flatten()]))
    assert (results[0] - results[1]).norm() <= 1e-14 * results[1].norm()


def test_a_model_that_cannot_be_packed_is_refused():
    with pytest.raises(InputError, match="attention reads its mask"):
        _ = RowMask([Segment(-1, 3), Segment(-1, 1)], None, torch.device("cpu")) | False
    for name, reason in (("mamba", "position_ids"), ("lfm2", "conv"), ("bloom", "position_ids")):
        with pytest.raises(InputError, match=f"{name.title()}.*cannot hold several sequences.*{reason}"):
            check_rows_of(tiny_model(name))
    model = build("qwen3")
    for name in ("eager", "flex_attention", "paged|sdpa"):
        model.config._attn_implementation = name
        words = rf"implementation is '{name.replace('|', '.')}'; load it with sdpa"
        with pytest.raises(InputError, match=words):
            check_rows_of(model)
    model.config._attn_implementation = "sdpa"
    # A convolution along the row, as a hybrid model without layer types would have.
    model.model.layers[0].register_forward_hook(lambda m, args, output: output + output.roll(1, dims=1))
    for shared_prefix in (False, True):
        with pytest.raises(InputError, match="differ from those of the sequences alone"):
            check_rows_of(model, shared_prefix=shared_prefix)
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(InputError, match="puts tokens before every row"):
        check_rows_of(peft.get_peft_model(build("qwen3"), config))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60), st.integers(0, 3))
def test_batches_hold_every_sequence_once_and_keep_the_budget(lengths, budget, more):
    batches = token_budget_batches(lengths, budget)
    fixed = token_budget_batches(lengths, budget, count=len(batches) + more)
    assert len(fixed) == len(batches) + more
    assert all(batches)
    for some in (batches, fixed):
        assert sorted(i for batch in some for i in batch) == list(range(len(lengths)))
        tokens = [sum(lengths[i] for i in batch) for batch in some]
        assert all(n <= budget or len(batch) == 1 for n, batch in zip(tokens, some, strict=True))
        assert tokens == sorted(tokens, reverse=True)
    # Empty only where there is no sequence left to give.
    assert sum(map(bool, fixed)) == min(len(fixed), len(lengths))
