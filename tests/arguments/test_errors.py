"""Wrong calls are refused before any work, in a message that begins with the argument's name.

Values that no policy gives are refused where they count, and nowhere else.
"""

import math
from functools import partial
from inspect import signature
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gspo_kernels as gk
from gspo_kernels import advantages, off_policy
from gspo_kernels.arguments import terms
from gspo_kernels.core import operators as library
from gspo_kernels.logits import policy_step
from tests.cases import generator

B, T, V, H = 3, 4, 11, 5
N = B * T
INF, NAN = math.inf, math.nan
ids, one, offsets = torch.int64, torch.ones, torch.tensor

token, linear = gk.token_logprobs, gk.linear_token_logprobs
policy, coefficients = gk.policy_loss, gk.policy_coefficients
fused, fused_linear, explain = gk.fused_policy_loss, gk.fused_linear_policy_loss, gk.explain_schedule
chosen, linear_chosen = gk.selected_logprobs, gk.linear_selected_logprobs
taught, linear_taught = gk.distillation_loss, gk.fused_linear_distillation_loss
rollout, normalized = gk.rollout_weights, advantages.group_normalized
LOSSES = (policy, coefficients, fused, fused_linear)
OF_IDS = (chosen, linear_chosen, taught, linear_taught)
value_error = partial(pytest.raises, ValueError)
TURNS = torch.zeros(4, 3, dtype=ids)
TEMPERATURES = [torch.tensor([1.0, wrong, 1.0]) for wrong in (0.0, -2.0, NAN, INF)]
WRONG_REWARDS = [torch.tensor([1.0, wrong, 2.0, 3.0]) for wrong in (INF, -INF)]
LENGTHS = [torch.tensor([1.0, wrong, 2.0, 3.0]) for wrong in (INF, NAN)]
WEIGHTS = [torch.tensor([1.0, wrong]) for wrong in (INF, -INF, NAN)]
HEATED = [
    (function, "temperature") for function in (token, linear, fused, fused_linear, *OF_IDS, gk.sampling_mask)
]
HEATED += [(taught, "teacher_temperature"), (linear_taught, "teacher_temperature")]
SETS = torch.zeros(B, T, 2, dtype=ids)
SCORED = {"ids": SETS, "teacher_logprobs": -one(B, T, 2)}


def arguments(function, packed=False, **changes):
    """Return a right call of a public function, with ``changes``; others, as objectives, need no arguments.

    With ``packed``, tensors of shape [B, T, ...] are packed, those of ``changes`` included.
    """
    rng = generator(0)
    logits, hidden = (torch.randn(B, T, size, generator=rng) for size in (V, H))
    weight = torch.randn(V, H, generator=rng).requires_grad_()
    labels = torch.randint(0, V, (B, T), generator=rng)
    logprobs, old = (-1.0 - torch.rand(B, T, generator=rng) for _ in range(2))
    loss = {"old_logprobs": old, "advantages": torch.tensor([1.0, -1.0, 0.5])}
    dense, pairs = {"hidden": hidden, "weight": weight}, {"rewards": torch.arange(4.0), "group_size": 2}
    mask = one(B, T, dtype=torch.bool)
    call = {
        token: {"logits": logits, "labels": labels},
        linear: dense | {"labels": labels},
        policy: {"logprobs": logprobs, **loss},
        coefficients: {"logprobs": logprobs, **loss, "objective": gk.GSPO()},
        fused: {"logits": logits, "labels": labels, **loss},
        fused_linear: dense | {"labels": labels, **loss},
        explain: dense | {"labels": labels, **loss},
        rollout: {"old_logprobs": old, "rollout_logprobs": logprobs, "high": 2.0},
        gk.off_policy_mask: {"logprobs": logprobs, **loss, "delta": 0.1},
        off_policy.without_rejected: {"loss_mask": mask, "weights": one(B)},
        off_policy.weight_metrics: {"weights": one(B), "advantages": one(B), "loss_mask": mask},
        gk.normalizer: {"objective": gk.GSPO(), "loss_mask": mask},
        chosen: {"logits": logits, "ids": labels.unsqueeze(2)},
        linear_chosen: dense | {"ids": labels.unsqueeze(2)},
        taught: {"logits": logits, "teacher_logits": logits},
        linear_taught: dense | {"teacher_hidden": hidden, "teacher_weight": weight},
        gk.kept_mask: {"ids": SETS, "vocabulary_size": V},
        gk.sampling_mask: {"logits": logits},
        normalized: pairs,
        advantages.leave_one_out: pairs,
        advantages.optimal_baseline: pairs | {"lengths": one(4)},
        advantages.gdpo: pairs | {"rewards": one(4, 2)},
        advantages.reinforce_plus_plus: {"rewards": one(4)},
        advantages.turn_normalized: pairs | {"rewards": one(4, 2), "turn_ids": TURNS},
        advantages.class_normalized: {"rewards": one(4, 2)},
        advantages.reverse_kl: {"logprobs": old, "teacher_logprobs": old},
    }.get(function, {}) | changes
    if not packed:
        return call
    call = {
        name: value.flatten(0, 1) if isinstance(value, torch.Tensor) and value.shape[:2] == (B, T) else value
        for name, value in call.items()
    }
    cu_seqlens = {"cu_seqlens": torch.arange(0, N + 1, T, dtype=torch.int32)}
    return cu_seqlens | call if "cu_seqlens" in signature(function).parameters else call


def assert_refused(exception, name, function, **call):
    """Check that the call fails, names the argument in its first words, and writes to no tensor."""
    tensors = {key: value for key, value in call.items() if isinstance(value, torch.Tensor)}
    before = {key: (value.detach().clone(), value._version) for key, value in tensors.items()}
    with pytest.raises(exception, match=rf"^[\w., ()]*{name}"):
        function(**call)
    for key, value in tensors.items():
        assert value._version == before[key][1] and value.grad is None, key
        assert value.is_meta or torch.equal(value.detach().nan_to_num(), before[key][0].nan_to_num()), key


KINDS = {torch.float32: (0.5, NAN), torch.float64: (-1.0, INF), torch.int32: (2,), ids: (-1,)}
NO_MASKS = [one(B), *(torch.full((B, T), x, dtype=dtype) for dtype, wrong in KINDS.items() for x in wrong)]
# Function, argument, values that raise ValueError, and those that raise TypeError.
WRONG = [
    (token, "logits", [one(B, V), one(B, T + 1, V), one(B, T, 0)],
     [one(B, T, V, dtype=ids), one(B, T, V, dtype=torch.complex64), [[0.0]]]),
    (token, "labels", [one(B, T, 1, dtype=ids), torch.full((B, T), V), torch.full((B, T), -1)],
     [one(B, T), one(B, T, dtype=torch.int16), None]),
    *((function, "labels", [torch.full((B, T), V), torch.full((B, T), -7)], [])
      for function in (linear, fused, fused_linear)),
    (linear, "hidden", [one(B, T), one(B, T + 1, H)], [one(B, T, H, dtype=torch.int32)]),
    (linear, "weight", [one(V, H + 1), one(V), one(0, H), one(V, H, device="meta")],
     [one(V, H, dtype=torch.bfloat16)]),
    (linear, "bias", [one(V + 1)], [one(V, dtype=torch.float64), 0.0]),
    (fused_linear, "weight", [one(H, V)], [one(V, H, dtype=torch.float16)]),
    # options of the logits
    (fused, "temperature", [one(B, T)], []),
    *((function, name, [0.0, -1, NAN, INF, one(B + 1), *TEMPERATURES], ["hot"]) for function, name in HEATED),
    (token, "logit_scale", [INF], [True]),
    (token, "softcap", [0.0], []),
    (linear, "softcap", [], ["30"]),
    (fused, "ignore_index", [], [1.0]),
    *((function, "ignore_index", [2**63, -(2**70)], []) for function in (token, linear, fused, fused_linear)),
    (token, "return_entropy", [], [1]),
    (token, "inplace_backward", [], ["yes"]),
    (token, "backend", ["cuda"], []),
    (fused_linear, "backend", [], [None]),
    # chunks and schedules
    (linear, "logits_dtype", ["float16"], [torch.float32]),
    (linear, "max_chunk_bytes", [0, -1, 2**63], []),
    (fused_linear, "max_chunk_bytes", [0, -1], [1e6]),
    # GSPO's coefficients are not known
    (fused_linear, "schedule", ["fastest", "known", None, np.ones(2)], []),
    (explain, "schedule", ["known"], []),
    *((function, "memory", ["less"], [None]) for function in (linear, fused_linear, explain)),
    (fused_linear, "skip_inactive", ["some"], [True]),
    # layout and mask
    (policy, "logprobs", [], [one(B, T, dtype=ids), None]),
    *((function, "loss_mask", NO_MASKS, [one(B, T, dtype=torch.complex64), [[1, 1, 1], [1, 1, 1]]])
      for function in (policy, fused, fused_linear, token, linear, chosen, linear_chosen)),
    (rollout, "loss_mask", [one(T)], []),
    # terms
    (policy, "old_logprobs", [one(B, T + 1)], [one(B, T, dtype=ids)]),
    (policy, "advantages", [one(B + 1), one(B, T)], [None, [1.0, 2.0], one(B, dtype=ids)]),
    (policy, "ref_logprobs", [one(B)], []),
    (policy, "kl_estimator", ["k4"], [3, np.ones(2)]),
    (policy, "kl_ratio_weighted", [], [1]),
    (policy, "kl_beta", [one(T + 1), one(4, B, T), INF, 10**400], ["0.1"]),
    *((function, "entropy_coef", [], [np.ones(2)]) for function in (fused, fused_linear)),
    (policy, "entropy", [one(B)], []),
    (policy, "rollout_weights", [one(T)], [2.0]),
    (policy, "token_weights", [one(B)], []),
    (policy, "lengths", [one(T), torch.tensor([1.0, 0.0, 1.0])], [one(B, dtype=torch.bool)]),
    (fused, "lengths", [torch.tensor([-1, 2, 2]), torch.tensor([1.0, INF, 1.0])], []),
    (policy, "group_ids", [torch.tensor([0, 1, 0])], []),  # GSPO would ignore them
    (policy, "turn_ids", [torch.zeros(B, T, dtype=ids)], [one(B, T)]),
    (policy, "normalizer", [0, one(B), torch.tensor(-1.0)], ["batch", torch.tensor(1j)]),
    (fused, "normalizer", [torch.tensor(NAN), torch.tensor(INF)], []),
    (policy, "objective", [], [gk.GSPO, "gspo", SimpleNamespace(spec={})]),
    *((function, "parallel", [], ["tp", None, gk.Parallel])
      for function in (token, linear, *LOSSES, explain, gk.normalizer, *OF_IDS)),
    (fused, "objective", [], [None]),
    (gk.normalizer, "loss_mask", [one(T), torch.full((B, T), 2)], [[[1] * T] * B]),
    (gk.normalizer, "lengths", [one(B)], []),  # GSPO counts sequences
    (gk.normalizer, "objective", [], [gk.GSPO]),
    (gk.normalizer, "advantages", [one(B)], []),  # GSPO counts no pairs
    # ids: of the label's rivals, of what a sampler kept, of what an engine scored
    (chosen, "logits", [one(V), one(1, B, T, V)], [None, [[0.0]]]),
    *((function, "ids", values, [one(B, T, 2)]) for function in (chosen, linear_chosen) for values in [
        [SETS[0, 0], SETS[..., :0], SETS + V, SETS[..., :1] + V, SETS - 2, SETS.to("meta")],
    ]),
    *((function, *wrong) for function in (token, linear) for wrong in [
        ("kept_mask", [one(B, T, 2, dtype=torch.int32)], [one(B, T, 1, dtype=ids)]),
    ]),
    (gk.kept_mask, "ids", [SETS[0, 0], SETS + V, SETS - 2], [one(B, T, 2), [[1]]]),
    (gk.kept_mask, "vocabulary_size", [0], [11.0]),
    (gk.sampling_mask, "logits", [one(V), torch.tensor(1.0)], []),
    (gk.sampling_mask, "top_k", [-1], [2.0]),
    (gk.sampling_mask, "top_p", [0.0, 1.1], []),
    (gk.sampling_mask, "min_p", [1.0], []),
    (gk.sampling_mask, "engine", ["sglang"], []),
    # teachers
    (taught, "logits", [one(V), one(1, B, T, V)], []),
    (linear_taught, "hidden", [one(H)], []),
    (taught, "beta", [1.5], ["forward"]),
    (taught, "top_k", [V + 1, -1], []),
    (taught, "top_k_of", ["student"], []),  # without a top_k
    (taught, "add_tail", [False], []),
    (taught, "ids", [SETS], []),
    (taught, "teacher_logits", [None, one(B, T, V - 1)], []),
    (taught, "aggregation", ["mean"], []),
    (taught, "loss_mask", [one(B, T + 1), torch.full((B, T), 2)], []),
    (taught, "teacher_softcap", [0.0], []),
    (taught, "inplace_backward", [], [1]),
    (linear_taught, "teacher_weight", [one(V - 1, H), None], [one(V, H, dtype=torch.bfloat16)]),
    (linear_taught, "teacher_hidden", [one(B, T + 1, H)], []),
    (linear_taught, "teacher_bias", [one(V - 1)], []),
    (advantages.reverse_kl, "teacher_logprobs", [one(B, T + 1)], []),
    (advantages.reverse_kl, "logprobs", [], [one(B, T, dtype=ids)]),
    (advantages.reverse_kl, "loss_mask", [one(B, T + 1)], []),
    (advantages.reverse_kl, "coef", [0], []),
    # off-policy corrections, and advantages
    (rollout, "rollout_logprobs", [one(T)], []),
    (rollout, "old_logprobs", [one(N)], []),
    (rollout, "level", ["turn"], []),
    (rollout, "reduce", ["sum"], []),
    (rollout, "mode", ["clip"], []),
    (rollout, "high", [None], []),
    (rollout, "low", [-0.5, 3.0], ["none"]),
    *((function, "rewards", [*WRONG_REWARDS, one(2, 2)], [[1.0, 2.0], one(4, dtype=ids)])
      for function in (normalized, advantages.leave_one_out, advantages.optimal_baseline,
                       advantages.reinforce_plus_plus)),
    *((function, "rewards", [one(4), *(each.view(4, 1) * one(2) for each in WRONG_REWARDS)], [])
      for function in (advantages.gdpo, advantages.turn_normalized, advantages.class_normalized)),
    (normalized, "group_size", [3, 0, None], [2.0]),
    (normalized, "group_ids", [torch.zeros(4, dtype=ids)], []),  # group_size is passed, too
    (normalized, "scale", ["std"], []),
    (normalized, "eps", [-1e-4], [None]),
    (gk.off_policy_mask, "logprobs", [one(T)], []),
    (gk.off_policy_mask, "old_logprobs", [one(B, T + 1)], [None]),
    (gk.off_policy_mask, "advantages", [one(B + 1)], [one(B, dtype=ids)]),
    (gk.off_policy_mask, "delta", [NAN], ["0.1"]),
    (gk.off_policy_mask, "loss_mask", [one(B), torch.full((B, T), 2)], []),
    (off_policy.without_rejected, "weights", [one(B + 1)], [one(B, dtype=ids)]),
    (off_policy.without_rejected, "loss_mask", [one(T)], []),
    (off_policy.weight_metrics, "weights", [one(B + 1)], [one(B, dtype=ids)]),
    (off_policy.weight_metrics, "advantages", [one(B + 1)], []),
    (off_policy.weight_metrics, "loss_mask", [torch.full((B, T), 2)], []),
    (advantages.leave_one_out, "group_size", [3, None], []),
    (advantages.optimal_baseline, "lengths", [one(3), -one(4), *LENGTHS], [[1, 2, 3, 4]]),
    *((advantages.gdpo, name, values, []) for name, values in [
        ("weights", [one(3), *WEIGHTS]), ("eps", [-1.0]), ("lengths", [one(4, 2), -one(4), *LENGTHS]),
    ]),
    (advantages.reinforce_plus_plus, "group_ids", [TURNS[:3, 0]], []),
    (advantages.reinforce_plus_plus, "lengths", [one(3), *LENGTHS], []),
    (advantages.turn_normalized, "rewards", [one(6, 2)], []),
    (advantages.turn_normalized, "turn_ids", [TURNS + 2, TURNS - 2], [TURNS.float()]),
    (advantages.turn_normalized, "scale", ["all"], []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "name", "values", "types"), WRONG, ids=lambda x: getattr(x, "__name__", None)
)
def test_wrong_argument(function, name, values, types):
    function(**arguments(function))  # that it is right does not make the next one so
    for exception, wrong in ((ValueError, values), (TypeError, types)):
        for value in wrong:
            assert_refused(exception, name, function, **arguments(function, **{name: value}))


# Options of objectives, each alone a ValueError.
WRONG_OPTIONS = {
    gk.GSPO: {"clip_low": -0.1, "clip_high": INF, "dual_clip": 1.0, "aggregation": "mean"},
    gk.GSPOToken: {"clip_low": 2, "clip_high": -1e-9, "dual_clip": NAN, "aggregation_constant": 3.0},
    gk.GRPO: {"clip_low": 1.1, "clip_high": NAN, "dual_clip": 1.1},
    gk.CISPO: {"min_ratio": 1.5, "max_ratio": 0.0},
    gk.GMPO: {"log_clip_low": -0.1},
    gk.PrimeIPO: {"max_ratio": 0.9},
    gk.M2PO: {"threshold": -0.1},
    gk.REAL: {"tau": 0.0},
    gk.FSPO: {"log_clip_high": -0.1},
    gk.CTPO: {"power": 1.5, "log_dual_clip": 0.01},
    gk.FIPO: {"half_life": 0.0, "safe_ratio": 0.5},
    gk.SAPO: {"tau_positive": 0.0},
    gk.ABCGRPO: {"positive_low": 1.1},
    gk.TOPR: {"ratio_level": "turn"},
    gk.VESPO: {"lambda_negative": NAN},
    gk.DRO: {"beta": INF},
    gk.DPPO: {"divergence": "js"},
    gk.CPPO: {"min_weight": 1.1, "bound": NAN, "prefix_bound_low": -0.1, "prefix_bound_high": 0.01},
    gk.DRPO: {"eps": 0.0},
    gk.SSPO: {"gate": "none"},
    gk.DHPO: {"mix": 1.5},
    gk.ESPO: {"elbo_kl_beta": -1.0},
    gk.DPO: {"beta": -0.1, "min_gap": -1.0},
    gk.TRPA: {"anisotropy": INF, "kl_coef": -1.0},
    gk.REBEL: {"eta": NAN},
    gk.EGSW: {"temperature": 0.0, "clip_low": 2.0, "alpha": -1.0},
    gk.ClipCov: {"clip_cov_ratio": 1.5},
    gk.KLCov: {"kl_cov_ratio": -0.1, "ppo_kl_coef": -0.1},
}


@pytest.mark.parametrize("objective", WRONG_OPTIONS)
def test_wrong_options_of_objectives(objective):
    """tests/objectives/test_definitions.py has the types."""
    for name, value in WRONG_OPTIONS[objective].items():
        assert_refused(ValueError, name, objective, **{name: value})
    assert_refused(TypeError, "'epsilon'", objective, epsilon=0.2)


PER_PROMPT, IDS = gk.GSPO(aggregation="prompt_mean"), torch.zeros(B, dtype=ids)
NO_ADVANTAGES = {"objective": gk.Linear(), "advantages": None}
COMBINED = [
    (token, "labels", {"logits": one(B, T, V, device="meta")}),
    (token, "inplace_backward", {"logits": one(V).expand(B, T, V), "inplace_backward": True}),
    (fused, "inplace_backward", {"logits": one(B, V, T).mT, "inplace_backward": True}),
    *(
        (function, "inplace_backward", {
            "logits": one(B * T * V).as_strided((B, T, V), strides), "inplace_backward": True,
            **({"teacher_logits": one(B, T, V)} if function is taught else {}),
        })
        for function in (token, fused, chosen, taught)
        for strides in ((T * V, V - 1, 1), (V, V, 1), (1, 1, 1))
    ),
    (fused, "labels", {"labels": one(N, dtype=ids), "logits": one(N, V)}),
    (fused, "ignore_index", {"labels": one(B, T, dtype=torch.int32), "ignore_index": 2**40}),
    (explain, "weight", {"hidden": one(B, T, H + 1)}),
    (fused_linear, "skip_inactive", {"skip_inactive": "all", "ref_logprobs": -one(B, T), "kl_beta": 0.1}),
    (fused_linear, "skip_inactive", {"skip_inactive": "all", "entropy_coef": 0.1}),
    (fused_linear, "skip_inactive", {"skip_inactive": "all", "token_weights": one(B, T)} | NO_ADVANTAGES),
    (policy, "logprobs", {"logprobs": one(N)}),
    (policy, "logprobs", {"cu_seqlens": offsets([0, N])}),
    # lengths in the place of offsets seem to give terms per sequence a wrong shape
    *((policy, "cu_seqlens", {"logprobs": one(9), "advantages": one(3), "cu_seqlens": wrong} | term)
      for wrong in (offsets([4, 2, 3]), offsets([4, 6, 9]))
      for term in ({}, {"objective": gk.GRPO()}, {"lengths": one(3)})),
    (policy, "advantages", {"objective": gk.Linear(), "token_weights": one(B, T)}),
    (policy, "token_weights", NO_ADVANTAGES),
    (policy, "kl_ratio_weighted", {"token_weights": one(B, T), "kl_ratio_weighted": True} | NO_ADVANTAGES),
    (policy, "ref_logprobs", {"kl_beta": 0.1}),
    (policy, "entropy", {"entropy_coef": 0.1}),
    (policy, "entropy_coef", {"entropy_coef": one(3, 3), "entropy": one(B, T)}),
    (coefficients, "entropy_coef", {"entropy_coef": 0.1}),
    (gk.normalizer, "group_ids", {"objective": gk.DPO(), "advantages": one(B)}),
    (gk.normalizer, "lengths", {"objective": PER_PROMPT, "group_ids": IDS, "lengths": -one(B)}),
    *((gk.normalizer, "lengths", {"objective": gk.DAPO(), "lengths": wrong}) for wrong in (one(T), -one(B))),
    (gk.normalizer, "group_ids", {"objective": PER_PROMPT}),
    (gk.normalizer, "advantages", {"objective": PER_PROMPT, "group_ids": IDS, "advantages": one(B)}),
    (policy, "group_ids", {"objective": PER_PROMPT}),
    (policy, "group_ids", {"objective": PER_PROMPT, "group_ids": IDS, "normalizer": one(B)}),
    *((policy, "normalizer", {"objective": PER_PROMPT, "normalizer": wrong})
      for wrong in (torch.tensor(2.0), one(B + 1), -one(B))),
    (taught, "group_ids", {"aggregation": "prompt_mean"}),
    (chosen, "logits", {"ids": SETS[..., 0]}),
    (linear_chosen, "hidden", {"ids": SETS[..., 0]}),
    *((function, "kept_mask", {"kept_mask": SETS.int()}) for function in (token, linear)),
    (gk.sampling_mask, "logits", {"labels": one(B, T - 1, dtype=ids)}),
    (taught, "top_k_of", {"top_k": 2, "top_k_of": "both"}),
    *((taught, name, {"teacher_logits": None} | SCORED | wrong) for name, wrong in [
        ("top_k", {"top_k": 2}),
        ("teacher_logprobs", {"teacher_logprobs": one(B, T, 3)}),
        ("ids", {"ids": SETS + V}),
        ("teacher_softcap", {"teacher_softcap": 2.0}),
    ]),
    (linear_taught, "teacher_weight", {"teacher_hidden": None} | SCORED),
    *((function, "add_tail", {"top_k": 1, "add_tail": False}) for function in (taught, linear_taught)),
    (taught, "add_tail", {
        "teacher_logits": None, "ids": SETS[..., :1], "teacher_logprobs": -one(B, T, 1), "add_tail": False,
    }),
    (linear_taught, "teacher_weight", {
        "teacher_hidden": torch.zeros(B, T, H).double(), "teacher_weight": torch.zeros(V, H).double(),
        "batch_invariant": True,
    }),
    *((advantages.reverse_kl, "logprobs", {"logprobs": wrong, "teacher_logprobs": wrong})
      for wrong in (-one(B, T, 1), torch.tensor(-1.0))),
    (rollout, "reduce", {"level": "sequence", "reduce": "max"}),
    (rollout, "level", {"mode": "icepop", "level": "sequence"}),
    (rollout, "level", {"mode": "sequence_mask", "level": "sequence"}),
    *((rollout, "low, high", {"mode": mode, "high": None}) for mode in ("sequence_mask", "k3")),
    (rollout, "low", {"mode": "k3", "low": -0.1, "high": None}),
    (rollout, "reduce", {"mode": "k3", "reduce": "max"}),
    (rollout, "low", {"mode": "icepop", "low": 6.0, "high": None}),
    (normalized, "group_ids", {"group_size": None, "group_ids": offsets([0, 0, 1])}),
    (gk.GSPO, "aggregation_constant", {"aggregation": "constant"}),
    (gk.GSPO, "aggregation_constant", {"aggregation": "constant", "aggregation_constant": 0.0}),
    (gk.GSPO, "aggregation_constant", {"aggregation": "constant", "aggregation_constant": INF}),
    (gk.CISPO, "max_ratio: got 0.5.* at least 0.8", {"min_ratio": 0.8, "max_ratio": 0.5}),
    (gk.DrGRPO, "aggregation_constant", {}),
    (gk.DHPO, "mix", {"mix": "more"}),
    (gk.ClipCov, "clip_cov_ub", {"clip_cov_lb": 6.0}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "name", "wrong"), COMBINED)
def test_arguments_that_do_not_go_together(function, name, wrong):
    assert_refused(ValueError, name, function, **arguments(function, **wrong))


WRONG_OFFSETS = [1, 4, 8, N], [0, 4, 8, N - 1], [0, 4, 8, N + 1], [0, N + 3, 8, N]
FROM_SCORES = (fused, fused_linear, taught, linear_taught)
BY_SEQUENCE = {function: {"temperature": one(B)} for function in FROM_SCORES}


@pytest.mark.parametrize(
    "function", [policy, coefficients, *FROM_SCORES, explain, rollout, gk.off_policy_mask, gk.normalizer]
)
def test_wrong_offsets(function):
    for options in ({}, BY_SEQUENCE.get(function, {})):
        call = partial(arguments, function, True, **options)
        for value in (*WRONG_OFFSETS, [[0, 4, 8, N]], [0], []):
            wrong = offsets(value, dtype=torch.int32)
            assert_refused(ValueError, "cu_seqlens", function, **call(cu_seqlens=wrong))
        for wrong in (offsets([0.0, 4.0, 8.0, N]), [0, 4, 8, N]):
            assert_refused(TypeError, "cu_seqlens", function, **call(cu_seqlens=wrong))


@pytest.mark.parametrize("function", FROM_SCORES)
def test_unchecked_offsets_stay_in_bounds(function, monkeypatch):
    """As on a GPU, where an index out of range ends the process."""
    monkeypatch.setattr(library, "_is_cpu", lambda device: False)
    options = {"backend": "reference"} | BY_SEQUENCE[function]
    for objective in (gk.GSPO(), gk.GRPO(aggregation="sequence_mean")):
        options |= {"objective": objective} if function not in (taught, linear_taught) else {}
        for value in WRONG_OFFSETS:
            function(**arguments(function, True, cu_seqlens=offsets(value), **options))


every_layout = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
every_function = pytest.mark.parametrize(
    "function",
    [
        token, linear, explain, *LOSSES, rollout, gk.off_policy_mask, off_policy.without_rejected,
        off_policy.weight_metrics, gk.normalizer, chosen, linear_chosen, taught, linear_taught,
        gk.kept_mask, gk.sampling_mask, normalized, advantages.leave_one_out, advantages.optimal_baseline,
        advantages.gdpo, advantages.reinforce_plus_plus, advantages.class_normalized, advantages.reverse_kl,
    ],
)  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*(nested tensors|Sparse CSR)")
@every_function
def test_only_dense_tensors_are_taken(function):
    call = arguments(function)
    for name, value in call.items():
        if not isinstance(value, torch.Tensor):
            continue
        value = value.detach()
        wrong = [value.to_sparse(), torch.nested.nested_tensor(list(torch.stack([value, value])))]
        if value.ndim == 2:
            wrong.append(value.to_sparse_csr())
        if name == "loss_mask":
            wrong.append(value.to(torch.complex64))
        for each in wrong:
            with pytest.raises(TypeError, match=rf"^{name}: got (a sparse|a nested|torch.complex)"):
                function(**call | {name: each})


@every_layout
@every_function
def test_the_calls_that_the_wrong_ones_vary_are_right(function, packed):
    function(**arguments(function, packed))
    assert_refused(TypeError, "'temprature'", function, **arguments(function, packed, temprature=1.0))


@pytest.mark.parametrize("function", [fused, fused_linear])
def test_labels_are_checked_where_they_count(function):
    for wrong in (-1, V):
        call = arguments(function, advantages=torch.zeros(B))  # also where no token has an advantage
        call["labels"][-1, -1] = wrong
        with value_error(match=f"labels: got {wrong} in a counted position"):
            function(**call)
        assert function(**call, loss_mask=call["labels"] != wrong).loss.isfinite()


@pytest.mark.parametrize("name", ["GSPO", "LUSPO", "ESPO", "GSPOToken"])
def test_clip_ranges_that_look_like_their_ends(name):
    objective = getattr(gk, name)
    for low, high in ((0.8, 1.2), (0.5, 1.001), (0.9997, 1.0004), (0.999, 1.999)):
        with value_error(match=f"clip_low, clip_high: got {low} and {high}, which look like bounds"):
            objective(low, high)
    for low, high in ((0.49, 1.2), (0.8, 1.0), (0.8, 2.0), (1.0, 1.2), (0.9, 99.0)):
        objective(low, high)
    # ratios of tokens may have any range
    assert all(getattr(gk, other)(0.8, 1.2).clip_high == 1.2 for other in ("GRPO", "DAPO", "TLGRPO", "DHPO"))


# Objectives for tests of values: one for each way in which an objective may be evaluated.
OBJECTIVES = {
    "sequences in one launch": gk.GSPO(),
    "tokens in one launch": gk.GRPO(),
    "tokens of sequences": gk.GSPOToken(),
    "evaluated": gk.GMPO(),
    "evaluated by token": gk.SAPO(),
    "dropped by a comparison": gk.DPPO(),
}
every_way = pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
every_loss = pytest.mark.parametrize("function", LOSSES, ids=lambda function: function.__name__)
OLD, ADVANTAGES = (arguments(policy)[name] for name in ("old_logprobs", "advantages"))
KL = {"ref_logprobs": OLD, "kl_beta": 0.1}
TEACHER = {"teacher_logits": None, "teacher_hidden": None, "teacher_weight": None}


def with_value(values, value, *place):
    changed = values.clone()
    changed[place] = value
    return changed


def result(function, packed=False, **changes):
    """Return what a right call with ``changes`` returns: a tensor, a loss or metrics."""
    out = function(**arguments(function, packed, **changes))
    return out.loss.detach() if hasattr(out, "loss") else out


def logprobs_of(*names):
    return [(name, -one(B, T), (NAN, 1.25, INF)) for name in names]


def weights_of(*names):
    return [(name, one(*shape), (NAN,)) for name in names for shape in ((B, T), (B,))]


POLICY_TERMS = [
    *logprobs_of("old_logprobs", "ref_logprobs"), *weights_of("rollout_weights"),
    ("advantages", one(B), (NAN,)), ("token_weights", one(B, T), (NAN,)), ("kl_beta", one(B, T), (NAN,)),
]  # fmt: skip
TAUGHT = [("teacher_logprobs", -one(B, T, 2), (NAN, 1.25, INF)), ("token_weights", one(B, T), (NAN,))]
CHECKED = [
    *((function, KL | {"objective": each}, POLICY_TERMS)
      for function in LOSSES for each in OBJECTIVES.values()),
    # with logits in place of both log-probs, the ratio would look like 1
    *((function, {}, [("logprobs", -one(B, T), (40.0,))]) for function in (policy, coefficients)),
    (rollout, {}, logprobs_of("old_logprobs", "rollout_logprobs")),
    (gk.off_policy_mask, {}, logprobs_of("logprobs", "old_logprobs") + weights_of("advantages")),
    (advantages.reverse_kl, {}, logprobs_of("logprobs", "teacher_logprobs")),
    (off_policy.without_rejected, {}, weights_of("weights")),
    (off_policy.weight_metrics, {}, weights_of("weights", "advantages")),
    (taught, SCORED | {"teacher_logits": None, "beta": 0.3}, TAUGHT),
    (linear_taught, SCORED | {"teacher_hidden": None, "teacher_weight": None, "beta": 0.3}, TAUGHT),
]  # fmt: skip
"""A call, and arguments with values that are refused, alone among right ones."""


@every_layout
@pytest.mark.parametrize(
    ("function", "options", "values"), CHECKED, ids=lambda x: getattr(x, "__name__", None)
)
def test_impossible_values_are_errors(function, options, values, packed):
    """They are named with their position where they count, and have no effect elsewhere."""
    for name, right, wrong in values:
        at, place = (2, 1), r"position \[9" if packed else r"position \[2, 1"
        if right.ndim == 1:
            at, place = (1,), "sequence 1"
        elif name == "rollout_weights":  # the launch of a ratio per sequence has the mean of its tokens'
            place = f"({place}|sequence 2)"
        mask = with_value(one(B, T), 0.0, *at)
        for value in wrong:
            shown, changed = "NaN" if value != value else f"{value:g}", with_value(right, value, *at)
            with value_error(match=rf"^{name}: got {shown} at {place}"):
                result(function, packed, **options | {name: changed})
            for kept in (mask, mask.bool()):
                got, expected = (
                    result(function, packed, **options | {name: each, "loss_mask": kept})
                    for each in (changed, right)
                )
                torch.testing.assert_close(got, expected, rtol=0, atol=0)
        if INF in wrong:  # rounding may take a log-prob above 0
            assert result(function, packed, **options | {name: with_value(right, 0.5, *at)}).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_each_of_many_log_probs_is_checked(dtype):
    """The check covers whole vectors and the remainder after the last one."""
    old = -one(1, 130, dtype=dtype)
    for place in (0, 63, 64, 129):
        with value_error(match=rf"old_logprobs: got 2.* at position \[0, {place}\]"):
            gk.policy_loss(old.clone(), with_value(old, 2.0, 0, place), one(1))


@every_layout
@every_way
@every_loss
def test_unused_log_probs_may_be_nan(function, objective, packed):
    loss = partial(result, function, packed, objective=objective)
    old, without = with_value(OLD, NAN, 1), with_value(ADVANTAGES, 0.0, 1)
    assert loss(old_logprobs=old, advantages=without).isfinite().all()
    assert loss(old_logprobs=old, rollout_weights=torch.tensor([1.0, 0.0, 1.0])).isfinite().all()
    with value_error(match="old_logprobs: got NaN"):  # a KL term moves the sequence
        loss(old_logprobs=old, advantages=without, **KL)
    with value_error(match="rollout_weights: got NaN at sequence 1"):
        loss(advantages=without, rollout_weights=with_value(one(B), NAN, 1))
    reference = with_value(OLD, NAN, 2, 1)
    assert loss(ref_logprobs=reference).isfinite().all()
    beta = with_value(torch.full((B, T), 0.1), 0.0, 2, 1)
    assert loss(ref_logprobs=reference, kl_beta=beta).isfinite().all()


@every_loss
def test_nan_with_advantages_of_tokens(function):
    assert result(function, objective=gk.GPG(), old_logprobs=torch.full((B, T), NAN)).isfinite().all()
    place, old = r"position \[0, 2\]", with_value(OLD, NAN, 0, 2)
    for objective in (gk.GRPO(), gk.SAPO()):
        loss = partial(result, function, objective=objective)
        with value_error(match=f"advantages: got NaN at {place}"):
            loss(advantages=with_value(one(B, T), NAN, 0, 2))
        with value_error(match=f"old_logprobs: got NaN at {place}"):
            loss(advantages=one(B, T), old_logprobs=old)
        assert loss(advantages=with_value(one(B, T), 0.0, 0, 2), old_logprobs=old).isfinite().all()


@pytest.mark.parametrize("function", [fused, fused_linear, taught, linear_taught])
def test_temperatures_of_empty_sequences(function, backend):
    mask = with_value(one(B, T), 0.0, 1)
    for name in ("temperature", "teacher_temperature")[: 1 + (function in (taught, linear_taught))]:
        changes = [{name: with_value(one(B), x, 1), "backend": backend} for x in (1.0, NAN, 0.0)]
        expected, *others = (function(**arguments(function, loss_mask=mask, **each)) for each in changes)
        for got in others:
            torch.testing.assert_close(got, expected, rtol=0, atol=0)
        with value_error(match=f"^{name}: got nan"):
            function(**arguments(function, **changes[1]))


@pytest.mark.parametrize("function", [taught, linear_taught])
def test_ids_of_masked_tokens_are_ignored(function):
    right = torch.arange(V).expand(B, T, V)
    wrong = with_value(with_value(right, 10**9, 2, 1), -7, 0, 0)
    calls = arguments(function)
    calls |= {k: v for k, v in TEACHER.items() if k in calls}
    calls["teacher_logprobs"] = torch.full((B, T, V), -math.log(V))
    calls["loss_mask"] = with_value(with_value(one(B, T), 0.0, 2, 1), 0.0, 0, 0)
    for got, expected in zip(function(**calls, ids=wrong), function(**calls, ids=right), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    with value_error(match="^ids: got 1000000000, expected 0 <= id < 11"):
        function(**calls, ids=with_value(wrong, 10**9, 1, 1))


def test_log_probs_of_skipped_sequences_come_back():
    given = {"old_logprobs": None, "advantages": torch.tensor([1.0, 0.0, 0.5])}
    old = fused_linear(**arguments(fused_linear, **given, skip_inactive="all")).logprobs
    assert old[1].isnan().all() and old[[0, 2]].isfinite().all()
    given["old_logprobs"] = old
    for skip in ("all", "backward", "none"):
        assert result(fused_linear, **given, skip_inactive=skip).isfinite()
    # now the sequence has an advantage, so its ratio is needed
    with value_error(match=r"old_logprobs: got NaN at position \[1, 0\]"):
        result(fused_linear, old_logprobs=old)


def test_every_backend_checks_values(backend):
    if torch.cuda.is_available() and backend == "triton":
        pytest.skip("serves no CPU tensors here")
    for function in (fused, fused_linear):
        for name, values, got in (
            ("old_logprobs", with_value(OLD, NAN, 0, 0), "NaN"),
            ("old_logprobs", torch.full((B, T), 3.0), "3"),
            ("advantages", with_value(ADVANTAGES, NAN, 0), "NaN"),
        ):
            with value_error(match=f"{name}: got {got}"):
                result(function, backend=backend, **{name: values})


def test_unchecked_nan_makes_the_result_nan(monkeypatch):
    """Values are not checked on a GPU without GSPO_KERNELS_VALIDATE=1."""
    for module in (policy_step, terms):
        monkeypatch.setattr(module, "must_check_values", lambda device: False)
    for objective in OBJECTIVES.values():
        assert result(policy, objective=objective, advantages=with_value(ADVANTAGES, NAN, 1)).isnan()


def test_a_backend_that_cannot_serve_is_refused():
    call = {name: value.to("meta") for name, value in arguments(token).items()}
    with pytest.raises(RuntimeError, match="backend='cpp' does not support tensors on meta"):
        token(**call, backend="cpp")


def test_compiled_calls_check_values():
    logprobs, old, advantages = arguments(policy).values()
    loss = torch.compile(lambda *call: policy(*call).loss, fullgraph=True, backend="aot_eager")
    assert loss(logprobs, old, advantages).isfinite()
    with value_error(match="old_logprobs: got NaN"):
        loss(logprobs, with_value(old, NAN, 0, 0), advantages)
    grouped = torch.compile(partial(normalized, group_size=2), fullgraph=True, backend="aot_eager")
    assert torch.equal(grouped(torch.arange(4.0)), normalized(torch.arange(4.0), group_size=2))
    with value_error(match="rewards: got inf"):
        grouped(WRONG_REWARDS[0])
