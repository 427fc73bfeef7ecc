"""Updates: old log-probs, the first minibatch's ratio, gradients that no micro-batch split changes."""

from dataclasses import replace

import pytest
import torch
from accelerate import Accelerator

import gspo_kernels as gk
from gspo_kernels.trainer.config import UpdateConfig
from gspo_kernels.trainer.errors import ConfigError
from gspo_kernels.trainer.rewards import Rewards
from gspo_kernels.trainer.rollout import Completions, completion_mask, left_pad
from gspo_kernels.trainer.updates import Experience, PolicyUpdater, learning_rate_factor, outer_count

from .conftest import tiny_qwen3

B, C, END = 8, 5, 9


def make_experience(seed=0):
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(10, 60, (1 + i % 4,), generator=generator).tolist() for i in range(B)]
    completion_ids = torch.randint(10, 60, (B, C), generator=generator)
    for row in range(B):
        completion_ids[row, 1 + row % C :] = END  # lengths 2 to C, the last ones truncated
    mask, finished = completion_mask(completion_ids, [END])
    completions = Completions(*left_pad(prompts, 0), completion_ids, mask, finished)
    advantages = torch.randn(B, generator=generator)
    loss_mask = mask & (torch.arange(B) != 2).unsqueeze(1)  # one completion does not count
    return Experience(completions, Rewards(advantages, {}), advantages, loss_mask)


def make_updater(tokenizer, objective, *, temperature=1.0, model=None, **changes):
    config = UpdateConfig(**({"minibatches": 2, "micro_batch_size": B, "learning_rate": 1e-3} | changes))
    model = model or tiny_qwen3(tokenizer)
    return PolicyUpdater(Accelerator(mixed_precision="no"), model, objective, config, temperature)


OBJECTIVES = [
    gk.GSPO(),
    gk.GSPO(aggregation="token_mean"),
    gk.GSPOToken(clip_low=0.1, clip_high=0.1),
    gk.GRPO(),
    gk.GRPO(aggregation="token_mean"),
    gk.GRPO(aggregation="sequence_mean_token_sum"),
    gk.GRPO(aggregation="sum"),
    gk.GRPO(aggregation="constant", aggregation_constant=7),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_micro_batches_add_up(tokenizer, objective):
    experience = make_experience()
    rows = torch.randperm(B, generator=torch.Generator().manual_seed(1))
    found = []
    for micro_batch_size in (B, 3, 1):
        updater = make_updater(tokenizer, objective, micro_batch_size=micro_batch_size)
        old_logprobs, _ = updater.score(experience, [rows])
        old_logprobs = old_logprobs + 1e-4 * torch.randn(B, C, generator=torch.Generator().manual_seed(2))
        divisor = outer_count(objective, experience.loss_mask)
        loss, logprobs = updater.accumulate(experience, old_logprobs, rows, divisor)
        gradients = {name: p.grad.clone() for name, p in updater.model.named_parameters()}
        found.append((loss, logprobs * experience.loss_mask[rows], gradients))
    for loss, logprobs, gradients in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-4, abs=1e-6)
        torch.testing.assert_close(logprobs, found[0][1], atol=1e-5, rtol=1e-5)
        for name, gradient in gradients.items():
            scale = float(found[0][2][name].abs().max())
            assert scale > 0
            torch.testing.assert_close(gradient, found[0][2][name], atol=1e-4 * scale, rtol=1e-3)


def test_gradient_is_that_of_the_whole_minibatch_by_autograd(tokenizer):
    """Against plain PyTorch: the model's own logits, log-softmax, and GSPO's Eq. 5 and 7 written out."""
    experience, temperature = make_experience(), 0.7
    updater = make_updater(tokenizer, gk.GSPO(), temperature=temperature, micro_batch_size=3)
    rows = torch.arange(B)
    old_logprobs, _ = updater.score(experience, [rows])
    updater.accumulate(experience, old_logprobs, rows, 7)  # one of the eight does not count
    ours = {name: p.grad.clone() for name, p in updater.model.named_parameters()}
    updater.model.zero_grad()

    input_ids, attention_mask, _ = experience.completions.inputs(rows)
    P = input_ids.shape[1] - C
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = updater.model(input_ids, attention_mask=attention_mask, position_ids=positions).logits
    logp = torch.log_softmax(logits[:, P - 1 : -1] / temperature, -1)
    logp = logp.gather(-1, input_ids[:, P:].unsqueeze(-1)).squeeze(-1)
    mask = experience.loss_mask
    torch.testing.assert_close(old_logprobs[mask], logp.detach()[mask], atol=1e-5, rtol=1e-5)
    lengths = mask.sum(1)
    ratios = (torch.where(mask, logp - logp.detach(), 0.0).sum(1) / lengths.clamp(min=1)).exp()
    loss = -(ratios * experience.advantages)[lengths > 0].sum() / (lengths > 0).sum()
    loss.backward()
    for name, parameter in updater.model.named_parameters():
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-4 * scale, rtol=1e-3)


@pytest.mark.parametrize("micro_batch_size", [B, 3])
def test_first_minibatch_has_ratio_one_and_later_ones_move(tokenizer, micro_batch_size):
    torch.manual_seed(0)
    updater = make_updater(tokenizer, gk.GSPO(), micro_batch_size=micro_batch_size)
    metrics = updater.update(make_experience())
    assert metrics["minibatch_1/ratio/min"] == metrics["minibatch_1/ratio/max"] == 1.0
    assert metrics["minibatch_1/clip_fraction/low"] == metrics["minibatch_1/clip_fraction/high"] == 0.0
    assert metrics["minibatch_2/ratio/max"] != 1.0
    assert metrics["ratio/min"] == min(metrics["minibatch_1/ratio/min"], metrics["minibatch_2/ratio/min"])
    assert 0.0 < metrics["entropy"] < 6.0


def test_what_does_not_count_is_inert(tokenizer):
    """Row 2 is left out of the loss: its tokens and its advantage change neither gradient nor loss."""
    experience, rows = make_experience(), torch.arange(B)
    other = make_experience()
    other.completions.completion_ids[2, 0] = 11
    other.advantages[2] = 1e6
    gradients = []
    for each in (experience, other):
        updater = make_updater(tokenizer, gk.GSPO(), micro_batch_size=4)
        old_logprobs, _ = updater.score(each, [rows])
        loss, _ = updater.accumulate(each, old_logprobs, rows, outer_count(gk.GSPO(), each.loss_mask))
        gradients.append([loss, *(p.grad.clone() for p in updater.model.parameters())])
    assert gradients[0][0] == gradients[1][0]
    assert all(torch.equal(a, b) for a, b in zip(gradients[0][1:], gradients[1][1:], strict=True))


def test_outer_count():
    mask = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)
    assert outer_count(gk.GSPO(), mask) == 2
    assert outer_count(gk.GRPO(aggregation="token_mean"), mask) == 5
    assert outer_count(gk.GRPO(aggregation="sum"), mask) == 1
    assert outer_count(gk.GSPO(), mask & False) == 1


def test_learning_rate_rises_then_stays(tokenizer):
    updater = make_updater(tokenizer, gk.GSPO(), warmup_updates=3, learning_rate=0.4)
    rates = []
    for _ in range(3):
        rates.append(updater.update(make_experience())["learning_rate"])
    assert rates == pytest.approx([0.3, 0.4, 0.4])


def test_an_update_with_gradients_that_are_not_finite_is_left_out(tokenizer):
    model = tiny_qwen3(tokenizer)
    updater = make_updater(tokenizer, gk.GSPO(), model=model)
    before = {name: p.clone() for name, p in model.named_parameters()}
    experience = make_experience()
    experience.advantages[0] = torch.inf
    metrics = updater.update(experience)
    assert metrics["updates_left_out"] > 0
    left_out = [metrics[f"minibatch_{n}/updates_left_out"] for n in (1, 2)]
    assert sorted(left_out) == [0.0, 1.0]
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_dropout_stays_off(tokenizer):
    updater = make_updater(tokenizer, gk.GSPO(), model=tiny_qwen3(tokenizer, attention_dropout=0.5))
    assert not updater.model.training
    assert updater.update(make_experience())["minibatch_1/ratio/max"] == 1.0


def test_completions_without_advantage_cost_nothing_and_still_count(tokenizer, monkeypatch):
    """The gradient is that of all of them: the divisor counts what the forward pass leaves out."""
    found = []
    for skip in (True, False):
        torch.manual_seed(0)
        updater = make_updater(tokenizer, gk.GSPO())
        experience = make_experience()
        experience.advantages[:4] = 0.0
        if not skip:
            monkeypatch.setattr(updater, "_active", lambda e: torch.ones(B, dtype=torch.bool))
        scored, inner = [], updater._hidden_and_labels

        def spy(completions, rows, scored=scored, inner=inner):
            scored.extend(rows.tolist())
            return inner(completions, rows)

        monkeypatch.setattr(updater, "_hidden_and_labels", spy)
        metrics = updater.update(experience)
        found.append((sorted(set(scored)), [metrics[f"minibatch_{n}/grad_norm"] for n in (1, 2)]))
    assert found[0][0] == [4, 5, 6, 7]
    assert found[1][0] == list(range(B))
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3)


def test_a_rollout_without_any_advantage_changes_nothing(tokenizer):
    updater = make_updater(tokenizer, gk.GSPO())
    before = [p.clone() for p in updater.model.parameters()]
    experience = make_experience()
    experience.advantages[:] = 0.0
    metrics = updater.update(experience)
    assert metrics["loss"] == metrics["grad_norm"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, updater.model.parameters(), strict=True))


def test_the_learning_rate_rises_and_then_falls_only_when_asked():
    config = UpdateConfig(steps=2, minibatches=4, warmup_updates=3)
    rates = [learning_rate_factor(update, config) for update in range(8)]
    assert rates == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]
    falling = replace(config, learning_rate_decay="linear")
    rates = [learning_rate_factor(update, falling) for update in range(9)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0])
    with pytest.raises(ConfigError, match=r"update\.learning_rate_decay"):
        replace(config, learning_rate_decay="cosine")
