"""PEFT's prompt learning: virtual tokens before the prompt, at which no label and no term lies."""

import copy

import pytest
import torch
from torch import nn

import gspo_kernels as gk
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.transformers import fuse_lm_head
from tests.draws import shifted_seed
from tests.integrations.tiny_models import tiny

peft = pytest.importorskip("peft", reason="peft is not installed")

KINDS = {
    "prompt tuning": ("PromptTuningConfig", {}),
    "p-tuning": ("PromptEncoderConfig", {"encoder_hidden_size": 16}),
    "prefix tuning": ("PrefixTuningConfig", {}),
}
B, T, VIRTUAL = 4, 9, 3


def adapted(kind):
    name, options = KINDS[kind]
    model = peft.get_peft_model(
        tiny(), getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, **options)
    )
    with torch.no_grad():  # so that the virtual tokens matter
        for parameter in model.prompt_encoder.parameters():
            parameter.add_(torch.randn(parameter.shape))
    return model.eval()


def problem():
    """Left-padded rows, the token that each position predicts, and every kind of term."""
    rng = torch.Generator().manual_seed(shifted_seed(0))
    ids = torch.randint(3, 96, (B, T), generator=rng)
    mask = (torch.arange(T) >= torch.tensor([2, 0, 1, 0]).unsqueeze(1)).long()
    labels = nn.functional.pad(ids[:, 1:], (0, 1), value=-100).masked_fill(mask == 0, -100)
    terms = {
        "old_logprobs": -5.0 + torch.rand(B, T, generator=rng),
        "advantages": torch.randn(B, T, generator=rng),
        "loss_mask": torch.rand(B, T, generator=rng) > 0.3,
        "rollout_weights": 0.5 + torch.rand(B, generator=rng),
        "ref_logprobs": -5.0 + torch.rand(B, T, generator=rng),
        "kl_beta": 0.1,
        "objective": gk.GRPO(),
    }
    return {"input_ids": ids, "attention_mask": mask}, labels, terms


def logprobs_of(logits, labels):
    """Of the labels, at the last T positions of the logits."""
    log_softmax = logits[:, -T:].log_softmax(-1)
    chosen = log_softmax.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels == -100, 0.0, chosen)


def gradients(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    got = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    return torch.cat([each.flatten() for each in got])


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_logits(kind):
    model = adapted(kind)
    inputs, labels, _ = problem()
    with torch.no_grad():
        expected = logprobs_of(model(**inputs).logits, labels)
        with model.disable_adapter():
            without = logprobs_of(model(**inputs).logits, labels)
        fused = fuse_lm_head(model)
        scored = fused(**inputs, shift_labels=labels, return_logprobs=True, return_entropy=True)
        with fused.disable_adapter():
            off = fused(**inputs, shift_labels=labels, return_logprobs=True).logprobs
    torch.testing.assert_close(scored.logprobs, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(off, without, rtol=1e-5, atol=1e-5)
    assert scored.entropy.shape == labels.shape
    assert (expected - without).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradient_are_those_of_the_logits(kind):
    inputs, labels, terms = problem()
    plain = adapted(kind)
    fused = fuse_lm_head(copy.deepcopy(plain))
    logprobs = logprobs_of(plain(**inputs).logits, labels)
    counted = terms["loss_mask"] & (labels != -100)
    expected = gk.policy_loss(logprobs, **{**terms, "loss_mask": counted})
    expected.loss.backward()
    got = fused(**inputs, shift_labels=labels, **terms)
    got.loss.backward()
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients(fused), gradients(plain), rtol=1e-4, atol=1e-6)
    assert gradients(plain).abs().max() > 1e-4
    assert got.logprobs.shape == labels.shape


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_placed_is_refused(kind):
    fused = fuse_lm_head(adapted(kind))
    inputs, labels, _ = problem()
    packed = {"input_ids": inputs["input_ids"].reshape(1, -1), "shift_labels": labels.reshape(1, -1)}
    with pytest.raises(IntegrationError, match="cu_seqlens: the virtual tokens of prompt learning"):
        fused(**packed, cu_seqlens=torch.arange(0, B * T + 1, T, dtype=torch.int32), return_logprobs=True)
    if kind != "prefix tuning":  # PEFT leaves its labels alone
        with pytest.raises(IntegrationError, match="labels: PEFT puts virtual tokens before the prompt"):
            fused(**inputs, labels=inputs["input_ids"], return_logprobs=True)
        with pytest.raises((TypeError, ValueError), match="labels"):  # not PEFT's number of tokens
            fused(**inputs, shift_labels=labels[:, 1:], return_logprobs=True)


def test_an_adapter_that_came_later_is_fused_anew():
    fused = fuse_lm_head(tiny())
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL)
    model = fuse_lm_head(peft.get_peft_model(fused, config))
    inputs, labels, _ = problem()
    assert model(**inputs, shift_labels=labels, return_logprobs=True).logprobs.shape == labels.shape


@pytest.mark.parametrize("kind", KINDS)
def test_in_trl_a_run_ends_at_its_weights(kind, tmp_path):
    pytest.importorskip("trl", reason='TRL is missing: pip install "gspo_kernels[trl]"')
    from trl import GRPOTrainer

    from gspo_kernels.integrations.trl import FusedGRPOTrainer
    from tests.integrations.trl_problem import make_trainer, save_model

    path = save_model(tmp_path / "model")
    name, options = KINDS[kind]
    ends, begin = [], []
    for trainer_class in (GRPOTrainer, FusedGRPOTrainer):
        torch.manual_seed(shifted_seed(7))
        config = getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=VIRTUAL, **options)
        trainer = make_trainer(
            trainer_class, path, tmp_path, peft_config=config, loss_type="grpo", beta=0.1, epsilon=0.02,
            importance_sampling_level="sequence", max_steps=8, learning_rate=1.0,
        )  # fmt: skip
        trained = [p for p in trainer.model.parameters() if p.requires_grad]
        begin.append(nn.utils.parameters_to_vector(trained).detach().clone())
        trainer.train()
        ends.append(nn.utils.parameters_to_vector(trained).detach().double())
    theirs, mine = ends
    assert torch.equal(*begin)
    assert (theirs - begin[0]).norm() > 1e-3 * theirs.norm()
    assert (theirs - mine).norm() <= 1e-6 * theirs.norm()
