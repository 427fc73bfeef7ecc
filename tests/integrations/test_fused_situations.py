"""A fused model keeps its loss in copies, wrappers and threads, or says why it cannot.

The expected log-probs are those of the model's own logits, in the same situation.
"""

import copy
import functools
import io
import multiprocessing
import pickle
import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.transformers import FusedLMOutput, fuse_lm_head, unfuse_lm_head
from tests.draws import shifted_seed
from tests.integrations.tiny_models import tiny
from tests.trainer.conftest import LIMIT, make_accelerator, model_of_varying_rope

pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.randint(3, 96, (3, 8), generator=torch.Generator().manual_seed(shifted_seed(0)))
SCORE = {"labels": IDS, "return_logprobs": True}
UPDATE = {"labels": IDS, "old_logprobs": None, "advantages": torch.tensor([1.0, -0.5, 2.0])}


def logits_of(output):
    return output.logits.float().log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1)


def check(model, tolerance=1e-5):
    """Compare scores and the loss's gradient with those of the model's own logits."""
    results = []
    for fused in (False, True):
        model.zero_grad()
        if fused:
            output = model(IDS, **SCORE)
            assert isinstance(output, FusedLMOutput)
            logprobs, loss = output.logprobs[:, :-1], model(IDS, **UPDATE).loss
        else:
            logprobs = logits_of(model(IDS))
            mean = logprobs.mean(1)
            loss = -(UPDATE["advantages"] * (mean - mean.detach()).exp()).mean()
        if loss.requires_grad:
            loss.backward()
        gradients = [p.grad.float().clone() for p in model.parameters() if p.grad is not None]
        results.append([logprobs.detach().float(), loss.detach().float(), *gradients])
    for got, want in zip(results[1], results[0], strict=True):
        assert (got - want).norm() <= tolerance * (1 + want.norm())


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def own_forward(model, **changes):
    """Return a ``forward`` as Liger sets it on instances: it takes any argument, and ignores ours."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        kwargs = {name: kwargs[name] for name in kwargs.keys() & {"use_cache", "position_ids"}}
        hidden = self.model(input_ids, attention_mask=attention_mask, **kwargs).last_hidden_state
        return types.SimpleNamespace(logits=self.lm_head(hidden), loss=torch.zeros(()))

    return types.MethodType(forward, model)


def with_forward(model):
    model.forward = own_forward(model)
    return model


def with_wrapped_forwards(model, times=2):
    """Set a forward that calls the one before, twice; take the outer one off and put it on again."""
    for _ in range(times):
        before, calls = model.forward, []
        model.forward = functools.wraps(before)(
            lambda *a, f=before, c=calls, **k: (c.append(1), f(*a, **k))[1]
        )
        after = model.forward
        model.forward = before
        model.forward = after
    model(IDS)
    model(IDS, **SCORE)
    assert len(calls) == 2
    return model


def with_forward_removed(model):
    with_forward(model)
    del model.forward
    assert "forward" not in vars(model)
    return model


def with_forward_of_the_class(model):
    cls = type(model)
    own = cls.forward
    cls.forward = functools.wraps(own)(lambda self, *args, **kwargs: own(self, *args, **kwargs))
    return model


def prepared(model, copied=lambda model: model):
    accelerator = make_accelerator("bf16")
    model = copied(accelerator.prepare(model))
    return accelerator.unwrap_model(model, keep_fp32_wrapper=False)


def with_lora(model, **options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(shifted_seed(1))
    options = {"r": 4, "init_lora_weights": False, "target_modules": ["q_proj"], **options}
    return peft.get_peft_model(model, peft.LoraConfig(**options))


def with_disabled_adapter(model, **options):
    model = with_lora(model, **options)
    for name, parameter in model.named_parameters():
        if "default" in name:  # the adapter's
            nn.init.normal_(parameter)
    model.base_model.disable_adapter_layers()
    return model


def with_head(model, head=None):
    head = nn.Linear(32, 96, bias=False) if head is None else head
    model.lm_head = head
    return model


def with_hook(module, **options):
    module.register_forward_hook(lambda module, args, output: output * 1.01, **options)


def resized(model):
    model.resize_token_embeddings(104)
    return model


def checkpointed(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model.train()


class Outer(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Recomputed(Outer):
    def forward(self, *args, **kwargs):
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


class Functional(Outer):
    def forward(self, *args, **kwargs):
        weights = dict(self.inner.named_parameters())
        return torch.func.functional_call(self.inner, weights, args, kwargs)


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", **options)


def with_compiled_forward(model):
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


def compiled_in_place(model):
    torch._dynamo.reset()
    model.compile(backend="eager")
    return model


def with_removed_parametrization(model):
    """Remove a parametrization that was there in a call, and another one from the same module."""
    model.lm_head.bias = nn.Parameter(torch.ones(96))
    for name in ("weight", "bias"):
        parametrize.register_parametrization(model.lm_head, name, nn.Identity())
        model(IDS, **SCORE)
    for name in ("weight", "bias"):
        parametrize.remove_parametrizations(model.lm_head, name)
    return model


def copied_in_a_call(model):
    copies = []
    handle = model.lm_head.register_forward_pre_hook(lambda *args: copies.append(copy.deepcopy(model)))
    model(IDS, **SCORE)
    handle.remove()
    copies[0].lm_head._forward_pre_hooks.clear()
    return through_pickle(copies[0])


def offloaded(model):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


def with_accelerate_hooks(model, remove=False):
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    for module in (model, model.lm_head):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))
    return hooks.remove_hook_from_module(model, recurse=True) if remove else model


def with_gathered_head(model):
    """Shard the head as ZeRO-3 does: empty outside its hooks, which also attach to its output's gradient."""
    whole = model.lm_head.weight.data

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            weight.data = whole
            return gradient

    def gather(module, args):
        weight.data = whole

    def release(module, args, output):
        weight.data = torch.empty(0)
        found = output if isinstance(output, tuple) else (output,)
        found = tuple(Gather.apply(x) if x.requires_grad else x for x in found)
        return found if isinstance(output, tuple) else found[0]

    weight = model.lm_head.weight
    for hook in (gather, release):
        hook.__module__ = "deepspeed.runtime.zero.parameter_offload"
    model.lm_head.register_forward_pre_hook(gather)
    model.lm_head.register_forward_hook(release)
    return model


def loaded_from_meta(model):
    with torch.device("meta"):
        empty = fuse_lm_head(type(model)(model.config))
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    for name, module in model.named_modules():  # buffers that are not in the state dict
        for key in module._non_persistent_buffers_set:
            setattr(empty.get_submodule(name), key, getattr(module, key))
    return empty.eval()


SITUATIONS = {
    "deep copy": copy.deepcopy,
    "copy": copy.copy,
    "copy, then unfused": lambda m: (unfuse_lm_head(copy.copy(m)), m)[1],
    "copy in a call": copied_in_a_call,
    "pickle": through_pickle,
    "torch.save": through_torch_save,
    "pickle of a deep copy of a used model": lambda m: (check(m), through_pickle(copy.deepcopy(m)))[1],
    "exponential moving average": torch.optim.swa_utils.AveragedModel,
    "another forward": with_forward,
    "another forward, copied": lambda m: copy.deepcopy(with_forward(m)),
    "another forward, fused again": lambda m: fuse_lm_head(with_forward(m)),
    "unfused, another forward, fused again": lambda m: fuse_lm_head(with_forward(unfuse_lm_head(m))),
    "wrapped forwards": with_wrapped_forwards,
    "forward removed": with_forward_removed,
    "another forward of the class": with_forward_of_the_class,
    "own forward of the class": lambda m: (setattr(m, "forward", type(m).forward.__get__(m)), m)[1],
    "fused twice": lambda m: fuse_lm_head(fuse_lm_head(m)),
    "unfused and fused": lambda m: fuse_lm_head(unfuse_lm_head(m)),
    "a new instance of the class": lambda m: type(m)(m.config).eval(),
    "loaded from meta": loaded_from_meta,
    "LoRA": with_lora,
    "LoRA on the head": lambda m: with_lora(m, target_modules=["lm_head"]),
    "LoRA with a saved head": lambda m: with_lora(m, modules_to_save=["lm_head"]),
    "LoRA with trained tokens": lambda m: with_lora(m, trainable_token_indices={"lm_head": [4, 5]}),
    "LoRA on the head, disabled": lambda m: with_disabled_adapter(m, target_modules=["lm_head"]),
    "LoRA with a saved head, disabled": lambda m: with_disabled_adapter(m, modules_to_save=["lm_head"]),
    "LoRA, fused": lambda m: fuse_lm_head(with_lora(unfuse_lm_head(m))),
    "LoRA, merged": lambda m: with_lora(m, target_modules=["lm_head"]).merge_and_unload(),
    "LoRA, compiled": lambda m: with_lora(compiled(m)),
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "compiled forward": with_compiled_forward,
    "compiled, then fused": lambda m: fuse_lm_head(compiled(unfuse_lm_head(m))),
    "in another module": Outer,
    "recomputed": Recomputed,
    "functional call": Functional,
    "checkpoint wrapper": lambda m: fuse_lm_head(checkpoint_wrapper(m)),
    "data parallel": nn.DataParallel,
    "checkpointing": lambda m: checkpointed(m, False),
    "checkpointing, reentrant": lambda m: checkpointed(m, True),
    "another head": with_head,
    "another weight": lambda m: (setattr(m.lm_head, "weight", nn.Parameter(torch.randn(96, 32))), m)[1],
    "tied weights": lambda m: (setattr(m.config, "tie_word_embeddings", True), m.tie_weights(), m)[-1],
    "more tokens": resized,
    "double": lambda m: m.double(),
    "weight norm": lambda m: (parametrizations.weight_norm(m.lm_head), m)[1],
    "parametrizations removed": with_removed_parametrization,
    "legacy weight norm": lambda m: (torch.nn.utils.weight_norm(m.lm_head), m)[1],
    "a hook before the head": lambda m: (
        m.lm_head.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,)),
        m,
    )[1],
    "accelerate's hooks": with_accelerate_hooks,
    "accelerate's hooks, removed": lambda m: with_accelerate_hooks(m, remove=True),
    "accelerate's hooks, then fused": lambda m: fuse_lm_head(with_accelerate_hooks(unfuse_lm_head(m))),
    "a head that hooks gather": with_gathered_head,
    "prepared and unwrapped": prepared,
    "prepared, copied, unwrapped": lambda m: prepared(m, copy.deepcopy),
    "another forward, prepared, unwrapped": lambda m: prepared(with_forward(m)),
    "prepared, fused, unwrapped": lambda m: fuse_lm_head(prepared(unfuse_lm_head(m))),
}


# tracing takes 20 seconds; other ways to compile a model are tested without it
TRACED = ("compiled", "compiled forward")
CASES = [(name, used) for name in SITUATIONS for used in (False, True) if not (used and name in TRACED)]


@pytest.mark.parametrize(
    ("name", "used"), CASES, ids=lambda x: x if isinstance(x, str) else ("new", "used")[x]
)
def test_log_probs_and_gradients_are_the_logits(name, used, monkeypatch):
    model = tiny(num_hidden_layers=1) if name in TRACED else tiny()
    monkeypatch.setattr(type(model), "forward", type(model).forward)  # undone afterwards
    fuse_lm_head(model)
    with torch.compiler.set_stance("default" if name in TRACED else "force_eager"):
        if used:
            check(model)
        check(SITUATIONS[name](model))


# ------------------------------------------------------ heads that are more than their weight


class FakeQuantized(nn.Linear):
    """As quantization-aware training replaces nn.Linear."""

    def forward(self, hidden):
        scale = self.weight.abs().amax(1, keepdim=True) / 127
        return nn.functional.linear(hidden, (self.weight / scale).round() * scale)


class Quantized(torch.Tensor):
    """As torchao's weights."""

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data)


class Observer(nn.Module):
    def forward(self, weight):
        return Quantized(weight.detach())


def fake_quantized(head):
    head.__class__ = FakeQuantized


def with_own_forward(head):
    head.forward = lambda hidden: FakeQuantized.forward(head, hidden)


def with_partial_forward(head):
    head.forward = functools.partial(FakeQuantized.forward, head)


def within_lora(model, change):
    """Fuse a model with LoRA on the head, then change the base layer."""
    model = with_lora(model, target_modules=["lm_head"])
    change(model.get_output_embeddings().base_layer)
    return model


def within_saved(model, change):
    model = with_lora(model, modules_to_save=["lm_head"])
    change(model.get_output_embeddings().modules_to_save["default"])
    return model


def within_original(model, change):
    model = with_disabled_adapter(model, modules_to_save=["lm_head"])
    change(model.get_output_embeddings().original_module)
    return model


class Returning(nn.Linear):
    def __call__(self, hidden):
        return self.weight @ hidden[0, 0]


def given_to_accelerate(head, change=lambda head: None):
    """Give accelerate a hook that doubles what a module returns, or make a change above its own hook."""
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed")
    hook = hooks.AlignDevicesHook(execution_device="cpu")
    if change is None:
        hook = hooks.ModelHook()
        hook.post_forward = lambda module, output: output * 2 if isinstance(output, torch.Tensor) else output
        hook.__class__ = type("Doubling", (hooks.ModelHook,), {"__module__": __name__})
        hooks.add_hook_to_module(head, hooks.AlignDevicesHook(execution_device="cpu"))
    hooks.add_hook_to_module(head, hook, append=True)
    if change is not None:
        change(head)


def on_head(change):
    return lambda model: (change(model.lm_head), model)[1]


def scaled(model, change=lambda logits: logits * 2):
    """Change the logits after the head, as the config does not say."""
    own = type(model).forward

    def forward(*args, **kwargs):
        output = own(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    model.forward = types.MethodType(forward, model)
    return model


def scaled_later(model):
    """Scale the logits in place, from the second call on."""
    factor = torch.ones(())
    scaled(model, lambda logits: logits.mul_(factor))(IDS, **SCORE)
    factor.mul_(2)
    return model


REFUSED = {
    "another class": (on_head(fake_quantized), "FakeQuantized, whose forward is not that of Linear"),
    "another head": (lambda m: with_head(m, FakeQuantized(32, 96)), "FakeQuantized, whose forward"),
    "own forward": (on_head(with_own_forward), "its own forward, tests.*with_own_forward"),
    "hook": (on_head(with_hook), "a hook, tests.*with_hook"),
    "hook that is called always": (on_head(lambda h: with_hook(h, always_call=True)), "a hook"),
    "backward hook": (on_head(lambda h: h.register_full_backward_pre_hook(with_hook)), "a hook, tests"),
    "hook of accelerate": (on_head(lambda h: given_to_accelerate(h, None)), "a hook, tests.*Doubling"),
    "own forward above accelerate's": (
        on_head(lambda h: given_to_accelerate(h, with_own_forward)),
        "its own forward, tests.*with_own_forward",
    ),
    "partial above accelerate's": (
        on_head(lambda h: given_to_accelerate(h, with_partial_forward)),
        "its own forward, tests.*FakeQuantized.forward",
    ),
    "other result": (
        on_head(lambda h: setattr(h, "__class__", Returning)),
        "changes what its forward returns",
    ),
    "dynamic quantization": (
        lambda m: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, inplace=True),
        "not a causal language model with a linear lm_head|holds a|whose forward|torch.qint8 weight",
    ),
    "tensor subclass": (
        on_head(lambda h: setattr(h, "weight", nn.Parameter(Quantized(h.weight.data)))),
        "holds a weight of type Quantized",
    ),
    "parametrization that quantizes": (
        on_head(lambda h: parametrize.register_parametrization(h, "weight", Observer(), unsafe=True)),
        "holds a weight of type Quantized",
    ),
    "on meta": (on_head(lambda h: h.to("meta")), r"shape \(96, 32\) on meta inside the forward"),
    "class within LoRA": (lambda m: within_lora(m, fake_quantized), "FakeQuantized, whose forward"),
    "class of a saved head, disabled": (lambda m: within_original(m, fake_quantized), "FakeQuantized, whose"),
    "hook within LoRA": (lambda m: within_lora(m, with_hook), "a hook"),
    "hook before a saved head": (
        lambda m: within_saved(m, lambda h: h.register_forward_pre_hook(lambda module, args: None)),
        "a hook",
    ),
    "logits of another scale": (scaled, "changes logits after the lm_head"),
    "bounded logits": (lambda m: scaled(m, torch.tanh), "changes logits after the lm_head"),
    "logits scaled in place": (lambda m: scaled(m, lambda x: x.mul_(2)), "changes logits after the lm_head"),
    "logits scaled in place later": (scaled_later, "changes logits after the lm_head"),
    "logits masked in place": (
        lambda m: scaled(m, lambda x: x.index_fill_(-1, IDS[0], -1e9)),
        "changes logits after the lm_head",
    ),
    "checkpoint wrapper": (lambda m: with_head(m, checkpoint_wrapper(m.lm_head)), "CheckpointWrapper, whose"),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_head_that_changes_after_a_call_is_refused(name):
    change, message = REFUSED[name]
    model = fuse_lm_head(tiny())
    model(IDS, **SCORE)
    model = change(model)
    for call in (SCORE, UPDATE):
        with pytest.raises(IntegrationError, match=message):
            model(IDS, **call)


def test_a_global_hook_is_refused():
    model = fuse_lm_head(tiny())
    model(IDS, **SCORE)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        with pytest.raises(IntegrationError, match="has a hook, tests"):
            model(IDS, **SCORE)
    finally:
        handle.remove()
    check(model)


def test_a_failed_call_leaves_nothing_behind():
    model = fuse_lm_head(tiny())
    with pytest.raises(IndexError):
        model(IDS * 100, **SCORE)
    assert [*map(type, model.model.modules())] == [*map(type, tiny().model.modules())]
    assert type(model.lm_head) is nn.Linear
    check(model)


def test_a_forward_read_before_unfusing_says_so():
    for model in (tiny(), with_forward(tiny())):
        want, forward = model(IDS).logits, fuse_lm_head(model).forward
        unfuse_lm_head(model)
        assert torch.equal(forward(IDS).logits, want)
        with pytest.raises(IntegrationError, match="unfuse_lm_head has been called"):
            forward(IDS, **SCORE)


def test_a_forward_with_our_names_is_refused():
    model = fuse_lm_head(tiny())
    for target in (model, unfuse_lm_head(tiny())):
        forward = types.MethodType(lambda self, input_ids, advantages=None, **kwargs: None, target)
        with pytest.raises(IntegrationError, match="an argument 'advantages' already"):
            target.forward = forward
            fuse_lm_head(target)
    check(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("lora", [False, True])
def test_rounding_is_no_other_product(dtype, lora, monkeypatch):
    """The head is served in each precision, wide ones too, and a small change of its product is found."""
    model = tiny(hidden_size=512).to(dtype)
    model = fuse_lm_head(with_lora(model, target_modules=["lm_head"]).to(dtype) if lora else model)
    model(IDS, **SCORE)
    cls = next(c for c in type(model.get_output_embeddings()).__mro__ if "forward" in vars(c))
    own, factor = cls.forward, 1.5 if lora else 1.02
    for change in (
        lambda self, hidden: own(self, hidden) * factor,
        lambda self, hidden: own(self, hidden.mul_(factor)),
    ):
        monkeypatch.setattr(cls, "forward", change)
        with pytest.raises(IntegrationError, match="is not the product with its weight"):
            copy.deepcopy(model)(IDS, **SCORE)


# ------------------------------------------------------ what others see of a fused model


def test_others_see_the_model_s_own_class(tmp_path):
    import transformers

    plain, model = tiny(), fuse_lm_head(tiny())
    model(IDS, **SCORE)
    for ours, own in ((model, plain), (model.lm_head, plain.lm_head)):
        assert isinstance(ours, type(own))
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(ours), name) == getattr(type(own), name)
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert type(model).forward is type(plain).forward
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("name", ["another forward", "wrapped forwards", "accelerate's hooks", "LoRA"])
def test_unfuse_restores_the_model(name):
    model = fuse_lm_head(tiny())
    changed = SITUATIONS[name](model)
    want, kept = changed(IDS).logits, vars(model).get("forward")
    changed(IDS, **SCORE)
    unfuse_lm_head(unfuse_lm_head(changed))
    assert {*map(type, tiny().modules())} <= {*map(type, model.modules())}
    assert vars(model).get("forward") is kept
    assert torch.equal(changed(IDS).logits, want)
    check(fuse_lm_head(changed))


def test_plain_calls_compile_into_one_graph():
    model = tiny()
    want = model(IDS).logits
    fuse_lm_head(model)(IDS, **SCORE)
    got = compiled(model, fullgraph=True)(IDS, use_cache=False).logits
    torch.testing.assert_close(got, want)


def work(model, queue):
    try:
        queue.put(model(IDS, **SCORE).logprobs.detach().numpy())
    except Exception as error:
        queue.put(repr(error))


def test_a_spawned_process_keeps_the_loss():
    model = fuse_lm_head(tiny())
    want = model(IDS, **SCORE).logprobs.detach()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=work, args=(pickle.loads(pickle.dumps(model)), queue))
    process.start()
    got = queue.get(timeout=120)
    process.join()
    torch.testing.assert_close(torch.as_tensor(got), want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [None, "dynamic", "longrope"])
def test_threads_do_not_see_each_other(kind):
    """Fused and plain calls and generation in threads give bit for bit what they give alone."""
    model = tiny() if kind is None else model_of_varying_rope(kind)
    fuse_lm_head(model)
    ids = IDS % 60
    long = ids.view(1, -1)[:, : 2 * LIMIT] if kind else ids  # beyond the original frequencies

    def policy():
        return model(long, labels=long, old_logprobs=None, advantages=torch.ones(len(long))).loss

    calls = [
        lambda: model(ids).logits,
        lambda: model(long, labels=long, return_logprobs=True).logprobs,
        policy,
        lambda: model.generate(ids[:, :3], max_new_tokens=4, do_sample=False),
    ]
    with torch.no_grad():
        want, wrong, interval = [call() for call in calls], [], sys.getswitchinterval()

        def run(call, expected):
            with torch.no_grad():
                for _ in range(20):
                    try:
                        same = torch.equal(call(), expected)
                    except Exception as error:
                        same = repr(error)
                    wrong.extend([] if same is True else [same])

        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=run, args=pair) for pair in zip(calls, want, strict=True)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        sys.setswitchinterval(interval)
    assert not wrong
