"""Compile the kernels as they ship, for GPUs that need not be present, and print a report as JSON. A script.

The launchers themselves decide what is compiled. Their ``launch`` is replaced by one that records the
arguments, and Triton's own binder turns these into the specialization that a launch on the target would ask
for. Run it without TRITON_INTERPRET.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, create_function_from_signature

from gspo_kernels.backends import triton as kernels
from gspo_kernels.backends.triton import batch_invariant_matmul as products
from gspo_kernels.backends.triton import exponentials, logprobs, tiles
from gspo_kernels.backends.triton import launch as launching
from gspo_kernels.core.types import (
    KLPenalty,
    LogitRows,
    LogitTransform,
    PairStats,
    RatioClip,
    RatioOperands,
    RowGradients,
    RowPair,
    RowStats,
    stats_dtype,
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
BLOCKS = {"sm_80": 1, "sm_90": 16, "sm_100": 16, "sm_120": 8, "gfx942": 1}
"""How many blocks of threads may share a program on a target, with a Triton that compiles clusters."""
SHARED_MEMORY = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "sm_120": 101376, "gfx942": 65536}
FORM = RatioClip(math.log(1 - 3e-4), math.log(1 + 4e-4), math.inf, False, "sequences", 1.0)
PLAIN = LogitTransform()
BENT = LogitTransform(0.5, 30.0, 0.7)
WARM = LogitTransform(1.0, 0.0, 0.7)
PER_ROW = BENT._replace(row_temperature=torch.ones(2, 3))


Call = tuple[Any, int, Any, tuple[Any, ...], dict[str, Any]]
"""A recorded launch: kernel, programs, tile, arguments, and constants."""


def record(target: str, blocks: int = 0) -> list[Call]:
    """Let launchers run as on a target, and return the list that takes their launches from now on. Up to
    ``blocks`` blocks of threads hold a row; with 0 no rows are held.
    """
    calls: list[Call] = []

    def launch(kernel: Any, programs: int, device: Any, tile: Any, *args: Any, **constants: Any) -> None:
        calls.append((kernel, programs, tile, args, constants))

    for module in filter(inspect.ismodule, vars(kernels).values()):
        module.platform = lambda: TARGETS[target].backend
        if module is not launching:
            module.launch = launch
    launching.without_spills.cache_clear()
    logprobs.max_blocks = lambda device: blocks
    tiles.multiprocessors = lambda device: 132
    exponentials.capability = lambda device: int(target[3:]) // 10
    products._has_tensor_maps = lambda device: target in ("sm_90", "sm_100")
    return calls


def specialization(call: Call, target: GPUTarget) -> tuple[str, ASTSource, Any]:
    """Return the cache key of a call's launch, and the source and the options of its compilation."""
    kernel, _, tile, args, constants = call
    keywords = constants | tile.options()
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, special, rest = binder(*args, **keywords)
    options, *source = kernel._pack_args(backend, keywords, bound, special, rest)
    return str(special) + str(rest), ASTSource(kernel, *source), options


def described(call: Call) -> dict[str, Any]:
    """Return a call's kernel, dtypes of the tensors that it got, and constants, as JSON takes them."""
    kernel, _, _, args, constants = call
    named = zip(kernel.signature.parameters, args, strict=False)
    tensors = {name: getattr(arg, "base", arg) for name, arg in named}
    dtypes = {name: str(it.dtype) for name, it in tensors.items() if isinstance(it, torch.Tensor)}
    found = {"kernel": kernel.fn.__name__, "dtypes": dtypes}
    for name, value in constants.items():
        # of equal names the first counts: a pair of rows has two tuples of constants
        found = (value._asdict() if hasattr(value, "_asdict") else {name: value}) | found
    return {name: str(value) if isinstance(value, tl.dtype) else value for name, value in found.items()}


def call_all(
    B: int, T: int, V: int, dtype: torch.dtype, transform: LogitTransform, optional: bool = True
) -> None:
    """Call every launcher over rows without optional arguments and, if ``optional``, also with them."""
    logits = torch.empty(B, T, V, dtype=dtype)
    labels, floats = torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T)

    def backward(grad_entropy: Any, scale: Any, out: torch.Tensor) -> None:
        kernels.logprobs_backward(rows, stats, RowGradients(floats, grad_entropy, scale), out)

    def both(out: torch.Tensor) -> None:
        kernels.logprobs_and_grad(rows, floats, out)

    rows = LogitRows(logits, labels, transform, -100)
    for entropy in (False, True)[: 1 + optional]:
        stats = kernels.logprobs_forward(rows, entropy)
        backward(floats if entropy else None, torch.ones(()), logits)
    both(logits)
    if dtype == torch.float32:
        for narrow in (torch.bfloat16, torch.float16):
            out = torch.empty(B, T, V, dtype=narrow)
            backward(None, None, out)
            both(out)
        out = logits.view(torch.bfloat16)[..., :V]
        backward(None, None, out)
        backward(floats, None, out)
        both(out)
    without: dict[str, Any] = dict.fromkeys(("weights", "lengths", "normalizer", "cu_seqlens"))
    ends = T * torch.arange(B + 1, dtype=torch.int32)
    with_all = dict(zip(without, (torch.zeros(B), torch.zeros(B), torch.zeros(()), ends), strict=True))
    for options, shape in ((without, (B, T)), (with_all, (1, B * T)))[: 1 + optional]:
        packed = options is with_all
        form = FORM._replace(count_tokens=True, divisor="tokens") if packed else FORM
        shaped = LogitRows(logits.view(*shape, V), labels.view(shape), transform, -100)
        operands = RatioOperands(floats.view(shape), torch.zeros(B), **options)
        mask = torch.ones(shape, dtype=torch.bool)
        kernels.sequence_ratio_forward(shaped, mask if packed else None, operands, form)
        numbers = floats.to(stats_dtype(dtype)).view(shape)
        # the two layouts together have each level and each estimator
        for level, estimator in (
            (("sequence", "k2"), ("token", "k1")) if packed else (("sequence", ""), ("token", "k3"))
        ):
            beta = None if estimator == "k1" else torch.zeros(())
            advantages = numbers if level == "token" and packed else torch.zeros(B)
            operands = RatioOperands(
                numbers if packed else None, advantages,
                **options | {"weights": advantages if packed else None},
            )  # fmt: skip
            kl = KLPenalty(numbers, beta, estimator) if estimator else None
            mask = torch.ones(shape, dtype=torch.bool)
            kernels.ratio_step(numbers, mask, operands, form._replace(level=level), kl)
            kernels.merge_mask(mask, labels.view(shape), -100)
            kernels.lengths(labels.view(shape), -100, operands.cu_seqlens, operands.advantages)


def compare(
    dtype: torch.dtype, transform: LogitTransform, beta: float, V: int = 4096, write: str = "in place"
) -> None:
    """Call the launcher of divergences; ``write`` selects the memory of the gradient."""
    logits, labels = torch.empty(2, 3, V, dtype=dtype), torch.zeros(2, 3, dtype=torch.int64)
    floats = torch.zeros(2, 3)
    pair = RowPair(logits, torch.empty_like(logits), labels, transform, transform, beta, ignore_index=-100)
    out = {"in place": logits, "narrower": logits.view(torch.bfloat16)[..., :V], "nowhere": None}[write]
    grad = None if out is None else floats
    kernels.divergence(pair, None, grad, out)
    if out is not None:
        floats = floats.to(stats_dtype(dtype))
        known = PairStats(floats.double(), floats.double(), floats, floats)
        kernels.divergence(pair, known, floats, out)


def backward_of_shards(B: int, T: int, V: int, dtype: torch.dtype) -> None:
    """Call the backward of rows whose label may be another rank's."""
    logits, labels = torch.empty(B, T, V, dtype=dtype), torch.zeros(B, T, dtype=torch.int64)
    floats = torch.zeros(B, T, dtype=stats_dtype(dtype))
    stats = RowStats(floats, floats.double(), floats)
    for entropy in (None, floats):
        rows = LogitRows(logits, labels, PLAIN, -100)
        kernels.logprobs_backward(rows, stats, RowGradients(floats, entropy), logits, sharded=True)


def around_products(dtype: torch.dtype, width: int, everything: bool) -> None:
    """Call the launchers around the gradient products, with every optional argument or none."""
    n, stats = 5, stats_dtype(dtype)
    floats, most = torch.zeros(n, dtype=stats), torch.finfo(stats).max * 2.0**-24
    hidden, values = torch.empty(n, width, dtype=dtype), torch.empty(n, width, dtype=stats)
    one, active = torch.ones((), dtype=stats), torch.ones(n, dtype=torch.bool)
    where = torch.zeros(n, dtype=torch.int64)
    given = (floats, active, one, where) if everything else (None,) * 3 + (slice(0, n),)
    factors, active, unit, where = given
    kernels.product_operand(hidden, floats, factors, active, unit, most, dtype)
    kernels.sum_unit(floats, factors, unit, most, stats)
    for scales, whole_last in ((floats, False), (None, everything)):
        kernels.store_hidden(values, floats, factors, where, hidden, scales, whole_last)
    kernels.scale_rows_(hidden, floats, one)


def multiply(n: int, H: int, V: int, dtype: torch.dtype) -> None:
    """Call the launcher of fixed products for a chunk's three products."""
    hidden, weight, rows = (torch.empty(shape, dtype=dtype) for shape in ((n, H), (V, H), (n, V)))
    out = torch.empty(n, V)
    products.batch_invariant_mm(hidden, weight.t(), out, bias=torch.empty(V))
    products.batch_invariant_mm(hidden, weight.t(), out.to(dtype))
    products.batch_invariant_mm(rows, weight, torch.empty(n, H))
    ends = torch.tensor([*range(128, n, 128), n])
    for accumulate in (False, True):
        products.batch_invariant_mm(rows.t(), hidden, torch.empty(V, H), accumulate=accumulate, ends=ends)


def project(transform: LogitTransform, everything: bool) -> None:
    """Call the launchers of the product with exponentials: with bias and entropy, and the gradient of the
    entropy, or without them.
    """
    n, V, H = 300, 4096, 1024
    hidden, weight, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((n, H), (V, H), (n, V)))
    labels, floats = torch.zeros(1, n, dtype=torch.int64), torch.zeros(n)
    bias = torch.empty(V, dtype=torch.bfloat16) if everything else None
    head = exponentials.exponentials(hidden, weight, bias, labels, transform, -100, out, entropy=everything)
    coefficients = None if everything else floats
    known = exponentials.KnownRows(
        hidden, weight, bias, labels, transform, -100, head.stats, coefficients, floats == 0
    )
    known.exponentials(out, 0)
    if everything:
        exponentials.entropy_rows_(out, labels, transform, -100, head, floats, floats)


def hold() -> None:
    """Call the launchers of log-probs and gradients of rows that may stay on the chip."""
    for V, dtype, transform in (
        (151936, torch.bfloat16, PLAIN),
        (151936, torch.float32, WARM),
        (10240, torch.float16, WARM._replace(row_temperature=torch.ones(2, 3))),
    ):
        logits, labels = torch.empty(2, 3, V, dtype=dtype), torch.zeros(2, 3, dtype=torch.int64)
        out = logits.view(torch.bfloat16)[..., :V] if dtype == torch.float32 else logits
        kernels.logprobs_and_grad(LogitRows(logits, labels, transform, -100), torch.zeros(2, 3), out)
    logits, labels = torch.empty(2, 3, 151936), torch.zeros(2, 3, dtype=torch.int64)
    narrow = logits.view(torch.bfloat16)[..., :151936]
    kernels.logprobs_and_rows(LogitRows(logits, labels, PLAIN, -100), narrow)


SHAPES = {
    "rows": [(2, 3, 4096), (1, 1, 4096), (16, 1, 4096), (1, 16, 4096), (3, 17, 4096)],
    "aligned": [(2, 3, 4096), (2, 3, 32000), (2, 3, 16), (2, 3, 151936)],
    "odd": [(2, 3, 1009), (16, 16, 1009), (2, 3, 4097), (1, 1, 1), (5, 7, 50257)],
}
"""Shapes of logits for which nothing is compiled again."""


def keys(shape: tuple[int, int, int]) -> dict[str, list[str]]:
    """Return the specializations of each kernel in calls over logits of a shape, in two transforms."""
    calls = record("sm_90")
    for transform in (BENT, LogitTransform(2.0, 16.0, 1.0)):
        call_all(*shape, torch.bfloat16, transform)
    found: dict[str, set[str]] = {}
    for call in calls:
        found.setdefault(call[0].fn.__name__, set()).add(specialization(call, TARGETS["sm_90"])[0])
    return {name: sorted(each) for name, each in found.items()}


def resources(kernel: Any) -> dict[str, int]:
    """Return registers, and bytes of stack and local memory (used only by spills)."""
    if "cubin" in kernel.asm:
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            command = [tool, "--dump-resource-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    names = {"REG": "vgpr_count", "STACK": "private_segment_fixed_size", "LOCAL": "vgpr_spill_count"}
    found = kernel.asm["amdgcn"]
    return {key: int(re.findall(rf"\.{name}: +(\d+)", found)[0]) for key, name in names.items()}


def accesses(code: str) -> dict[str, Any]:
    """Return how many loads and stores of global memory in PTX move how many bits, and the barriers."""
    found: dict[str, Any] = {}
    for word in ("ld", "st"):
        words = re.findall(rf"\b{word}\.\S*global\S*?(?:\.v(\d))?\.[bfsu](\d+)\b", code)
        found[word] = Counter(int(count or 1) * int(bits) for count, bits in words)
    return found | {"barriers": len(re.findall(r"\bbar(?:rier)?\.sync", code))}


def loops(ptx: str) -> list[dict[str, Any]]:
    """Return the accesses of the innermost loops that access global memory, in order."""
    lines, labels, ends = ptx.splitlines(), {}, {}
    for place, line in enumerate(lines):
        if label := re.match(r"(\$L__BB\w+):", line):
            labels[label[1]] = place
        elif (jump := re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+)", line)) and jump[1] in labels:
            ends[labels[jump[1]]] = place
    found = [
        accesses("\n".join(lines[start:end]))
        for start, end in ends.items()
        if not any(start < other and last < end for other, last in ends.items())
    ]
    return [loop for loop in found if loop["ld"] or loop["st"]]


def order_of_cluster(kernel: Any) -> list[str]:
    """Return the accesses to global and shared memory and the barriers of a cluster, in the PTX's order."""
    return re.findall(r"\b(?:barrier\.cluster\.\S+|(?:ld|st)\.(?:\S*global\S*|shared\S*))", kernel.asm["ptx"])


def order_of_memory(kernel: Any) -> list[str]:
    """Return barriers, accesses to global memory and what orders them, in the order of the assembly."""
    if "ptx" in kernel.asm:
        words = r"\b(?:bar|barrier|fence|membar)\.\S+|\b(?:ld|st|atom|red)\.\S*global\S*"
        return re.findall(words, kernel.asm["ptx"])
    words = r"\bs_barrier\b|\bs_waitcnt vmcnt\(0\)|\bbuffer_(?:wbl2|inv) .*|\bglobal_(?:load|store|atomic)\w*"
    return re.findall(words, kernel.asm["amdgcn"])


def matrix_instructions(kernel: Any) -> list[str]:
    """Return the instructions of the PTX or AMD assembly that multiply matrices."""
    if "ptx" in kernel.asm:
        return sorted(set(re.findall(r"\b(?:wg|tcgen05\.)?mma\.\S+", kernel.asm["ptx"])))
    return sorted(set(re.findall(r"\bv_mfma_\S+", kernel.asm["amdgcn"])))


def compile_calls(calls: list[Call], target: str) -> list[dict[str, Any]]:
    """Compile calls for a target, each specialization once, and return a report of the machine code."""
    report = []
    asked = {(call[0].fn.__name__, specialization(call, TARGETS[target])[0]): call for call in calls}
    for call in asked.values():
        _, source, options = specialization(call, TARGETS[target])
        kernel = triton.compile(source, target=TARGETS[target], options=options.__dict__)
        entry = described(call) | {"target": target, "warps": call[2].warps, "blocks": call[2].blocks}
        entry["fits"] = kernel.metadata.shared <= SHARED_MEMORY[target]
        entry |= resources(kernel)
        if entry["kernel"].startswith(("ratio_step", "sequence_ratio")):
            entry["order"] = order_of_memory(kernel)
        if entry["kernel"] == "fixed_product_kernel":
            entry["matrix_instructions"] = matrix_instructions(kernel)
        if entry["blocks"] > 1:
            entry["cluster"] = order_of_cluster(kernel)
        if "ptx" in kernel.asm:
            entry |= {"all": accesses(kernel.asm["ptx"]), "loops": loops(kernel.asm["ptx"])}
        else:
            entry["wide_loads"] = len(re.findall(r"\b(?:global|buffer)_load_dwordx4\b", kernel.asm["amdgcn"]))
        report.append(entry)
    return report


class Driver:
    """A Hopper GPU on which nothing runs."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 7)
    get_current_target = staticmethod(lambda: TARGETS["sm_90"])


def _identity(argument: Any) -> Any:
    return argument if isinstance(argument, int | float) else id(argument)


def launched(calls: list[Call]) -> tuple[list[bool], int, int]:
    """Return whether ``launch``, called twice, hands the same arguments to the same compiled kernel as
    Triton's own launch, for each call on Hopper; the number of compiled kernels, and of Triton's launches.
    """
    seen: list[Any] = []
    served: list[Any] = []
    hashes: set[str] = set()
    run, same = JITFunction.run, []

    def prepare(kernel: Any) -> None:
        kernel.module, kernel.function = 0, id(kernel)
        # what follows the first nine arguments, of the driver and of hooks, is the kernel's
        kernel._run = lambda *args: seen.append((kernel.hash, args[:3], list(map(_identity, args[9:]))))

    def counted(*arguments: Any, **keywords: Any) -> Any:
        served.append(arguments)
        return run(*arguments, **keywords)

    driver.set_active(Driver())
    torch.cuda.current_device = lambda: 0
    CompiledKernel._init_handles = prepare
    for kernel, programs, tile, args, constants in calls:
        seen.clear()
        kernel[(programs,)](*args, **constants, **tile.options())
        JITFunction.run = counted
        for _ in range(2):
            launching.launch(kernel, programs, torch.device("cuda", 0), tile, *args, **constants)
        JITFunction.run = run
        hashes.add(seen[0][0])
        same.append(seen[1:] == [seen[0]] * 2)
    return same, len(hashes), len(served)


def calls_for(target: str) -> list[Call]:
    """Return calls of every kernel as bf16 training launches it; on Hopper also with optional arguments,
    other dtypes, transforms, sampling masks, shards and unaligned rows.
    """
    everything = target == "sm_90"
    bf16, fp32, fp64, fp16 = torch.bfloat16, torch.float32, torch.float64, torch.float16
    clusters = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    held = record(target, BLOCKS[target] if clusters else 1)
    hold()
    # the first shows whether fp32 is rounded to TF32; the last accumulates, and needs most registers
    products_of_fp32 = record(target)
    multiply(300, 4096, 4096, fp32)
    calls = record(target)
    call_all(2, 3, 4096, bf16, PLAIN, optional=everything)
    kernels.scale_(torch.empty(3, dtype=bf16), torch.ones(()))
    compare(bf16, PLAIN, 0.5)
    around_products(bf16, 4096, False)
    multiply(300, 4096, 4096, bf16)
    if target in ("sm_90", "sm_100"):
        project(PLAIN, False)
        project(BENT._replace(row_temperature=torch.ones(1, 300)), True)
    if everything:
        call_all(2, 3, 4096, fp32, PLAIN)
        call_all(2, 3, 4096, fp64, PLAIN, optional=False)
        for V, dtype, transform in ((4096, bf16, BENT), (1009, fp16, PER_ROW)):
            kept = torch.empty(2, 3, -(-V // 32), dtype=torch.int32)
            call_all(2, 3, V, dtype, transform._replace(kept=kept), optional=False)
        compare(bf16, BENT, 0.0)
        compare(fp64, PLAIN, 1.0)
        compare(fp16, WARM, 0.5, V=1009)
        compare(fp32, PLAIN, 1.0)
        compare(fp32, PLAIN, 1.0, write="nowhere")
        compare(fp32, PLAIN, 0.5, write="narrower")
        backward_of_shards(2, 3, 4096, bf16)
        around_products(fp16, 1009, True)
        around_products(fp64, 1009, False)
        multiply(300, 1009, 1009, fp16)
        labels = torch.zeros(2, 3, dtype=torch.int64)
        kernels.logprobs_forward(LogitRows(torch.empty(2, 3, 1009, dtype=fp16), labels, PLAIN, -100), False)
        calls += products_of_fp32[-1:]
    return [*calls, products_of_fp32[0], *held]


def main() -> None:
    """Print the report, which is about Hopper's launches last: these are patched."""
    report = [entry for target in TARGETS for entry in compile_calls(calls_for(target), target)]
    shapes = {kind: [keys(shape) for shape in some] for kind, some in SHAPES.items()}
    launches = launched(calls_for("sm_90"))
    print(
        json.dumps({"triton": triton.__version__, "compiled": report, "keys": shapes, "launches": launches})
    )


if __name__ == "__main__":
    main()
