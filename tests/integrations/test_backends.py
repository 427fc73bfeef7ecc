"""Our kernels in place of functions of TRL, verl, torchtitan and SkyRL, inside the real packages."""

import importlib
import importlib.util
import logging
import sys
import types
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gspo_kernels.integrations import errors
from gspo_kernels.integrations.backends import shared, skyrl, torchtitan, verl
from gspo_kernels.integrations.backends.shared import NotServedError, Replacements
from gspo_kernels.integrations.errors import IntegrationError
from tests.draws import shifted_seed
from tests.forks import in_processes

SHAPE, VOCABULARY, WIDTH = (3, 7), 61, 16


@pytest.fixture
def lines(caplog):
    """Return a function for the log lines of this test; each line is logged once per process."""
    shared._log.cache_clear()
    with caplog.at_level(logging.WARNING, logger="gspo_kernels"):
        yield lambda: {each.getMessage() for each in caplog.records if each.name == "gspo_kernels"}


def backend_of(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    return importlib.import_module(f"gspo_kernels.integrations.backends.{framework}")


@contextmanager
def installed(backend):
    """Install a backend and yield the framework's functions by name; put them back afterwards."""

    def found(path):
        module, _, name = path.partition(":")
        value = importlib.import_module(module)
        for each in name.split("."):
            value = getattr(value, each)
        return value

    paths = backend.REPLACEMENTS.functions
    theirs = {path.rpartition(":")[2]: found(path) for path in paths}
    backend.install()
    try:
        assert all(found(path) != each for path, each in zip(paths, theirs.values(), strict=True))
        yield theirs
    finally:
        backend.remove()
    assert all(found(path) == each for path, each in zip(paths, theirs.values(), strict=True))


def draw(linear=False):
    """Draw leaves, labels, and weights of log-probs and entropy."""
    rng = torch.Generator().manual_seed(shifted_seed(0))
    shapes = ((*SHAPE, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)) if linear else ((*SHAPE, VOCABULARY),)
    leaves = [torch.randn(shape, generator=rng, dtype=torch.float64) for shape in shapes]
    labels = torch.randint(0, VOCABULARY, SHAPE, generator=rng)
    return leaves, labels, torch.randn(2, *SHAPE, generator=rng, dtype=torch.float64)


def results(function, leaves, labels, weights):
    """Return the values of a function of (leaves, labels), and the gradients of their weighted sum."""
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    values = function(*leaves, labels)
    values = values if isinstance(values, tuple) else (values,)
    total = sum((w.view(v.shape).to(v.dtype) * v).sum() for w, v in zip(weights, values, strict=False))
    return [v.detach().reshape(SHAPE) for v in values], torch.autograd.grad(total, leaves)


def assert_equal(ours, theirs, linear=False, dtypes=(torch.float64,)):
    """Compare two functions of (leaves, labels): ours in ``dtypes``, the framework's in fp64."""
    leaves, labels, weights = draw(linear)
    for dtype in dtypes:
        leaves = [leaf.to(dtype) for leaf in leaves]
        values, gradients = results(ours, leaves, labels, weights)
        wanted, wanted_gradients = results(theirs, [leaf.double() for leaf in leaves], labels, weights)
        # 16-bit gradients are rounded once; some functions compute in fp32 regardless of the dtype of inputs
        exact = all(each.dtype == torch.float64 for each in (*values, *wanted))
        near = 1e-12 if exact else 1e-5
        for one, other in zip(values, wanted, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=near, atol=near)
        for one, other in zip(gradients, wanted_gradients, strict=True):
            assert one.dtype == dtype
            rounding = torch.finfo(dtype).eps
            torch.testing.assert_close(one.double(), other, rtol=max(rounding, near), atol=near)


BOTH = (torch.float64, torch.bfloat16)


def test_trls_functions_from_logits(lines):
    backend = backend_of("trl")
    from trl.trainer import utils

    keep = torch.ones(SHAPE, dtype=torch.bool)
    keep[1, 2:] = False
    names = ("selective_log_softmax", "selective_log_softmax_and_entropy", "entropy_from_logits")
    with installed(backend) as theirs:
        for name in names[:2]:
            for options in ({}, {"temperature": 0.7}, {"row_mask": keep}):
                ours, other = getattr(utils, name), theirs[name]
                assert_equal(
                    lambda x, y, f=ours, o=options: f(x, y, **o),
                    lambda x, y, f=other, o=options: f(x, y, **o),
                    dtypes=BOTH,
                )
        assert_equal(lambda x, y: utils.entropy_from_logits(x), lambda x, y: theirs[names[2]](x), dtypes=BOTH)
        (logits,), labels, _ = draw()
        several = torch.stack([labels, labels, (labels + 1) % VOCABULARY], -1)
        torch.testing.assert_close(
            utils.selective_log_softmax(logits, several), theirs[names[0]](logits, several)
        )
        masked = utils.selective_log_softmax(logits, several, row_mask=torch.ones_like(several))
        assert torch.equal(masked, theirs[names[0]](logits, several))
        logits.requires_grad_()
        scored = utils.selective_log_softmax_and_entropy(logits, labels, entropy_requires_grad=False)
        assert scored[0].requires_grad and not scored[1].requires_grad
    assert lines() == {f"trl.trainer.utils.{name} runs in gspo_kernels" for name in names} | {
        f"trl.trainer.utils.{names[0]} stays as it is where several ids of a row have a mask"
    }


def test_trls_head_from_hidden_states(lines):
    backend, options = backend_of("trl"), (0.7, 32, 5.0, 0.5)

    def scored(outputs, apply):
        def call(hidden, weight, bias, labels):
            rows = hidden.reshape(-1, WIDTH)
            got = apply(rows, weight, bias, labels.reshape(-1), *options, outputs)
            return tuple(each for each in got if each is not None)

        return call

    from trl.kernels import ChunkedLogProbFunction

    with installed(backend) as theirs:
        before = theirs["ChunkedLogProbFunction.apply"]
        for outputs in (("log_probs",), ("log_probs", "entropy")):
            ours, other = (scored(outputs, each) for each in (ChunkedLogProbFunction.apply, before))
            assert_equal(ours, other, linear=True)
        leaves, labels, _ = draw(linear=True)
        refused = [
            scored(("log_probs", "is_top1"), each)(*leaves, labels)
            for each in (ChunkedLogProbFunction.apply, before)
        ]
        assert all(torch.equal(one, other) for one, other in zip(*refused, strict=True))
    assert "apply" not in vars(ChunkedLogProbFunction)
    path = "trl.kernels.chunked_logprob.ChunkedLogProbFunction.apply"
    assert lines() == {f"{path} runs in gspo_kernels", f"{path} stays as it is where is_top1 is asked for"}


@pytest.mark.parametrize("options", [
    {"beta": 0.0}, {"beta": 1.0, "num_items_in_batch": torch.tensor(31)},
    {"beta": 0.3, "temperature": 0.7, "student_logit_scale": 0.8, "teacher_logit_scale": 1.3,
     "student_final_logit_softcapping": 3.0, "teacher_final_logit_softcapping": 5.0},
])  # fmt: skip
def test_trls_divergence_from_hidden_states(lines, options):
    """Loss, sum of entropies, number of tokens and gradients are TRL's; its loss is in fp32."""
    backend = backend_of("trl")
    from trl.trainer import distillation_trainer

    rng = torch.Generator().manual_seed(shifted_seed(1))
    (student, weight, bias), _, _ = draw(linear=True)
    teacher, *theirs = (
        torch.randn(size, generator=rng) for size in ((*SHAPE, 9), (VOCABULARY, 9), VOCABULARY)
    )
    mask = torch.ones(SHAPE, dtype=torch.int64)
    mask[0, 2:] = mask[2, 0] = 0

    def called(dtype, mask):
        leaves = [each.to(dtype).requires_grad_() for each in (student, weight, bias)]
        others = [each.to(dtype) for each in (teacher, *theirs)]
        loss, entropy, count = distillation_trainer._chunked_divergence_loss(
            leaves[0], others[0], leaves[1], others[1], mask, student_lm_head_bias=leaves[2],
            teacher_lm_head_bias=others[2], **options,
        )  # fmt: skip
        return loss.detach(), entropy, count, *torch.autograd.grad(loss, leaves)

    for dtype in (torch.float32, torch.bfloat16):
        near = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
        for each in (mask, mask * 0):
            wanted = called(dtype, each)
            with installed(backend):
                got = called(dtype, each)
            for one, other in zip(got, wanted, strict=True):
                assert one.dtype == other.dtype
                scale = other.abs().max().item() if other.ndim else abs(other.item())
                torch.testing.assert_close(one, other, rtol=near, atol=near * max(scale, 1e-6))
    assert lines() == {"trl.trainer.distillation_trainer._chunked_divergence_loss runs in gspo_kernels"}


def test_a_run_of_trl_ends_where_its_own_does(lines, tmp_path):
    """TRL's own trainer keeps its loss, options and log lines, and uses our log-probs."""
    backend = backend_of("trl")
    from trl import GRPOTrainer

    from tests.integrations.trl_problem import make_trainer, save_model, whole

    model, runs = save_model(tmp_path / "model"), []
    options = {"max_steps": 2, "beta": 0.1, "importance_sampling_level": "sequence"}
    for context in (nullcontext(), installed(backend)):
        with context:
            trainer = make_trainer(GRPOTrainer, model, tmp_path / "run", **options)
            before = whole(trainer.model.parameters())
            trainer.train()
            runs.append((whole(trainer.model.parameters()), trainer.state.log_history[:-1]))
    (theirs, their_log), (ours, log) = runs
    assert (ours - theirs).norm() <= 1e-5 * (theirs - before).norm() and (theirs - before).norm() > 0
    assert [entry.keys() for entry in log] == [entry.keys() for entry in their_log]
    assert any(line.endswith("runs in gspo_kernels") for line in lines())


def test_torchtitans_losses(lines):
    backend = backend_of("torchtitan")
    from torchtitan.components import loss

    skipped = torch.zeros(SHAPE, dtype=torch.bool)
    skipped[0, :3] = True

    def by_token(function, **options):
        return lambda logits, labels: function(logits, labels.masked_fill(skipped, -100), **options)

    def repeated(function):
        return lambda logits, labels: by_token(function)(logits, labels) * torch.ones(SHAPE)

    with installed(backend) as theirs:
        for options in ({}, {"return_entropy": True}):
            ours, other = loss.compute_logprobs, theirs["compute_logprobs"]
            assert_equal(by_token(ours, **options), by_token(other, **options), dtypes=BOTH)
        built = loss.CrossEntropyLoss(loss.CrossEntropyLoss.Config()).fn
        assert_equal(repeated(built), repeated(theirs["cross_entropy_loss"]))
    assert len(lines()) == 2


def test_skyrls_log_probs(lines, monkeypatch):
    """SkyRL's module is imported without its parent packages, which need Ray."""
    backend = backend_of("skyrl")
    root = Path(importlib.util.find_spec("skyrl").submodule_search_locations[0])
    for path in ("backends", "backends/skyrl_train", "backends/skyrl_train/utils"):
        package = types.ModuleType("skyrl." + path.replace("/", "."))
        package.__path__ = [str(root / path)]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    pytest.importorskip("jaxtyping")
    utils = importlib.import_module("skyrl.backends.skyrl_train.utils.torch_utils")
    mask = torch.ones(SHAPE)
    mask[0, :2] = 0
    with installed(backend) as theirs:
        assert_equal(utils.logprobs_from_logits, theirs["logprobs_from_logits"])
        for options in ({}, {"attention_mask": mask}):
            assert_equal(
                lambda x, y, o=options: utils.chunked_entropy_from_logits(x, True, **o),
                lambda x, y, o=options: theirs["chunked_entropy_from_logits"](x, True, **o),
            )
        (logits,), _, _ = draw()
        assert not utils.chunked_entropy_from_logits(logits.requires_grad_()).requires_grad
        with pytest.raises(ValueError, match="attention_mask: got shape"):
            utils.chunked_entropy_from_logits(logits, attention_mask=mask[:1])
    assert len(lines()) == 2


def test_verls_log_probs(lines):
    backend = backend_of("verl")
    from verl.utils import torch_functional as utils
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    def plain_scores(hidden, weight, bias, labels):
        logp = torch.log_softmax(hidden @ (weight + 0 * bias.unsqueeze(1)).T / 0.7, -1)
        return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)

    with installed(backend) as theirs:
        assert_equal(utils.logprobs_from_logits, utils.logprobs_from_logits_naive, dtypes=BOTH)
        for name in ("entropy_from_logits", "entropy_from_logits_with_chunking"):
            ours, other = getattr(utils, name), theirs["entropy_from_logits"]
            assert_equal(lambda x, y, f=ours: f(x.reshape(-1, VOCABULARY)), lambda x, y, f=other: f(x))
        assert_equal(
            lambda h, w, b, y: FusedLinearForPPO()(h, w + 0 * b.unsqueeze(1), y, temperature=0.7),
            plain_scores,
            linear=True,
        )
    assert len(lines()) == 4


def test_verls_log_probs_leave_gradients_in_logits():
    function = verl.REPLACEMENTS.functions["verl.utils.torch_functional:logprobs_from_logits"]
    (leaf,), labels, _ = draw()
    for options, overwritten in (({}, True), ({"inplace_backward": False}, False)):
        logits = leaf.clone().requires_grad_() * 1.0
        function(logits, labels, **options).sum().backward()
        assert torch.equal(logits.detach(), leaf) != overwritten
    logits = leaf.clone().requires_grad_()
    function(logits, labels).sum().backward()
    assert torch.equal(logits.detach(), leaf)  # a leaf is never overwritten


def test_formulas_without_the_packages(monkeypatch):
    """For torchtitan, SkyRL and verl; torchtitan's label of -100 has an entropy, but no log-prob."""
    size = 1
    for name, module in (
        ("utils", types.SimpleNamespace(get_spmd_backend=lambda: "spmd_types")),
        ("spmd_types", types.SimpleNamespace(spmd_mesh_size=lambda dim: size)),
    ):
        monkeypatch.setitem(sys.modules, f"torchtitan.distributed.{name}", module)
    cross_entropy, logprobs_of = torchtitan.REPLACEMENTS.functions.values()
    skyrls_logprobs, skyrls_entropy = skyrl.REPLACEMENTS.functions.values()
    verls = verl.REPLACEMENTS.functions["verl.utils.kernel.linear_cross_entropy:linear_cross_entropy"]
    (hidden, weight, _), labels, _ = draw(linear=True)
    logits, rows = hidden @ weight.t() / 0.7, hidden.flatten(0, 1)
    ignored = torch.rand(SHAPE, generator=torch.Generator().manual_seed(shifted_seed(1))) < 0.3
    logp = logits.log_softmax(-1)
    chosen, entropy = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)
    mask, some = torch.arange(SHAPE[1]).expand(SHAPE) < 5, labels.masked_fill(ignored, -100)
    for got, want in (
        (logprobs_of(logits, some), chosen.masked_fill(ignored, 0.0)),
        (logprobs_of(logits, some, return_entropy=True)[0], chosen.masked_fill(ignored, 0.0)),
        (logprobs_of(logits, some, return_entropy=True)[1], entropy),
        (cross_entropy(logits, some), -chosen[~ignored].sum()),
        (skyrls_logprobs(logits, labels), chosen),
        (skyrls_entropy(logits, attention_mask=mask), entropy * mask),
        (torch.stack(verls(rows, weight, labels, 0.7)), torch.stack([chosen.flatten(), entropy.flatten()])),
        (verls(rows / 0.7, weight, labels)[0], chosen.flatten()),
    ):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    size = 2
    with pytest.raises(NotServedError, match="tensor-parallel"):
        logprobs_of(logits, some)
    with pytest.raises(NotServedError, match="reduction"):
        verls(rows, weight, labels, reduction="mean")


def over_ranks(rank):
    """Megatron's head in verl: each rank has half of the vocabulary; dHidden is a rank's part."""
    dist.init_process_group("gloo")
    verls = verl.REPLACEMENTS.functions["verl.utils.kernel.linear_cross_entropy:linear_cross_entropy"]
    (hidden, weight, _), labels, weights = draw(linear=True)
    weight, alone = weight[:60], dist.new_group([0])  # on rank 1 no member, which has nothing to share with
    place, labels = slice(rank * 30, rank * 30 + 30), (labels % 60).flatten()
    exact = [hidden.flatten(0, 1).requires_grad_(), weight.requires_grad_()]
    logits = exact[0] @ exact[1].T / 0.7
    logp = logits.log_softmax(-1)
    chosen, entropy = logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)
    want = torch.stack([chosen, entropy])
    total = (want * weights.flatten(1)).sum()
    of_hidden, of_weight = torch.autograd.grad(total, exact)

    own = [exact[0].detach().requires_grad_(), weight[place].detach().requires_grad_()]
    got = torch.stack(verls(*own, labels, 0.7, dist_process_group=dist.group.WORLD))
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)
    part, gradient = torch.autograd.grad((got * weights.flatten(1)).sum(), own)
    dist.all_reduce(part)
    torch.testing.assert_close((part, gradient), (of_hidden, of_weight[place]), rtol=1e-9, atol=1e-12)

    if rank == 0:  # a group of one rank shares nothing
        got = torch.stack(verls(*exact, labels, 0.7, dist_process_group=alone))
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_heads_that_ranks_share():
    in_processes(2, over_ranks)


def test_replacements_reach_modules_that_imported_it(monkeypatch, lines):
    framework, user = types.ModuleType("some_framework"), types.ModuleType("some_framework.user")

    def theirs(x):
        return x

    framework.double, user.imported = theirs, theirs
    monkeypatch.setitem(sys.modules, "some_framework", framework)
    monkeypatch.setitem(sys.modules, "some_framework.user", user)
    monkeypatch.setattr(errors, "version", lambda name: "99.0")

    def ours(x, more=None):
        if x < 0:
            raise NotServedError("x is negative")
        return 2 * x

    both = Replacements("some_framework", {"some_framework:double": ours})
    for _ in range(2):
        both.install()
    assert framework.double(3) == user.imported(3) == 6 and user.imported(-3) == -3
    late = {name: types.ModuleType(name) for name in ("some_framework.late", "another_package")}
    for name, module in late.items():
        module.imported = framework.double
        monkeypatch.setitem(sys.modules, name, module)
    both.remove()
    assert all(each is theirs for each in (framework.double, user.imported))
    assert all(module.imported is theirs for module in late.values())
    assert lines() == {
        "some_framework.double runs in gspo_kernels",
        "some_framework.double stays as it is where x is negative",
    }
    framework.changed, framework.fewer = lambda x, other: x, lambda: None
    for path in (
        "framework:fewer",
        "framework:changed",
        "framework:missing",
        "framework:Missing.apply",
        "framework.gone:double",
    ):
        both = {"some_framework:double": ours, f"some_{path}": ours}
        with pytest.raises(IntegrationError, match=f"{path.replace(':', '.')} .* in version 99.0, expected"):
            Replacements("some_framework", both).install()
        assert framework.double is theirs
