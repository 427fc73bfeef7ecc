"""Our kernels behind TRL's, verl's, torchtitan's and SkyRL's own functions, inside the real packages."""

import importlib
import importlib.util
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from gspo_kernels.integrations.backends import replacing
from gspo_kernels.integrations.backends.replacing import NotServedError, Replacements
from gspo_kernels.integrations.errors import IntegrationError
from tests.draws import shifted_seed
from tests.integrations import hook_problem

SHAPE, VOCABULARY, WIDTH = (3, 7), 61, 16


@pytest.fixture
def said(caplog):
    """The lines of a run, each of which comes once in a process."""
    replacing._log.cache_clear()
    with caplog.at_level(logging.WARNING, logger="gspo_kernels"):
        yield lambda: [record.getMessage() for record in caplog.records]


def needs(framework):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    return importlib.import_module(f"gspo_kernels.integrations.backends.{framework}")


def draw(seed, dtype=torch.float32, linear=False):
    """Leaves, labels, weights of log-probs and entropy."""
    rng = torch.Generator().manual_seed(shifted_seed(seed))
    shapes = ((*SHAPE, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,)) if linear else ((*SHAPE, VOCABULARY),)
    leaves = [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]
    labels = torch.randint(0, VOCABULARY, SHAPE, generator=rng)
    return leaves, labels, torch.randn(2, *SHAPE, generator=rng, dtype=torch.float64)


def results(function, leaves, labels, weights, dtype):
    """What a function of (leaves, labels) returns, and the gradients of a weighted sum of it."""
    leaves = [leaf.to(dtype).requires_grad_() for leaf in leaves]
    values = function(*leaves, labels)
    values = values if isinstance(values, tuple) else (values,)
    total = sum((w.view(v.shape).to(v.dtype) * v).sum() for w, v in zip(weights, values, strict=False))
    return [*(v.detach().reshape(SHAPE) for v in values), *torch.autograd.grad(total, leaves)]


def judge(ours, theirs, linear=False, dtype=torch.float32):
    """``ours`` and ``theirs`` take (leaves, labels): both against theirs in fp64 on what dtype rounds."""

    def make(seed):
        leaves, labels, weights = draw(seed, dtype, linear)
        return leaves[: 2 + linear], labels, weights

    hook_problem.judge(
        lambda each: results(ours, *each, dtype),
        lambda each, precision: results(theirs, *each, precision),
        make,
        row_dims=3,
        rounded_to=None,
    )


def test_trls_functions_from_logits(said):
    backend = needs("trl")
    from trl.trainer import utils

    theirs = utils.selective_log_softmax, utils.selective_log_softmax_and_entropy, utils.entropy_from_logits
    keep = torch.ones(SHAPE, dtype=torch.bool)
    keep[1, 2:] = False
    backend.install()
    try:
        ours = utils.selective_log_softmax, utils.selective_log_softmax_and_entropy, utils.entropy_from_logits
        assert not {*ours} & {*theirs}
        for dtype in (torch.float32, torch.bfloat16):
            for options in ({}, {"temperature": 0.7}, {"row_mask": keep}):
                for one, other in zip(ours[:2], theirs[:2], strict=True):
                    judge(
                        lambda x, y, f=one, o=options: f(x, y, **o),
                        lambda x, y, f=other, o=options: f(x, y, **o),
                        dtype=dtype,
                    )
            judge(lambda x, y: ours[2](x), lambda x, y: theirs[2](x), dtype=dtype)
        leaves, labels, _ = draw(0)
        several = torch.stack([labels, labels, (labels + 1) % VOCABULARY], -1)
        torch.testing.assert_close(ours[0](leaves[0], several), theirs[0](leaves[0], several))
        with torch.no_grad():
            several_masked = ours[0](leaves[0], several, row_mask=torch.ones_like(several))
        assert torch.equal(several_masked, theirs[0](leaves[0], several))
        _, entropy = ours[1](leaves[0].requires_grad_(), labels, entropy_requires_grad=False)
        assert not entropy.requires_grad
    finally:
        backend.remove()
    names = ("selective_log_softmax", "selective_log_softmax_and_entropy", "entropy_from_logits")
    assert theirs == tuple(getattr(utils, name) for name in names)
    lines = [f"trl.trainer.utils.{name} runs in gspo_kernels" for name in names]
    lines += [f"trl.trainer.utils.{names[0]} stays as it is where several ids of a row have a mask"]
    assert {*said()} == {*lines} and len(said()) == len(lines)


def test_trls_head_from_hidden_states(said):
    backend = needs("trl")
    from trl.kernels import ChunkedLogProbFunction as Theirs

    before, options = Theirs.apply, (0.7, 32, 5.0, 0.5)

    def scored(outputs, apply):
        def call(hidden, weight, bias, labels):
            rows = hidden.reshape(-1, WIDTH)
            found = apply(rows, weight, bias, labels.reshape(-1), *options, outputs)
            return tuple(each for each in found if each is not None)

        return call

    backend.install()
    try:
        for outputs in (("log_probs",), ("log_probs", "entropy")):
            judge(scored(outputs, Theirs.apply), scored(outputs, before), linear=True)
        leaves, labels, _ = draw(0, linear=True)
        found = scored(("log_probs", "is_top1"), Theirs.apply)(*leaves, labels)
        for one, other in zip(found, scored(("log_probs", "is_top1"), before)(*leaves, labels), strict=True):
            assert torch.equal(one, other)
    finally:
        backend.remove()
    assert "apply" not in vars(Theirs)
    assert said() == [
        "trl.kernels.chunked_logprob.ChunkedLogProbFunction.apply runs in gspo_kernels",
        "trl.kernels.chunked_logprob.ChunkedLogProbFunction.apply stays as it is where is_top1 is asked for",
    ]


def test_a_run_of_trl_ends_where_its_own_does(said, tmp_path):
    """TRL's own trainer: its loss, options and log lines, and our log-probs."""
    backend = needs("trl")
    from trl import GRPOTrainer

    from tests.integrations.trl_problem import make_trainer, save_model, weights

    model, runs = save_model(tmp_path / "model"), []
    for install in (False, True):
        if install:
            backend.install()
        try:
            options = {"max_steps": 3, "beta": 0.1, "importance_sampling_level": "sequence"}
            trainer = make_trainer(GRPOTrainer, model, tmp_path / "run", **options)
            before = weights(trainer.model)
            trainer.train()
            runs.append((weights(trainer.model), trainer.state.log_history[:-1]))
        finally:
            backend.remove()
    (theirs, their_log), (ours, log) = runs
    assert (ours - theirs).norm() <= 1e-5 * (theirs - before).norm() and (theirs - before).norm() > 0
    assert [entry.keys() for entry in log] == [entry.keys() for entry in their_log]
    assert any(line.endswith("runs in gspo_kernels") for line in said())


def test_torchtitans_losses(said):
    backend = needs("torchtitan")
    from torchtitan.components import loss

    theirs = loss.cross_entropy_loss, loss.compute_logprobs
    backend.install()
    try:
        for dtype in (torch.float32, torch.bfloat16):
            judge(lambda x, y: loss.compute_logprobs(x, y), lambda x, y: theirs[1](x, y), dtype=dtype)
            for seed in range(6):
                (logits,), labels, _ = draw(seed, dtype)
                labels[0, :3] = -100
                leaves = [logits.clone().requires_grad_() for _ in range(2)]
                built = loss.CrossEntropyLoss(loss.CrossEntropyLoss.Config())
                one, other = built.fn(leaves[0], labels), theirs[0](leaves[1], labels)
                torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
                for each in (one, other):
                    each.backward()
                eps = torch.finfo(dtype).eps
                torch.testing.assert_close(leaves[0].grad, leaves[1].grad, rtol=4 * eps, atol=4 * eps)
                got, want = (
                    f(logits, labels, return_entropy=True) for f in (loss.compute_logprobs, theirs[1])
                )
                for value, expected in zip(got, want, strict=True):
                    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    finally:
        backend.remove()
    assert theirs == (loss.cross_entropy_loss, loss.compute_logprobs)
    assert len(said()) == 2


@pytest.fixture
def skyrl_utils(monkeypatch):
    """SkyRL's module, without the packages around it, whose own modules need Ray."""
    backend = needs("skyrl")
    root = Path(importlib.util.find_spec("skyrl").submodule_search_locations[0])
    for path in ("backends", "backends/skyrl_train", "backends/skyrl_train/utils"):
        package = types.ModuleType("skyrl." + path.replace("/", "."))
        package.__path__ = [str(root / path)]
        monkeypatch.setitem(sys.modules, package.__name__, package)
    pytest.importorskip("jaxtyping")
    return backend, importlib.import_module("skyrl.backends.skyrl_train.utils.torch_utils")


def test_skyrls_log_probs(skyrl_utils, said):
    backend, utils = skyrl_utils
    logprobs, entropy = utils.logprobs_from_logits, utils.chunked_entropy_from_logits
    mask = torch.ones(SHAPE)
    mask[0, :2] = 0
    backend.install()
    try:
        judge(utils.logprobs_from_logits, logprobs)
        for options in ({}, {"attention_mask": mask}):
            judge(
                lambda x, y, o=options: utils.chunked_entropy_from_logits(x, True, **o),
                lambda x, y, o=options: entropy(x, True, **o),
            )
        (logits,), _, _ = draw(0)
        assert not utils.chunked_entropy_from_logits(logits.requires_grad_()).requires_grad
        with pytest.raises(ValueError, match="attention_mask: got shape"):
            utils.chunked_entropy_from_logits(logits, attention_mask=mask[:1])
    finally:
        backend.remove()
    assert utils.logprobs_from_logits is logprobs and len(said()) == 2


def test_verls_log_probs(said):
    backend = needs("verl")
    from verl.utils import torch_functional as utils
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    names = ("logprobs_from_logits", "entropy_from_logits", "entropy_from_logits_with_chunking")
    theirs = {name: getattr(utils, name) for name in names}
    forward = FusedLinearForPPO.forward
    backend.install()
    try:
        judge(utils.logprobs_from_logits, utils.logprobs_from_logits_naive)
        for name in names[1:]:
            flat = [
                lambda x, y, f=f: f(x.reshape(-1, VOCABULARY)) for f in (getattr(utils, name), theirs[name])
            ]
            judge(flat[0], lambda x, y: theirs["entropy_from_logits"](x))
        judge(
            lambda h, w, b, y: FusedLinearForPPO()(h, w + 0 * b.unsqueeze(1), y, temperature=0.7),
            lambda h, w, b, y: plain_scores(h, w + 0 * b.unsqueeze(1), y, 0.7),
            linear=True,
        )
    finally:
        backend.remove()
    assert FusedLinearForPPO.forward is forward
    assert all(getattr(utils, name) is each for name, each in theirs.items())
    assert len(said()) == 4


def plain_scores(hidden, weight, labels, temperature):
    logp = torch.log_softmax(hidden @ weight.T / temperature, -1)
    return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1), -(logp.exp() * logp).sum(-1)


def test_verls_workers_install_by_the_environment():
    needs("verl")
    root = Path(__file__).parents[2]
    code = (
        "import torch, verl; from verl.utils.torch_functional import logprobs_from_logits as f; "
        "f(torch.randn(2, 3, 9), torch.zeros(2, 3, dtype=torch.int64))"
    )
    modules = "gspo_kernels.integrations.backends.verl_workers"
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": modules, "PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    assert "verl.utils.torch_functional.logprobs_from_logits runs in gspo_kernels" in done.stderr


def test_replacements_reach_modules_that_have_imported_the_function(monkeypatch, said):
    framework, user = types.ModuleType("some_framework"), types.ModuleType("some_framework.user")

    def theirs(x):
        return x

    framework.double, user.imported = theirs, theirs
    monkeypatch.setitem(sys.modules, "some_framework", framework)
    monkeypatch.setitem(sys.modules, "some_framework.user", user)
    monkeypatch.setattr(replacing, "require_package", lambda *_: "1.0")

    def ours(x):
        if x < 0:
            raise NotServedError("x is negative")
        return 2 * x

    both = Replacements("some_framework", ">=1", {"some_framework:double": ours})
    both.install()
    both.install()
    assert framework.double(3) == user.imported(3) == 6 and user.imported(-3) == -3
    both.remove()
    assert framework.double is theirs and user.imported is theirs
    assert said() == [
        "some_framework.double runs in gspo_kernels",
        "some_framework.double stays as it is where x is negative",
    ]


def test_a_missing_framework_is_refused():
    with pytest.raises(IntegrationError, match="no-such-framework: not installed"):
        Replacements("no-such-framework", ">=1", {}).install()
