"""The fused head gives the loss, scores and gradients of the logits path."""

import copy
import inspect

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.integrations import transformers
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.transformers import fuse_lm_head, unfuse_lm_head
from tests.draws import shifted_seed
from tests.integrations.fuse_lm_head.common import (
    IGNORED,
    assert_within_budget,
    batch,
    compared,
    gradients,
    logprobs_of,
    shifted,
    terms_of,
)
from tests.integrations.tiny_models import MODELS, tiny


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_all_gradients_equal_the_logits_path(name):
    model = tiny(name)
    (got,), plain, truth = compared(model)
    assert all(each.abs().sum() > 0 for each in got[0].values())
    assert_within_budget(got, plain, truth)
    for name in truth[0]:
        wrong = [{name: each[name] * (1 + 2.0**-16)} for each in got]
        with pytest.raises(AssertionError, match=name):
            assert_within_budget(wrong, *([{name: each[name]} for each in kind] for kind in (plain, truth)))


def test_other_objectives_and_schedules_go_through():
    options = ({"schedule": "two_pass"}, {"max_chunk_bytes": 96 * 4 * 5}, {"skip_inactive": "none"})
    every, plain, truth = compared(tiny(), {"objective": gk.GRPO()}, options)
    for got in every:
        assert_within_budget(got, plain, truth)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma2, softcap", "Phi, bias"])
def test_scores_are_the_log_softmax_at_the_position_that_predicts(name):
    model = tiny(name)
    inputs, labels = batch()
    want, want_entropy = logprobs_of(model(**inputs).logits / 0.7, labels)
    fuse_lm_head(model)
    scored = model(**inputs, labels=labels, return_logprobs=True, return_entropy=True, temperature=0.7)
    assert isinstance(scored, transformers.FusedLMOutput) and scored.logits is None and scored.loss is None
    torch.testing.assert_close(scored.logprobs, want)
    torch.testing.assert_close(scored.entropy, want_entropy)
    again = model(**inputs, shift_labels=shifted(labels), return_logprobs=True, temperature=0.7)
    assert torch.equal(again.logprobs, scored.logprobs) and again.entropy is None


def test_scores_carry_the_gradient_of_a_loss_on_log_probs():
    model = tiny()
    inputs, labels = batch()
    terms = terms_of(model, inputs, labels)
    fuse_lm_head(model)
    direct = model(**inputs, labels=labels, schedule="two_pass", **terms)
    want = gradients(model, direct.loss)
    logprobs = model(**inputs, labels=labels, return_logprobs=True).logprobs
    assert torch.equal(logprobs, direct.logprobs)
    loss = gk.policy_loss(logprobs, **terms, loss_mask=shifted(labels) != IGNORED).loss
    for name, value in gradients(model, loss).items():
        assert torch.equal(value, want[name]), name


def test_shift_labels_take_a_mask_and_labels_do_not():
    model = fuse_lm_head(tiny())
    inputs, labels = batch()
    terms = terms_of(model, inputs, labels)
    want = model(**inputs, labels=labels, **terms)
    targets = inputs["input_ids"].roll(-1, dims=1)
    got = model(**inputs, shift_labels=targets, loss_mask=shifted(labels) != IGNORED, **terms)
    assert torch.equal(got.loss, want.loss)
    with pytest.raises(IntegrationError, match="loss_mask: belongs to the tokens that positions predict"):
        model(**inputs, labels=labels, loss_mask=labels != IGNORED, **terms)


def test_the_same_weights_have_a_ratio_of_exactly_one():
    for name in ("Qwen3", "Gemma2, softcap", "Qwen3-MoE"):
        model = fuse_lm_head(tiny(name).bfloat16())
        inputs, labels = batch()
        old = model(**inputs, labels=labels, return_logprobs=True).logprobs.detach()
        assert old.dtype == torch.float32
        metrics = model(**inputs, labels=labels, old_logprobs=old, advantages=torch.ones(4)).metrics
        assert float(metrics["ratio/min"]) == float(metrics["ratio/max"]) == 1.0


def test_calls_without_our_arguments_are_the_models_own():
    model = tiny()
    inputs, labels = batch()
    before = model(**inputs, labels=labels, ignore_index=IGNORED)
    signature = inspect.signature(model.forward)
    prompt = {n: v[:2, :5] for n, v in inputs.items()}
    generated = model.generate(**prompt, do_sample=False, max_new_tokens=3)
    assert fuse_lm_head(model) is model and fuse_lm_head(model) is model
    after = model(**inputs, labels=labels, ignore_index=IGNORED)
    assert torch.equal(after.logits, before.logits) and torch.equal(after.loss, before.loss)
    assert inspect.signature(model.forward) == signature
    assert torch.equal(model.generate(**prompt, do_sample=False, max_new_tokens=3), generated)
    model(**inputs, labels=labels, return_logprobs=True)
    assert torch.equal(model(**inputs).logits, before.logits)  # nothing is left behind in the head
    unfuse_lm_head(unfuse_lm_head(model))
    assert "forward" not in model.__dict__ and "forward" not in model.lm_head.__dict__


def test_a_copy_is_fused_and_independent():
    model = fuse_lm_head(tiny())
    inputs, labels = batch()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
    scores = copied(**inputs, labels=labels, return_logprobs=True).logprobs
    counted = shifted(labels) != IGNORED
    torch.testing.assert_close(scores[counted], torch.full((int(counted.sum()),), -torch.tensor(96.0).log()))
    assert not torch.equal(model(**inputs, labels=labels, return_logprobs=True).logprobs, scores)


def test_a_forward_that_the_instance_had_before_is_called_and_restored():
    model = tiny()
    own, calls = model.forward, []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return own(*args, **kwargs)

    model.forward = counted
    inputs, labels = batch()
    fuse_lm_head(model)(**inputs, labels=labels, return_logprobs=True)
    assert len(calls) == 1
    fused = model.forward
    model.forward = counted
    with pytest.raises(IntegrationError, match="patched again"):
        unfuse_lm_head(model)
    model.forward = fused
    assert unfuse_lm_head(model).forward is counted


def largest_allocation(function):
    """Bytes of the largest block that any operator allocated."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as run:
        function()
    return max(event.self_cpu_memory_usage for event in run.events())


def test_logits_are_never_built():
    vocabulary, width = 4096, 64
    model = tiny(vocab_size=vocabulary)
    ids = torch.randint(3, vocabulary, (4, width), generator=torch.Generator().manual_seed(shifted_seed(0)))
    logits_bytes, advantages = ids.numel() * vocabulary * 4, torch.tensor([1.0, -1.0, 2.0, -2.0])
    rows = []
    own = model.lm_head.forward
    model.lm_head.forward = lambda hidden: rows.append(hidden.shape[:-1].numel()) or own(hidden)
    assert largest_allocation(lambda: model(ids).logits.sum().backward()) >= logits_bytes
    assert rows.pop() == ids.numel()
    fuse_lm_head(model)
    chunk = {"max_chunk_bytes": logits_bytes // 8}

    def score():
        return model(ids, labels=ids, return_logprobs=True, **chunk).logprobs

    def update():
        model(ids, labels=ids, old_logprobs=old, advantages=advantages, **chunk).loss.backward()

    old = score().detach()
    assert rows == [1]  # the head's product of one row was compared, once
    assert largest_allocation(score) <= logits_bytes // 4
    assert largest_allocation(update) <= logits_bytes // 4
    assert rows == [1]
