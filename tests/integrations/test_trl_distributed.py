"""Two processes over gloo: under DDP and under FSDP2 ours ends at the weights of TRL's trainer.

One pair of processes runs everything, because most of its time is importing.
"""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("trl") is None, reason='TRL is missing: pip install "gspo_kernels[trl]"'
    ),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each of the two processes saved."""
    from transformers import AutoModelForCausalLM

    from tests.integrations.trl_problem import save_model, weights

    folder = tmp_path_factory.mktemp("distributed")
    model = save_model(folder / "model")
    command = [sys.executable, "-m", "tests.integrations.trl_worker", model, str(folder)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    workers = []
    for rank in ("0", "1"):
        environment = os.environ | common | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        log = (folder / f"log{rank}").open("w")
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        codes = [worker.wait(timeout=500) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert codes == [0, 0], (folder / "log0").read_text()[-3000:] + (folder / "log1").read_text()[-3000:]
    start = {"start": weights(AutoModelForCausalLM.from_pretrained(model))}
    return [torch.load(folder / f"rank{rank}.pt") | start for rank in (0, 1)]


@pytest.mark.parametrize("name", ["GSPO", "dapo"])
@pytest.mark.parametrize("where", ["DDP", "FSDP2"])
def test_two_processes_end_at_the_weights_of_trl(where, name, results):
    theirs, ours = (results[0][where, name, kind] for kind in ("GRPOTrainer", "FusedGRPOTrainer"))
    start = results[0]["start"]
    distance = (ours["weights"] - theirs["weights"]).norm() / theirs["weights"].norm()
    assert distance <= 1e-5
    assert (theirs["weights"] - start).norm() / start.norm() > 100 * distance
    assert torch.equal(ours["weights"], results[1][where, name, "FusedGRPOTrainer"]["weights"])
    clipped = [(entry["clip_ratio/region_mean"], entry["ratio/min"]) for entry in ours["log"]]
    assert clipped[0] == (0.0, 1.0)
    assert 0 < clipped[1][0] < 1 and clipped[1][1] < 1
    # gathered over both processes
    for key in ("ratio/min", "ratio/max", "active_fraction", "clip_ratio/region_mean"):
        logs = [result[where, name, "FusedGRPOTrainer"]["log"] for result in results]
        assert [entry[key] for entry in logs[0]] == [entry[key] for entry in logs[1]]


def test_bf16_of_fsdp2_rounds_no_log_prob(results):
    """accelerate's policy rounds inputs and outputs of the model and its head; ratios must not see that."""
    log = results[0]["FSDP2", "bf16"]["log"]
    fp32 = results[0]["FSDP2", "GSPO", "FusedGRPOTrainer"]["log"]
    for fresh in (log[0], log[4]):
        assert fresh["ratio/min"] == fresh["ratio/max"] == 1.0
    assert log[1]["ratio/min"] < 1.0 < log[1]["ratio/max"]
    # on fresh weights the loss is a mean of advantages: bf16 layers do not change it, bf16 could not hold it
    assert log[0]["loss"] == pytest.approx(fp32[0]["loss"], rel=1e-6)
    assert log[0]["loss"] != torch.tensor(log[0]["loss"]).bfloat16().item()
