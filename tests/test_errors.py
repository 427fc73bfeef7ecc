"""Wrong calls: refused before any work, by the right exception, with the argument's name in the message."""

import pytest
import torch

import gspo_kernels as gk
from tests.draws import shifted_seed

B, T, V, H = 2, 3, 11, 5
N = B * T


def arguments(function, packed=False):
    """A right call of each public function."""
    rng = torch.Generator().manual_seed(shifted_seed(0))
    shape = (N,) if packed else (B, T)
    logits = torch.randn(*shape, V, generator=rng).requires_grad_()
    hidden, weight = torch.randn(*shape, H, generator=rng).requires_grad_(), torch.randn(V, H, generator=rng)
    labels = torch.randint(0, V, shape, generator=rng)
    logprobs = -torch.rand(*shape, generator=rng)
    policy = {"old_logprobs": logprobs - 0.1, "advantages": torch.tensor([1.0, -1.0])}
    if packed:
        policy["cu_seqlens"] = torch.tensor([0, 2, N], dtype=torch.int32)
    return {
        gk.token_logprobs: {"logits": logits, "labels": labels},
        gk.linear_token_logprobs: {"hidden": hidden, "weight": weight, "labels": labels},
        gk.policy_loss: {"logprobs": logprobs, **policy},
        gk.policy_coefficients: {"logprobs": logprobs, **policy, "objective": gk.GSPO()},
        gk.fused_policy_loss: {"logits": logits, "labels": labels, **policy},
        gk.fused_linear_policy_loss: {"hidden": hidden, "weight": weight, "labels": labels, **policy},
        gk.explain_schedule: {"hidden": hidden, "weight": weight, "labels": labels, **policy},
        gk.rollout_weights: {"old_logprobs": logprobs, "rollout_logprobs": logprobs - 0.2, "high": 2.0}
        | ({"cu_seqlens": policy["cu_seqlens"]} if packed else {}),
        gk.advantages.group_normalized: {"rewards": torch.arange(4.0), "group_size": 2},
    }[function]


token, linear = gk.token_logprobs, gk.linear_token_logprobs
policy, coefficients = gk.policy_loss, gk.policy_coefficients
fused, fused_linear, explain = gk.fused_policy_loss, gk.fused_linear_policy_loss, gk.explain_schedule
rollout, normalized = gk.rollout_weights, gk.advantages.group_normalized
one = torch.ones
offsets = torch.tensor

WRONG = [
    # logits and labels
    (token, {"logits": one(B, V)}, ValueError, "logits"),
    (token, {"logits": one(B, T + 1, V)}, ValueError, "logits"),
    (token, {"logits": one(B, T, 0)}, ValueError, "logits"),
    (token, {"logits": one(B, T, V, dtype=torch.int64)}, TypeError, "logits"),
    (token, {"logits": one(B, T, V, dtype=torch.complex64)}, TypeError, "logits"),
    (token, {"logits": [[0.0]]}, TypeError, "logits"),
    (token, {"logits": one(B, T, V, device="meta")}, ValueError, "labels"),
    (token, {"labels": one(B, T)}, TypeError, "labels"),
    (token, {"labels": one(B, T, dtype=torch.int16)}, TypeError, "labels"),
    (token, {"labels": one(B, T, 1, dtype=torch.int64)}, ValueError, "labels"),
    (token, {"labels": None}, TypeError, "labels"),
    (token, {"labels": torch.full((B, T), V)}, ValueError, "labels"),
    (token, {"labels": torch.full((B, T), -1)}, ValueError, "labels"),
    (linear, {"labels": torch.full((B, T), V)}, ValueError, "labels"),
    (fused, {"labels": torch.full((B, T), V)}, ValueError, "labels"),
    (fused_linear, {"labels": torch.full((B, T), -7)}, ValueError, "labels"),
    (fused, {"labels": one(N, dtype=torch.int64), "logits": one(N, V)}, ValueError, "cu_seqlens"),
    # hidden states, weight, bias
    (linear, {"hidden": one(B, T)}, ValueError, "hidden"),
    (linear, {"hidden": one(B, T + 1, H)}, ValueError, "hidden"),
    (linear, {"hidden": one(B, T, H, dtype=torch.int32)}, TypeError, "hidden"),
    (linear, {"weight": one(V, H + 1)}, ValueError, "weight"),
    (linear, {"weight": one(V)}, ValueError, "weight"),
    (linear, {"weight": one(0, H)}, ValueError, "weight"),
    (linear, {"weight": one(V, H, dtype=torch.bfloat16)}, TypeError, "weight"),
    (linear, {"weight": one(V, H, device="meta")}, ValueError, "weight"),
    (linear, {"bias": one(V + 1)}, ValueError, "bias"),
    (linear, {"bias": one(V, dtype=torch.float64)}, TypeError, "bias"),
    (linear, {"bias": 0.0}, TypeError, "bias"),
    (fused_linear, {"weight": one(H, V)}, ValueError, "weight"),
    (fused_linear, {"weight": one(V, H, dtype=torch.float16)}, TypeError, "weight"),
    (explain, {"hidden": one(B, T, H + 1)}, ValueError, "weight"),
    # options of the logits
    (token, {"temperature": 0.0}, ValueError, "temperature"),
    (token, {"temperature": -1}, ValueError, "temperature"),
    (token, {"temperature": float("nan")}, ValueError, "temperature"),
    (token, {"temperature": "hot"}, TypeError, "temperature"),
    (token, {"temperature": one(B + 1)}, ValueError, "temperature"),
    (token, {"temperature": torch.tensor([1.0, 0.0])}, ValueError, "temperature"),
    (fused_linear, {"temperature": torch.tensor([1.0, -2.0])}, ValueError, "temperature"),
    (fused, {"temperature": one(B, T)}, ValueError, "temperature"),
    (token, {"logit_scale": float("inf")}, ValueError, "logit_scale"),
    (token, {"logit_scale": True}, TypeError, "logit_scale"),
    (token, {"softcap": 0.0}, ValueError, "softcap"),
    (linear, {"softcap": "30"}, TypeError, "softcap"),
    (fused, {"ignore_index": 1.0}, TypeError, "ignore_index"),
    (token, {"return_entropy": 1}, TypeError, "return_entropy"),
    (token, {"inplace_backward": "yes"}, TypeError, "inplace_backward"),
    (token, {"logits": one(V).expand(B, T, V), "inplace_backward": True}, ValueError, "inplace_backward"),
    (fused, {"logits": one(B, V, T).mT, "inplace_backward": True}, ValueError, "inplace_backward"),
    (token, {"backend": "cuda"}, ValueError, "backend"),
    (fused_linear, {"backend": None}, TypeError, "backend"),
    # chunks and schedules
    (linear, {"logits_dtype": "float16"}, ValueError, "logits_dtype"),
    (linear, {"logits_dtype": torch.float32}, TypeError, "logits_dtype"),
    (linear, {"max_chunk_bytes": 0}, ValueError, "max_chunk_bytes"),
    (fused_linear, {"max_chunk_bytes": 1e6}, TypeError, "max_chunk_bytes"),
    (fused_linear, {"schedule": "fastest"}, ValueError, "schedule"),
    (fused_linear, {"schedule": None}, (TypeError, ValueError), "schedule"),
    (fused_linear, {"schedule": "known"}, ValueError, "schedule"),  # GSPO off-policy
    (explain, {"schedule": "known"}, ValueError, "schedule"),
    (fused_linear, {"skip_inactive": True}, TypeError, "skip_inactive"),
    (fused_linear, {"skip_inactive": "some"}, ValueError, "skip_inactive"),
    (
        fused_linear,
        {"skip_inactive": "all", "ref_logprobs": one(B, T), "kl_beta": 0.1},
        ValueError,
        "skip_inactive",
    ),
    (fused_linear, {"skip_inactive": "all", "entropy_coef": 0.1}, ValueError, "skip_inactive"),
    (
        fused_linear,
        {"skip_inactive": "all", "objective": gk.Linear(), "advantages": None, "token_weights": one(B, T)},
        ValueError,
        "skip_inactive",
    ),
    # layout and mask
    (policy, {"logprobs": one(N)}, ValueError, "cu_seqlens"),
    (policy, {"logprobs": one(B, T, dtype=torch.int64)}, TypeError, "logprobs"),
    (policy, {"logprobs": None}, TypeError, "logprobs"),
    (policy, {"cu_seqlens": offsets([0, N])}, ValueError, "logprobs"),
    (policy, {"loss_mask": one(B)}, ValueError, "loss_mask"),
    (policy, {"loss_mask": one(B, T, dtype=torch.complex64)}, TypeError, "loss_mask"),
    (policy, {"loss_mask": [[1, 1, 1], [1, 1, 1]]}, TypeError, "loss_mask"),
    (policy, {"loss_mask": torch.full((B, T), 0.5)}, ValueError, "loss_mask"),
    (fused, {"loss_mask": torch.full((B, T), 2)}, ValueError, "loss_mask"),
    (fused_linear, {"loss_mask": torch.full((B, T), float("nan"))}, ValueError, "loss_mask"),
    # terms
    (policy, {"old_logprobs": one(B, T + 1)}, ValueError, "old_logprobs"),
    (policy, {"old_logprobs": one(B, T, dtype=torch.int64)}, TypeError, "old_logprobs"),
    (policy, {"advantages": None}, TypeError, "advantages"),
    (policy, {"advantages": one(B + 1)}, ValueError, "advantages"),
    (policy, {"advantages": [1.0, 2.0]}, TypeError, "advantages"),
    (policy, {"advantages": one(B, T)}, ValueError, "advantages"),  # GSPO has one per sequence
    (policy, {"advantages": one(B, dtype=torch.int64)}, TypeError, "advantages"),
    (policy, {"objective": gk.Linear(), "token_weights": one(B, T)}, ValueError, "advantages"),
    (policy, {"objective": gk.Linear(), "advantages": None}, ValueError, "token_weights"),
    (policy, {"kl_beta": 0.1}, ValueError, "ref_logprobs"),
    (policy, {"ref_logprobs": one(B)}, ValueError, "ref_logprobs"),
    (policy, {"kl_beta": "0.1"}, TypeError, "kl_beta"),
    (policy, {"kl_beta": one(T + 1), "ref_logprobs": one(B, T)}, ValueError, "kl_beta"),
    (policy, {"kl_beta": one(4, B, T), "ref_logprobs": one(B, T)}, ValueError, "kl_beta"),
    (policy, {"kl_beta": float("inf"), "ref_logprobs": one(B, T)}, ValueError, "kl_beta"),
    (policy, {"kl_estimator": "k4"}, ValueError, "kl_estimator"),
    (policy, {"kl_estimator": 3}, TypeError, "kl_estimator"),
    (policy, {"kl_ratio_weighted": 1}, TypeError, "kl_ratio_weighted"),
    (
        policy,
        {"objective": gk.Linear(), "advantages": None, "token_weights": one(B, T), "kl_ratio_weighted": True},
        ValueError,
        "kl_ratio_weighted",
    ),
    (policy, {"entropy_coef": 0.1}, ValueError, "entropy"),
    (policy, {"entropy": one(B)}, ValueError, "entropy"),
    (policy, {"entropy_coef": one(3, 3), "entropy": one(B, T)}, ValueError, "entropy_coef"),
    (coefficients, {"entropy_coef": 0.1}, ValueError, "entropy_coef"),
    (policy, {"rollout_weights": one(T)}, ValueError, "rollout_weights"),
    (policy, {"rollout_weights": 2.0}, TypeError, "rollout_weights"),
    (policy, {"token_weights": one(B)}, ValueError, "token_weights"),
    (policy, {"lengths": one(T)}, ValueError, "lengths"),
    (policy, {"lengths": one(B, dtype=torch.bool)}, TypeError, "lengths"),
    (policy, {"lengths": torch.tensor([1.0, 0.0])}, ValueError, "lengths"),
    (fused, {"lengths": torch.tensor([-1, 2])}, ValueError, "lengths"),
    (policy, {"group_ids": torch.tensor([0, 1])}, ValueError, "group_ids"),  # GSPO would ignore them
    (policy, {"turn_ids": torch.zeros(B, T, dtype=torch.int64)}, ValueError, "turn_ids"),
    (policy, {"turn_ids": one(B, T)}, TypeError, "turn_ids"),
    (policy, {"normalizer": 0}, ValueError, "normalizer"),
    (policy, {"normalizer": "batch"}, TypeError, "normalizer"),
    (policy, {"normalizer": one(B)}, ValueError, "normalizer"),
    (policy, {"normalizer": torch.tensor(-1.0)}, ValueError, "normalizer"),
    (fused, {"normalizer": torch.tensor(float("nan"))}, ValueError, "normalizer"),
    (policy, {"objective": gk.GSPO}, TypeError, "objective"),
    (policy, {"objective": "gspo"}, TypeError, "objective"),
    (fused, {"objective": None}, TypeError, "objective"),
    # rollout weights
    (rollout, {"rollout_logprobs": one(T)}, ValueError, "rollout_logprobs"),
    (rollout, {"old_logprobs": one(N)}, ValueError, "old_logprobs"),
    (rollout, {"level": "turn"}, ValueError, "level"),
    (rollout, {"level": "sequence", "reduce": "max"}, ValueError, "reduce"),
    (rollout, {"level": "token", "reduce": "sum"}, ValueError, "reduce"),
    (rollout, {"mode": "clip"}, ValueError, "mode"),
    (rollout, {"high": None}, ValueError, "high"),
    (rollout, {"low": -0.5}, ValueError, "low"),
    (rollout, {"low": 3.0}, ValueError, "low"),
    (rollout, {"low": "none"}, TypeError, "low"),
    (rollout, {"loss_mask": one(T)}, ValueError, "loss_mask"),
    # advantages
    (normalized, {"rewards": one(2, 2)}, ValueError, "rewards"),
    (normalized, {"rewards": [1.0, 2.0]}, TypeError, "rewards"),
    (normalized, {"rewards": one(4, dtype=torch.int64)}, TypeError, "rewards"),
    (normalized, {"group_size": 3}, ValueError, "group_size"),
    (normalized, {"group_size": 0}, ValueError, "group_size"),
    (normalized, {"group_size": 2.0}, TypeError, "group_size"),
    (normalized, {"group_size": None}, ValueError, "group_size"),
    (normalized, {"group_ids": torch.zeros(4, dtype=torch.int64)}, ValueError, "group_ids"),
    (normalized, {"group_size": None, "group_ids": one(4)}, TypeError, "group_ids"),
    (normalized, {"group_size": None, "group_ids": offsets([0, 0, 1])}, ValueError, "group_ids"),
    (normalized, {"scale": "std"}, ValueError, "scale"),
    (normalized, {"eps": -1e-4}, ValueError, "eps"),
    (normalized, {"eps": None}, TypeError, "eps"),
]  # fmt: skip

WRONG_OFFSETS = [
    (offsets([1, 2, N]), ValueError),
    (offsets([0, 2, N - 1]), ValueError),
    (offsets([0, 2, N + 1]), ValueError),
    (offsets([0, N + 3, N]), ValueError),
    (offsets([[0, 2, N]]), ValueError),
    (offsets([], dtype=torch.int32), ValueError),
    (offsets([0.0, 2.0, N]), TypeError),
    ([0, 2, N], TypeError),
]

WRONG_OBJECTIVES = [
    (gk.GSPO, {"clip_low": -0.1}, ValueError, "clip_low"),
    (gk.GSPO, {"clip_low": 1.1}, ValueError, "clip_low"),
    (gk.GSPO, {"clip_low": "3e-4"}, TypeError, "clip_low"),
    (gk.GSPO, {"clip_high": float("inf")}, ValueError, "clip_high"),
    (gk.GSPO, {"clip_high": float("nan")}, ValueError, "clip_high"),
    (gk.GSPO, {"clip_high": None}, TypeError, "clip_high"),
    (gk.GSPO, {"dual_clip": 1.0}, ValueError, "dual_clip"),
    (gk.GSPO, {"dual_clip": True}, TypeError, "dual_clip"),
    (gk.GSPO, {"dual_clip": float("nan")}, ValueError, "dual_clip"),
    (gk.GSPO, {"aggregation": "mean"}, ValueError, "aggregation"),
    (gk.GSPO, {"aggregation": "constant"}, ValueError, "aggregation_constant"),
    (gk.GSPO, {"aggregation": "constant", "aggregation_constant": 0.0}, ValueError, "aggregation_constant"),
    (gk.GSPO, {"aggregation": "constant", "aggregation_constant": "9"}, TypeError, "aggregation_constant"),
    (
        gk.GSPO,
        {"aggregation": "constant", "aggregation_constant": float("inf")},
        ValueError,
        "aggregation_constant",
    ),
    (gk.GSPO, {"aggregation_constant": 3.0}, ValueError, "aggregation_constant"),
    (gk.GSPO, {"epsilon": 0.2}, TypeError, "epsilon"),
    (gk.GSPOToken, {"clip_low": 2}, ValueError, "clip_low"),
    (gk.GSPOToken, {"clip_high": -1e-9}, ValueError, "clip_high"),
    (gk.GRPO, {"clip_high": "0.2"}, TypeError, "clip_high"),
    (gk.GRPO, {"dual_clip": 1.1}, ValueError, "dual_clip"),
    (gk.Linear, {"aggregation": None}, (TypeError, ValueError), "aggregation"),
    (gk.Linear, {"clip_low": 0.1}, TypeError, "clip_low"),
    (gk.CISPO, {"min_ratio": 1.5}, ValueError, "min_ratio"),
    (gk.CISPO, {"max_ratio": 0.0}, ValueError, "max_ratio: got 0"),
    (gk.CISPO, {"min_ratio": 0.8, "max_ratio": 0.5}, ValueError, "max_ratio: got 0.5.* at least 0.8"),
    (gk.GMPO, {"log_clip_low": -0.1}, ValueError, "log_clip_low"),
    (gk.PrimeIPO, {"max_ratio": 0.9}, ValueError, "max_ratio"),
    (gk.M2PO, {"threshold": -0.1}, ValueError, "threshold"),
    (gk.REAL, {"tau": 0.0}, ValueError, "tau"),
    (gk.FSPO, {"log_clip_high": -0.1}, ValueError, "log_clip_high"),
    (gk.CTPO, {"power": 1.5}, ValueError, "power"),
    (gk.CTPO, {"log_dual_clip": 0.01}, ValueError, "log_dual_clip: got 0.01.* at least 0.05"),
    (gk.FIPO, {"half_life": 0.0}, ValueError, "half_life"),
    (gk.FIPO, {"safe_ratio": 0.5}, ValueError, "safe_ratio"),
    (gk.SAPO, {"tau_positive": 0.0}, ValueError, "tau_positive"),
    (gk.ABCGRPO, {"positive_low": 1.1}, ValueError, "positive_low"),
    (gk.TOPR, {"ratio_level": "turn"}, ValueError, "ratio_level"),
    (gk.VESPO, {"lambda_negative": float("nan")}, ValueError, "lambda_negative"),
    (gk.DRO, {"beta": float("inf")}, ValueError, "beta"),
    (gk.DPPO, {"divergence": "js"}, ValueError, "divergence"),
    (gk.SSPO, {"gate": "none"}, ValueError, "gate"),
    (gk.DHPO, {"mix": 1.5}, ValueError, "mix"),
    (gk.DHPO, {"mix": "more"}, ValueError, "mix"),
    (gk.ESPO, {"elbo_kl_beta": -1.0}, ValueError, "elbo_kl_beta"),
    (gk.DrGRPO, {}, ValueError, "aggregation_constant"),
    (gk.DPO, {"beta": -0.1}, ValueError, "^beta"),
    (gk.DPO, {"beta": "0.1"}, TypeError, "^beta"),
    (gk.DPO, {"min_gap": -1.0}, ValueError, "^min_gap"),
    (gk.TRPA, {"anisotropy": float("inf")}, ValueError, "^anisotropy"),
    (gk.TRPA, {"kl_coef": -1.0}, ValueError, "^kl_coef"),
    (gk.REBEL, {"eta": float("nan")}, ValueError, "^eta"),
    (gk.AGRO, {"beta": None}, TypeError, "^beta"),
    (gk.EGSW, {"temperature": 0.0}, ValueError, "^temperature"),
    (gk.EGSW, {"clip_low": 2.0}, ValueError, "^clip_low"),
    (gk.EGSW, {"alpha": -1.0}, ValueError, "^alpha"),
    (gk.ClipCov, {"clip_cov_ratio": 1.5}, ValueError, "^clip_cov_ratio"),
    (gk.ClipCov, {"clip_cov_lb": 6.0}, ValueError, "^clip_cov_ub"),
    (gk.ClipCov, {"seed": 1.5}, TypeError, "^seed"),
    (gk.KLCov, {"kl_cov_ratio": -0.1}, ValueError, "^kl_cov_ratio"),
    (gk.KLCov, {"ppo_kl_coef": -0.1}, ValueError, "^ppo_kl_coef"),
]


def described(row):
    function, wrong, _, name = row
    shown = ",".join(
        f"{key}={tuple(value.shape) if isinstance(value, torch.Tensor) else value}"
        for key, value in wrong.items()
    )
    return f"{function.__name__}-{shown}-{name}"


def raises_naming(exception, name, function, **kwargs):
    tensors = {key: value for key, value in kwargs.items() if isinstance(value, torch.Tensor)}
    kept = {key: (value.detach().clone(), value._version) for key, value in tensors.items()}
    with pytest.raises(exception) as caught:
        function(**kwargs)
    message = str(caught.value)

    assert name in message
    for key, value in tensors.items():
        assert value._version == kept[key][1], f"{key} was written to"
        assert value.is_meta or torch.equal(value.detach().nan_to_num(), kept[key][0].nan_to_num()), key
        assert value.grad is None


@pytest.mark.parametrize(("function", "wrong", "exception", "name"), WRONG, ids=map(described, WRONG))
def test_wrong_argument(function, wrong, exception, name):
    raises_naming(exception, name, function, **(arguments(function) | wrong))


@pytest.mark.parametrize("function", [policy, coefficients, fused, fused_linear, rollout])
@pytest.mark.parametrize(("cu_seqlens", "exception"), WRONG_OFFSETS)
def test_wrong_offsets(function, cu_seqlens, exception):
    kwargs = arguments(function, packed=True) | {"cu_seqlens": cu_seqlens}
    kwargs.pop("advantages", None)
    if function is not rollout:
        kwargs["advantages"] = one(2)
    raises_naming(exception, "cu_seqlens", function, **kwargs)


@pytest.mark.parametrize(
    ("cls", "wrong", "exception", "name"), WRONG_OBJECTIVES, ids=map(described, WRONG_OBJECTIVES)
)
def test_wrong_option_of_an_objective(cls, wrong, exception, name):
    with pytest.raises(exception, match=name):
        cls(**wrong)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "function", [token, linear, policy, coefficients, fused, fused_linear, explain, rollout, normalized]
)
def test_the_calls_that_the_wrong_ones_vary_are_right(function, packed):
    function(**arguments(function, packed))


@pytest.mark.parametrize("function", [token, linear, policy, coefficients, fused, fused_linear, rollout])
def test_unknown_arguments_fail(function):
    raises_naming(TypeError, "temprature", function, **arguments(function), temprature=1.0)


def test_ignored_labels_may_be_anything_where_the_mask_leaves_them_out():
    kwargs = arguments(fused)
    kwargs["labels"] = kwargs["labels"].clone()
    kwargs["labels"][0, 1] = V + 5
    kwargs["loss_mask"] = torch.ones(B, T, dtype=torch.bool)
    kwargs["loss_mask"][0, 1] = False
    assert fused(**kwargs).loss.isfinite()


def test_messages_say_what_was_got_and_what_is_expected():
    with pytest.raises(ValueError, match=r"advantages: got shape \(3,\), expected \[B\] = \(2,\)"):
        policy(**(arguments(policy) | {"advantages": one(3)}))
    with pytest.raises(ValueError, match=r"labels: got 11 in a counted position, expected 0 <= label < 11"):
        token(**(arguments(token) | {"labels": torch.full((B, T), V)}))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("function", [linear, fused_linear])
@pytest.mark.parametrize("budget", [0, -1])
def test_a_chunk_has_at_least_a_row(function, budget, backend):
    """Also where no gradient is wanted, and the backend writes no logits anyway."""
    kwargs = arguments(function) | {"max_chunk_bytes": budget, "backend": backend}
    expected = rf"max_chunk_bytes: got {budget}, expected at least 1: a chunk is at least a row"
    with torch.no_grad(), pytest.raises(ValueError, match=expected):
        function(**kwargs)


@pytest.mark.parametrize("function", [fused, fused_linear])
@pytest.mark.parametrize("wrong", [-1, V])
def test_one_label_that_is_no_column_is_found_where_nothing_is_learned(function, wrong):
    given = arguments(function)
    given["labels"], given["advantages"] = given["labels"].clone(), torch.zeros(B)
    given["labels"][-1, -1] = wrong
    with pytest.raises(ValueError, match=f"labels: got {wrong} in a counted position, expected 0 <= label"):
        function(**given)


def test_a_backend_that_cannot_serve_says_why(monkeypatch):
    import gspo_kernels.cpp

    monkeypatch.setattr(gspo_kernels.cpp, "unavailable", lambda device: "it is being renovated")
    with pytest.raises(RuntimeError, match=r"cpp.*renovated"):
        token(**arguments(token), backend="cpp")
    token(**arguments(token), backend="auto")


@pytest.mark.parametrize("objective", [gk.GSPO(), gk.GRPO()], ids=["sequences", "tokens"])
def test_lengths_in_the_place_of_offsets_are_blamed_on_them(objective):
    """There seems to be one sequence less: so every term that is one per sequence has a wrong shape."""
    logprobs, lengths = -torch.rand(9), torch.tensor([4, 2, 3])
    terms = {"rollout_weights": torch.ones(3), "lengths": lengths}
    for name, value in ({"": None} | terms).items():
        named = {} if value is None else {name: value}
        for given in (lengths, lengths.cumsum(0)):
            with pytest.raises(
                ValueError, match=r"cu_seqlens: starts at 4, expected 0: .* not their lengths"
            ):
                gk.policy_loss(
                    logprobs, logprobs, torch.ones(3), cu_seqlens=given, objective=objective, **named
                )
    offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    gk.policy_loss(logprobs, logprobs, torch.ones(3), cu_seqlens=offsets, objective=objective)
    # right offsets and wrong advantages
    with pytest.raises(ValueError, match=r"advantages: got shape \(4,\)"):
        gk.policy_loss(logprobs, logprobs, torch.ones(4), cu_seqlens=offsets, objective=objective)


@pytest.mark.parametrize("name", ["GSPO", "LUSPO", "ESPO", "GSPOToken"])
def test_clip_ranges_that_look_like_their_ends_are_refused(name):
    objective = getattr(gk, name)
    for low, high in ((0.8, 1.2), (0.5, 1.001), (0.9997, 1.0004), (0.999, 1.999)):
        with pytest.raises(
            ValueError, match=f"clip_low, clip_high: got {low} and {high}, which look like the ends"
        ):
            objective(low, high)
    for low, high in ((0.49, 1.2), (0.8, 1.0), (0.8, 2.0), (1.0, 1.2), (0.9, 99.0)):
        objective(low, high)


@pytest.mark.parametrize("name", ["GRPO", "DAPO", "BNPO", "TLGRPO", "DHPO", "ClipCov"])
def test_ratios_of_tokens_may_have_any_clip_range(name):
    assert getattr(gk, name)(0.8, 1.2).clip_high == 1.2
