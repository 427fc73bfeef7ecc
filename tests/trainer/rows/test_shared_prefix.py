"""A shared prompt: equal to a copy per completion in values and gradients, completions independent."""

import pytest
import torch

from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rows.shared_prefix import (
    check_shared_prefix,
    shared_prefix_hidden_states,
    shared_prefix_tokens,
)
from tests.trainer.rows.packing_cases import (
    FAMILIES,
    assert_as_exact_as_padding,
    build,
    padded,
    sequences,
    values_and_gradients,
)


def grouped():
    """Three groups: ([prompt], [[completion]]) and the same as plain pairs."""
    prompts, completions = sequences([9, 1, 4], [4, 1, 7, 2, 6, 1])
    groups = [completions[:3], completions[3:5], completions[5:]]
    copies = [prompt for prompt, group in zip(prompts, groups, strict=True) for _ in group]
    return prompts, groups, copies, completions


def share(model, prompts, groups):
    return shared_prefix_hidden_states(model, prompts, groups).hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_a_prompt_per_completion(family):
    prompts, groups, copies, completions = grouped()
    assert_as_exact_as_padding(
        build(family), lambda m: share(m, prompts, groups), lambda m: padded(m, copies, completions)
    )


@pytest.mark.parametrize("group", [0, 1, 2])
def test_one_group_is_one_row(group):
    prompts, groups, _, _ = grouped()
    model = build("Qwen3")
    rows = []
    model.register_forward_pre_hook(lambda m, args, kwargs: rows.append(kwargs), with_kwargs=True)
    packed = shared_prefix_hidden_states(model, [prompts[group]], [groups[group]])
    lengths = [len(completion) for completion in groups[group]]
    assert packed.hidden.shape == (sum(lengths), 32)
    assert torch.equal(packed.labels, torch.cat(groups[group]))
    assert packed.cu_seqlens.diff().tolist() == lengths
    (row,) = rows
    T = shared_prefix_tokens(len(prompts[group]), lengths)
    assert row["input_ids"].shape == (1, T)
    assert row["attention_mask"].shape == (1, 1, T, T)
    assert len(lengths) * len(prompts[group]) + sum(lengths) > T


def test_a_completion_sees_its_prompt_and_itself_only():
    prompts, groups, _, _ = grouped()
    model = build("Qwen3")
    before = shared_prefix_hidden_states(model, prompts, groups)
    changed = [[groups[0][0], groups[0][1], groups[0][2] % 63 + 1], *groups[1:]]
    after = shared_prefix_hidden_states(model, prompts, changed)
    own = slice(*before.cu_seqlens[2:4].tolist())
    others = torch.ones(len(before.labels), dtype=torch.bool)
    others[own] = False
    assert torch.equal(before.hidden[others], after.hidden[others])
    # Its first token is predicted by the prompt alone.
    assert torch.equal(before.hidden[own][0], after.hidden[own][0])
    assert (before.hidden[own][1:] != after.hidden[own][1:]).any(1).all()

    embedded = []
    handle = model.get_input_embeddings().register_forward_hook(lambda *args: embedded.append(args[2]))
    hidden = share(model, prompts, groups)
    handle.remove()
    (gradient,) = torch.autograd.grad(hidden[own].sum(), embedded[0])
    touched = (gradient.abs().sum(2) > 0).nonzero().tolist()
    prompt, third = range(9), range(9 + 3 + 0, 9 + 3 + 0 + 6)
    assert touched == [[0, t] for t in (*prompt, *third)]


def test_through_a_lora_adapter_with_gradient_checkpointing():
    peft = pytest.importorskip("peft")
    prompts, groups, copies, completions = grouped()
    model = peft.get_peft_model(build("Qwen3"), peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    model.get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    calls = []
    layer = model.get_base_model().model.layers[0]
    layer.input_layernorm.register_forward_hook(lambda *args: calls.append(1))
    values_and_gradients(model, lambda m: share(m, prompts, groups))
    assert len(calls) == 2
    assert_as_exact_as_padding(
        model,
        lambda m: share(m, prompts, groups),
        lambda m: padded(m.get_base_model(), copies, completions),
    )


def test_flex_attention_gets_the_same_mask():
    from torch.nn.attention.flex_attention import BlockMask, create_mask

    prompts, groups, _, _ = grouped()
    masks = {}
    for implementation in ("sdpa", "flex_attention"):
        model = build("Mistral")  # one window for all layers
        model.config._attn_implementation = implementation

        class Taken(Exception):
            pass

        def take(module, args, kwargs, name=implementation):
            masks[name] = kwargs["attention_mask"]
            raise Taken

        model.register_forward_pre_hook(take, with_kwargs=True)
        with pytest.raises(Taken):
            share(model, prompts, groups)
    dense, block = masks["sdpa"], masks["flex_attention"]
    assert isinstance(block, BlockMask)
    rows, _, T, _ = dense.shape
    assert torch.equal(create_mask(block.mask_mod, rows, 1, T, T, device="cpu"), dense | False)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_accepts_what_is_exact(family):
    check_shared_prefix(build(family).train())


def test_the_check_refuses_what_is_not():
    model = build("Qwen3")
    model.model.layers[0].register_forward_hook(lambda m, args, output: output + output.roll(1, dims=1))
    with pytest.raises(ModelError, match="differ from those of the sequences alone"):
        check_shared_prefix(model)


def test_flash_attention_is_refused():
    model = build("Qwen3")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ModelError, match=r"flash_attention_2 takes no mask.*'sdpa'"):
        check_shared_prefix(model)


def test_groups_and_prompts_belong_together():
    prompts, groups, _, _ = grouped()
    with pytest.raises(ValueError, match="completions: got 2 groups for 3 prompts"):
        share(build("Qwen3"), prompts, groups[:2])
    with pytest.raises(ValueError, match="completions: got 0 for 0 prompts"):
        share(build("Qwen3"), prompts[:1], [[]])
