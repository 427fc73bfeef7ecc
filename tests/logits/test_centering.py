"""Score centering against its formula in plain PyTorch, and against what it is for: a mean score of zero."""

import dataclasses
import functools
import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.objectives.base import Objective
from tests.accuracy import assert_draws_as_exact
from tests.cases import device_of, generator, scores_of

WEIGHTS = {
    "GPG": lambda o, A, p, q: torch.ones_like(p),
    "CISPO": lambda o, A, p, q: (p / q).clamp(o.min_ratio, o.max_ratio),
    "ABCGRPO": lambda o, A, p, q: inside(p / q, *bounds(o, A)),
    "GRPO": lambda o, A, p, q: inside(p / q, *bounds(o, A)),
    "PrimeIPO": lambda o, A, p, q: torch.where((p - q).abs() <= o.eps, (p / q).clamp(max=o.max_ratio), 0.0),
}
"""f(p / q) of an objective for the advantage A, as its source writes it."""


def bounds(o, A):
    """Return the lowest and highest ratio that the clip lets pass."""
    if isinstance(o, gk.ABCGRPO) and A > 0:
        return 1 - o.positive_low, 1 + o.positive_high
    if isinstance(o, gk.ABCGRPO):
        return 1 - o.negative_low, 1 + o.negative_high
    return (0.0, 1 + o.clip_high) if A > 0 else (1 - o.clip_low, o.dual_clip or math.inf)


def inside(ratio, low, high):
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


OBJECTIVES = [
    gk.GPG(),
    gk.CISPO(0.7, 1.3, aggregation="sequence_mean"),
    gk.CISPO(0.0, 1e30, aggregation="sum"),  # the ratio itself
    gk.ABCGRPO(
        positive_low=0.5, positive_high=1.0, negative_low=0.3, negative_high=2.0,
        aggregation="constant", aggregation_constant=7.0,
    ),
    gk.GRPO(0.2, 0.28, dual_clip=3.0),
    gk.PrimeIPO(eps=0.02, max_ratio=1.5),
    gk.CISPO(0.6, 1.2, aggregation="prompt_mean"),
]  # fmt: skip


def by_backend(name, values, common):
    """Parametrize with all values on C++, and on other backends, which only compute log-probs, with one."""
    pairs = [("cpp", value) for value in values] + [(other, common) for other in ("reference", "triton")]
    return pytest.mark.parametrize(("backend", name), pairs, indirect=["backend"], ids=described)


def described(value):
    return f"{type(value).__name__}-{value.aggregation}" if isinstance(value, Objective) else str(value)


def weight_of_tail(objective, A, p, q):
    """Return f of the mass that is left, of which no id is large."""
    bounded = isinstance(objective, gk.PrimeIPO)
    each = dataclasses.replace(objective, eps=1e9) if bounded else objective
    return WEIGHTS[type(objective).__name__](each, A, p, q)


class Problem:
    """A batch with holes, repeated ids, fewer ids and none, and with anything where tokens don't count.

    ``far``: by how many nats policy and sampler prefer K candidates, from which the ids are, to all others.
    """

    def __init__(
        self, objective, K=5, *, V=61, dtype=torch.float32, linear=False, packed=False, draw=0, far=None
    ):  # fmt: skip
        rng, fixed = generator(300 + draw), generator(31)
        self.objective, self.packed, self.linear = objective, packed, linear
        self.part = slice(None)  # the tokens of this rank
        lengths = (1, 4, 0, 3) if packed else (4, 4)
        N = sum(lengths)
        self.lengths, self.cu_seqlens = lengths, torch.tensor((0, 1, 5, 5, 8)) if packed else None
        self.groups = torch.tensor((7, 7, 3, 3) if packed else (7, 3))
        self.mask = torch.ones(N, dtype=torch.bool)
        self.mask[2] = self.mask[5] = False
        self.ids = torch.stack([torch.randperm(K if far else V, generator=fixed)[:K] for _ in range(N)])
        self.ids[0, -1] = self.ids[0, 0]
        self.ids[1, 1 : min(K, 3)], self.ids[3, 0], self.ids[4] = torch.tensor([-1, -100])[: K - 1], -1, -1
        self.labels = torch.randint(0, V, (N,), generator=fixed)
        self.labels[0], self.labels[6] = self.ids[0, 0], self.ids[6, 1]
        q = torch.randn(N, V, generator=fixed, dtype=torch.float64).mul(1.5)
        if far:
            q[:, K:] -= far[1]
        q = q.log_softmax(-1)
        self.q = q.gather(-1, self.ids.clamp(min=0))
        self.old = q.gather(-1, self.labels.unsqueeze(-1)).squeeze(-1)
        self.advantages = torch.randn(N if packed else len(lengths), generator=fixed, dtype=torch.float64)
        self.weights = torch.rand(N, generator=fixed, dtype=torch.float64) + 0.5
        shapes = {"hidden": (N, 12), "weight": (V, 12), "bias": (V,)} if linear else {"logits": (N, V)}
        self.inputs = {
            name: torch.randn(*shape, generator=rng, dtype=torch.float64).mul(0.4 if linear else 1.5)
            for name, shape in shapes.items()
        }
        if far:
            self.inputs["bias" if linear else "logits"][..., K:] -= far[0]
        self.inputs = {name: value.to(dtype) for name, value in self.inputs.items()}

    def formulas(self, dtype):
        leaves = {name: value.to(dtype, copy=True).requires_grad_() for name, value in self.inputs.items()}
        log_p, o = scores_of(leaves).log_softmax(-1), self.objective
        loss, end = log_p.new_zeros(()), 0
        counts = [int(part.sum()) for part in self.mask.split(self.lengths)]
        prompts = {group: sum(torch.tensor(counts)[self.groups == group]) for group in self.groups.tolist()}
        outer = {
            "token_mean": sum(counts), "sequence_mean": sum(n > 0 for n in counts), "sum": 1.0,
            "constant": sum(n > 0 for n in counts) * (o.aggregation_constant or 1.0),
            "prompt_mean": len(prompts),
        }[o.aggregation]  # fmt: skip
        for i, length in enumerate(self.lengths):
            end += length
            for t in range(end - length, end):
                if not self.mask[t]:
                    continue
                inner = {"sequence_mean": counts[i], "prompt_mean": prompts[int(self.groups[i])]}
                share = 1.0 / outer / inner.get(o.aggregation, 1.0)
                advantage = self.advantages[t if self.packed else i].to(dtype)
                logp, old = log_p[t, self.labels[t]], self.old[t].to(dtype)
                p_label, q_label = logp.detach().exp(), old.exp()
                f = functools.partial(WEIGHTS[type(o).__name__], o, advantage)
                if isinstance(o, gk.ABCGRPO | gk.GRPO):
                    value = (p_label / q_label).clamp(*bounds(o, advantage))
                    policy = value + f(p_label, q_label) * (logp - logp.detach())
                elif isinstance(o, gk.PrimeIPO):
                    policy = f(p_label, q_label) * (1 + logp - logp.detach())
                else:
                    policy = f(p_label, q_label) * logp
                loss = loss - share * advantage * self.weights[t].to(dtype) * policy
                first = {int(v): k for k, v in reversed(list(enumerate(self.ids[t]))) if v >= 0}
                if not first:
                    continue
                ids = torch.tensor(list(first))
                q, p = self.q[t, list(first.values())].to(dtype).exp(), log_p[t, ids].detach().exp()
                rest = torch.ones_like(log_p[t], dtype=torch.bool).index_fill(0, ids, False)
                left = (self.q[t, list(first.values())].exp().sum() - 1).neg().to(dtype)
                tail = log_p[t, rest].logsumexp(-1)
                of_tail = left * weight_of_tail(o, advantage, tail.detach().exp(), left)
                loss = loss + share * advantage * ((q * f(p, q) * log_p[t, ids]).sum() + of_tail * tail)
        grads = torch.autograd.grad(loss, list(leaves.values()))
        named = {f"grad {name}": grad for name, grad in zip(leaves, grads, strict=True)}
        return {"loss": loss.detach(), **named}

    def arguments(self, device):
        """Labels, terms and centering; what does not count may be anything."""

        def tokens(values):
            return (values if self.packed else values.view(2, 4, *values.shape[1:]))[self.part].to(device)

        ids, q, old = self.ids.clone(), self.q.clone(), self.old.clone()
        ids[~self.mask], q[~self.mask], old[~self.mask] = 10**6, math.nan, math.nan
        q[self.ids < 0] = math.nan
        terms = {
            "old_logprobs": tokens(old), "advantages": self.advantages.to(device),
            "loss_mask": tokens(self.mask), "rollout_weights": tokens(self.weights),
            "centering": gk.ScoreCentering(tokens(ids), tokens(q)), "objective": self.objective,
        }  # fmt: skip
        if self.packed:
            terms["cu_seqlens"] = self.cu_seqlens.to(device)
        if self.objective.aggregation == "prompt_mean":
            terms["group_ids"] = self.groups.to(device)
        return tokens(self.labels), terms, tokens

    def ours(self, backend, given=False, **options):
        device = device_of(backend)
        leaves = {name: value.clone().to(device).requires_grad_() for name, value in self.inputs.items()}
        labels, terms, tokens = self.arguments(device)
        rows = {
            name: value if name in ("weight", "bias") else tokens(value) for name, value in leaves.items()
        }
        if given:
            logprobs = gk.token_logprobs(rows["logits"], labels, backend=backend).logprobs
            ids = tokens(self.ids)
            selected = gk.selected_logprobs(rows["logits"], ids, backend=backend)
            counted, (of_ids, tail) = terms["loss_mask"], selected
            selected = gk.SelectedLogprobs(
                of_ids.masked_fill(~counted.unsqueeze(-1), math.nan), tail.masked_fill(~counted, math.nan)
            )
            out = gk.policy_loss(logprobs, **terms, selected_logprobs=selected)
        elif self.linear:
            out = gk.fused_linear_policy_loss(**rows, labels=labels, **terms, backend=backend, **options)
        else:
            out = gk.fused_policy_loss(**rows, labels=labels, **terms, backend=backend, **options)
        grads = torch.autograd.grad(out.loss, list(leaves.values()))
        named = {f"grad {name}": grad.cpu() for name, grad in zip(leaves, grads, strict=True)}
        if "entropy" in out.metrics:
            named["entropy"] = out.metrics["entropy"].cpu()
        return {"loss": out.loss.detach().cpu(), **named}


def check(objective, backend, *, K=5, dtype=torch.float32, options=None, **kind):
    problems = [Problem(objective, K, dtype=dtype, draw=i, **kind) for i in range(3)]
    draws = [(p.formulas, functools.partial(p.ours, backend, **(options or {}))) for p in problems]
    assert_draws_as_exact(draws, dtype, compared=1 if backend == "triton" else None)


@by_backend("objective", OBJECTIVES, OBJECTIVES[1])
def test_equals_its_formula(objective, backend):
    check(objective, backend)
    check(objective, backend, packed=True, options={"given": True})
    chunks = {"max_chunk_bytes": 3 * 61 * 4}
    for schedule in ("known", "two_pass"):
        check(objective, backend, linear=True, packed=True, options={"schedule": schedule} | chunks)


SERVED = [
    *({"schedule": "two_pass"}, {"memory": "least"}, {"batch_invariant": True}),
    *({"skip_inactive": "all"}, {"skip_inactive": "none", "schedule": "known"}),
]


@pytest.mark.parametrize("options", SERVED, ids=str)
def test_schedules(options):
    check(OBJECTIVES[1], "auto", linear=True, options=options)


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype, linear, backend):
    check(OBJECTIVES[1], backend, dtype=dtype, linear=linear)


FAR = [(6.0, 6.0), (20.0, 6.0), (33.0, 33.0), (66.0, 6.0), (66.0, 66.0)]


@pytest.mark.parametrize("K", [2, 20])
@by_backend("far", FAR, FAR[3])
def test_ids_that_hold_nearly_all_mass(far, K, backend):
    """Tails down to 1e-27: alpha is the sampler's tail, or rounding in its place, over the policy's."""
    objectives = gk.GPG(), gk.CISPO(0.5, 2.0)
    check(objectives[K > 2], backend, K=K, far=far)
    check(objectives[K == 2], backend, K=K, far=far, linear=True, options={"max_chunk_bytes": 3 * 61 * 4})
    if backend == "cpp":
        check(gk.GPG(), backend, K=K, far=far, packed=True, options={"given": True})
        check(gk.GPG(), backend, K=K, far=far, linear=True, options={"schedule": "two_pass"})


# --- what it is for


def mean_score(objective, z, q, ids, kept=None, centered=True, backend="auto"):
    """Return the mean under q of a policy gradient with the advantage 1, with respect to the logits z [V].

    Every id is drawn once, as a token whose advantage is the id's q; ids with a q of 0 are not drawn.
    """
    V, device = len(z), device_of(backend)
    leaf, log_q = z.to(device).requires_grad_(), q.log().to(device)
    drawn = torch.where(q > 0, torch.arange(V), ids[0]).to(device)
    centering = gk.ScoreCentering(*(x.expand(1, V, -1) for x in (ids.to(device), log_q[ids.to(device)])))
    out = gk.fused_policy_loss(
        leaf.expand(1, V, V), drawn.view(1, V), log_q[drawn].view(1, V), q.to(device).view(1, V),
        objective=objective, normalizer=1.0, centering=centering if centered else None, backend=backend,
        kept_mask=None if kept is None else kept.to(device).expand(1, V, -1),
    )  # fmt: skip
    return torch.autograd.grad(out.loss, leaf)[0].cpu()


BY_TOKEN = [
    gk.GPG(), gk.CISPO(0.6, 1.4), gk.CISPO(0.0, 1e300), gk.PrimeIPO(eps=0.05, max_ratio=1.2),
    gk.ABCGRPO(positive_low=0.3, positive_high=0.5), gk.GRPO(0.2, 0.3),
]  # fmt: skip


@by_backend("objective", BY_TOKEN, BY_TOKEN[1])
@pytest.mark.parametrize("support", ["whole", "mask", "tail"])
def test_the_mean_score_under_the_sampler_is_zero(objective, support, backend):
    """With all ids, with all of a sampling mask, and with K ids and others in the proportions of p."""
    V, rng, kept = 23, generator(3), None
    q, noise = (torch.randn(V, generator=rng, dtype=torch.float64) for _ in range(2))
    z = q + 0.5 * noise
    q, p = q.softmax(-1), z.softmax(-1)
    ids = torch.randperm(V, generator=rng)
    if support != "whole":
        ids = ids[:9]
        rest = torch.ones(V, dtype=torch.bool).index_fill(0, ids, False)
        q[rest] = p[rest] * (q[rest].sum() / p[rest].sum()) if support == "tail" else 0.0
        q = q / q.sum()
        if support == "tail" and isinstance(objective, gk.PrimeIPO):  # of whose tail all ids are inside
            objective = dataclasses.replace(objective, eps=max(0.05, 2 * float((p - q)[rest].abs().max())))
    if support == "mask":
        kept = gk.kept_mask(ids.view(1, -1), V)
    centered = mean_score(objective, z, q, ids, kept, backend=backend)
    drift = mean_score(objective, z, q, ids, kept, centered=False, backend=backend)
    assert centered.abs().max() < 1e-14
    assert not isinstance(objective, gk.GPG) or drift.abs().max() > 1e-3


def test_full_support_leaves_no_tail(backend):
    """``alpha f(1 / alpha)`` is 0 there, for unbounded weights, too, where it would be 0 times infinity."""
    V, device = 7, device_of(backend)
    z = torch.linspace(-2, 1, V, device=device).double().expand(1, 2, V)
    log_p, log_q = z.log_softmax(-1), z.flip(-1).log_softmax(-1) - 1e-8  # rounded, so that they leave mass
    ids, labels = torch.arange(V, device=device).expand(1, 2, V), torch.tensor([[1, 4]], device=device)
    terms = {"advantages": torch.ones(1, device=device), "objective": gk.CISPO(0.0, 1e300, aggregation="sum")}
    terms["old_logprobs"] = log_q.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    own, centering = log_p.gather(-1, labels.unsqueeze(-1)).squeeze(-1), gk.ScoreCentering(ids, log_q)
    expected = gk.policy_loss(own, **terms).loss + (log_p.exp() * log_p).sum()
    of_all = gk.SelectedLogprobs(log_p, None)
    for loss in (
        gk.fused_policy_loss(z, labels, **terms, centering=centering, backend=backend).loss,
        gk.policy_loss(own, **terms, centering=centering, selected_logprobs=of_all).loss,
    ):
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)


# --- how it is computed


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_the_entropy_comes_along(linear, backend):
    """It changes nothing else."""
    problem, device = Problem(OBJECTIVES[1], linear=linear, packed=True), device_of(backend)
    labels, terms, _ = problem.arguments(device)
    loss = gk.fused_linear_policy_loss if linear else gk.fused_policy_loss
    results = []
    for asked in (True, False):
        leaves = {name: value.clone().to(device).requires_grad_() for name, value in problem.inputs.items()}
        out = loss(**leaves, labels=labels, **terms, backend=backend, return_entropy=asked)
        results.append([out.loss.detach(), *torch.autograd.grad(out.loss, list(leaves.values()))])
        if asked:
            wide = {name: value.detach().double() for name, value in leaves.items()}
            log_p = scores_of(wide).log_softmax(-1)
            expected = -(log_p.exp() * log_p).sum(-1)[problem.mask]
            torch.testing.assert_close(out.entropy[problem.mask].double(), expected, rtol=1e-5, atol=1e-5)
            assert out.metrics["entropy"].item() == pytest.approx(expected.mean().item(), rel=1e-5)
    assert all(map(torch.equal, *results))


def test_a_head_with_an_adapter():
    problem = Problem(OBJECTIVES[1], linear=True, dtype=torch.float64)
    weight, A, B = problem.inputs["weight"], torch.randn(3, 12).double(), torch.randn(61, 3).double()
    labels, terms, tokens = problem.arguments("cpu")
    results = []
    for schedule in ("known", "two_pass"):
        for lora in (False, True):
            leaves = [tokens(problem.inputs["hidden"]).clone(), A.clone(), B.clone()]
            hidden, a, b = (leaf.requires_grad_() for leaf in leaves)
            head = gk.LoRAHead(weight, a, b, 0.5) if lora else weight + 0.5 * b @ a
            out = gk.fused_linear_policy_loss(hidden, head, labels, **terms, schedule=schedule)
            results.append([out.loss, *torch.autograd.grad(out.loss, leaves)])
    for each in results[1:]:
        torch.testing.assert_close(each, results[0], rtol=1e-10, atol=1e-12)


@by_backend("ignore_index", [-1, 3, 66], 3)
def test_any_ignore_index(ignore_index, backend):
    problem = Problem(OBJECTIVES[1])
    labels, terms, tokens = problem.arguments(device_of(backend))
    mask = terms.pop("loss_mask") & (labels != 3)
    logits = tokens(problem.inputs["logits"]).to(labels.device).requires_grad_()
    head, results = torch.eye(61, device=labels.device), []
    for ignored, loss_mask in ((-100, mask), (ignore_index, mask), (ignore_index, None)):
        given = terms | {"ignore_index": ignored, "loss_mask": loss_mask, "backend": backend}
        given["labels"] = labels.where(mask, ignored) if loss_mask is None else labels
        losses = [gk.fused_policy_loss(logits, **given).loss]
        for schedule in ("known", "two_pass"):
            losses.append(gk.fused_linear_policy_loss(logits, head, schedule=schedule, **given).loss)
        results.append([x for loss in losses for x in (loss.detach(), *torch.autograd.grad(loss, logits))])
    for each in results[1:]:
        torch.testing.assert_close(each, results[0], rtol=0, atol=0)


@pytest.mark.parametrize("linear", [False, True], ids=["logits", "hidden"])
def test_masks_of_tokens_that_do_not_count(linear, backend):
    """Padding has ids of 0 and masks of 0, which cut them."""
    device, rng = device_of(backend), generator(5)
    scores = torch.randn(2, 4, 61, generator=rng, dtype=torch.float64).to(device).requires_grad_()
    kept = torch.rand(2, 4, 61, generator=rng) < 0.7
    q = torch.randn(2, 4, 61, generator=rng).masked_fill(~kept, -math.inf).log_softmax(-1).to(device)
    logprobs, ids = q.topk(3)
    words = gk.kept_mask(torch.where(kept, torch.arange(61), -1), 61).to(device)
    labels, old, advantages = ids[..., 0], logprobs[..., 0], torch.tensor([1.0, -1.0], device=device)
    mask = torch.ones(2, 4, dtype=torch.bool, device=device)
    mask[0, 2:] = False
    call, results = functools.partial(gk.fused_policy_loss, scores), []
    if linear:
        call = functools.partial(gk.fused_linear_policy_loss, scores, torch.eye(61, device=device).double())
    for _ in range(2):
        loss = call(
            labels, old, advantages, loss_mask=mask, kept_mask=words, backend=backend, objective=gk.GPG(),
            centering=gk.ScoreCentering(ids, logprobs),
        ).loss  # fmt: skip
        results.append((loss.detach(), *torch.autograd.grad(loss, scores)))
        logprobs, ids, words = (x.masked_fill(~mask.unsqueeze(-1), 0) for x in (logprobs, ids, words))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


# --- what is refused


HIDDEN = Problem(OBJECTIVES[1], linear=True, packed=True)
LABELS, TERMS, _ = HIDDEN.arguments("cpu")
IDS, LOGPROBS, SOME = TERMS["centering"].ids, TERMS["centering"].logprobs, TERMS["centering"].ids[1, 3]
center, given = gk.ScoreCentering, gk.SelectedLogprobs


class Steeper(gk.GRPO):
    """Has a different loss than PPO's clip."""

    def evaluate(self, batch):
        loss = super().evaluate(batch)
        return loss._replace(loss=2.0 * loss.loss)


REFUSED = [
    ("centering: GSPO", {"objective": gk.GSPO(), "advantages": torch.ones(4), "rollout_weights": None}),
    ("SAPO can't be centered", {"objective": gk.SAPO()}),
    ("Steeper can't be centered", {"objective": Steeper()}),
    ("PrimeIPO can't", {"objective": gk.PrimeIPO(kl_tau=0.1)}),
    ("centering: .*high=1.3", {"centering": center(IDS, LOGPROBS, gk.RatioWeight(high=2.0))}),
    ("old_logprobs: got None", {"old_logprobs": None}),
    ("token_weights: got a tensor", {"token_weights": torch.ones(8)}),
    ("return_entropy: got True, expected False", {"return_entropy": True, "schedule": "two_pass"}),
    ("has no gradient of the entropy", {"entropy_coef": 0.1}),
    *((f"schedule: '{name}'", {"schedule": name}) for name in ("aligned", "deferred", "frozen")),
    ("schedule: 'known'", {"schedule": "known", "batch_invariant": True}),
    (r"centering.ids: got shape \(7, 5\)", {"centering": center(IDS[:7], LOGPROBS[:7])}),
    ("centering.logprobs: got shape", {"centering": center(IDS, LOGPROBS[:, :4])}),
    *((f"centering.ids: got {wrong}", {"centering": center(IDS.masked_fill(IDS == SOME, wrong), LOGPROBS)})
      for wrong in (-3, 61)),
    ("centering.logprobs: got NaN", {"centering": center(IDS, LOGPROBS * math.nan)}),
    ("centering.logprobs: got 2 at", {"centering": center(IDS, torch.full_like(LOGPROBS, 2.0))}),
    *((f"labels: got {label}", {"labels": LABELS.masked_fill(HIDDEN.mask, label)}) for label in (-5, 61)),
    ("centering.ids: got .* mask", {"kept_mask": gk.kept_mask(LABELS.unsqueeze(-1), 61)}),
]  # fmt: skip
REFUSED_OF_LOGPROBS = [
    ("selected_logprobs: got a tensor", {"centering": None, "selected_logprobs": given(HIDDEN.q, None)}),
    ("selected_logprobs.logprobs: got shape", {"selected_logprobs": given(HIDDEN.q[:, :4], None)}),
    ("selected_logprobs.tail: got shape", {"selected_logprobs": given(HIDDEN.q, HIDDEN.q)}),
    ("selected_logprobs.tail: .*gradient",
     {"selected_logprobs": given(HIDDEN.q.clone().requires_grad_(), HIDDEN.q[:, 0])}),
]  # fmt: skip


def test_unsupported_centering_is_an_error():
    whole = functools.partial(gk.fused_linear_policy_loss, **HIDDEN.inputs)
    of_logprobs = functools.partial(gk.policy_loss, HIDDEN.old.clone())
    arguments = TERMS | {"labels": LABELS}
    whole(**arguments | {"centering": center(IDS, LOGPROBS, gk.RatioWeight(0.7, 1.3))})
    for function, shared, cases in ((whole, arguments, REFUSED), (of_logprobs, TERMS, REFUSED_OF_LOGPROBS)):
        for match, changes in cases:
            with pytest.raises(ValueError, match=match):
                function(**shared | changes)
    for match, wrong in (("got dict", {}), ("centering.ids: got torch.float64", center(LOGPROBS, LOGPROBS))):
        with pytest.raises(TypeError, match=match):
            whole(**arguments | {"centering": wrong})
    with pytest.raises(TypeError, match="selected_logprobs: got NoneType"):
        of_logprobs(**TERMS)


def test_results_do_not_depend_on_rows_or_chunks():
    problem = Problem(OBJECTIVES[1], linear=True)
    labels, terms, tokens = problem.arguments("cpu")
    weight, bias = problem.inputs["weight"], problem.inputs["bias"]
    centering = terms.pop("centering")

    def gradients(first, last, **options):
        leaves = [tokens(problem.inputs["hidden"])[first:last].clone(), weight.clone(), bias.clone()]
        hidden, head, own_bias = (leaf.requires_grad_() for leaf in leaves)
        some = {name: x[first:last] if isinstance(x, torch.Tensor) else x for name, x in terms.items()}
        out = gk.fused_linear_policy_loss(
            hidden, head, labels[first:last], bias=own_bias, **some,
            centering=gk.ScoreCentering(centering.ids[first:last], centering.logprobs[first:last]),
            normalizer=2.0, batch_invariant=True, **options,
        )  # fmt: skip
        return torch.autograd.grad(out.loss, leaves, retain_graph=True), torch.autograd.grad(out.loss, leaves)

    whole, again = gradients(0, 2)
    assert all(map(torch.equal, whole, again))
    assert torch.equal(gradients(1, 2)[0][0], whole[0][1:])
    for options in ({"max_chunk_bytes": 2 * 61 * 4}, {"schedule": "two_pass"}, {"skip_inactive": "none"}):
        assert all(map(torch.equal, gradients(0, 2, **options)[0], whole)), options
