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
    return SimpleNamespace(
        logits=logits, target_ids=ids, tensor_parallel_group=group, with_entropy=with_entropy,
        with_entropy_grad=with_entropy, chunk_size=64, log_prob_keep_mask=kept, metadata={}, **linear,
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


def compare(run, rank=0, ranks=1):
    """Compare a provider with fp64 from logits and from hidden states; ranks share the vocabulary."""
    hidden, weight, bias, ids, kept, upstream = problem()
    group = dist.group.WORLD if ranks > 1 else None
    columns, heat = slice(rank * V // ranks, (rank + 1) * V // ranks), torch.linspace(0.5, 2.0, T)
    for mask in (None, kept):
        local = None if mask is None else mask[:, columns]
        exact = [each.double().requires_grad_() for each in (hidden, weight, bias)]
        z = exact[0] @ exact[1].T + exact[2]
        whole, leaf = z.detach().requires_grad_(), z.detach()[:, columns].float().requires_grad_()
        values, (gradient,) = expected(whole, ids, mask, upstream, [whole])
        check(run(request(leaf, ids, group, local)), (values, [gradient[:, columns]]), [leaf], upstream)

        own = [each.clone().requires_grad_() for each in (hidden, weight[columns], bias[columns])]
        linear = linear_fields(*own, first=columns.start, temperature=heat)
        real, z = None if mask is None else mask[:, :REAL], z[:, :REAL] / heat.double().unsqueeze(-1)
        values, (dhidden, *shared) = expected(z, ids, real, upstream, exact)
        got = run(request(torch.empty(T, 0), ids, group, local, **linear))
        check(got, (values, [dhidden, *(each[columns] for each in shared)]), own, upstream)


@pytest.mark.parametrize("run", [vime.provider, vime.batch_invariant_provider])
def test_equals_fp64(run):
    compare(run)
    hidden, weight, bias, ids, *_ = problem()
    one, same = (
        run(request(None, ids, with_entropy=False, **linear_fields(hidden, weight, bias, temperature=heat)))
        for heat in (torch.tensor(2.0), 2.0)
    )
    assert one.entropy is None and torch.equal(one.selected_logprobs, same.selected_logprobs)


def over_ranks(rank):
    dist.init_process_group("gloo")
    compare(vime.provider, rank, 2)
    with pytest.raises(vime.ProviderUnavailableError, match="tensor_parallel_group: got 2 ranks") as refused:
        vime.batch_invariant_provider(request(None, None, dist.group.WORLD))
    assert refused.value.selected_logprob_provider_unavailable  # what mode "auto" looks at


def test_over_ranks():
    in_processes(2, over_ranks)


def test_a_rank_of_padding_is_refused():
    hidden, weight, bias, ids, *_ = problem()
    with pytest.raises(vime.ProviderUnavailableError, match=r"real_vocab_size: got 120, .* begin at 120"):
        vime.provider(request(weight, ids, **linear_fields(hidden, weight[REAL:], bias[REAL:], first=REAL)))
