"""The fused head beside adapters, checkpointing, autocast, packed rows."""

import copy

import pytest
import torch
from torch import nn

from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.transformers import fuse_lm_head
from tests.draws import shifted_seed
from tests.integrations.fuse_lm_head.common import (
    IGNORED,
    SEEDS,
    assert_within_budget,
    batch,
    compared,
    gradients,
    logprobs_of,
    terms_of,
)
from tests.integrations.tiny_models import tiny
from tests.trainer.test_batch import nothing_in_single_precision


def adapted(model, **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(shifted_seed(1))
    config = peft.LoraConfig(
        r=4, init_lora_weights=False, **{"target_modules": ["q_proj", "v_proj"], **options}
    )
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["lm_head"]}], ids=["frozen head", "trained head"]
)
def test_lora(options):
    model = adapted(tiny(), **options)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any("lm_head" in n for n in trained) == bool(options)
    (got,), plain, truth = compared(model)
    assert {*got[0]} == trained | {"loss"}
    assert_within_budget(got, plain, truth)


def test_without_the_adapter_the_head_is_the_original_one():
    inputs, labels = batch()
    base = tiny()
    want, _ = logprobs_of(base(**inputs).logits, labels)
    model = fuse_lm_head(adapted(base, modules_to_save=["lm_head"]))
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    with model.disable_adapter():
        reference = model(**inputs, labels=labels, return_logprobs=True).logprobs
    torch.testing.assert_close(reference, want)
    assert not torch.allclose(model(**inputs, labels=labels, return_logprobs=True).logprobs, want)


def test_adapters_that_change_what_the_head_computes_are_refused():
    pytest.importorskip("peft", reason="peft is not installed")
    with pytest.raises(IntegrationError, match=r"lm_head of Qwen3ForCausalLM carries an adapter \(Linear\)"):
        fuse_lm_head(adapted(tiny(), target_modules=["q_proj", "lm_head"]))
    model = fuse_lm_head(tiny())
    inputs, labels = batch()
    with pytest.raises(IntegrationError, match="carries an adapter"):  # added afterwards
        adapted(model, target_modules=["lm_head"])(**inputs, labels=labels, return_logprobs=True)


def test_gradient_checkpointing_changes_no_bit():
    inputs, labels = batch()
    model = fuse_lm_head(tiny())
    terms = terms_of(model, inputs, labels)
    want = gradients(model, model(**inputs, labels=labels, **terms).loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    got = gradients(model, model(**inputs, labels=labels, **terms).loss)
    assert all(torch.equal(value, want[name]) for name, value in got.items())


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2, softcap", "Qwen3-MoE"])
def test_bf16_autocast(name):
    """Truth: an fp64 product of hidden states and weight in bf16; plain PyTorch rounds its logits to bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        (got,), plain, truth = compared(tiny(name))
    names = {"loss", "lm_head.weight"}
    ends = [[{n: each[n] for n in names & each.keys()} for each in kind] for kind in (got, plain, truth)]
    assert_within_budget(*ends, times=0.1)
    # the backbone rounds the gradient that reaches it to bf16: what differs least may differ by one rounding
    assert_within_budget(got, plain, truth, times=0.1, eps=torch.finfo(torch.bfloat16).eps)


def test_fp32_heads():
    model = tiny().bfloat16()
    model.lm_head.float()
    with torch.no_grad():
        model.lm_head.weight += 1e-3 * torch.randn(96, 32)  # not what bf16 can hold
    model.lm_head.forward = lambda hidden: nn.functional.linear(hidden.float(), model.lm_head.weight)
    (got,), plain, truth = compared(model)
    assert_within_budget(got, plain, truth)
    inputs, labels = batch()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(**inputs, labels=labels, return_logprobs=True).logprobs
        fuse_lm_head(model, fp32_head=True)
        kept = model(**inputs, labels=labels, return_logprobs=True).logprobs
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(**inputs).last_hidden_state.detach()
    want, _ = logprobs_of(hidden.double() @ model.lm_head.weight.detach().double().T, labels)
    torch.testing.assert_close(kept.double(), want, atol=1e-6, rtol=0)
    assert (rounded - want).abs().max() > 1e-4


def packed_batch(seed=0):
    """Three sequences in one row, one of them empty; and the same as padded rows."""
    lengths = (5, 0, 7, 4)
    ids = torch.randint(3, 96, (1, sum(lengths)), generator=torch.Generator().manual_seed(shifted_seed(seed)))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    padded, attention_mask = torch.zeros(4, 7, dtype=torch.int64), torch.zeros(4, 7, dtype=torch.int64)
    for i, length in enumerate(lengths):
        padded[i, :length] = ids[0, cu_seqlens[i] : cu_seqlens[i + 1]]
        attention_mask[i, :length] = 1
    return ids, cu_seqlens, padded, attention_mask


@pytest.mark.parametrize(
    ("name", "attention"), [("Qwen3", "sdpa"), ("Qwen3", "eager"), ("Gemma2, softcap", "eager")]
)
def test_packed_rows_equal_padded_ones(name, attention):
    model = fuse_lm_head(tiny(name, attention=attention))
    temperature = torch.tensor([0.7, 1.0, 1.3, 2.0])
    options = {"return_logprobs": True, "temperature": temperature}
    terms = {"advantages": torch.tensor([1.0, 2.0, -1.0, 0.5]), "temperature": temperature}
    precise, kinds = copy.deepcopy(model).double(), ([], [], [])
    for seed in SEEDS:
        # other tokens each time: errors of the same activations would be one draw, however often counted
        ids, cu_seqlens, padded, attention_mask = packed_batch(seed)
        inside = attention_mask.bool()
        rows = {"input_ids": padded, "attention_mask": attention_mask}
        rows["labels"] = padded.masked_fill(~inside, IGNORED)
        want = model(**rows, **options).logprobs
        got = model(ids, labels=ids, cu_seqlens=cu_seqlens, **options).logprobs
        assert got.shape == ids.shape
        torch.testing.assert_close(got[0], want[inside])
        rng = torch.Generator().manual_seed(shifted_seed(seed))
        old = want.detach() + 1e-3 * torch.randn(want.shape, generator=rng)
        by_rows = model(**rows, old_logprobs=old, **terms)
        with nothing_in_single_precision():
            truth = precise(**rows, old_logprobs=old.double(), **terms)
        out = model(ids, labels=ids, old_logprobs=old[inside].unsqueeze(0), cu_seqlens=cu_seqlens, **terms)
        assert out.logprobs.shape == ids.shape
        for key, value in by_rows.metrics.items():
            torch.testing.assert_close(out.metrics[key], value, msg=key)
        for kind, one, loss in zip(
            kinds, (model, model, precise), (out.loss, by_rows.loss, truth.loss), strict=True
        ):
            kind.append(gradients(one, loss))
    assert_within_budget(*kinds)


def test_packed_sequences_do_not_see_each_other():
    """Other tokens before and after a sequence change nothing in it: not with positions, nor without."""
    model = fuse_lm_head(tiny())
    ids, cu_seqlens, *_ = packed_batch()
    positions = torch.cat([torch.arange(n) for n in cu_seqlens.diff().tolist()]).unsqueeze(0)
    other = ids.clone()
    other[0, :5] = 3
    other[0, 12:] = 4
    options = {"cu_seqlens": cu_seqlens, "return_logprobs": True}
    want = model(ids, labels=ids, position_ids=positions, **options).logprobs
    for given in ({}, {"position_ids": positions}):
        assert torch.equal(model(ids, labels=ids, **given, **options).logprobs, want)
        got = model(other, labels=other, **given, **options).logprobs
        torch.testing.assert_close(got[0, 5:12], want[0, 5:12])
        assert not torch.allclose(got[0, :5], want[0, :5])


@pytest.mark.parametrize("name", ["OPT", "GPT-OSS"])
def test_models_whose_packed_sequences_would_see_each_other_are_refused(name):
    if name == "OPT":
        model = tiny("OPT", ffn_dim=32, word_embed_proj_dim=32)
    else:
        model = tiny("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=16, attention="eager")
    fuse_lm_head(model.train())
    ids, cu_seqlens, *_ = packed_batch()
    for _ in range(2):  # not only in the first call
        with pytest.raises(IntegrationError, match="packed sequences see each other"):
            model(ids, labels=ids, cu_seqlens=cu_seqlens, return_logprobs=True)
    assert all(module.training for module in model.modules())


def test_a_model_without_positions_is_refused_packed():
    model = fuse_lm_head(tiny("Bloom", n_head=2, n_layer=2))
    ids, cu_seqlens, *_ = packed_batch()
    with pytest.raises(IntegrationError, match="takes no position_ids"):
        model(ids, labels=ids, cu_seqlens=cu_seqlens, return_logprobs=True)
