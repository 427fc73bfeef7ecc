"""What holds for every objective: at extremes, through all entry points, however a batch is cut."""

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.linear.schedule import SCHEDULES
from tests.draws import shifted_seed
from tests.objectives.every import alone, close, coefficients, every, layouts
from tests.objectives.sample_batches import EVERY, make_batch


@every
@pytest.mark.parametrize("seed", range(2))
def test_extreme_log_ratios_never_give_nan(objective, seed):
    batch = make_batch(objective, seed=seed)
    rng = torch.Generator().manual_seed(shifted_seed(seed))
    for size in (50.0, 1e4):
        # old log-probs far below or above: whole sequences, then single tokens
        for shape in ((6, 1), (6, 7)):
            log_ratio = size * (2 * torch.rand(shape, generator=rng, dtype=torch.float64) - 1)
            log_ratio[rng_zero(shape, rng)] = size
            # neither side is above 0
            far = {
                "logprobs": batch.logprobs + log_ratio.clamp(max=0),
                "old_logprobs": batch.logprobs - log_ratio.clamp(min=0),
            }
            loss = batch.call(gk.policy_loss, objective, **far).loss
            got = coefficients(batch, objective, **far)
            assert not got.isnan().any()
            # without a clip both signs overflow
            assert not loss.isnan() or "identity" in vars(objective).values()
            if size == 50.0:
                assert loss.isfinite() and got.isfinite().all()
            if objective.zero_advantage_is_inactive and objective.coefficient_scope not in ("group", "batch"):
                assert not got[2].any()  # its advantage is 0


def rng_zero(shape, rng):
    return torch.rand(shape, generator=rng) < 0.3


BOUNDED = ("ABCGRPO", "CISPO", "DPPO", "TOPR", "VESPO", "SAPO", "GPG", "DRO", "PrimeIPO")


@every
@pytest.mark.parametrize("log_ratio", [-1e4, 1e4])
def test_bounded_coefficients_stay_finite(objective, log_ratio):
    sigmoid = type(objective).__name__ == "SSPO" and objective.gate == "sigmoid"
    if type(objective).__name__ not in BOUNDED and not sigmoid:
        pytest.skip("an unclipped ratio overflows")
    batch = make_batch(objective)
    logprobs = batch.logprobs + min(log_ratio, 0)
    got = coefficients(batch, objective, logprobs=logprobs, old_logprobs=logprobs - log_ratio)
    assert got.isfinite().all()


@pytest.mark.parametrize("name", ["GRPO", "DAPO", "GSPO", "LUSPO", "GSPOToken", "GMPO"])
def test_clipped_ratios_have_no_gradient_however_far_off(name):
    objective = EVERY[name]()
    logprobs = torch.full((2, 3), -1e4, dtype=torch.float64)
    logprobs[0] = 0.0
    old = -1e4 - logprobs
    got = gk.policy_coefficients(logprobs, old, torch.tensor([1.0, -1.0]).double(), objective=objective)
    assert torch.equal(got, torch.zeros_like(got))


@every
@layouts
def test_all_entry_points_agree(objective, layout):
    batch = make_batch(objective)
    if layout == "packed":
        batch = batch.packed()
    rng = torch.Generator().manual_seed(shifted_seed(1))
    shape, width, vocabulary = tuple(batch.logprobs.shape), 8, 23
    labels = torch.randint(vocabulary, shape, generator=rng)
    start = {
        "hidden": torch.randn(*shape, width, generator=rng, dtype=torch.float64),
        "weight": 0.3 * torch.randn(vocabulary, width, generator=rng, dtype=torch.float64),
    }

    def leaves():
        return {name: value.clone().requires_grad_() for name, value in start.items()}

    inputs = leaves()
    logits = inputs["hidden"] @ inputs["weight"].T
    tokens = gk.token_logprobs(logits, labels, return_entropy=True)
    # ratios near 1 here too, so that not everything is clipped
    old = tokens.logprobs.detach() - torch.where(batch.loss_mask, batch.logprobs - batch.old_logprobs, 0.0)
    given = {"loss_mask": batch.loss_mask, **batch.terms, "objective": objective}
    given.pop("entropy", None)
    entropy = {"entropy": tokens.entropy} if "entropy" in objective.needs else {}
    output = gk.policy_loss(tokens.logprobs, old, batch.advantages, **given, **entropy)
    output.loss.backward()
    expected = [output.loss.detach(), inputs["hidden"].grad, inputs["weight"].grad]

    inputs = leaves()
    fused = gk.fused_policy_loss(
        inputs["hidden"] @ inputs["weight"].T, labels, old, batch.advantages, **given
    )
    fused.loss.backward()
    close([fused.loss.detach(), inputs["hidden"].grad, inputs["weight"].grad], expected)
    for name, number in output.metrics.items():
        assert fused.metrics[name].item() == pytest.approx(number.item(), rel=1e-9, abs=1e-12)

    served = set()
    for schedule in (*SCHEDULES, "auto"):
        inputs = leaves()
        try:
            loss = gk.fused_linear_policy_loss(
                inputs["hidden"], inputs["weight"], labels, old, batch.advantages, **given, schedule=schedule
            ).loss
        except ValueError as error:
            assert "is not exact here" in str(error)
            continue
        served.add(schedule)
        loss.backward()
        close([loss.detach(), inputs["hidden"].grad, inputs["weight"].grad], expected)
    assert served >= {"aligned", "two_pass", "auto"}
    assert ("known" in served) == (objective.coefficient_scope in ("nothing", "token"))
    assert ("deferred" in served) == objective.factorizes

    frozen = start["hidden"].clone().requires_grad_()
    gk.fused_linear_policy_loss(
        frozen, start["weight"], labels, old, batch.advantages, **given, schedule="frozen"
    ).loss.backward()
    close(frozen.grad, expected[1])


@alone
def test_on_policy_through_every_entry(objective):
    """``old_logprobs=None`` equals old log-probs that are the current ones."""
    batch = make_batch(objective)
    rng = torch.Generator().manual_seed(shifted_seed(2))
    start = torch.randn(*batch.logprobs.shape, 23, generator=rng, dtype=torch.float64)
    labels = torch.randint(23, start.shape[:2], generator=rng)
    given = {"loss_mask": batch.loss_mask, **batch.terms, "objective": objective}
    given.pop("entropy", None)
    grads = []
    for old in (None, gk.token_logprobs(start, labels).logprobs):
        logits = start.clone().requires_grad_()
        gk.fused_policy_loss(logits, labels, old, batch.advantages, **given).loss.backward()
        grads.append(logits.grad)
    close(*grads)


@alone
def test_no_counted_token(objective):
    batch = make_batch(objective)
    logprobs = batch.logprobs.nan_to_num(0.0).requires_grad_()
    loss = batch.call(
        gk.policy_loss, objective, logprobs=logprobs, loss_mask=torch.zeros_like(batch.loss_mask)
    ).loss
    loss.backward()
    assert loss == 0 and not logprobs.grad.any()
