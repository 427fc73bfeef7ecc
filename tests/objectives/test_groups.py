"""Objectives over groups of sequences: the formula sheet in plain Python, draws, and what they refuse."""

import functools
import itertools
import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import AGRO, DPO, EGSW, REBEL, TRPA, ClipCov, KLCov
from gspo_kernels.objectives.groups import Groups
from tests import oracle
from tests.cases import KIND, generator, make_case, pad, replace, run

ENTRIES = ("policy_loss", "fused_policy_loss", "fused_linear_policy_loss")
# Groups of four (one sequence without a token), of two and of three, not side by side.
LENGTHS = (3, 2, 1, 4, 2, 0, 3, 2, 5)
IDS = (5, -1, 5, 7, -1, 5, 7, 5, 7)
LEVELS = (1.0, 2.0, 3.0, 2.0, 2.0, 1.0, 1.0, 1.0, 4.0)  # the group of two has no pair
REWARDS = (0.7, -1.2, 0.0, 2.0, 1.4, 9.0, -0.5, 0.3, 1.1)
OBJECTIVES = {
    "TRPA": TRPA(beta=0.7, kl_coef=0.2),
    "DPO": DPO(beta=0.3),
    "REBEL": REBEL(eta=0.8),
    "AGRO": AGRO(beta=0.4),
    "EGSW": EGSW(alpha=0.7, temperature=0.6, dual_clip=1.5),
    "ClipCov": ClipCov(clip_cov_ratio=0.1, clip_cov_lb=0.001, clip_cov_ub=5.0),
    "KLCov": KLCov(kl_cov_ratio=0.2, ppo_kl_coef=0.6),
}
PAIRWISE, BATCHWIDE = ("TRPA", "DPO", "REBEL"), ("ClipCov", "KLCov")
every = pytest.mark.parametrize("name", OBJECTIVES)


@functools.cache
def case_of(name, layout="packed", kind="logprobs", rollout=False):
    """A case with all that an objective needs, and a hole in its first sequence."""
    values = LEVELS if name in ("TRPA", "DPO") else REWARDS
    log_s = (0.2, -0.3, 0.1, 0.4, -0.2, 0.0, -0.4, 0.05, 0.3)
    case = make_case(
        kind, "packed", lengths=LENGTHS, advantages=values, log_s=log_s, dtype=torch.float64, noise=0.15
    )
    rng, needs, tokens = generator(7), OBJECTIVES[name].needs, sum(LENGTHS)
    mask = torch.ones(tokens, dtype=torch.bool)
    mask[1] = False
    terms = {}
    if "ref_logprobs" in needs:
        terms["ref_logprobs"] = case.old_logprobs + 0.3 * torch.randn(tokens, generator=rng).double()
    if "group_ids" in needs:
        terms["group_ids"] = torch.tensor(IDS)
    if rollout:
        terms["rollout_weights"] = 0.5 + torch.rand(len(LENGTHS), generator=rng).double()
    inputs = dict(case.inputs)
    if "entropy" in needs and kind == "logprobs":
        inputs["entropy"] = torch.rand(tokens, generator=rng).double()
    case = replace(case, inputs=inputs, terms=terms, loss_mask=mask)
    return case if layout == "packed" else pad(case, 2)


def arguments(case, objective, **changes):
    """Keywords of ``policy_loss`` from logprobs."""
    given = {"loss_mask": case.loss_mask, "cu_seqlens": case.cu_seqlens, **case.terms, "objective": objective}
    if "entropy" in case.inputs:
        given["entropy"] = case.inputs["entropy"]
    return {**given, **changes}


def coefficients(case, objective, **changes):
    return gk.policy_coefficients(
        case.inputs["logprobs"], case.old_logprobs, case.advantages, **arguments(case, objective, **changes)
    )


class Plain:
    """The sequences of a packed case as lists of floats."""

    def __init__(self, case):
        found = oracle.sequences(case.counted, case.cu_seqlens)
        pick = lambda tokens: [s.pick(tokens).tolist() for s in found]  # noqa: E731
        self.logp, self.old = pick(case.inputs["logprobs"]), pick(case.old_logprobs)
        self.ref = pick(case.terms["ref_logprobs"]) if "ref_logprobs" in case.terms else self.old
        self.entropy = pick(case.inputs["entropy"]) if "entropy" in case.inputs else self.old
        self.values = case.advantages.tolist()
        weights = case.terms.get("rollout_weights", torch.ones(len(found)))
        self.weights = weights.tolist()
        self.present = [i for i, tokens in enumerate(self.logp) if tokens]
        self.where = [s.where for s in found]
        self.counted = [s.counted for s in found]

    def l(self, i):  # noqa: E743
        return [a - b for a, b in zip(self.logp[i], self.old[i], strict=True)]

    def d(self, i):
        return [a - b for a, b in zip(self.logp[i], self.ref[i], strict=True)]

    def groups(self):
        return [[i for i in self.present if IDS[i] == group] for group in sorted(set(IDS))]

    def tokens(self, case, per_sequence):
        out = torch.zeros(case.labels.shape, dtype=torch.float64)
        for i in self.present:
            out[self.where[i]] = out[self.where[i]].masked_scatter(
                self.counted[i], torch.tensor(per_sequence[i], dtype=torch.float64)
            )
        return out


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def ppo(r, a, low=0.2, high=0.2, dual=None):
    """PPO's loss and its slope in log r."""
    if (a > 0 and r > 1 + high) or (a < 0 and r < 1 - low):
        return -(1 + high if a > 0 else 1 - low) * a, 0.0
    if dual is not None and a < 0 and r > dual:
        return -dual * a, 0.0
    return -r * a, -r * a


def stated_pairs(o, q, pairs, slope, value):
    """Mean over pairs; ``slope(i, j, sign)`` is the pair's slope in each of the tokens of i or j."""
    loss, g = 0.0, [[0.0] * len(tokens) for tokens in q.logp]
    for i, j in pairs:
        weight = (q.weights[i] + q.weights[j]) / 2 / len(pairs)
        loss += weight * value(i, j)
        for k, sign in ((i, 1), (j, -1)):
            g[k] = [a + weight * sign * slope(i, j) / (len(g[k]) if o == "TRPA" else 1) for a in g[k]]
    return loss, g


def stated(name, q):
    """Loss and coefficients of the sheet: aggregation included, "sequence_mean"."""
    o = OBJECTIVES[name]
    if name in PAIRWISE:
        within = [(i, j) for members in q.groups() for i, j in itertools.permutations(members, 2)]
        if name == "REBEL":
            pairs = [(i, j) for i, j in within if i < j]

            def residual(i, j):
                return sum(q.l(i)) - sum(q.l(j)) - o.eta * (q.values[i] - q.values[j])

            return stated_pairs(
                name, q, pairs, lambda i, j: 2 * residual(i, j), lambda i, j: residual(i, j) ** 2
            )
        pairs = [(i, j) for i, j in within if q.values[i] < q.values[j]]

        def strength(i):
            return o.beta * (o.anisotropy if name == "TRPA" and q.values[i] == 1 else 1)

        def h(i, j):
            score = lambda k: sum(q.d(k)) / (len(q.d(k)) if name == "TRPA" else 1)  # noqa: E731
            return strength(i) * (score(i) - score(j))

        loss, g = stated_pairs(
            name, q, pairs, lambda i, j: -strength(i) * sigmoid(-h(i, j)),
            lambda i, j: -math.log(sigmoid(h(i, j))),
        )  # fmt: skip
        if name == "TRPA":
            for pair in pairs:
                for k in pair:
                    l = q.l(k)  # noqa: E741
                    share = o.kl_coef * q.weights[k] / (2 * len(pairs) * len(l))
                    loss += share * sum(math.exp(-x) + x - 1 for x in l)
                    g[k] = [a + share * (1 - math.exp(-x)) for a, x in zip(g[k], l, strict=True)]
        return loss, g
    loss, g = 0.0, [[0.0] * len(tokens) for tokens in q.logp]
    count = len(q.present)
    if name == "AGRO":
        for members in q.groups():
            regularised = {i: q.values[i] - o.beta * sum(q.d(i)) for i in members}
            mean = sum(regularised.values()) / len(members)
            for i in members:
                loss += (regularised[i] - mean) ** 2 / 2 / count
                g[i] = [-o.beta * (regularised[i] - mean) / count] * len(g[i])
        return loss, g
    everything = [(i, t) for i in q.present for t in range(len(q.logp[i]))]
    if name == "EGSW":
        weight = {}
        for members in q.groups():
            merit = [
                math.exp((q.values[i] + o.alpha * sum(q.entropy[i]) / len(q.entropy[i])) / o.temperature)
                for i in members
            ]
            weight |= {i: m / sum(merit) for i, m in zip(members, merit, strict=True)}
        for i, t in everything:
            value, slope = ppo(math.exp(q.l(i)[t]), q.values[i], dual=o.dual_clip)
            share = weight[i] / len(g[i]) / count
            loss, g[i][t] = loss + share * value, share * slope
        return loss, g
    if name == "REAL":
        for members in q.groups():
            signs = {i: 1 if q.values[i] > o.threshold else -1 for i in members}
            score = {i: math.exp(-signs[i] * sum(q.l(i)) / len(q.l(i)) / o.tau) for i in members}
            if len(set(signs.values())) < 2:
                continue
            rest = {s: 1 + sum(score[i] for i in members if signs[i] == s) for s in (1, -1)}
            loss += len(members) * (math.log(rest[1]) + math.log(rest[-1])) / count
            for i in members:
                share = score[i] / rest[signs[i]] * len(members) / count
                g[i] = [-signs[i] * share / o.tau / len(g[i])] * len(g[i])
        return loss, g
    if name == "M2PO":
        pushed = [at for at in everything if q.values[at[0]] * q.l(at[0])[at[1]] > 0]
        pushed.sort(key=lambda at: q.l(at[0])[at[1]] ** 2)
        while pushed and sum(q.l(i)[t] ** 2 for i, t in pushed) / len(pushed) > o.threshold:
            pushed.pop()
        for i, t in everything:
            l, a = q.l(i)[t], q.values[i]  # noqa: E741
            if a * l <= 0 or (i, t) in pushed:
                value = -math.exp(l) * a / len(g[i]) / count
                loss, g[i][t] = loss + value, value
        return loss, g
    mean_a = sum(q.values[i] for i, _ in everything) / len(everything)
    mean_logp = sum(q.logp[i][t] for i, t in everything) / len(everything)
    cov = {(i, t): (q.values[i] - mean_a) * (q.logp[i][t] - mean_logp) for i, t in everything}
    special = max(1, int((o.clip_cov_ratio if name == "ClipCov" else o.kl_cov_ratio) * len(everything)))
    if name == "ClipCov":
        terms = {(i, t): ppo(math.exp(q.l(i)[t]), q.values[i]) for i, t in everything}
        candidates = sorted(
            (c, at) for at, c in cov.items()
            if o.clip_cov_lb < c < o.clip_cov_ub and (terms[at][1] != 0 or q.values[at[0]] == 0)
        )  # fmt: skip
        shuffled = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(o.seed)).tolist()
        assert len(candidates) > special
        for k in shuffled[:special]:
            terms[candidates[k][1]] = (0.0, 0.0)
    else:
        terms = {}
        for i, t in everything:
            l = q.l(i)[t]  # noqa: E741
            terms[i, t] = (-math.exp(l) * q.values[i],) * 2
        for _, at in sorted((-c, at) for at, c in cov.items())[:special]:
            l = q.l(at[0])[at[1]]  # noqa: E741
            value, slope = terms[at]
            terms[at] = (value + o.ppo_kl_coef * abs(l), slope + o.ppo_kl_coef * math.copysign(1, l))
    for (i, t), (value, slope) in terms.items():
        share = 1 / len(g[i]) / count
        loss, g[i][t] = loss + share * value, share * slope
    return loss, g


@every
def test_loss_and_coefficients_are_the_formula_sheets(name):
    case, objective = case_of(name), OBJECTIVES[name]
    plain = Plain(case)
    loss, per_sequence = stated(name, plain)
    leaf = case.inputs["logprobs"].clone().requires_grad_()
    output = gk.policy_loss(leaf, case.old_logprobs, case.advantages, **arguments(case, objective))
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    expected = plain.tokens(case, per_sequence)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-11, atol=1e-14)
    assert torch.equal(coefficients(case, objective), leaf.grad)
    assert expected.count_nonzero() > 3


@pytest.mark.parametrize("name", PAIRWISE)
def test_a_pairs_rollout_weight_is_the_mean_of_its_two(name):
    if name == "TRPA":
        pytest.skip("its KL takes each sequence's own")
    case = case_of(name, rollout=True)
    plain = Plain(case)
    expected = plain.tokens(case, stated(name, plain)[1])
    torch.testing.assert_close(coefficients(case, OBJECTIVES[name]), expected, rtol=1e-11, atol=1e-14)


def fp64(*values):
    return torch.tensor(values, dtype=torch.float64)


def loss_and_gradient(objective, logprobs, old, advantages, **terms):
    logprobs = logprobs.clone().requires_grad_()
    output = gk.policy_loss(logprobs, old, advantages, objective=objective, **terms)
    output.loss.backward()
    return output.loss.item(), logprobs.grad


def test_dpo_pairs_only_what_differs_enough():
    """Levels 1, 2, 3.5 in one group: gaps 1, 1.5 and 2.5; the middle one is left without a pair."""
    ref, d = torch.zeros(3, 1, dtype=torch.float64), fp64([0.4], [0.1], [-0.2])
    levels, group_ids, here = fp64(1.0, 2.0, 3.5), torch.zeros(3, dtype=torch.int64), torch.ones(3) > 0
    for gap, pairs in ((1.0, [(0, 2), (1, 2)]), (1.5, [(0, 2)]), (2.5, [])):
        dpo = DPO(beta=0.5, min_gap=gap)
        loss, g = loss_and_gradient(dpo, ref + d, None, levels, ref_logprobs=ref, group_ids=group_ids)
        losses = [math.log1p(math.exp(-0.5 * float(d[i] - d[j]))) for i, j in pairs]
        assert loss == pytest.approx(sum(losses) / max(len(losses), 1), rel=1e-14)
        paired = [any(i in pair for pair in pairs) for i in range(3)]
        assert dpo.paired(levels, group_ids, here).tolist() == paired
        assert dpo.count_pairs(levels, group_ids, here) == len(pairs)
        assert (g.flatten() != 0).tolist() == paired
    # who has no counted token is in no pair
    assert DPO().paired(levels, group_ids, torch.tensor([True, False, True])).tolist() == [True, False, True]


def test_trpa_defaults_are_the_codes():
    assert (TRPA().beta, TRPA().anisotropy, TRPA().kl_coef) == (0.1, 2.5, 1e-3)


def test_clip_cov_by_hand():
    """Means 0.5 and -2; covariances 0.5, -0.5, -0.5, 0.5: two candidates, one is drawn."""
    logprobs, advantages = fp64([-1.0, -3.0], [-1.0, -3.0]), fp64(1.0, 0.0)
    objective = ClipCov(clip_cov_lb=0.1)
    _, plain = loss_and_gradient(gk.GRPO(), logprobs, logprobs, advantages)
    _, g = loss_and_gradient(objective, logprobs, logprobs, advantages)
    drawn = {ClipCov(clip_cov_lb=0.1, seed=s): None for s in range(20)}
    for one in drawn:
        _, found = loss_and_gradient(one, logprobs, logprobs, advantages)
        drawn[one] = tuple((found != plain).flatten().tolist())
    # the first token with its gradient, or the fourth, which has none to lose
    assert set(drawn.values()) == {(True, False, False, False), (False,) * 4}
    assert torch.equal(g, loss_and_gradient(objective, logprobs, logprobs, advantages)[1])


@pytest.mark.parametrize("bounds", [(0.5, 0.6), (0.4, 0.5), (0.6, 9.0)])
def test_covariances_on_the_bounds_are_no_candidates(bounds):
    logprobs, advantages = fp64([-1.0, -3.0], [-1.0, -3.0]), fp64(1.0, 0.0)
    objective = ClipCov(clip_cov_ratio=1.0, clip_cov_lb=bounds[0], clip_cov_ub=bounds[1])
    _, g = loss_and_gradient(objective, logprobs, logprobs, advantages)
    assert torch.equal(g, loss_and_gradient(gk.GRPO(), logprobs, logprobs, advantages)[1])


def test_cov_defaults_are_verls():
    assert (ClipCov().clip_cov_ratio, ClipCov().clip_cov_lb, ClipCov().clip_cov_ub) == (2e-4, 1.0, 5.0)
    assert (KLCov().kl_cov_ratio, KLCov().ppo_kl_coef) == (2e-4, 1.0)


def test_groups_are_tables():
    ids, nonempty = torch.tensor([4, -1, 4, 9, 4]), torch.tensor([True, True, False, True, True])
    groups, values = Groups(ids, nonempty), fp64(1.0, 2.0, 3.0, 4.0, 5.0)
    table = groups.table(values)
    assert table.tolist() == [[2, 0, 0], [1, 3, 5], [4, 0, 0]]
    assert groups.present.tolist() == [[True, False, False], [True, False, True], [True, False, False]]
    assert torch.equal(groups.flat(table), values)
    assert groups.flat(groups.mean(table)).tolist() == [3, 2, 3, 4, 3]
    weights = groups.flat(groups.softmax(table))
    assert weights.tolist() == pytest.approx([sigmoid(-4), 1, 0, 1, sigmoid(4)])
    empty = Groups(ids[:0], nonempty[:0])
    assert empty.flat(empty.mean(empty.table(values[:0]))).shape == (0,)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in BATCHWIDE])
def test_micro_batches_of_whole_groups_add_up_with_a_normalizer(name):
    """The normalizer stands for what the divisor counts: pairs for pairwise objectives."""
    case, objective = case_of(name, "padded"), OBJECTIVES[name]
    # group 5: levels 1, 3, 1; group 7: levels 2, 1, 4; the group of two has no pair of different levels
    counted = {"TRPA": 2 + 3, "DPO": 2 + 3, "REBEL": 3 + 3 + 1, "AGRO": 8, "EGSW": 8}
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


@pytest.mark.parametrize("name", BATCHWIDE)
@pytest.mark.parametrize("entry", ENTRIES)
def test_objectives_over_the_batch_refuse_micro_batches(entry, name):
    case = case_of(name, "packed", KIND[entry])
    part = replace(case, terms={**case.terms, "normalizer": 8.0})
    with pytest.raises(ValueError, match=r"normalizer: .*policy_coefficients of the whole batch.*Linear"):
        run(part, entry, OBJECTIVES[name])


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in BATCHWIDE])
@pytest.mark.parametrize("entry", ENTRIES)
def test_groups_of_one_are_refused(entry, name):
    case = case_of(name, "packed", KIND[entry])
    cut = torch.tensor((5, -1, 5, 7, 3, 5, 7, 5, 7))
    part = replace(case, terms={**case.terms, "group_ids": cut})
    with pytest.raises(ValueError, match=r"group_ids: group -1 has a single sequence.*Linear"):
        run(part, entry, OBJECTIVES[name])
