"""Values that no policy gives are refused in a sentence, where they count and nowhere else."""

import math

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.ops.backends import load
from tests.cases import generator

B, T, V, H = 3, 4, 19, 8
NAN, INF = math.nan, math.inf
OBJECTIVES = {
    "sequences in one launch": gk.GSPO(),
    "tokens in one launch": gk.GRPO(),
    "tokens of sequences": gk.GSPOToken(),
    "evaluated": gk.GMPO(),
    "evaluated by token": gk.SAPO(),
    "dropped by a comparison": gk.DPPO(),
}
ENTRIES = ("policy_loss", "policy_coefficients", "fused_policy_loss", "fused_linear_policy_loss")


class Call:
    """A plain call of an entry, of which a test changes some arguments."""

    def __init__(self, entry, objective, packed=False):
        rng = generator(0)
        self.entry, self.packed = entry, packed
        logits, hidden, weight = (
            torch.randn(*shape, generator=rng) for shape in ((B, T, V), (B, T, H), (V, H))
        )
        labels = torch.randint(0, V, (B, T), generator=rng)
        self.first = {
            "fused_policy_loss": (logits, labels),
            "fused_linear_policy_loss": (hidden, weight, labels),
        }.get(entry, (-1.0 - torch.rand(B, T, generator=rng),))
        self.terms = {
            "old_logprobs": -1.0 - torch.rand(B, T, generator=rng),
            "advantages": torch.tensor([1.0, -1.0, 0.5]),
            "objective": objective,
        }

    def __call__(self, **changed):
        def laid_out(value):
            tokens = isinstance(value, torch.Tensor) and value.shape[:2] == (B, T)
            return value.flatten(0, 1) if tokens and self.packed else value

        terms = {name: laid_out(value) for name, value in (self.terms | changed).items()}
        if self.packed:
            terms["cu_seqlens"] = torch.arange(0, B * T + 1, T, dtype=torch.int32)
        out = getattr(gk, self.entry)(*map(laid_out, self.first), **terms)
        return out if isinstance(out, torch.Tensor) else out.loss

    def refuses(self, message, **changed):
        with pytest.raises(ValueError, match=message):
            self(**changed)


def with_value(values, value, *place):
    changed = values.clone()
    changed[place] = value
    return changed


@pytest.fixture(params=ENTRIES)
def entry(request):
    return request.param


@pytest.fixture(params=OBJECTIVES)
def objective(request):
    return OBJECTIVES[request.param]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_nan_and_what_no_log_prob_is(entry, objective, packed):
    call = Call(entry, objective, packed)
    old, advantages = call.terms["old_logprobs"], call.terms["advantages"]
    reference = {"ref_logprobs": old, "kl_beta": 0.1}
    place = r"position \[9\]" if packed else r"position \[2, 1\]"
    call.refuses(r"advantages: got NaN at sequence 1", advantages=with_value(advantages, NAN, 1))
    for name in ("old_logprobs", "ref_logprobs"):
        for value, said in ((NAN, "NaN"), (1.25, "1.25"), (INF, "inf")):
            changed = reference | {name: with_value(old, value, 2, 1)}
            call.refuses(rf"{name}: got {said} at {place}", **changed)
        # rounding may take a log-prob above 0
        assert call(**reference | {name: with_value(old, 0.5, 2, 1)}).isfinite().all()


def test_current_log_probs_are_looked_at_where_they_are_given(objective):
    for entry in ENTRIES[:2]:
        call = Call(entry, objective)
        call.first = (with_value(call.first[0], 40.0, 0, 3),)
        call.refuses(r"^logprobs: got 40 at position \[0, 3\]")


def test_logits_in_the_place_of_log_probs(objective):
    """Old and new ones from the same wrong place look like a ratio of 1."""
    call = Call("policy_loss", objective)
    call.first = (torch.full((B, T), 12.0),)
    call.refuses("logprobs: got 12 .* are these logits, or negated?", old_logprobs=torch.full((B, T), 12.0))


@pytest.mark.parametrize("name", ["old_logprobs", "ref_logprobs"])
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
def test_what_does_not_count_is_inert(entry, objective, name, kind):
    call = Call(entry, objective)
    mask = with_value(torch.ones(B, T), 0.0, 2, 1).to(kind)
    plain = {"ref_logprobs": call.terms["old_logprobs"], "kl_beta": 0.1, "loss_mask": mask}
    for value in (NAN, INF, 50.0):
        changed = with_value(call.terms["old_logprobs"], value, 2, 1)
        assert torch.equal(call(**plain | {name: changed}), call(**plain))
    mask[1] = 0
    advantages = with_value(call.terms["advantages"], NAN, 1)
    assert call(**plain | {"advantages": advantages, "loss_mask": mask}).isfinite().all()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_old_log_probs_may_be_nan_where_they_decide_nothing(entry, objective, packed):
    call = Call(entry, objective, packed)
    old = with_value(call.terms["old_logprobs"], NAN, 1)
    still = {"advantages": with_value(call.terms["advantages"], 0.0, 1)}
    no_weight = {"rollout_weights": torch.tensor([1.0, 0.0, 1.0])}
    for terms in (still, no_weight):
        assert call(old_logprobs=old, **terms).isfinite().all()
    # a KL term moves the sequence
    kl = still | {"ref_logprobs": call.terms["old_logprobs"], "kl_beta": 0.1}
    call.refuses("old_logprobs: got NaN", old_logprobs=old, **kl)


def test_log_probs_of_skipped_sequences_come_back():
    call = Call("fused_linear_policy_loss", gk.GSPO())
    advantages = torch.tensor([1.0, 0.0, 0.5])
    hidden, weight, labels = call.first
    old = gk.fused_linear_policy_loss(hidden, weight, labels, None, advantages, skip_inactive="all").logprobs
    assert old[1].isnan().all() and old[[0, 2]].isfinite().all()
    for skip in ("all", "backward", "none"):
        assert call(old_logprobs=old, advantages=advantages, skip_inactive=skip).isfinite()
    # the sequence gets an advantage: its ratio is asked for
    call.refuses(r"old_logprobs: got NaN at position \[1, 0\]", old_logprobs=old)


def test_reference_log_probs_may_be_nan_where_nobody_asks(entry, objective):
    call = Call(entry, objective)
    reference = with_value(call.terms["old_logprobs"], NAN, 2, 1)
    assert call(ref_logprobs=reference).isfinite().all()
    beta = with_value(torch.full((B, T), 0.1), 0.0, 2, 1)
    assert call(ref_logprobs=reference, kl_beta=beta).isfinite().all()


def test_an_objective_without_a_ratio_takes_any_old_log_probs(entry):
    call = Call(entry, gk.GPG())
    assert call(old_logprobs=with_value(call.terms["old_logprobs"], NAN, 0, 0)).isfinite().all()


@pytest.mark.parametrize("objective", [gk.GRPO(), gk.SAPO()], ids=["one launch", "evaluated"])
def test_advantages_of_tokens(entry, objective):
    call = Call(entry, objective)
    advantages = torch.ones(B, T)
    call.refuses(r"advantages: got NaN at position \[0, 2\]", advantages=with_value(advantages, NAN, 0, 2))
    old = with_value(call.terms["old_logprobs"], NAN, 0, 2)
    call.refuses(r"old_logprobs: got NaN at position \[0, 2\]", advantages=advantages, old_logprobs=old)
    still = with_value(advantages, 0.0, 0, 2)
    assert call(advantages=still, old_logprobs=old).isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "cpp", "triton"])
def test_every_backend_looks(backend):
    if load(backend).unavailable(torch.device("cpu")):
        pytest.skip("serves no CPU tensors here")
    for entry in ENTRIES[2:]:
        call = Call(entry, gk.GSPO())
        old = call.terms["old_logprobs"]
        call.refuses("old_logprobs: got NaN", old_logprobs=with_value(old, NAN, 0, 0), backend=backend)
        call.refuses("old_logprobs: got 3", old_logprobs=old + 3 - old, backend=backend)
        wrong = with_value(call.terms["advantages"], NAN, 0)
        call.refuses("advantages: got NaN", advantages=wrong, backend=backend)


def test_compiled_calls_look(monkeypatch):
    call = Call("policy_loss", gk.GSPO())
    loss = torch.compile(lambda old, advantages: gk.policy_loss(call.first[0], old, advantages).loss,
                         fullgraph=True, backend="aot_eager")  # fmt: skip
    old, advantages = call.terms["old_logprobs"], call.terms["advantages"]
    assert loss(old, advantages).isfinite()
    with pytest.raises(ValueError, match="old_logprobs: got NaN"):
        loss(with_value(old, NAN, 0, 0), advantages)


def test_elsewhere_nothing_is_looked_at(monkeypatch):
    """As on a GPU without GSPO_KERNELS_VALIDATE=1: what comes out is NaN."""
    from gspo_kernels import step, terms

    for module in (step, terms):
        monkeypatch.setattr(module, "checked_values", lambda device: False)
    for objective in OBJECTIVES.values():
        call = Call("policy_loss", objective)
        advantages = with_value(call.terms["advantages"], NAN, 1)
        assert call(advantages=advantages).isnan()
