"""Rows of several sequences give the values and gradients of each sequence alone; errors; micro-batches."""

import copy
import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.transformers import check_head
from gspo_kernels.models.rows import (
    RowMask,
    Segment,
    check_rows_of,
    hidden_states,
    packed_row,
    token_budget_batches,
    tree_row,
)
from tests.draws import shifted_seed
from tests.trainer.conftest import (
    ROPES,
    model_of_varying_rope,
    nothing_in_single_precision,
    stretch_rope,
    tiny_model,
)

LAYOUTS = {"packed": packed_row, "shared prefix": tree_row}


def build(family):
    if family in ROPES:
        return model_of_varying_rope(family)
    name = "qwen3" if family == "adapters" else family
    model = tiny_model(name, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    if family == "adapters":
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    with torch.no_grad():
        for parameter in model.parameters():  # so that attention is far from uniform
            parameter.normal_(std=0.3)
    if family == "qwen3_moe":
        model.set_experts_implementation("eager")  # the grouped product has no fp64
    return model


def sequences(layout="packed"):
    """Return lists of prompts and completions. With a shared prefix, copies of a prompt are adjacent."""
    generator = torch.Generator().manual_seed(shifted_seed(1))
    # Adjacent sequences of equal length attend as a batch; others have one token or exceed a window.
    shapes = ([5, 3, 9, 3], [4, 6, 1, 8]) if layout == "packed" else ([9, 1, 4], [7, 7, 1, 4, 6, 1])
    prompts, completions = (
        [torch.randint(1, 64, (n,), generator=generator) for n in each] for each in shapes
    )
    if layout != "packed":
        prompts = [prompts[group] for group in (0, 0, 0, 1, 1, 2)]
    return prompts, completions


def alone(model, prompts, completions):
    """Return the hidden states that predict completions, from a plain forward pass of each sequence."""
    hidden = []
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    for prompt, completion in zip(prompts, completions, strict=True):
        model.base_model(input_ids=prompt[None, :1])  # dynamic RoPE forgets the longest sequence so far
        output = model.base_model(input_ids=torch.cat([prompt, completion])[None], use_cache=False)
        hidden.append(output.last_hidden_state[0, len(prompt) - 1 : -1])
    return torch.cat(hidden)


def values_and_gradients(model, run):
    """Return hidden states of ``run(model)``, and gradients of a random weighted sum of them by parameter."""
    model.zero_grad()
    hidden = run(model)
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(shifted_seed(2)))
    (hidden * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"hidden states": hidden.detach()} | gradients


def assert_as_exact(model, run, reference):
    """Check that both are equal in fp64, and that in fp32 the error of ``run`` is about the reference's."""
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
@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_moe", "llama", "mistral", "gemma3_text", "gpt2", "adapters", *ROPES]
)
def test_rows_equal_each_sequence_alone(family, layout):
    prompts, completions = sequences(layout)
    model, row = build(family), LAYOUTS[layout]
    check_rows_of(model, row)
    assert_as_exact(
        model, lambda m: hidden_states(m, prompts, completions, row), lambda m: alone(m, prompts, completions)
    )


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_completions_that_branch_are_a_tree(family):
    """Turns that several completions share go through the model once, at any depth, but count for each.

    The model's head projects nothing, and nothing is cached.
    """
    a, b, c, d, e = (torch.arange(first, first + 3) for first in (3, 10, 17, 24, 31))
    prompts = [a, a, a, a, a[:2], b]
    completions = [torch.cat(parts) for parts in ((b, c, d), (b, c, e), (b, e), (b, c, d), (e,), (a,))]
    model, seen, logits = build(family), [], []
    model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    model.register_forward_hook(lambda m, args, output: logits.append(output.logits.shape))
    hidden_states(model, prompts, completions, tree_row)
    # "a b c d" without its last token; e after c, after b and after a[:2]; "b a"
    assert seen[0]["input_ids"].numel() == 11 + 2 + 2 + 2 + 5
    assert seen[0]["use_cache"] is False and logits == [(1, 22, model.config.hidden_size)]
    assert_as_exact(
        model,
        lambda m: hidden_states(m, prompts, completions, tree_row),
        lambda m: alone(m, prompts, completions),
    )


@pytest.mark.parametrize(
    "change", [lambda x: x.mul_(2), lambda x: x.index_fill_(-1, torch.tensor([3, 5]), -1e9)]
)
def test_logits_that_are_changed_in_place(change):
    """Rows do not depend on logits; the trainer's check refuses such a model."""
    model, (prompts, completions) = build("qwen3"), sequences()
    want, own = hidden_states(model, prompts, completions), model.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        output = own(*args, **kwargs)
        change(output.logits)
        return output

    model.forward = forward
    assert torch.equal(hidden_states(model, prompts, completions), want)
    with pytest.raises(IntegrationError, match="changes logits after the lm_head"):
        check_head(model)


def test_flash_attention_gets_the_offsets_and_no_mask():
    model = build("qwen3")
    model.config._attn_implementation = "flash_attention_2"
    inputs = packed_row(model, *sequences()).inputs
    lengths = [5 + 3, 3 + 5, 9 + 0, 3 + 7]  # without the last token of each sequence
    assert inputs["position_ids"].tolist() == [[place for length in lengths for place in range(length)]]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        assert inputs[name].tolist() == [0, 8, 16, 25, 35] and inputs[name].dtype == torch.int32
    assert inputs["max_length_q"] == inputs["max_length_k"] == 10
    assert inputs.keys() - {"input_ids", "position_ids"} == {
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    }
    with pytest.raises(IntegrationError, match=r"tree_row: flash_attention_2 takes no mask.*sdpa"):
        check_rows_of(model, tree_row)


def test_a_model_that_cannot_be_packed_is_refused():
    with pytest.raises(IntegrationError, match="attention reads its mask"):
        _ = RowMask([Segment(-1, 3), Segment(-1, 1)], None, torch.device("cpu")) | False
    for name, reason in (("mamba", "position_ids"), ("lfm2", "conv"), ("bloom", "position_ids")):
        with pytest.raises(
            IntegrationError, match=f"{name.title()}.*cannot hold several sequences.*{reason}"
        ):
            check_rows_of(tiny_model(name))
    model = build("qwen3")
    for name in ("eager", "flex_attention", "paged|sdpa"):
        model.config._attn_implementation = name
        words = rf"implementation is '{name.replace('|', '.')}'; load it with sdpa"
        with pytest.raises(IntegrationError, match=words):
            check_rows_of(model)
    model.config._attn_implementation = "sdpa"
    # like a convolution along the row, which a hybrid model without layer types would have
    model.model.layers[0].register_forward_hook(lambda m, args, output: output + output.roll(1, dims=1))
    for layout in LAYOUTS.values():
        with pytest.raises(IntegrationError, match="differ from those of the sequences alone"):
            check_rows_of(model, layout)
    model = stretch_rope(build("llama"))
    with pytest.raises(IntegrationError, match="differ from those of the sequences alone"):
        check_rows_of(model)


def test_the_check_has_no_dropout_and_finite_weights():
    model = build("gpt2").train()  # it drops a tenth
    check_rows_of(model)
    assert all(module.training for module in model.modules())
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = torch.nan
    with pytest.raises(IntegrationError, match=r"hidden states of GPT2LMHeadModel are not finite"):
        check_rows_of(model)


def test_one_percent_is_rounding_only_in_16_bit():
    model = build("qwen3")
    model.model.norm.register_forward_hook(
        lambda m, args, output: output * (1.01 if output.shape[1] > 9 else 1)
    )
    with pytest.raises(IntegrationError, match=r"differ from those .* by 1\.0% \(rounding: < 0\.1%\)"):
        check_rows_of(model)
    with torch.autocast("cpu", torch.bfloat16):
        check_rows_of(model)
    check_rows_of(model.bfloat16())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 60), st.integers(0, 3))
def test_batches_keep_the_budget(lengths, budget, more):
    batches = token_budget_batches(lengths, budget)
    fixed = token_budget_batches(lengths, budget, count=len(batches) + more)
    assert len(fixed) == len(batches) + more
    assert all(batches)
    for some in (batches, fixed):
        assert sorted(i for batch in some for i in batch) == list(range(len(lengths)))
        tokens = [sum(lengths[i] for i in batch) for batch in some]
        assert all(n <= budget or len(batch) == 1 for n, batch in zip(tokens, some, strict=True))
        assert tokens == sorted(tokens, reverse=True)
    # A batch is empty only if there are fewer sequences than batches.
    assert sum(map(bool, fixed)) == min(len(fixed), len(lengths))
