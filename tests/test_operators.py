"""Every operator keeps PyTorch's rules."""

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import bits
from gspo_kernels.linear.call import Chunking, LinearOperands
from gspo_kernels.linear.distillation import LinearTeacher
from gspo_kernels.objectives.base import from_spec
from gspo_kernels.ops.divergence import divergence_forward
from gspo_kernels.ops.library import can_bypass_dispatcher, flat
from gspo_kernels.ops.logprobs import RowGradients, logprobs_forward
from gspo_kernels.ops.pairs import DivergenceForm, Pair, TeacherRows
from gspo_kernels.ops.selected import SelectedGradients, SelectedOperands, selected_forward
from gspo_kernels.plan import Plan, RequiresGrad, coefficients_depend_on, ratio_of
from gspo_kernels.sequence_ratio import RatioOperands
from gspo_kernels.step import policy_step
from gspo_kernels.terms import Terms
from gspo_kernels.types import NO_RATIO, RatioClip, RowOptions, RowStats, Shard
from tests.cases import generator


def operator_inputs():
    """Representative arguments of each operator of the namespace, several where branches differ."""
    rng = generator(0)
    logits, labels = torch.randn(2, 3, 7, generator=rng), torch.tensor([[0, 6, -100], [3, 2, 1]])
    hidden, weight, bias = (torch.randn(*shape, generator=rng) for shape in ((2, 3, 4), (7, 4), (7,)))
    kept = bits.packed_columns(torch.rand(2, 3, 7, generator=rng) < 0.5)
    kept |= bits.packed_ids(labels.unsqueeze(-1), 7)
    options = RowOptions(1.5, 4.0, 0.7, None, None, -100, "cpp")
    by_row = RowOptions(1.0, 0.0, 1.0, torch.full((2, 3), 0.8), kept, -100, "reference")
    in_triton = options._replace(backend="triton", kept=None)
    scored = logprobs_forward(logits, labels, options, True)
    logprobs, entropy, upstream = scored.logprobs, scored.entropy, torch.randn(2, 3, generator=rng)
    stats, without_entropy = RowStats(*scored), RowStats(logprobs, scored.lse, None)
    chunks, fit = Chunking("float32", 2 * 7 * 4, True), Chunking("float32", 0, False)
    ids = torch.stack([labels, (labels + 1) % 7, labels], -1).masked_fill(labels.unsqueeze(-1) < 0, -100)
    selected = selected_forward(logits, ids, options, False)
    both = SelectedGradients(torch.randn(2, 3, 3, generator=rng), upstream)
    old, advantages = logprobs - 0.1, torch.tensor([1.0, -1.0])
    offsets_ = torch.tensor([0, 2, 6], dtype=torch.int32)
    number = torch.tensor(0.1, dtype=torch.float64)
    plain = Terms(old_logprobs=old, advantages=advantages, objective=gk.GRPO().spec)
    full = plain._replace(
        loss_mask=labels != -100, ref_logprobs=old - 0.2, kl_beta=number, entropy_coef=number,
        rollout_weights=upstream.abs(), token_weights=upstream, lengths=advantages.abs(), normalizer=number,
    )  # fmt: skip
    sequence = plain._replace(objective=gk.GSPO().spec)
    packed_rows = [value.reshape(1, 6, *value.shape[2:]) for value in (logits, labels, old)]
    packed = sequence._replace(
        old_logprobs=packed_rows[2], loss_mask=packed_rows[1] != -100, cu_seqlens=offsets_,
        rollout_weights=advantages.abs(), normalizer=number,
    )  # fmt: skip
    form = RatioClip(-0.2, 0.2, float("inf"), False, "sequences", 1.0)
    everything, only_hidden = RequiresGrad(True, True, True), RequiresGrad(True, False, False)

    def plan(terms, needs):
        depends_on = coefficients_depend_on(from_spec(terms.objective), terms)
        return Plan("cpp", depends_on, ratio_of(terms, "cpp"), needs, needs.weight)

    shares, said = upstream.double(), TeacherRows(None, ids, torch.full(ids.shape, -1.5))
    whole, over_ids = DivergenceForm(0.3, 0, False, True), DivergenceForm(1.0, 0, False, False)
    warm = TeacherRows(logits.flip(0), None, None, row_temperature=upstream.abs())
    distilled = [
        (Pair(logits, warm, labels, whole), options),
        (Pair(logits, said, labels, over_ids), by_row._replace(kept=None)),
    ]
    compared = [divergence_forward(*each) for each in distilled]
    heads = LinearTeacher(
        torch.cat([hidden, hidden], -1), torch.cat([weight, weight], -1), bias, TeacherRows(None, None, None)
    )
    scored_heads = heads._replace(hidden=None, weight=None, bias=None, rows=said)

    def trained(options):
        return LinearOperands(hidden, weight, bias, labels, options, chunks)

    def frozen(options, chunking=chunks):
        return LinearOperands(hidden, weight, None, labels, options, chunking)

    return {
        "logprobs_forward": [(logits, labels, options, True), (logits, labels, by_row, False)],
        "logprobs_backward": [
            (logits, labels, stats, RowGradients(upstream, upstream, None), options),
            (logits, labels, without_entropy, RowGradients(upstream, None, torch.tensor(2.0)), options),
        ],
        "logprobs_backward_": [
            (logits.clone(), labels, stats, RowGradients(upstream, upstream, None), options)
        ],
        "logprobs_and_grad": [(logits, labels, upstream, options)],
        "scale_": [
            (logits.clone(), torch.tensor(2.0), "cpp"),
            (logits.clone(), torch.tensor(1.0), "reference"),
        ],
        "mask_of_ids": [(labels.unsqueeze(-1), 7)],
        "mask_of_shard": [(ids, None, Shard("", 2), 3), (None, kept, Shard("", 2), 3)],
        "checked_ids": [(ids, 7, options)],
        "selected_forward": [(logits, ids, options, False), (logits, ids[..., ::2], by_row, True)],
        "selected_backward": [(logits, SelectedOperands(ids, selected, both, options, False))],
        "selected_backward_": [(logits.clone(), SelectedOperands(ids, selected, both, options, False))],
        "linear_selected_forward": [(trained(options), ids, False), (frozen(options), ids, True)],
        "linear_selected_backward": [
            (trained(options), ids, selected, both, everything, False),
            (frozen(options), ids, selected, both._replace(tail=None), only_hidden, True),
        ],
        "mask_labels": [(labels, None, None, -100), (labels, labels > 2, None, -100)],
        "linear_logprobs_forward": [
            (trained(options), True),
            (frozen(by_row), False),
        ],
        "linear_logprobs_backward": [
            (trained(options), stats, upstream, upstream, everything, True),
            (frozen(options), without_entropy, upstream, None, only_hidden, False),
        ],
        "policy_step": [
            (logprobs, None, plain, "cpp", ratio_of(plain, "cpp"), True),
            (logprobs, entropy, full, "reference", NO_RATIO, True),
            (packed_rows[2], packed_rows[2], packed, "triton", NO_RATIO, False),
        ]
        + [
            (
                values,
                monitored,
                sequence._replace(old_logprobs=before),
                backend,
                ratio_of(sequence, backend),
                monitored is None,
            )
            for backend in ("triton", "cpp")
            for values, monitored, before in (
                (logprobs, None, old),
                (logprobs.double(), entropy, None),
                (logprobs.bfloat16(), entropy, old),
            )
        ],
        "linear_policy": [
            (trained(options), plain, plan(plain, everything)._replace(schedule=name, defers=True))
            for name in ("known", "deferred", "auto")
        ]
        + [
            (frozen(by_row, cut), full, plan(full, only_hidden)._replace(schedule=name, entropy=True))
            for cut, name in ((fit, "aligned"), (chunks, "auto"))
        ],
        "token_shares": [(labels, full._replace(objective=gk.Linear(aggregation="token_mean").spec))],
        "divergence_forward": distilled,
        "divergence_backward": [
            (*each, found, upstream) for each, found in zip(distilled, compared, strict=True)
        ],
        "divergence_backward_": [(logits.clone(), warm, labels, whole, options, compared[0], upstream)],
        "divergence_and_grad": [(*each, upstream) for each in distilled],
        "linear_distillation": [
            (trained(options), heads, whole, shares, everything),
            (trained(options), scored_heads, over_ids, shares, everything),
            (frozen(by_row), heads, whole, shares, only_hidden),
            (
                frozen(by_row)._replace(hidden=hidden.bfloat16(), weight=weight.bfloat16()),
                heads,
                whole,
                shares,
                RequiresGrad(False, True, False),
            ),
        ],
        "sequence_ratio": [
            (logits, labels, in_triton, RatioOperands.of(labels, sequence), form),
            (*packed_rows[:2], in_triton, RatioOperands.of(packed_rows[1], packed), form),
        ],
    }


def registered():
    names = torch._C._dispatch_get_all_op_names()
    return sorted({name.split("::")[1].split(".")[0] for name in names if name.startswith("gspo_kernels::")})


def test_every_operator_has_representative_inputs():
    # an operator is registered when its module is imported; the public functions import them all
    for name in gk.__all__:  # which imports the modules that register operators
        getattr(gk, name)
    assert registered() == sorted(operator_inputs())


@pytest.mark.parametrize("name", registered())
def test_opcheck(name):
    for arguments in operator_inputs()[name]:
        operands = tuple(flat(arguments))
        torch.library.opcheck(getattr(torch.ops.gspo_kernels, name).default, operands)


def test_mutating_operators_declare_it():
    mutable = {
        name for name in registered() if getattr(torch.ops.gspo_kernels, name).default._schema.is_mutable
    }
    assert mutable == {"divergence_backward_", "logprobs_backward_", "selected_backward_", "scale_"}


def test_tensor_subclasses_are_noticed_inside_structs():
    class Subclass(torch.Tensor):
        pass

    plain = torch.zeros(2, 3)

    def unheard(old_logprobs):
        terms = Terms(old_logprobs=old_logprobs)
        return can_bypass_dispatcher(policy_step.tensors(plain, None, terms, "cpp", NO_RATIO, True))

    assert unheard(plain)
    assert not unheard(plain.as_subclass(Subclass))
