"""Tensor parallelism of sampling masks and of selected ids, which are those of the whole vocabulary."""

import itertools
from dataclasses import replace

import torch
import torch.distributed as dist

import gspo_kernels as gk
from gspo_kernels import bits
from gspo_kernels.parallel.agreement import RanksDisagreeError
from tests.cases import make_case
from tests.draws import shifted_seed
from tests.judging import assert_equals_oracle
from tests.parallel.ranks import LOSSES, VOCABULARY, assert_all_raise, assert_same_bits, every, of_ranks
from tests.parallel.vocabulary import cut, run, shares


@of_ranks(2)
def sampling_masks():
    """As bits of the whole vocabulary, over shards that begin anywhere; a label that its own set cuts."""
    for kind, backend in itertools.product(LOSSES, ("cpp", "triton")):
        case = make_case(kind, "packed", "entropy", vocabulary=VOCABULARY, logit_options="kept")
        ids = case.logit_options["kept_ids"]
        by_bits = replace(case, logit_options={"kept_mask": bits.packed_ids(ids, VOCABULARY)})
        result, _ = run(by_bits, LOSSES[kind], gk.GSPO(), backend, uneven=True)
        if dist.get_rank() == 0:
            assert_equals_oracle(result, case, gk.GSPO())
    case = make_case("logits", "padded", vocabulary=VOCABULARY)
    leaves, group = cut(case.inputs), {"parallel": gk.Parallel(dist.group.WORLD)}
    labels = case.labels.clamp(min=0)
    owner = next(r for r, (start, end) in enumerate(shares()) if start <= int(labels[0, 0]) < end)
    everything = torch.full((*labels.shape, 2), -1, dtype=torch.int32)
    without = everything.clone()
    without[0, 0, labels[0, 0] // 32] ^= torch.tensor(1, dtype=torch.int32) << (labels[0, 0] % 32).int()
    gk.token_logprobs(leaves["logits"], labels, kept_mask=everything, **group)
    for message, culprit, options in (
        (f"labels: got {int(labels[0, 0])} at position [0, 0]", owner, {"kept_mask": without}),
        ("kept_mask: got 1 words, expected 2", None, {"kept_mask": everything[..., :1]}),
        ("kept_ids: got 64, expected", None, {"kept_ids": torch.full((*labels.shape, 1), VOCABULARY)}),
    ):
        assert_all_raise(
            message, culprit, lambda o=options: gk.token_logprobs(leaves["logits"], labels, **group, **o)
        )


@of_ranks(2)
def selected_ids():
    """Log-probs of ids that lie on several ranks, what they leave, and gradients; one twice, one alone."""
    generator = torch.Generator().manual_seed(shifted_seed(2))
    hidden = torch.randn(2, 3, 8, generator=generator)
    weight = torch.randn(VOCABULARY, 8, generator=generator)
    ids = torch.randint(0, VOCABULARY, (2, 3, 6), generator=generator)
    ids[..., 3] = ids[..., 0]
    ids[0, 0, 1:], ids[0, 1], ids[1, 0] = -100, -100, torch.arange(6)
    upstream = torch.randn(2, 3, 7, generator=generator)
    kept = torch.cat([ids, torch.randint(0, VOCABULARY, (2, 3, 9), generator=generator)], -1)
    start, end = shares(uneven=True)[dist.get_rank()]
    group = {"parallel": gk.Parallel(dist.group.WORLD, (start, end))}
    for linear, within, masked, K in itertools.product((False, True), (False, True), (False, True), (1, 6)):
        found = []
        for options, columns in (({}, slice(None)), (group, slice(start, end))):
            own = [hidden.clone().requires_grad_(), weight[columns].clone().requires_grad_()]
            given = {"normalize_within": within, "temperature": 0.7, "backend": "cpp", **options}
            given |= {"kept_ids": kept} if masked else {}
            if linear:
                out = gk.linear_selected_logprobs(*own, ids[..., :K], max_chunk_bytes=256, **given)
            else:
                out = gk.selected_logprobs(own[0] @ own[1].T, ids[..., :K], **given)
            loss = (out.logprobs * upstream[..., :K]).sum()
            if not within:
                loss = loss + (out.tail * upstream[..., 6]).sum()
            found.append([out.logprobs, out.tail, *torch.autograd.grad(loss, own)])
        (logprobs, tail, grad_hidden, grad_weight), (*ours, own_hidden, own_weight) = found
        assert_same_bits(logprobs=ours[0], tail=ours[1])
        if not linear:  # autograd's product is of this rank's columns alone
            own_hidden = sum(every(own_hidden))
        pairs = [(ours[0], logprobs), (own_hidden, grad_hidden), (own_weight, grad_weight[start:end])]
        for got, wanted in [*pairs, *([] if within else [(ours[1], tail)])]:
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-6)
    leaves = hidden, weight[start:end]
    for message, changed, options in (
        ("ids: got -3", ids.clone().index_fill_(-1, torch.tensor([2]), -3), {}),
        ("which the sampling mask there cuts", ids, {"kept_ids": kept[..., 9:]}),
    ):
        assert_all_raise(
            message,
            None,
            lambda i=changed, o=options: gk.linear_selected_logprobs(*leaves, i, **group, **o),
            (ValueError, RanksDisagreeError),
        )
