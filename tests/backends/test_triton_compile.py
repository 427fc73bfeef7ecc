"""The kernels as they ship, compiled for GPUs that need not be present, without the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
NVIDIA = TARGETS[:-1]
ONE_OF_EACH_KIND = ("sm_80", "sm_90", "gfx942")
"""Targets for which all kernels are compiled, the others get those whose code depends on the GPU."""
ALL = pytest.mark.parametrize("target", TARGETS)


@pytest.fixture(scope="module")
def report(request):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    paths = [request.config.getoption("--triton"), str(ROOT), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    script = Path(__file__).with_name("compile_all.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def entries(report, target, kernel=""):
    compiled = report["compiled"]
    found = [each for each in compiled if each["target"] == target and kernel in each["kernel"]]
    assert found
    return found


@ALL
def test_every_kernel_compiles_and_fits(report, target):
    """A program fits into a multiprocessor's shared memory and registers, and nothing spills."""
    compiled = entries(report, target)
    assert target != "sm_90" or {entry["kernel"] for entry in compiled} == set(report["kernels"])
    for entry in compiled:
        assert entry["STACK"] + entry["LOCAL"] == 0 and entry["fits"], entry
        assert target not in NVIDIA or entry["REG"] * 32 * entry["warps"] <= 65536, entry


def arrivals(order):
    """Yield each atomic addition with the words before and behind it, up to the neighboring additions."""
    places = [place for place, word in enumerate(order) if "atom" in word]
    assert places
    for start, place, stop in zip([0, *places], places, [*places[1:], len(order)], strict=False):
        yield order[start:place], order[place], order[place + 1 : stop]


@pytest.mark.parametrize("target", ONE_OF_EACH_KIND)
def test_arrivals_order_memory_accesses(report, target):
    """There are: stores, a barrier, one addition that releases and acquires, a barrier, loads past caches."""
    if target == "gfx942" and report["triton"].startswith(("3.6.", "3.7.")):
        pytest.skip("refused on AMD GPUs: LLVM leaves out the wait behind buffer_wbl2 there")
    for entry in entries(report, target, "ratio"):
        found = list(arrivals(entry["order"]))
        assert len(found) == 1 + (entry["kernel"] == "sequence_ratio_kernel"), entry["kernel"]
        for before, atomic, behind in found:
            if target in NVIDIA:
                assert {"global", "gpu", "acq_rel", "add"} <= set(atomic.split(".")), atomic
                assert before[-1].startswith("bar") and behind[0].startswith("bar"), (before[-1], behind[0])
                assert any("volatile" in word for word in behind)
            else:
                # the L2 is written back before the addition, and caches in front of it are invalidated after
                assert before[-2:] == ["buffer_wbl2 sc1", "s_waitcnt vmcnt(0)"], before[-2:]
                assert behind[:3] == ["s_waitcnt vmcnt(0)", "buffer_inv sc1", "s_barrier"], behind[:3]
                gone = [word for word in before[:-2] if not word.startswith("s_waitcnt")]
                assert gone[-1] == "s_barrier", gone[-1]
        if target in NVIDIA:
            # the last program reduces other programs' stores, loaded as volatile, and reads the normalizer
            last = found[-1][2]
            assert sum(word.startswith("ld") and "volatile" not in word for word in last) <= 1, last


@pytest.mark.parametrize("target", ("sm_90", "sm_100", "sm_120"))
def test_clusters_order_memory_accesses(report, target):
    """All global loads come before blocks first meet, blocks read each other's shared memory between two
    meetings, and gradients are stored over the logits after these reads.
    """
    if tuple(map(int, report["triton"].split(".")[:2])) < (3, 8):
        pytest.skip(f"Triton {report['triton']} knows no reductions over clusters")
    held = entries(report, target, "on_chip_row_kernel")
    clusters = [entry["cluster"] for entry in held if "cluster" in entry]
    assert len(clusters) == 3
    for order in clusters:
        meetings = [place for place, word in enumerate(order) if "cluster.arrive" in word]
        reads = [place for place, word in enumerate(order) if word.startswith("ld.shared::cluster")]
        assert len(reads) == 2 and len(meetings) >= 3
        for place in meetings:
            assert order[place + 1].startswith("barrier.cluster.wait"), order[place : place + 2]
            assert not any(word in order[place] for word in ("relaxed", ".cta")), order[place]
        loads = [place for place, word in enumerate(order) if word.startswith("ld.") and "global" in word]
        stores = [place for place, word in enumerate(order) if word.startswith("st.") and ".v" in word]
        assert max(loads) < meetings[0] and max(reads) < min(stores)
        writes = [place for place, word in enumerate(order) if word.startswith("st.shared")]
        for read in reads:
            written = max(place for place in writes if place < read)
            assert any(written < place < read for place in meetings), "read before it is written"
            after = min((place for place in writes if place > read), default=len(order))
            assert any(read < place < after for place in meetings), "overwritten, or gone, before it is read"


WALKS = ("logprobs_", "divergence", "product_operand", "store_hidden", "scale_rows", "sequence_ratio")
"""Kernels whose loops walk over rows, the last one only with its first loop."""


@ALL
def test_rows_move_16_bytes_at_a_time(report, target):
    """Loops over rows move 16 bytes at a time where rows consist of such pieces, else one element. Threads
    exchange nothing, and only narrowing in place needs a barrier.
    """
    for entry in entries(report, target):
        name = entry["kernel"]
        if name == "on_chip_row_kernel":
            loads = entry["all"]["ld"]["128"] if target in NVIDIA else entry["wide_loads"]
            assert loads >= entry["PIECES"], entry
        if target not in NVIDIA or not name.startswith(WALKS):
            continue
        loops = entry["loops"][: 1 if name.startswith("sequence_ratio") else None]
        widths = {bits for loop in loops for bits in loop["ld"]}
        if "kept_ptr" in entry["dtypes"]:
            widths -= {"32"}  # words of masks
        assert widths == {"128"} if entry["ALIGNED"] else "128" not in widths, entry
        if name.startswith("logprobs_") and entry["ALIGNED"]:
            assert {bits for loop in loops for bits in loop["st"]} <= {"128"}, entry
        if name != "store_hidden_kernel":  # its rows' maxima are reduced
            assert sum(loop["barriers"] for loop in loops) == entry.get("NARROWS_IN_PLACE", False), entry


@ALL
def test_products_of_fp32_are_products_of_fp32(report, target):
    """NVIDIA's matrix instructions would round fp32 to TF32, AMD's xf32 ones likewise."""
    for entry in entries(report, target, "fixed_product_kernel"):
        instructions = entry["matrix_instructions"]
        if entry["dtypes"]["a"] == "torch.float32":
            assert all("xf32" not in one and target not in NVIDIA for one in instructions), entry
        else:  # the search can succeed
            assert instructions, entry


def test_shapes_do_not_recompile_and_alignment_does(report):
    for first, *others in report["keys"].values():
        assert all(each == first for each in others)
    aligned, odd = (report["keys"][kind][0] for kind in ("aligned", "odd"))
    without_logits = {name for name in aligned if set(aligned[name]) & set(odd[name])}
    assert without_logits == {"ratio_step_kernel", "divide_kernel", "merge_mask_kernel", "lengths_kernel"}


def test_a_later_launch_is_that_of_triton(report):
    same, kernels, served_by_triton = report["launches"]
    assert all(same) and len(same) > kernels == served_by_triton == len(entries(report, "sm_90"))
