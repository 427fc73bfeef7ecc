"""A fake GPU: CPU tensors that report a CUDA device, to run the code paths of a GPU on any machine.

It records kernel launches, matmuls, host-device syncs and live bytes, not times.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # which keeps what attributes tensors have: before they are patched
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from gspo_kernels.core import operators as library

DEVICE = torch.device("cuda", 0)
LOOKS = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "repeat_interleave"}
"""Operations that the host waits for: the result is a number, or its size is known on the device alone."""
COPIES_TO_HOST = {"tolist", "cpu", "numpy"}
FACTORIES = {"empty", "zeros", "ones", "full", "arange", "tensor", "linspace"}
MEMORY_ALONE = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "detach",
    "lift_fresh",
    "_unsafe_view",
}
PRODUCTS = {"mm", "addmm", "addmm_", "bmm"}


class FakeGpu:
    """A context in which every tensor reports a GPU, unless created without a device.

    Attributes:
        products: matrix products in order: operation and overload, and whether it adds to its own output.
        inexact: names of the products in which PyTorch may round operands or sums.
        kernels: launches of the package's kernels, by name.
        small: launches of anything else, by operation: at least one kernel each.
        looks: operations that sync with the device, by name.
        peak: peak bytes of tensors created inside.
    """

    def __init__(self, monkeypatch: Any):
        self.products: list[tuple[str, bool]] = []
        self.inexact: list[str] = []
        self.kernels: Counter[str] = Counter()
        self.small: Counter[str] = Counter()
        self.looks: Counter[str] = Counter()
        self.alive = self.peak = 0
        self._monkeypatch, self._storages = monkeypatch, {}

    def __enter__(self) -> FakeGpu:
        self._context = self._monkeypatch.context()
        context = self._context.__enter__()
        # an operator runs as plain calls, which are seen, instead of as one opaque call
        context.setattr(library, "can_bypass_dispatcher", lambda _: True)
        context.setattr(Tensor, "device", property(self._device_of), raising=False)
        context.setattr(Tensor, "is_cuda", property(lambda x: not _on_host(x)), raising=False)
        context.setattr(Tensor, "is_cpu", property(_on_host), raising=False)
        context.setattr(torch.cuda, "is_available", lambda: True)
        context.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
        context.setattr(torch.cuda, "current_stream", lambda _: None)
        context.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
        context.setattr(torch.cuda, "Event", lambda: event)
        self._interpret(context)
        self._modes = (_Asked(self), _Launched(self))
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        self._context.__exit__(*error)

    def _device_of(self, tensor: Tensor) -> torch.device:
        return torch.device("cpu") if _on_host(tensor) else DEVICE

    def _interpret(self, context: Any) -> None:
        """Count launches, and let Triton's interpreter see tensors as they are."""
        from triton.runtime import interpreter

        run = interpreter.GridExecutor.__call__

        def counted(executor: Any, *args: Any, **keywords: Any) -> Any:
            self.kernels[executor.fn.__name__] += 1
            assert not any(map(_on_host, _tensors(args))), "a kernel was handed a tensor of the host"
            with (
                torch._C.DisableTorchFunction(),
                _disable_current_modes(),
                self._monkeypatch.context() as plain,
            ):
                for name in ("device", "is_cuda", "is_cpu"):
                    plain.delattr(Tensor, name)
                return run(executor, *args, **keywords)

        context.setattr(interpreter.GridExecutor, "__call__", counted)

    def host(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that is on the host."""
        return _host(tensor.clone())

    def made(self, tensor: Tensor) -> None:
        """Count a tensor's memory until nothing refers to it any more."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._storages and size:
            if size >= 2**15 and self.alive + size > self.peak:
                gc.collect()  # the interpreter's cycles may hold tensors that are gone on a device
            self._storages[key] = size
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._freed, key).atexit = False

    def _freed(self, key: int) -> None:
        self.alive -= self._storages.pop(key)


def _on_host(tensor: Tensor) -> bool:
    return getattr(tensor, "_on_host", False)


def _host(result: Any) -> Any:
    for tensor in tree_leaves(result):
        if isinstance(tensor, Tensor):
            tensor._on_host = True
    return result


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class _Asked(TorchFunctionMode):
    """Calls of torch from Python: where tensors are made, and what the host reads."""

    def __init__(self, gpu: FakeGpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), dict(kwargs or {})
        if name in FACTORIES:
            device = kwargs.pop("device", None)
            if device is None or torch.device(device).type == "cpu":
                return _host(func(*args, **kwargs))
            if name == "tensor":
                self.gpu.looks["copy to the device"] += 1
            return func(*args, **kwargs)
        if func is Tensor.backward:
            # Tensor.backward would come here once more, so the engine is called, with this mode on
            loss = args[0]
            ones = torch.ones_like(loss)
            with self:
                return _engine_run_backward((loss,), (ones,), False, False, (), accumulate_grad=True)
        if func is torch.autograd.grad and not kwargs["materialize_grads"]:  # not that of an objective
            (loss,), leaves = args
            with self:
                return _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, leaves, False)
        there = [tensor for tensor in _tensors(args, kwargs) if not _on_host(tensor)]
        if name in ("cat", "stack"):
            assert len(there) in (0, len(_tensors(args, kwargs))), "tensors of two devices"
        if name == "pin_memory":
            pinned = _host(args[0].clone())
            pinned._pinned = True
            return pinned
        if name == "to":
            return self._moved(func, args, kwargs)
        if not there and _tensors(args, kwargs):
            return _host(func(*args, **kwargs))
        if name in COPIES_TO_HOST:
            self.gpu.looks[name] += 1
        return func(*args, **kwargs)

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run ``Tensor.to`` without its device, and record the copy."""
        tensor, *rest = args
        devices = [x for x in (*rest, kwargs.pop("device", None)) if isinstance(x, torch.device | str)]
        rest = [x for x in rest if not isinstance(x, torch.device | str)]
        moved = func(tensor, *rest, **kwargs) if rest or kwargs else tensor
        on_host = torch.device(devices[0]).type == "cpu" if devices else _on_host(tensor)
        # a copy to the host that doesn't block goes into pinned memory
        at_once = kwargs.get("non_blocking") and (on_host or getattr(tensor, "_pinned", False))
        if on_host != _on_host(tensor) and at_once:
            self.gpu.small["copy of pinned memory"] += 1
        elif on_host != _on_host(tensor):
            self.gpu.looks["copy to the host" if on_host else "copy to the device"] += 1
        if on_host != _on_host(tensor):
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                moved = moved.clone()
        return _host(moved) if on_host else moved


class _Launched(TorchDispatchMode):
    """Operations that reach the device."""

    def __init__(self, gpu: FakeGpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = kwargs or {}, self.gpu
        result = _wide(func, *args, **kwargs) if "dtype" in func._overloadname else None
        if result is None:
            result = func(*args, **kwargs)
        inputs, outputs = _tensors(args, kwargs), _tensors(result)
        if inputs and all(_on_host(tensor) for tensor in inputs):
            return result
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(x.dtype == torch.bool for x in inputs[1:])
        if name in LOOKS or by_mask:
            gpu.looks["index by mask" if by_mask else name] += 1
        if name in PRODUCTS:
            matmul = torch.backends.cuda.matmul
            if matmul.fp32_precision != "ieee" or matmul.allow_bf16_reduced_precision_reduction:
                gpu.inexact.append(name)
            own = "out" in kwargs and kwargs["out"] is args[0]
            gpu.products.append((str(func).removeprefix("aten."), own or name == "addmm_"))
        elif not _is_view(func) and name not in MEMORY_ALONE | LOOKS and any(x.numel() for x in outputs):
            gpu.small[name] += 1
        given = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in given:
                gpu.made(tensor)
        return result


def _is_view(func: Any) -> bool:
    alias = [returned.alias_info for returned in func._schema.returns]
    return any(info is not None and not info.is_write for info in alias)


def _wide(func: Any, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Multiply 16-bit operands into fp32. Refuse what PyTorch's CUDA code refuses (2.10 to 2.13)."""
    name = func.overloadpacket.__name__
    if name not in PRODUCTS:
        return None
    *added, left, right, dtype = args
    assert left.dtype == right.dtype and left.dtype in (torch.float16, torch.bfloat16), "16-bit operands"
    assert dtype == torch.float32 and (out is None or out.dtype == dtype), "fp32 out"
    assert all(tensor.dtype in (dtype, left.dtype) for tensor in added), "what is added"
    product = torch.mm(left.float(), right.float())
    for tensor in added:
        product = tensor + product
    return product if out is None else out.copy_(product)
