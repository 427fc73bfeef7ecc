"""Packed rows: equal to padding in values and gradients, sequences independent, what is refused."""

import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import gspo_kernels as gk
from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rows.attention import Row, SegmentMask, dense_mask
from gspo_kernels.trainer.rows.packing import (
    check_packing,
    packed_hidden_states,
    packed_inputs,
    token_budget_batches,
)
from gspo_kernels.trainer.rows.policy import Policy
from tests.draws import shifted_seed
from tests.trainer.rows.packing_cases import (
    FAMILIES,
    SMALL,
    assert_as_exact_as_padding,
    build,
    padded,
    sequences,
    values_and_gradients,
)


def pack(model, prompts, completions):
    return packed_hidden_states(model, prompts, completions).hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_padding(family):
    prompts, completions = sequences()
    assert_as_exact_as_padding(
        build(family), lambda m: pack(m, prompts, completions), lambda m: padded(m, prompts, completions)
    )


def test_eager_attention_is_exact_too():
    prompts, completions = sequences()
    assert_as_exact_as_padding(
        build("Qwen3", attn_implementation="eager"),
        lambda m: pack(m, prompts, completions),
        lambda m: padded(m, prompts, completions),
    )


def test_labels_and_offsets_are_the_completions():
    prompts, completions = sequences()
    packed = packed_hidden_states(build("Llama"), prompts, completions)
    assert packed.hidden.shape == (19, 32)
    assert torch.equal(packed.labels, torch.cat(completions))
    assert packed.cu_seqlens.tolist() == [0, 4, 10, 11, 19]
    assert packed.cu_seqlens.dtype == torch.int32


def test_inputs_of_one_row():
    row = packed_inputs(*[[torch.tensor(t) for t in part] for part in ([[1, 2, 3], [7]], [[4, 5], [8]])])
    assert row["input_ids"].tolist() == [[1, 2, 3, 4, 7]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 0]]
    assert row["shift_labels"].tolist() == [[-100, -100, 4, 5, 8]]
    assert row["cu_seqlens"].tolist() == [0, 4, 5]
    assert row["use_cache"] is False
    assert "attention_mask" not in row


def test_inputs_without_a_model_let_transformers_find_the_sequences():
    prompts, completions = sequences()
    model = build("Qwen3").double()
    row = packed_inputs(prompts, completions)
    counted = row.pop("shift_labels")[0] != -100
    row.pop("cu_seqlens")
    found = model.base_model(**row).last_hidden_state[0, counted]
    assert torch.equal(found, pack(model, prompts, completions))


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])
def test_a_sequence_sees_nothing_of_the_others(family):
    prompts, completions = sequences()
    model = build(family)
    before = packed_hidden_states(model, prompts, completions)
    changed = [prompts[0], prompts[1], prompts[2] + 1, prompts[3]]
    after = packed_hidden_states(model, changed, completions)
    own = slice(*before.cu_seqlens[2:4].tolist())
    same = torch.ones(len(before.labels), dtype=torch.bool)
    same[own] = False
    assert torch.equal(before.hidden[same], after.hidden[same])
    assert not torch.equal(before.hidden[own], after.hidden[own])

    embedded = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *args: embedded.append(args[2]))
    hidden = packed_hidden_states(model, prompts, completions).hidden
    handle.remove()
    (gradient,) = torch.autograd.grad(hidden[own].sum(), embedded[0])
    begin = 8 + 6  # rows of the first two sequences: P + C - 1
    touched = gradient[0].abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == list(range(begin, begin + 9))


def test_the_row_has_no_padding_and_the_call_goes_through_the_model_itself():
    prompts, completions = sequences()
    model = build("Qwen3")
    seen = []
    model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    logits = []
    model.lm_head.register_forward_hook(lambda m, args, output: logits.append(output.shape))
    pack(model, prompts, completions)
    (kwargs,) = seen
    assert kwargs["input_ids"].shape == (1, sum(map(len, prompts + completions)) - 4)
    assert kwargs["use_cache"] is False
    assert logits == [(1, 1, 64)]


def test_through_a_lora_adapter():
    peft = pytest.importorskip("peft")
    prompts, completions = sequences()
    model = peft.get_peft_model(build("Qwen3"), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    assert_as_exact_as_padding(
        model,
        lambda m: pack(m, prompts, completions),
        lambda m: padded(m.get_base_model(), prompts, completions),
    )


def test_with_gradient_checkpointing():
    prompts, completions = sequences()
    model = build("Qwen3").double()
    plain = values_and_gradients(model, lambda m: pack(m, prompts, completions))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    calls = []
    model.model.layers[0].input_layernorm.register_forward_hook(lambda *args: calls.append(1))
    checkpointed = values_and_gradients(model, lambda m: pack(m, prompts, completions))
    assert len(calls) == 2
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_through_ddp():
    from torch import distributed

    prompts, completions = sequences()
    model = build("Qwen3")
    alone = values_and_gradients(model, lambda m: pack(m, prompts, completions))
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model.lm_head.requires_grad_(False)  # used outside by whoever computes the loss
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        ours = values_and_gradients(wrapped, lambda m: pack(m, prompts, completions))
    finally:
        # the wrapper first: were it the group's last owner, joining the group's threads could wait for the
        # GIL that it holds
        wrapped = None
        gc.collect()
        distributed.destroy_process_group()
    assert ours.keys() == {"hidden states"} | {f"module.{n}" for n in alone if n != "hidden states"}
    assert all(torch.equal(alone[name.removeprefix("module.")], ours[name]) for name in ours)


def flash_stand_in(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """What flash-attention computes from its offsets, one sequence after the other."""
    assert attention_mask is None
    assert torch.equal(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"])
    bounds = kwargs["cu_seq_lens_q"].tolist()
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == max(b - a for a, b in pairwise(bounds))
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[:, :, a:b] for x in (query, key, value)), is_causal=True, scale=scaling, enable_gqa=True
        )
        for a, b in pairwise(bounds)
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def test_flash_attention_gets_the_offsets_and_no_mask(monkeypatch):
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask

    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_stand_in", flash_stand_in)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "flash_stand_in", flash_attention_mask)
    prompts, completions = sequences()
    model = build("Qwen3").double()
    reference = pack(model, prompts, completions)
    model.config._attn_implementation = "flash_stand_in"
    ours = pack(model, prompts, completions)
    bound = 16 * torch.finfo(torch.float64).eps * reference.abs().max().item()
    assert (ours - reference).abs().max().item() <= bound


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_accepts_what_is_exact(family):
    check_packing(build(family).train())


ROWS = {
    "packed": [Row(0, [3, 1, 6])],
    "shared": [Row(4, [2, 0, 5]), Row(1, [3]), Row(2, [0, 1])],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [None, 3])
def test_a_segment_mask_is_the_dense_mask(rows, window):
    mask = SegmentMask(rows, window, torch.device("cpu"))
    dense = dense_mask(rows, window, torch.device("cpu"))
    assert mask.shape == dense.shape
    assert torch.equal(mask | False, dense)  # any operation but attention
    shape = (len(rows), 2, dense.shape[-1], 4)
    qkv = torch.randn(3, *shape, generator=torch.Generator().manual_seed(shifted_seed(0)), requires_grad=True)
    real = torch.zeros(shape)
    for row, own in zip(rows, real, strict=True):
        own[:, : row.tokens] = 1

    def attend(qkv, mask):
        output = scaled_dot_product_attention(*qkv, attn_mask=mask, scale=0.7)
        (gradient,) = torch.autograd.grad((output.square() * real).sum(), qkv)
        return [(output * real).detach(), gradient]

    truth, plain, ours = attend(qkv.double(), dense), attend(qkv, dense), attend(qkv, mask)
    for exact, same_dtype, mine in zip(truth, plain, ours, strict=True):
        budget = 2 * (same_dtype - exact).norm() + torch.finfo(torch.float32).eps * exact.norm()
        assert (mine - exact).norm() <= budget


def recurrent(name):
    import transformers

    options = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    if name == "Lfm2":
        options = SMALL | {"full_attn_idxs": [1]}
    return getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**options))


@pytest.mark.parametrize(
    ("name", "reason"), [("Mamba", "position_ids"), ("Lfm2", "conv"), ("Bloom", "position_ids")]
)
def test_a_model_that_cannot_be_packed_is_refused(name, reason):
    with pytest.raises(ModelError, match=f"{name}.*cannot hold several sequences.*{reason}"):
        check_packing(recurrent(name))


def test_an_unknown_attention_is_refused():
    model = build("Qwen3")
    model.config._attn_implementation = "paged|sdpa"
    with pytest.raises(ModelError, match=r"'paged\|sdpa'.*not known"):
        check_packing(model)


def test_a_model_that_does_something_else_with_the_row_is_refused():
    model = build("Qwen3")
    # A convolution along the row, as a hybrid model without layer types would have.
    model.model.layers[0].register_forward_hook(lambda m, args, output: output + output.roll(1, dims=1))
    with pytest.raises(ModelError, match="differ from those of the sequences alone"):
        check_packing(model)


def test_an_adapter_that_adds_tokens_is_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        build("Qwen3"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(ModelError, match="puts tokens of its own before every row"):
        check_packing(model)


@pytest.mark.parametrize(
    ("prompts", "completions", "message"),
    [
        ([[1]], [], "completions: got 0 for 1 prompts"),
        ([], [], "completions: got 0 for 0 prompts"),
        ([[1], []], [[1], [2]], r"prompts\[1\]: got shape \(0,\)"),
        ([[1]], [[]], r"completions\[0\]: got shape \(0,\)"),
        ([[[1]]], [[1]], r"prompts\[0\]: got shape \(1, 1\)"),
    ],
)
def test_sequences_that_cannot_be_packed(prompts, completions, message):
    with pytest.raises(ValueError, match=message):
        packed_inputs(list(map(torch.tensor, prompts)), list(map(torch.tensor, completions)))


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
    if batches:
        with pytest.raises(ValueError, match=f"count: got {len(batches) - 1}"):
            token_budget_batches(lengths, budget, count=len(batches) - 1)


def test_batches_are_balanced():
    assert token_budget_batches([8, 4, 4, 4, 4, 8], 16) == [[0, 1, 3], [2, 4, 5]]
    assert token_budget_batches([70, 70, 70], 100) == [[0], [1], [2]]
    assert token_budget_batches([30] * 7, 100) == [[0, 3, 6], [1, 4], [2, 5]]
    assert token_budget_batches([200, 10, 10], 100) == [[0], [1, 2]]


@pytest.mark.parametrize(("lengths", "budget"), [([1, 2], 0), ([0], 5)])
def test_budget_and_lengths_are_positive(lengths, budget):
    with pytest.raises(ValueError, match="positive"):
        token_budget_batches(lengths, budget)


def test_a_policy_scores_and_learns_batch_invariantly_where_it_is_to(monkeypatch):
    """Its head's results have the same bits however few completions share the row that its layers made."""
    prompts, completions = sequences()
    model = build("Qwen3")
    inputs = packed_hidden_states(model, prompts, completions)
    asked = []
    functions = {name: getattr(gk, name) for name in ("linear_token_logprobs", "fused_linear_policy_loss")}
    for name, function in functions.items():

        def noted(*args, inner=function, **options):
            asked.append(options["batch_invariant"])
            return inner(*args, **options)

        monkeypatch.setattr(gk, name, noted)
    for wanted, said in ((False, None), (True, True)):
        asked.clear()
        policy = Policy(model, layout="packed", temperature=1.0, batch_invariant=wanted)
        scored = policy(prompts, completions).logprobs
        terms = {"old_logprobs": scored.detach(), "advantages": torch.ones(len(prompts))}
        loss = policy(prompts, completions, terms)
        assert asked == [said, said]
    assert torch.equal(loss.logprobs, scored)
    few = inputs.hidden[:4].detach(), model.lm_head.weight, inputs.labels[:4]
    assert torch.equal(gk.linear_token_logprobs(*few, batch_invariant=True).logprobs, scored[:4])
