"""Objectives over groups of sequences: every way in gives the same, and what they refuse."""

import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.objectives.agro import AGRO
from gspo_kernels.objectives.clip_cov import ClipCov
from gspo_kernels.objectives.dpo import DPO
from gspo_kernels.objectives.egsw import EGSW
from gspo_kernels.objectives.kl_cov import KLCov
from gspo_kernels.objectives.rebel import REBEL
from gspo_kernels.objectives.trpa import TRPA
from tests.cases import LAYOUTS, generator, pad, replace, run
from tests.objectives.group_cases import (
    BATCHWIDE,
    IDS,
    LENGTHS,
    OBJECTIVES,
    arguments,
    case_of,
    coefficients,
    every,
)

ENTRIES = {
    "policy_loss": "logprobs",
    "fused_policy_loss": "logits",
    "fused_linear_policy_loss": "linear",
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@every
def test_padded_and_packed_agree(name):
    packed, padded = case_of(name), case_of(name, "padded")
    got = coefficients(padded, OBJECTIVES[name])[pad(replace(packed, loss_mask=None), 2).counted]
    torch.testing.assert_close(got, coefficients(packed, OBJECTIVES[name]), rtol=1e-11, atol=1e-14)


@every
@layouts
@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
def test_all_entry_points_agree(entry, layout, name):
    """From hidden states, from logits, and from the log-probs that these give: one loss, one gradient."""
    objective, kind = OBJECTIVES[name], ENTRIES[entry]
    case = case_of(name, layout, kind)
    found = run(case, entry, objective)
    other = "linear_token_logprobs" if kind == "linear" else "token_logprobs"
    with_entropy = run_with_entropy(case, other, objective)
    torch.testing.assert_close(found.loss, with_entropy[0], rtol=1e-11, atol=1e-14)
    torch.testing.assert_close(found.grads, with_entropy[1], rtol=1e-10, atol=1e-13)


def run_with_entropy(case, entry, objective):
    """``policy_loss`` of log-probs by a fused operator."""
    leaves = {key: value.detach().requires_grad_() for key, value in case.inputs.items()}
    if entry == "token_logprobs":
        tokens = gk.token_logprobs(leaves["logits"], case.labels, return_entropy=True)
    else:
        tokens = gk.linear_token_logprobs(
            leaves["hidden"], leaves["weight"], case.labels, bias=leaves["bias"], return_entropy=True
        )
    entropy = {"entropy": tokens.entropy} if "entropy" in objective.needs else {}
    loss = gk.policy_loss(
        tokens.logprobs, case.old_logprobs, case.advantages, **arguments(case, objective), **entropy
    ).loss
    loss.backward()
    return loss.detach(), {key: leaf.grad for key, leaf in leaves.items()}


@every
@layouts
def test_all_schedules_agree(layout, name):
    case, objective = case_of(name, layout, "linear"), OBJECTIVES[name]
    # a chunk holds any group but not two, and for "aligned" the batch where that is the scope
    rows = {"aligned": 21 if name in BATCHWIDE else 12}
    found = {
        schedule: run(
            case, "fused_linear_policy_loss", objective, schedule=schedule,
            max_chunk_bytes=rows.get(schedule, 5) * 61 * 8,
        )
        for schedule in ("two_pass", "aligned", "auto")
    }  # fmt: skip
    for schedule in ("aligned", "auto"):
        torch.testing.assert_close(found[schedule].loss, found["two_pass"].loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(
            found[schedule].grads, found["two_pass"].grads, rtol=1e-10, atol=1e-13, msg=schedule
        )
    for schedule in ("known", "deferred"):
        with pytest.raises(ValueError, match=r"schedule: .*not exact"):
            run(case, "fused_linear_policy_loss", objective, schedule=schedule)
    if objective.zero_advantage_is_inactive:
        skipping = run(case, "fused_linear_policy_loss", objective, skip_inactive="all")
        torch.testing.assert_close(skipping.grads, found["two_pass"].grads, rtol=1e-10, atol=1e-13)
        return
    with pytest.raises(ValueError, match="skip_inactive: 'all'"):
        run(case, "fused_linear_policy_loss", objective, skip_inactive="all")


@every
def test_a_frozen_head_may_defer_everything(name):
    case, objective = case_of(name, "packed", "linear"), OBJECTIVES[name]
    expected = run(case, "fused_linear_policy_loss", objective, schedule="two_pass").grads["hidden"]
    hidden = case.inputs["hidden"].clone().requires_grad_()
    given = {key: value for key, value in arguments(case, objective).items() if key != "entropy"}
    gk.fused_linear_policy_loss(
        hidden, case.inputs["weight"], case.labels, case.old_logprobs, case.advantages,
        bias=case.inputs["bias"], schedule="frozen", **given,
    ).loss.backward()  # fmt: skip
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-10, atol=1e-13)


@every
@pytest.mark.parametrize("entry", ["fused_policy_loss", "fused_linear_policy_loss"])
@pytest.mark.parametrize("parts", [[[0, 3], [1, 2, 5], [4, 6, 7, 8]], [[i] for i in range(9)]], ids=len)
def test_any_split_into_micro_batches_gives_the_same(parts, entry, name):
    """Coefficients of the whole batch, then each part's through ``Linear``, groups cut or not."""
    objective, kind = OBJECTIVES[name], ENTRIES[entry]
    case = case_of(name, "padded", kind)
    whole = run(case, entry, objective)
    entropy = {}
    if "entropy" in objective.needs:
        scores = case.inputs["logits"] if kind == "logits" else None
        if scores is None:
            scores = case.inputs["hidden"] @ case.inputs["weight"].T + case.inputs["bias"]
        entropy["entropy"] = gk.token_logprobs(scores, case.labels, return_entropy=True).entropy
    weights = gk.policy_coefficients(
        whole.logprobs, case.old_logprobs, case.advantages, **arguments(case, objective), **entropy
    )
    total = {key: torch.zeros_like(value) for key, value in case.inputs.items()}
    for rows in parts:
        part = replace(
            case, advantages=None, old_logprobs=None, labels=case.labels[rows],
            loss_mask=case.loss_mask[rows], terms={"token_weights": weights[rows]},
            inputs={k: v if k in ("weight", "bias") else v[rows] for k, v in case.inputs.items()},
        )  # fmt: skip
        for key, grad in run(part, entry, gk.Linear()).grads.items():
            if key in ("weight", "bias"):
                total[key] += grad
            else:
                total[key][rows] = grad
    torch.testing.assert_close(total, whole.grads, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in BATCHWIDE])
def test_micro_batches_of_whole_groups_add_up_with_a_normalizer(name):
    """The normalizer stands for what the divisor counts: pairs for pairwise objectives."""
    case, objective = case_of(name, "padded"), OBJECTIVES[name]
    # group 5: levels 1, 3, 1; group 7: levels 2, 1, 4; the group of two has no pair of different levels
    counted = {"TRPA": 2 + 3, "DPO": 2 + 3, "REBEL": 3 + 3 + 1, "AGRO": 8, "EGSW": 8, "REAL": 8}
    whole = coefficients(case, objective)
    for ids in ((5,), (7, -1)):
        rows = [i for i, group in enumerate(IDS) if group in ids]
        terms = {key: value[rows] for key, value in case.terms.items()}
        inputs = {key: value[rows] for key, value in case.inputs.items()}
        part = replace(
            case, terms=terms, inputs=inputs, advantages=case.advantages[rows], labels=case.labels[rows],
            old_logprobs=case.old_logprobs[rows], loss_mask=case.loss_mask[rows],
        )  # fmt: skip
        got = coefficients(part, objective, normalizer=float(counted[name]))
        torch.testing.assert_close(got, whole[rows], rtol=1e-11, atol=1e-14)


@every
def test_sequences_in_any_order(name):
    case, objective = case_of(name, "padded"), OBJECTIVES[name]
    whole = coefficients(case, objective)
    for seed in range(3):
        order = torch.randperm(9, generator=generator(seed))
        moved = replace(
            case, terms={key: value[order] for key, value in case.terms.items()},
            inputs={key: value[order] for key, value in case.inputs.items()},
            advantages=case.advantages[order], old_logprobs=case.old_logprobs[order],
            labels=case.labels[order], loss_mask=case.loss_mask[order],
        )  # fmt: skip
        torch.testing.assert_close(coefficients(moved, objective), whole[order], rtol=1e-10, atol=1e-14)


@every
def test_masked_positions_are_inert(name):
    case, objective = case_of(name, "padded"), OBJECTIVES[name]
    clean = coefficients(case, objective)
    for poison in (math.nan, math.inf, -math.inf):

        def spoil(value, poison=poison):
            if not value.is_floating_point() or value.shape != case.labels.shape:
                return value
            return value.masked_fill(~case.counted, poison)

        advantages = case.advantages.clone()
        advantages[5] = poison  # a sequence without tokens
        spoiled = replace(
            case, terms={key: spoil(value) for key, value in case.terms.items()}, advantages=advantages,
            inputs={key: spoil(value) for key, value in case.inputs.items()},
            old_logprobs=spoil(case.old_logprobs),
        )  # fmt: skip
        assert torch.equal(coefficients(spoiled, objective), clean)


@every
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_extreme_log_ratios(name, size):
    """Finite wherever fp64 fits: everything but exp of what a ratio overflows by. Never NaN."""
    case, objective = case_of(name), OBJECTIVES[name]
    for seed in range(5):
        sign = torch.randn(sum(LENGTHS), generator=generator(seed)).sign().double()
        # neither side is above 0
        inputs = {"logprobs": case.inputs["logprobs"] + (size * sign).clamp(max=0)}
        old = inputs["logprobs"] - size * sign
        terms = {key: old if key == "ref_logprobs" else value for key, value in case.terms.items()}
        extreme = replace(case, inputs=case.inputs | inputs, old_logprobs=old, terms=terms)
        got = coefficients(extreme, objective)
        loss = gk.policy_loss(
            extreme.inputs["logprobs"], old, extreme.advantages, **arguments(extreme, objective)
        ).loss
        assert not got.isnan().any() and not loss.isnan()
        if size == 30.0 or name in ("DPO", "REBEL", "AGRO"):
            assert got.isfinite().all() and loss.isfinite()


@every
def test_nothing_counted(name):
    case, objective = case_of(name), OBJECTIVES[name]
    logprobs = case.inputs["logprobs"].clone().requires_grad_()
    nothing = torch.zeros_like(case.loss_mask)
    loss = gk.policy_loss(
        logprobs, case.old_logprobs, case.advantages, **arguments(case, objective, loss_mask=nothing)
    ).loss
    loss.backward()
    assert loss == 0 and not logprobs.grad.any()


@pytest.mark.parametrize("name", BATCHWIDE)
@pytest.mark.parametrize("entry", ENTRIES)
def test_objectives_over_the_batch_refuse_micro_batches(entry, name):
    case = case_of(name, "packed", ENTRIES[entry])
    part = replace(case, terms={**case.terms, "normalizer": 8.0})
    with pytest.raises(ValueError, match=r"normalizer: .*policy_coefficients of the whole batch.*Linear"):
        run(part, entry, OBJECTIVES[name])


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in BATCHWIDE])
@pytest.mark.parametrize("entry", ENTRIES)
def test_groups_of_one_are_refused(entry, name):
    case = case_of(name, "packed", ENTRIES[entry])
    cut = torch.tensor((5, -1, 5, 7, 3, 5, 7, 5, 7))
    part = replace(case, terms={**case.terms, "group_ids": cut})
    with pytest.raises(ValueError, match=r"group_ids: group -1 has a single sequence.*Linear"):
        run(part, entry, OBJECTIVES[name])


@every
def test_what_is_needed_is_asked_for_by_name(name):
    case, objective = case_of(name), OBJECTIVES[name]
    for needed in objective.needs:
        with pytest.raises(ValueError, match=f"{needed}: got None, but {name} needs it"):
            coefficients(case, objective, **{needed: None})
    if not objective.takes_token_advantages:
        with pytest.raises(ValueError, match=r"advantages: .* takes one per sequence"):
            coefficients(replace(case, advantages=case.inputs["logprobs"]), objective)


@pytest.mark.parametrize(
    ("cls", "options", "kind", "named"),
    [
        (DPO, {"beta": -0.1}, ValueError, "beta"),
        (DPO, {"beta": "0.1"}, TypeError, "beta"),
        (DPO, {"min_gap": -1.0}, ValueError, "min_gap"),
        (TRPA, {"anisotropy": math.inf}, ValueError, "anisotropy"),
        (TRPA, {"kl_coef": -1.0}, ValueError, "kl_coef"),
        (REBEL, {"eta": math.nan}, ValueError, "eta"),
        (AGRO, {"beta": None}, TypeError, "beta"),
        (EGSW, {"temperature": 0.0}, ValueError, "temperature"),
        (EGSW, {"clip_low": 2.0}, ValueError, "clip_low"),
        (EGSW, {"alpha": -1.0}, ValueError, "alpha"),
        (ClipCov, {"clip_cov_ratio": 1.5}, ValueError, "clip_cov_ratio"),
        (ClipCov, {"clip_cov_lb": 6.0}, ValueError, "clip_cov_ub"),
        (ClipCov, {"seed": 1.5}, TypeError, "seed"),
        (KLCov, {"kl_cov_ratio": -0.1}, ValueError, "kl_cov_ratio"),
        (KLCov, {"ppo_kl_coef": -0.1}, ValueError, "ppo_kl_coef"),
    ],
)  # fmt: skip
def test_wrong_options_are_named(cls, options, kind, named):
    with pytest.raises(kind, match=f"^{named}: "):
        cls(**options)
