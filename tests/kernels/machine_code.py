"""The Triton kernels as they ship, compiled for GPUs that needn't be here, and their machine code.

The launchers themselves decide what is compiled. Their ``launch`` is replaced by one that records the
arguments, and Triton's own binder turns these into the specialisation that a launch on the target would ask
for. Import this module in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import math
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from gspo_kernels.kernels import (
    clipped_ratios,
    divergences,
    exponentials,
    gradients,
    logprobs,
    masks,
    one_pass,
    products,
    row_scaling,
    scale,
    sequence_ratio,
)

_LAUNCHING = (
    clipped_ratios, divergences, exponentials, gradients, logprobs, masks, one_pass, products, row_scaling,
    scale, sequence_ratio,
)  # fmt: skip
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
BLOCKS = {"sm_80": 1, "sm_90": 16, "sm_100": 16, "sm_120": 8, "gfx942": 1}
"""How many blocks of threads may share a program on a target, with a Triton that compiles clusters."""
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A recorded launch: kernel, arguments, and constants with options."""


class Recorder:
    """Records calls of ``launch``. Up to ``blocks`` blocks of threads hold a row; with 0 no rows are held."""

    def __init__(self, blocks: int = 0) -> None:
        self.calls: list[Call] = []
        one_pass.max_blocks = lambda device: blocks
        for module in _LAUNCHING:
            module.launch = self  # type: ignore[assignment]

    def __call__(
        self, kernel: Any, programs: int, device: Any, tile: Any, *args: Any, **constants: Any
    ) -> None:
        self.calls.append((kernel, args, constants | tile.options()))


def _on_platform(name: str, value: Any, platform: str) -> Any:
    """Return a constant as a launch on the platform would have it."""
    if hasattr(value, "PLATFORM"):
        return value._replace(PLATFORM=platform)
    return platform if name == "PLATFORM" else value


def constants_of(call: Call) -> dict[str, Any]:
    """Return a call's constants by name, named tuples as their fields. Of equal names the first counts."""
    found: dict[str, Any] = {}
    for name, value in call[2].items():
        fields = value._asdict() if hasattr(value, "_asdict") else {name: value}
        found = fields | found
    return found


def specialisation(call: Call, target: GPUTarget) -> tuple[str, ASTSource, Any]:
    """Return the cache key of a call's launch, and the source and the options of its compilation."""
    kernel, args, keywords = call
    keywords = {name: _on_platform(name, value, target.backend) for name, value in keywords.items()}
    if target.backend != "cuda":
        keywords = {key: value for key, value in keywords.items() if key != "maxnreg"}
    backend = make_backend(target)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, special, rest = binder(*args, **keywords)
    options, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, special, rest)
    return str(special) + str(rest), ASTSource(kernel, signature, constants, attributes), options


def name_of(call: Call) -> str:
    """Return a readable name of a call: kernel, dtypes of logits and gradient, flags, missing arguments.

    A missing sampling mask is not mentioned.
    """
    kernel, args, _ = call
    keywords = constants_of(call)
    names = list(kernel.signature.parameters)
    rows = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 3]
    tensors = [each for each in rows if each.is_floating_point()] or args[:1]
    dtypes = "->".join(str(getattr(it, "base", it).dtype).removeprefix("torch.") for it in tensors)
    known = (
        "SCALED",
        "SOFTCAP",
        "PER_TOKEN",
        "SHARDED",
        "A_ALONG_K",
        "B_ALONG_K",
        "WHOLE",
        "ACCUMULATE",
    )
    flags = [key.lower() for key in known if keywords.get(key)]
    vectors = [key for key in ("A_VECTOR", "B_VECTOR") if keywords.get(key, 1) > 1]
    flags += [key.lower() for key in vectors]
    flags += ["aligned"] if keywords.get("ALIGNED") else []
    flags += [keywords[key] for key in ("ESTIMATOR", "KIND", "PASS") if keywords.get(key)]
    flags += ["narrows_in_place"] if keywords.get("NARROWS_IN_PLACE") else []
    given = dict(zip(names, args, strict=False))
    if "PIECES" in keywords:
        flags += [f"{keywords['PIECES']} pieces of {keywords['num_ctas']} blocks"]
    flags += ["kept"] if given.get("kept_ptr") is not None else []
    missing = [f"no {name}" for name, arg in given.items() if arg is None and name != "kept_ptr"]
    return " ".join([kernel.fn.__name__, dtypes, *flags, *missing])


def compiled(call: Call, target: str) -> Any:
    """Compile a call's kernel for a target."""
    _, source, options = specialisation(call, TARGETS[target])
    return triton.compile(source, target=TARGETS[target], options=options.__dict__)


def _run(tool: str, *options: str, of: bytes) -> str:
    """Run one of NVIDIA's tools, which Triton ships, on a file with the content ``of``; return its output."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(of)
        file.flush()
        run = subprocess.run([_TOOLS / tool, *options, file.name], capture_output=True, text=True, check=True)
    return run.stdout


def _code(cubin: bytes) -> bytes:
    """Return the instructions in an ELF file: its sections whose names begin with ".text."."""
    (headers,) = struct.unpack_from("<Q", cubin, 40)
    count, names = struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, headers + 64 * index) for index in range(count)]
    return b"".join(
        cubin[start : start + size]
        for name, _, _, _, start, size in sections
        if cubin.startswith(b".text.", sections[names][4] + name)
    )


_SASS: dict[bytes, str] = {}
"""Disassembled programs, by cubin."""


def disassemble(kernels: Iterable[Any]) -> None:
    """Disassemble kernels for one NVIDIA GPU all at once, which is faster than one by one in ``sass``.

    NVIDIA's disassembler takes longer to start than to disassemble any of these kernels.
    """
    found = list({kernel.asm["cubin"]: kernel for kernel in kernels}.values())
    if not found:
        return
    (architecture,) = {re.findall(r"\.target sm_(\w+)", kernel.asm["ptx"])[0] for kernel in found}
    programs = [_code(kernel.asm["cubin"]) for kernel in found]
    printed = _run("nvdisasm", "--no-vliw", "--binary", f"SM{architecture}", of=b"".join(programs))
    lines = iter(re.findall(r"^\s+/\*([0-9a-f]{4,})\*/(.*)", printed, re.M))
    address, text = next(lines)
    end = 0
    for kernel, program in zip(found, programs, strict=True):
        end, own = end + len(program), []
        while address and int(address, 16) < end:
            own.append(f"        /*{address}*/{text}")
            address, text = next(lines, ("", ""))
        _SASS[kernel.asm["cubin"]] = "\n".join(own)


def sass(kernel: Any) -> str:
    """Return machine code for an NVIDIA GPU, one instruction per line; addresses may begin above 0."""
    if kernel.asm["cubin"] not in _SASS:
        disassemble([kernel])
    return _SASS[kernel.asm["cubin"]]


def resources(kernel: Any) -> dict[str, int]:
    """Return registers, and bytes of stack and local memory (used only by spills) and of shared memory."""
    if "cubin" in kernel.asm:
        usage = _run("cuobjdump", "--dump-resource-usage", of=kernel.asm["cubin"])
        return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    names = {"REG": "vgpr_count", "STACK": "private_segment_fixed_size", "LOCAL": "vgpr_spill_count"}
    names["SHARED"] = "group_segment_fixed_size"
    found = kernel.asm["amdgcn"]
    return {key: int(re.findall(rf"\.{name}: +(\d+)", found)[0]) for key, name in names.items()}


# --- instructions


class Instruction(NamedTuple):
    """One instruction; for a branch also the index of its target, and whether it always jumps."""

    opcode: str
    jump: int | None
    always: bool = False

    @property
    def loaded(self) -> int:
        """Bytes per thread that a load from global memory reads; 0 for other instructions."""
        if not re.match(r"LDG|global_load|buffer_load", self.opcode):
            return 0
        words = re.search(r"dwordx(\d)", self.opcode)
        if words or self.opcode.endswith("dword"):
            return 4 * int(words[1]) if words else 4
        bits = re.search(r"\.(?:[US])?(8|16|64|128|256)\b|_u?s?(short|byte|ubyte)", self.opcode)
        if bits is None:
            return 4
        return int(bits[1]) // 8 if bits[1] else 2 if bits[2] == "short" else 1


def instructions(kernel: Any) -> list[Instruction]:
    """Return the instructions of a kernel in the order of their addresses."""
    if "cubin" in kernel.asm:
        line = r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][^\s;]*)([^;]*);"
        lines = re.findall(line, sass(kernel), re.M)
        places = {int(address, 16): index for index, (address, *_) in enumerate(lines)}
        found = []
        for _, condition, opcode, operands in lines:
            to = re.findall(r"0x([0-9a-f]+)", operands) if opcode.startswith("BRA") else []
            always = not condition and re.search(r"\bU?P\d", operands) is None
            found.append(Instruction(opcode, places.get(int(to[-1], 16)) if to else None, always))
        return found
    labels: dict[str, int] = {}
    parsed: list[tuple[str, str]] = []
    for line in kernel.asm["amdgcn"].splitlines():
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = len(parsed)
        elif code := re.match(r"\t([a-z]+_\w+)\s*(\S*)", line):
            parsed.append((code[1], code[2]))
    return [
        Instruction(opcode, labels.get(operand) if "branch" in opcode else None, opcode == "s_branch")
        for opcode, operand in parsed
    ]


def shortest_way(
    program: list[Instruction],
    start: int,
    end: int,
    moves: Callable[[Instruction], bool],
    most: int = 1,
) -> list[Instruction]:
    """Return the instructions on a path from ``start`` to ``end``: the shortest of those paths with most
    instructions for which ``moves`` is true, up to ``most``. What blocks at the ends of a row need is rare.
    """
    # By (place, how many such instructions must follow): length of the shortest path, and its next place.
    ways = {(end, left): (1 if left == 0 else math.inf, end) for left in range(most + 1)}
    for place in range(end - 1, start - 1, -1):
        opcode, jump, always = program[place]
        # On AMD some lane executes: a branch for that is taken, one around code that no lane executes is not.
        onward = [jump] if jump is not None and place < jump <= end and "execz" not in opcode else []
        onward += [] if onward and (always or "execnz" in opcode) else [place + 1]
        for left in range(most + 1):
            rest = max(0, left - moves(program[place]))
            ways[place, left] = min((1 + ways[one, rest][0], one) for one in onward)
    left = max(many for many in range(most + 1) if ways[start, many][0] < math.inf)
    place, way = start, [program[start]]
    while place != end:
        left, place = max(0, left - moves(program[place])), ways[place, left][1]
        way.append(program[place])
    return way


def _is_exponential(one: Instruction) -> bool:
    return bool(re.match(r"MUFU\.EX2|v_exp_f", one.opcode))


def exponentials(body: list[Instruction]) -> int:
    """Count the fp32 exponentials."""
    return sum(map(_is_exponential, body))


def row_loops(program: list[Instruction]) -> list[list[Instruction]]:
    """Return the innermost loops that load 16 bytes at a time or take at least 8 exponentials: the walks over
    a row, not the loops of reductions.
    """
    # of several jumps back to one place the last one ends the loop
    ends = {one.jump: end for end, one in enumerate(program) if one.jump is not None and one.jump <= end}
    loops = list(ends.items())
    inner = [
        (start, end)
        for start, end in loops
        if not any((a, b) != (start, end) and start <= a and b <= end for a, b in loops)
    ]

    def body_of(start: int, end: int) -> list[Instruction]:
        # If some paths of a loop load 16 bytes at a time, the others are for blocks at the ends of a row.
        least = 16 if any(one.loaded >= 16 for one in program[start:end]) else 1
        return shortest_way(program, start, end, lambda one: one.loaded >= least)

    bodies = [body_of(start, end) for start, end in inner]

    def walks(body: list[Instruction]) -> bool:
        return any(one.loaded >= 16 for one in body) or exponentials(body) >= 8

    return [body for body in bodies if walks(body)]


def held_row(program: list[Instruction]) -> list[Instruction]:
    """Return the path through all exponentials, which runs for a row that is held and has a gradient."""
    # AMD's assembly ends with its last instruction.
    end = max((place for place, one in enumerate(program) if one.opcode == "EXIT"), default=len(program) - 1)
    return shortest_way(program, 0, end, _is_exponential, exponentials(program))


_BARRIER = r"BAR\.|s_barrier"


def counts(call: Call, kernel: Any) -> dict[str, Any]:
    """Return the barriers, and the loads by their bits per thread, of all walks over a row together."""
    program = instructions(kernel)
    walks = [held_row(program)] if "PIECES" in call[2] else row_loops(program)
    barriers = sum(bool(re.match(_BARRIER, one.opcode)) for walk in walks for one in walk)
    widths = Counter(8 * one.loaded for walk in walks for one in walk if one.loaded)
    return {"barriers": barriers, "loads": {str(bits): number for bits, number in sorted(widths.items())}}
