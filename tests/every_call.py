"""Small calls of every public function, in all its ways, for tests of what holds for each."""

from functools import partial

import torch

import gspo_kernels as gk
from tests.cases import ADAPTER_SCALE, HEAD, KIND, call, device_of, for_objective, generator, make_case

POLICY, ROWS, FUSED, LINEAR_ROWS, LINEAR = KIND
# No sequence is clipped by the bounds below.
SIZE = {"lengths": (2, 1), "log_s": (0.3, -0.2), "advantages": (-1.0, 1.0), "vocabulary": 4, "width": 2}
GSPO, GRPO, LINEAR_LOSS = gk.GSPO(0.9, 9.0), gk.GRPO(0.9, 9.0), gk.objectives.Linear()
ROW = {"max_chunk_bytes": 4 * 8}


def loss(entry, objective, terms, layout="packed", adapter=0, frozen=(), **options):
    """Return a function that builds a loss for a backend: a function of leaves, and the leaves."""

    def build(backend, constant, dtype=torch.float64):
        case = make_case(KIND[entry], layout, terms, adapter=adapter, dtype=dtype, **SIZE)
        case = for_objective(case, objective).each(lambda _, value: value.to(device_of(backend)))
        names = tuple(name for name in case.inputs if name not in (*case.frozen, *frozen))
        case = case.each(lambda name, value: value if name in names else constant(value))

        def function(*leaves):
            given = case.inputs | dict(zip(names, leaves, strict=True))
            return (call(case, given, entry, objective, backend, **options).loss,)

        return function, [case.inputs[name] for name in names]

    return build


def normal(*shape):
    return torch.randn(*shape, generator=generator(sum(shape)), dtype=torch.float64)


LABELS = torch.tensor([[0, -100], [3, 2]])
IDS = torch.tensor([[[0, 3], [1, -100]], [[1, 1], [2, 0]]])
LEAVES = {"logits": normal(2, 2, 4), "hidden": normal(2, 2, 2), "weight": normal(4, 2), "bias": normal(4)}
ADAPTER = {"A": normal(1, 2), "B": normal(4, 1)}
TEACHER = {"teacher_hidden": normal(2, 2, 3), "teacher_weight": normal(4, 3)}
SHARES = {"loss_mask": LABELS != -100, "token_weights": normal(2, 2).abs() + 0.1}
TEMPERATURE = {"temperature": torch.tensor([0.7, 1.3])}


def outputs(name, lora=False, **options):
    """Return a function that builds a call of a public function, like ``loss``; both its outputs count."""
    names = ("hidden", "weight", "bias") if "linear" in name else ("logits",)
    inputs = {key: LEAVES[key] for key in names} | (ADAPTER if lora else {})

    def build(backend, constant, dtype=torch.float64):
        def moved(value, change=constant):
            if not isinstance(value, torch.Tensor):
                return value
            return change(value.to(device_of(backend), dtype if value.dtype == torch.float64 else None))

        values = inputs | options
        given = {key: moved(value) for key, value in values.items()}
        learned = [key for key in inputs if not (lora and key == "weight")]

        def function(*leaves):
            call = given | dict(zip(learned, leaves, strict=True))
            if lora:
                call["weight"] = gk.LoRAHead(call["weight"], call.pop("A"), call.pop("B"), ADAPTER_SCALE)
            if "inplace_backward" in options and call["logits"].is_leaf:
                call["logits"] = call["logits"] * 1.0
            found = getattr(gk, name)(**call, backend=backend)
            return tuple(value for value in found if isinstance(value, torch.Tensor))

        return function, [moved(values[key], torch.clone) for key in learned]

    return build


CALLS = {
    "policy_loss": loss(POLICY, GSPO, "plain"),
    "policy_loss, entropy": loss(POLICY, GRPO, "all"),
    "fused_policy_loss": loss(FUSED, GSPO, "weighted"),
    "fused_policy_loss, tokens": loss(FUSED, GRPO, "kl_tensor"),
    "fused_policy_loss, known": loss(FUSED, LINEAR_LOSS, "holes"),
    "fused_policy_loss, entropy": loss(FUSED, GSPO, "entropy_tensor"),
    "fused_policy_loss, entropy without coefficient": loss(FUSED, GSPO, "plain", return_entropy=True),
    **{
        f"fused_linear_policy_loss, {schedule}": loss(
            LINEAR, GRPO if schedule == "known" else GSPO, terms, frozen=frozen, schedule=schedule,
            **({} if schedule == "aligned" else ROW),
        )
        for schedule, terms, frozen in (
            ("known", "all", ()), ("aligned", "k3", ()), ("deferred", "weighted", ()),
            ("frozen", "weighted", HEAD), ("two_pass", "all", ()),
        )
    },
    "fused_linear_policy_loss, head alone": loss(LINEAR, GSPO, "holes", frozen=("hidden",), **ROW),
    "fused_linear_policy_loss, small": loss(LINEAR, GSPO, "plain"),
    "fused_linear_policy_loss, known coefficients": loss(LINEAR, LINEAR_LOSS, "holes", schedule="known"),
    "fused_linear_policy_loss, adapter": loss(LINEAR, GSPO, "plain", adapter=1, schedule="aligned"),
    "token_logprobs": outputs(ROWS, labels=LABELS, return_entropy=True, kept_mask=gk.kept_mask(torch.cat(
        [LABELS.unsqueeze(-1), (LABELS.clamp(min=0) + 2).unsqueeze(-1) % 4], -1), 4), **TEMPERATURE),
    "linear_token_logprobs": outputs(LINEAR_ROWS, labels=LABELS, return_entropy=True, **TEMPERATURE, **ROW),
    "linear_token_logprobs, adapter": outputs(LINEAR_ROWS, lora=True, labels=LABELS, return_entropy=True),
    "selected_logprobs": outputs("selected_logprobs", ids=IDS, **TEMPERATURE),
    "selected_logprobs, within": outputs("selected_logprobs", ids=IDS, normalize_within=True),
    "linear_selected_logprobs": outputs("linear_selected_logprobs", ids=IDS, **TEMPERATURE, **ROW),
    "distillation_loss": outputs(
        "distillation_loss", teacher_logits=normal(2, 2, 4).sin(), teacher_temperature=torch.ones(2), **SHARES
    ),
    "distillation_loss, ids": outputs(
        "distillation_loss", ids=IDS, teacher_logprobs=normal(2, 2, 2).abs().neg() - 1, beta=0.0
    ),
    "fused_linear_distillation_loss": outputs("fused_linear_distillation_loss", **TEACHER, **SHARES, **ROW),
}  # fmt: skip
GIVEN = {"labels": LABELS, "old_logprobs": torch.full((2, 2), -1.4), "advantages": torch.ones(2)}
WIDE = normal(2, 2, 613).bfloat16().double()  # several blocks of a kernel, the same in every dtype
TAUGHT = {"teacher_logits": normal(2, 2, 613).flip(-1).bfloat16().double()}
OVERWRITING = {
    "token_logprobs": (ROWS, {"labels": LABELS, "return_entropy": True}),
    "fused_policy_loss": (FUSED, GIVEN | {"objective": GSPO}),
    "fused_policy_loss, on-policy": (FUSED, GIVEN | {"old_logprobs": None}),
    "fused_policy_loss, entropy": (FUSED, GIVEN | {"objective": GSPO, "entropy_coef": 0.1}),
    "selected_logprobs": ("selected_logprobs", {"ids": IDS}),
    "distillation_loss": ("distillation_loss", TAUGHT | {"beta": 0.3}),
    "distillation_loss, forward": ("distillation_loss", TAUGHT | {"beta": 0.0}),
    "distillation_loss, reverse": ("distillation_loss", TAUGHT | {"beta": 1.0}),
    "distillation_loss, ids": ("distillation_loss", TAUGHT | {"beta": 0.3, "top_k": 2}),
}
"""Calls with logits that the backward may overwrite."""
APART, INPLACE = (
    {
        f"{key}, wide": outputs(name, logits=WIDE, **options, **how)
        for key, (name, options) in OVERWRITING.items()
    }
    for how in ({}, {"inplace_backward": True})
)
WHERE = {"loss_mask": torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])}
ROLLOUT, OLD = (-normal(2, 3 + i)[:, :3].abs().float() for i in range(2))
WITHOUT_GRADIENT = {
    **{
        f"rollout_weights, {level}, {mode}": partial(
            gk.rollout_weights, OLD, ROLLOUT, level=level, mode=mode, low=0.5, high=2.0, **WHERE
        )
        for level in ("token", "sequence") for mode in ("truncate", "mask")
    },
    "rollout_weights, max": partial(
        gk.rollout_weights, OLD, ROLLOUT, level="sequence", reduce="max", mode="k1", high=0.5, **WHERE
    ),
    "off_policy_mask": partial(gk.off_policy_mask, OLD, ROLLOUT, -torch.ones(2), delta=0.1, **WHERE),
    "sampling_mask": partial(gk.sampling_mask, normal(2, 5, 9).float(), top_k=4, top_p=0.8, min_p=0.01),
    "group_normalized": partial(gk.advantages.group_normalized, normal(10).float(), group_size=5),
    "group_normalized, ids": partial(
        gk.advantages.group_normalized, normal(10).float(), group_ids=torch.arange(10) // 5, scale="batch"
    ),
    "turn_normalized": partial(
        gk.advantages.turn_normalized, normal(4, 2).float(), torch.arange(12).view(4, 3) % 2, group_size=2
    ),
    "reverse_kl": partial(gk.advantages.reverse_kl, OLD, ROLLOUT, **WHERE),
    "normalizer": partial(gk.normalizer, gk.DAPO(), **WHERE),
}  # fmt: skip
"""Calls that return a tensor, from fp32 tensors."""


def centered(backend, constant, dtype=torch.float64):
    """Build centered losses like ``loss``; not in ``CALLS``, as their gradients are not derivatives."""
    ids = IDS.flip(-1).masked_fill(IDS.flip(-1) < 0, -1)
    given = {"objective": gk.PrimeIPO(), "advantages": torch.ones(2), "old_logprobs": -torch.ones(2, 2)}
    given["centering"] = gk.ScoreCentering(ids, torch.full(ids.shape, -2.0))

    def function(*leaves):
        logits = leaves[0] @ leaves[1].T
        selected = gk.selected_logprobs(logits, ids)
        logprobs = gk.token_logprobs(logits, LABELS).logprobs
        return (
            gk.fused_linear_policy_loss(*leaves, LABELS, **given, **ROW).loss,
            gk.fused_policy_loss(logits, LABELS, **given).loss,
            gk.policy_loss(logprobs, loss_mask=LABELS >= 0, **given, selected_logprobs=selected).loss,
        )

    return function, [LEAVES[name].to(dtype) for name in ("hidden", "weight")]


def prepare(build, backend="auto", constant=lambda value: value, dtype=torch.float64):
    """Return a function, its leaves, and its outputs that have a gradient."""
    function, leaves = build(backend, constant, dtype)
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    return function, leaves, [value for value in function(*leaves) if value.requires_grad]
