"""The vocabulary cut up over ranks: the same numbers, and the same bits on all of them."""

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist

import gspo_kernels as gk
from tests.accuracy import Spread, assert_as_exact
from tests.cases import ADVANTAGES, LOGIT_OPTIONS, Result, call, make_case
from tests.draws import shifted_seed
from tests.judging import assert_equals_oracle
from tests.objectives.sample_batches import examples, make_batch
from tests.parallel.ranks import LOSSES, SCORES, VOCABULARY, assert_same_bits, every, of_ranks

SHARDED = {"logits": -1, "weight": 0, "bias": 0}


def shares(vocabulary=VOCABULARY, uneven=False):
    """Where each rank's ids begin, and where they end."""
    size = dist.get_world_size()
    ends = [vocabulary * rank // size for rank in range(size + 1)]
    if uneven:  # one column, many, and what is left
        ends = [0, 1, *range(vocabulary - size + 2, vocabulary + 1)]
    return list(itertools.pairwise(ends))


def cut(inputs, uneven=False):
    """What this rank has of a case's inputs, as leaves."""
    start, end = shares(uneven=uneven)[dist.get_rank()]
    return {
        name: (value.narrow(SHARDED[name], start, end - start) if name in SHARDED else value)
        .clone()
        .requires_grad_()
        for name, value in inputs.items()
    }


def run(case, entry, objective, backend="cpp", uneven=False, **options):
    """A case whose vocabulary is cut, as ``tests.cases.run`` has it; and the output of the call."""
    leaves = cut(case.inputs, uneven)
    if uneven:
        start, end = shares(uneven=True)[dist.get_rank()]
        options["vocab_range"] = (start, end)
    out = call(case, leaves, entry, objective, backend, tp_group=dist.group.WORLD, **options)
    out.loss.backward()
    grads = {name: leaf.grad for name, leaf in leaves.items()}
    summed = options.get("reduce_hidden_grad", True)
    hidden = grads.get("hidden") if summed else None
    by_token = {"logprobs": out.logprobs, "each entropy": out.entropy}
    assert_same_bits(loss=out.loss, hidden=hidden, **by_token, **out.metrics)
    shards = every({name: grad for name, grad in grads.items() if name in SHARDED})
    whole = grads | {name: torch.cat([each[name] for each in shards], SHARDED[name]) for name in shards[0]}
    logprobs, entropy = out.logprobs.detach(), None if out.entropy is None else out.entropy.detach()
    if entry in SCORES.values():
        logprobs = torch.where(case.counted, logprobs, 0.0)
        entropy = None if entropy is None else torch.where(case.counted, entropy, 0.0)
    return Result(out.loss.detach(), logprobs, whole, entropy), out


def judge(case, entry, objective, backend="cpp", **options):
    """As exact as plain PyTorch, and the same bits on all ranks."""
    result, out = run(case, entry, objective, backend, **options)
    if dist.get_rank() == 0:
        assert_equals_oracle(result, case, objective)
    return out


@of_ranks(2, 4)
def layouts_and_terms():
    """Padded and packed, sequences of no and of one token, holes, every term; all entries."""
    for kind, layout, terms in itertools.product(LOSSES, ("padded", "packed"), ("all", "plain")):
        case = make_case(kind, layout, terms, vocabulary=VOCABULARY)
        for entry in (LOSSES[kind], SCORES[kind]):
            judge(case, entry, gk.GSPOToken(0.2, 0.2), uneven=terms == "all")


@of_ranks(2)
def metrics():
    """Those of the log-probs, in bits."""
    case = make_case("linear", "packed", "holes", vocabulary=VOCABULARY)
    _, out = run(case, LOSSES["linear"], gk.GSPO())
    layout = {"loss_mask": case.loss_mask, "cu_seqlens": case.cu_seqlens}
    again = gk.policy_loss(out.logprobs, case.old_logprobs, case.advantages, **layout)
    assert torch.equal(out.loss, again.loss)
    for name, value in again.metrics.items():
        assert torch.equal(out.metrics[name], value), name


@of_ranks(2)
def backends():
    for backend, kind in itertools.product(("reference", "triton"), LOSSES):
        for terms, options in (("entropy", "together"), ("on_policy", "default")):
            case = make_case(kind, "packed", terms, vocabulary=VOCABULARY, logit_options=options)
            judge(case, LOSSES[kind], gk.GSPO(), backend, uneven=True)


@of_ranks(2)
def logit_options():
    for name, kind in itertools.product(LOGIT_OPTIONS, LOSSES):
        case = make_case(kind, "padded", "entropy", vocabulary=VOCABULARY, logit_options=name)
        judge(case, LOSSES[kind], gk.GSPO())


@of_ranks(2)
def dtypes():
    for dtype, kind in itertools.product((torch.bfloat16, torch.float16, torch.float64), LOSSES):
        case = make_case(kind, vocabulary=VOCABULARY, dtype=dtype)
        judge(case, LOSSES[kind], gk.GSPO(), uneven=True)
    rounded = make_case("linear", vocabulary=VOCABULARY, dtype=torch.bfloat16, logits_dtype="input")
    judge(rounded, LOSSES["linear"], gk.GSPO())


@of_ranks(2)
def schedules():
    """Chunks of a few rows, of as many rows on all ranks although shards are uneven; rows are skipped."""
    case = make_case("linear", vocabulary=VOCABULARY)
    for schedule in ("deferred", "two_pass", "auto"):
        for skip in ("backward", "none"):
            options = {"schedule": schedule, "skip_inactive": skip, "max_chunk_bytes": 1024}
            judge(case, LOSSES["linear"], gk.GSPO(), uneven=True, **options)
    judge(case, LOSSES["linear"], gk.GSPO(), schedule="aligned")
    judge(case, LOSSES["linear"], gk.GRPO(), schedule="known", max_chunk_bytes=256)
    leaves = cut(case.inputs)
    for name in ("weight", "bias"):
        leaves[name].requires_grad_(False)
    options = {"schedule": "frozen", "tp_group": dist.group.WORLD, "max_chunk_bytes": 256}
    call(case, leaves, LOSSES["linear"], gk.GSPO(), "cpp", **options).loss.backward()
    trained, _ = run(case, LOSSES["linear"], gk.GSPO())
    if dist.get_rank() == 0:
        frozen = replace(trained, grads={**trained.grads, "hidden": leaves["hidden"].grad})
        assert_equals_oracle(frozen, case, gk.GSPO())


@of_ranks(2)
def idle_sequences():
    """``skip_inactive="all"``: sequences that nobody projects, on all ranks alike."""
    case = make_case("linear", "padded", vocabulary=VOCABULARY)
    _, out = run(case, LOSSES["linear"], gk.GSPO(), skip_inactive="all")
    idle = torch.tensor(ADVANTAGES) == 0
    assert torch.equal(out.logprobs.isnan(), idle.unsqueeze(1) & case.counted)


@of_ranks(2)
def every_objective():
    """Loss and metrics are those of the log-probs, gradients those of the loss's coefficients."""
    errors, plain, exacts = {}, {}, {}
    generator = torch.Generator().manual_seed(shifted_seed(0))
    hidden = torch.randn(6, 7, 16, generator=generator)
    weight = torch.randn(VOCABULARY, 16, generator=generator)
    labels = torch.randint(0, VOCABULARY, (6, 7), generator=generator)
    for objective in examples():
        batch = make_batch(objective)
        terms = {**batch.terms, "loss_mask": batch.loss_mask}
        truth = torch.log_softmax(hidden.double() @ weight.double().T, -1)
        truth = truth.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        old = (truth - (batch.logprobs - batch.old_logprobs)).float()
        terms.pop("entropy", None)
        if "ref_logprobs" in terms:
            terms["ref_logprobs"] = truth + (batch.terms["ref_logprobs"] - batch.logprobs)
        leaves = cut({"hidden": hidden, "weight": weight}, uneven=True)
        out = gk.fused_linear_policy_loss(
            leaves["hidden"], leaves["weight"], labels, old, batch.advantages, **terms, objective=objective,
            return_entropy=True, parallel=gk.Parallel(dist.group.WORLD, shares(uneven=True)[dist.get_rank()]),
        )  # fmt: skip
        out.loss.backward()
        assert_same_bits(loss=out.loss, hidden=leaves["hidden"].grad, **out.metrics)
        given = {"entropy": out.entropy} if "entropy" in objective.needs else {}
        arguments = (out.logprobs, old, batch.advantages)
        again = gk.policy_loss(*arguments, **terms, **given, objective=objective)
        assert torch.equal(again.loss, out.loss), objective
        wanted = gk.policy_coefficients(*arguments, **terms, **given, objective=objective)
        got = {"hidden": leaves["hidden"].grad, "weight": torch.cat(every(leaves["weight"].grad))}
        for dtype, kept in ((torch.float64, exacts), (torch.float32, plain)):
            whole = [x.to(dtype).requires_grad_() for x in (hidden.clone(), weight.clone())]
            logp = torch.log_softmax(whole[0] @ whole[1].T, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
            grads = torch.autograd.grad(logp, whole, wanted.to(dtype))
            for name, grad in zip(got, grads, strict=True):
                kept.setdefault(name, []).append(grad.double())
        for name, grad in got.items():
            errors.setdefault(name, []).append(grad.double() - exacts[name][-1])
    for name in errors:
        rounding = [a - b for a, b in zip(plain[name], exacts[name], strict=True)]
        # per-token coefficients have one rounding of their own
        spread = Spread.of(rounding, by_row=True)
        assert_as_exact(name, errors[name], spread, exacts[name], torch.finfo(torch.float32).eps)


@of_ranks(2, 4)
def edges():
    """Labels at both ends of every shard; banned shards, with the label too; banned rows; infinities, NaN."""
    ids = [edge for start, end in shares() for edge in (start, end - 1)]
    labels = torch.tensor([*ids, 0, VOCABULARY - 1, 1, 1, 1, 2, -100])
    generator = torch.Generator().manual_seed(shifted_seed(1))
    logits = 3 * torch.randn(len(labels), VOCABULARY, generator=generator)
    (start, end), other = shares()[0], VOCABULARY - 2
    for row, columns, value in (
        (2, slice(start, end), "-inf"),  # a shard
        (-7, slice(start, end), "-inf"),  # the label's
        (-6, slice(start, end), "-inf"),
        (-5, other, "inf"),
        (-4, other, "nan"),
        (-3, slice(None), "-inf"),
        (-2, slice(3, None), "-inf"),  # all shards but one
        (-1, slice(None), "nan"),
    ):
        logits[row, columns] = float(value)
    alone = logits.clone().requires_grad_()
    weights = torch.linspace(-1.0, 2.0, len(labels))
    want = gk.token_logprobs(alone, labels, return_entropy=True)
    (whole,) = torch.autograd.grad((want.logprobs * weights).sum(), alone)
    # log-probs have the roundings of the label's logit and of the log-sum-exp, here and there
    allowed = 4 * torch.finfo(torch.float32).eps * float(logits.nan_to_num(0.0, 0.0, 0.0).abs().max())
    start, end = shares()[dist.get_rank()]
    for backend in ("cpp", "reference", "triton"):
        own = logits[:, start:end].clone().requires_grad_()
        parallel = gk.Parallel(dist.group.WORLD)
        got = gk.token_logprobs(own, labels, return_entropy=True, parallel=parallel, backend=backend)
        assert_same_bits(logprobs=got.logprobs.nan_to_num(1.0), entropy=got.entropy.nan_to_num(1.0))
        (grad,) = torch.autograd.grad((got.logprobs * weights).sum(), own)
        pairs = ((got.logprobs, want.logprobs), (got.entropy, want.entropy), (grad, whole[:, start:end]))
        for one, expected in pairs:
            torch.testing.assert_close(one, expected, rtol=0, atol=allowed, equal_nan=True)


@of_ranks(2, 4)
def nothing_to_do():
    """No tokens, no counted token, no sequences: a loss of 0 with a gradient, and no waiting."""
    for lengths in ((), (0, 0)):
        for kind in LOSSES:
            judge(make_case(kind, lengths=lengths, vocabulary=VOCABULARY), LOSSES[kind], gk.GSPO())
    case = make_case("linear", "padded", vocabulary=VOCABULARY)
    case = replace(case, loss_mask=torch.zeros_like(case.labels, dtype=torch.bool))
    result, _ = run(case, LOSSES["linear"], gk.GSPO())
    assert result.loss == 0 and not result.grads["hidden"].any() and not result.grads["weight"].any()


@of_ranks(2)
def once_more():
    """A second backward, logits overwritten by their gradient, and scoring without a gradient."""
    case = make_case("linear", vocabulary=VOCABULARY)
    for schedule in ("auto", "two_pass"):
        leaves = cut(case.inputs)
        group = {"tp_group": dist.group.WORLD, "schedule": schedule}
        out = call(case, leaves, LOSSES["linear"], gk.GSPO(), "cpp", **group)
        out.loss.backward(retain_graph=True)
        first = leaves["hidden"].grad.clone()
        out.loss.backward()
        torch.testing.assert_close(leaves["hidden"].grad, 2 * first, rtol=1e-6, atol=0)
    with torch.no_grad():
        scored = call(case, cut(case.inputs), SCORES["linear"], gk.GSPO(), "cpp", tp_group=dist.group.WORLD)
    assert torch.equal(scored.logprobs, out.logprobs)
    case = make_case("logits", vocabulary=VOCABULARY)
    logits = cut(case.inputs)["logits"].detach()
    leaf = logits.requires_grad_()
    terms = {"cu_seqlens": case.cu_seqlens, "parallel": gk.Parallel(dist.group.WORLD)}
    terms["inplace_backward"] = True
    out = gk.fused_policy_loss(leaf * 1.0, case.labels, case.old_logprobs, case.advantages, **terms)
    out.loss.backward()
    kept, _ = run(case, LOSSES["logits"], gk.GSPO())
    start, end = shares()[dist.get_rank()]
    assert torch.equal(leaf.grad, kept.grads["logits"][:, start:end])


@of_ranks(2)
def parts_of_the_hidden_gradient():
    """Left to the caller, they add up to the gradient."""
    case = make_case("linear", vocabulary=VOCABULARY)
    part, _ = run(case, LOSSES["linear"], gk.GSPO(), reduce_hidden_grad=False)
    hidden = sum(every(part.grads["hidden"]))
    if dist.get_rank() == 0:
        assert_equals_oracle(replace(part, grads={**part.grads, "hidden": hidden}), case, gk.GSPO())
