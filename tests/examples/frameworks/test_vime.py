"""vime's log-prob provider, called with the fields of the request that vime publishes (#423, #424)."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from examples.frameworks import vime
from tests.draws import shifted_seed
from tests.forks import in_processes

T, H, V, REAL = 7, 5, 128, 120  # 8 ids are padding


def problem():
    """Return hidden states, weight, bias, ids, a mask that holds them, and upstream gradients."""
    rng = torch.Generator().manual_seed(shifted_seed(3))
    hidden, weight, bias = (torch.randn(*size, generator=rng) for size in ((T, H), (V, H), (V,)))
    ids = torch.randint(REAL, (T,), generator=rng)
    kept = torch.rand(T, V, generator=rng) < 0.5
    kept[:, REAL:] = False
    kept[torch.arange(T), ids] = True
    return hidden, weight, bias, ids, kept, torch.randn(2, T, generator=rng)


def expected(logits, ids, kept, upstream, leaves):
    """Return log-probs, entropies and the gradients of leaves, from fp64 logits."""
    if kept is not None:
        logits = logits.masked_fill(~kept, -torch.inf)
    logp = logits.log_softmax(-1)
    finite = logp if kept is None else torch.where(kept, logp, 0.0)  # else 0 times -inf
    entropy = -(logp.exp() * finite).sum(-1)
    values = torch.stack([logp.gather(-1, ids.unsqueeze(-1)).squeeze(-1), entropy])
    return values.detach(), torch.autograd.grad((values * upstream).sum(), leaves)


def request(logits, ids, group=None, kept=None, with_entropy=True, **linear):
    world, rank = (2, dist.get_rank() % 2) if group is not None else (1, 0)
    context = SimpleNamespace(world_size=world, rank=rank, layout="single" if world == 1 else "zigzag")
    return SimpleNamespace(
        logits=logits, target_ids=ids, tensor_parallel_group=group, context_parallel=context,
        with_entropy=with_entropy, with_entropy_grad=with_entropy, chunk_size=64, log_prob_keep_mask=kept,
        metadata={}, **linear,
    )  # fmt: skip


def linear_fields(hidden, weight, bias, first=0, temperature=1.0):
    return {
        "hidden": hidden, "lm_head_weight": weight, "lm_head_bias": bias, "vocab_start_index": first,
        "global_vocab_size": V, "real_vocab_size": REAL, "temperature": temperature,
    }  # fmt: skip


def check(result, want, leaves, upstream):
    """Compare with fp64, and hold what vime's strict mode checks."""
    values, gradients = want
    assert result.selected_logprobs.shape == (len(values[0]), 1) and result.entropy.shape == values[1].shape
    assert result.backend_id and result.contract_id
    got = torch.stack([result.selected_logprobs.squeeze(-1), result.entropy])
    torch.testing.assert_close(got.double(), values, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad((got * upstream).sum(), leaves), gradients, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("run", [vime.provider, vime.batch_invariant_provider])
def test_equals_fp64(run, masked):
    hidden, weight, bias, ids, kept, upstream = problem()
    kept = kept if masked else None
    logits = (hidden @ weight.T + bias).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    check(
        run(request(logits, ids, kept=kept)),
        expected(exact, ids, kept, upstream, [exact]),
        [logits],
        upstream,
    )

    leaves = [each.requires_grad_() for each in (hidden, weight, bias)]
    exact = [each.detach().double().requires_grad_() for each in leaves]
    heat = torch.linspace(0.5, 2.0, T)
    z = (exact[0] @ exact[1].T + exact[2])[:, :REAL] / heat.double().unsqueeze(-1)
    want = expected(z, ids, None if kept is None else kept[:, :REAL], upstream, exact)
    linear = linear_fields(*leaves, temperature=heat)
    check(run(request(torch.empty(T, 0), ids, kept=kept, **linear)), want, leaves, upstream)
    one = run(
        request(logits, ids, with_entropy=False, **linear_fields(*leaves, temperature=torch.tensor(2.0)))
    )
    assert one.entropy is None
    same = run(request(logits, ids, with_entropy=False, **linear_fields(*leaves, temperature=2.0)))
    assert torch.equal(one.selected_logprobs, same.selected_logprobs)


def over_ranks(rank):
    """Two ranks share the vocabulary; two such pairs have rows of their own (context parallelism)."""
    dist.init_process_group("gloo")
    hidden, weight, bias, ids, kept, upstream = problem()
    context, tensor = divmod(rank, 2)
    groups = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    rows, columns = (slice(0, 4), slice(4, T))[context], slice(tensor * V // 2, (tensor + 1) * V // 2)
    hidden, ids, kept, upstream = hidden[rows], ids[rows], kept[rows], upstream[:, rows]
    for mask in (None, kept):
        exact = [each.double().requires_grad_() for each in (hidden, weight, bias)]
        z = exact[0] @ exact[1].T + exact[2]
        local = None if mask is None else mask[:, columns]
        leaf = z.detach()[:, columns].float().requires_grad_()
        whole = z.detach().requires_grad_()
        values, (gradient,) = expected(whole, ids, mask, upstream, [whole])
        got = vime.provider(request(leaf, ids, groups[context], local))
        check(got, (values, [gradient[:, columns]]), [leaf], upstream)

        own = [hidden.clone(), weight[columns].clone(), bias[columns].clone()]
        linear = linear_fields(*(each.requires_grad_() for each in own), first=columns.start)
        mask = None if mask is None else mask[:, :REAL]
        values, (dhidden, *shared) = expected(z[:, :REAL], ids, mask, upstream, exact)
        got = vime.provider(request(leaf, ids, groups[context], local, **linear))
        check(got, (values, [dhidden, *(each[columns] for each in shared)]), own, upstream)
    with pytest.raises(vime.ProviderUnavailableError, match="tensor_parallel_group: got 2 ranks") as refused:
        vime.batch_invariant_provider(request(leaf, ids, groups[context]))
    assert refused.value.selected_logprob_provider_unavailable  # what mode "auto" looks at


def test_over_ranks():
    in_processes(4, over_ranks)


def test_a_rank_of_padding_is_refused():
    hidden, weight, bias, ids, *_ = problem()
    with pytest.raises(vime.ProviderUnavailableError, match=r"real_vocab_size: got 120, .* begin at 120"):
        vime.provider(request(weight, ids, **linear_fields(hidden, weight[REAL:], bias[REAL:], first=REAL)))
