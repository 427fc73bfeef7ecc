"""``gspo mismatch`` on a tiny model: transformers' ``generate`` samples, or files hold its scores."""

import json
from dataclasses import replace

import pytest
import torch

from gspo_kernels import cli
from gspo_kernels.mismatch.scoring import Samples, Setting, score, switches
from gspo_kernels.trainer.rollout import Sampling
from tests.trainer.conftest import tiny_qwen3

PROMPTS = ("ab", "bcd", "c", "dabc", "ea", "fgh", "ijkl", "mn")
LENGTH = 12


@pytest.fixture(scope="module")
def peaked(tokenizer):
    """Logits that differ by several nats, as a trained model's do."""
    model = tiny_qwen3(tokenizer)
    with torch.no_grad():
        model.lm_head.weight.mul_(30.0)
    return model.eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory, peaked, tokenizer):
    path = tmp_path_factory.mktemp("peaked")
    peaked.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return path


def rollouts(path, tokenizer, model, masks=False, **sampling):
    """A file of completions with the scores of ``generate``, and ``masks``, as a run would keep them."""
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor(tokenizer([prompt])["input_ids"])
        out = model.generate(
            ids, do_sample=True, max_new_tokens=LENGTH, output_scores=True, return_dict_in_generate=True,
            **{"top_k": 0, **sampling},
        )  # fmt: skip
        tokens = out.sequences[0, ids.shape[1] :]
        logprobs = torch.stack(out.scores, 1)[0].float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        rows.append({"prompt": prompt, "token_ids": tokens.tolist(), "logprobs": logprobs.tolist()})
        if masks:
            rows[-1]["sampling_mask"] = [
                scores[0].isfinite().nonzero()[:, 0].tolist() for scores in out.scores
            ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reported(tmp_path, *arguments):
    assert cli.main(["mismatch", *map(str, arguments), "--output", str(tmp_path / "out")]) == 0
    return json.loads((tmp_path / "out" / "mismatch.json").read_text())


def left_by(report):
    """The mean difference under each switch, over that of the baseline."""
    before = report["summary"]["tokens/mean"]
    return {each["name"]: each["tokens/mean"] / before for each in report["switches"]}


def test_generate_in_fp32_agrees(tmp_path, directory, prompts, capsys):
    arguments = (directory, "--prompts", prompts, "--max-new-tokens", LENGTH)
    report = reported(tmp_path, *arguments)
    assert 0 < report["summary"]["tokens/mean"] < 1e-5 and report["summary"]["sequences/outside"] == 0
    moved = {each["name"]: each["moved"] for each in report["switches"]}
    assert moved["head in bf16"] > 1e-3 and moved["one sequence at a time"] < 1e-5
    out = capsys.readouterr().out
    assert "No sequence leaves the clip range" in out and "head in bf16" in out
    assert (tmp_path / "out" / "mismatch.png").stat().st_size > 10_000


def test_generate_in_bf16_is_found(tmp_path, directory, prompts, capsys):
    arguments = (directory, "--prompts", prompts, "--max-new-tokens", LENGTH, "--sampler-dtype", "bf16")
    report = reported(tmp_path, *arguments)
    assert report["summary"]["sequences/outside"] > 0.5
    left = left_by(report)
    assert min(left, key=left.get) == "weights and head in bf16" and min(left.values()) < 0.05
    assert "Where it comes from: with weights and head in bf16" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("sampling", "cause"),
    [
        ({"top_p": 0.8}, "sampling mask on"),
        ({"top_k": 4}, "sampling mask on"),
        ({"top_p": 0.8, "temperature": 0.6}, "sampling mask on"),
    ],
    ids=str,
)
def test_a_mask_of_the_sampler_is_found(tmp_path, directory, peaked, tokenizer, sampling, cause):
    file = rollouts(tmp_path / "rollouts.jsonl", tokenizer, peaked, **sampling)
    options = [str(part) for name, v in sampling.items() for part in (f"--{name.replace('_', '-')}", v)]
    report = reported(tmp_path, directory, "--rollouts", file, *options)
    left = left_by(report)
    assert report["summary"]["sequences/mean_log_s"] < -1e-3
    assert min(left, key=left.get) == cause and left[cause] < 0.01
    assert any("top_p=1" in sentence for sentence in report["advice"])


def test_masks_of_a_run_are_trained_with(tmp_path, directory, peaked, tokenizer):
    sampling = {"top_p": 0.8, "temperature": 0.6}
    file = rollouts(tmp_path / "rollouts.jsonl", tokenizer, peaked, masks=True, **sampling)
    report = reported(tmp_path, directory, "--rollouts", file, "--temperature", "0.6")
    assert report["summary"]["tokens/mean"] < 1e-5 and report["summary"]["sequences/outside"] == 0
    named = {each["name"]: each for each in report["switches"]}
    assert named["sampling mask off"]["sequences/outside"] > 0.5
    assert (
        named["one sequence at a time"]["tokens/mean"] < 1e-5
        and named["softmax in bf16"]["tokens/mean"] < 0.1
    )


def test_log_probs_before_temperature_are_found(tmp_path, directory, peaked, tokenizer):
    file = rollouts(tmp_path / "rollouts.jsonl", tokenizer, peaked)  # scores at temperature 1
    report = reported(tmp_path, directory, "--rollouts", file, "--temperature", "0.7")
    left = left_by(report)
    assert left["log-probs before temperature"] < 0.01
    assert any("processed_logprobs" in sentence for sentence in report["advice"])


def test_two_files(tmp_path, peaked, tokenizer, capsys):
    one = rollouts(tmp_path / "one.jsonl", tokenizer, peaked)
    rows = [json.loads(line) for line in one.read_text().splitlines()]
    for row in rows:
        row["logprobs"] = [value - 1e-3 for value in row["logprobs"]]
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = reported(tmp_path, "--rollouts", one, "--against", other)
    assert report["summary"]["sequences/mean_log_s"] == pytest.approx(-1e-3)
    assert report["summary"]["sequences/outside_low"] == 1.0 and report["switches"] == []
    rows[3]["token_ids"][0] += 1
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["mismatch", "--rollouts", str(one), "--against", str(other), "--output", str(tmp_path / "no")]
    assert cli.main(command) == 1 and not (tmp_path / "no").exists()
    assert "row 4: its token_ids are not those" in capsys.readouterr().err


# --- how log-probs are computed


@pytest.fixture(scope="module")
def samples(peaked, tokenizer):
    """What the model would write, but every third token is any."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.tensor(tokenizer([prompt])["input_ids"][0]) for prompt in PROMPTS]
    completions = []
    for prompt, length in zip(ids, (3, 1, 7, 2, 5, 4, 6, 12), strict=True):
        written = peaked.generate(prompt[None], do_sample=False, min_new_tokens=length, max_new_tokens=length)
        tokens = written[0, len(prompt) :].clone()
        tokens[1::3] = torch.randint(0, 250, (len(tokens[1::3]),), generator=generator)
        completions.append(tokens)
    return Samples(ids, completions, torch.zeros(sum(map(len, completions)), dtype=torch.float64))


def by_hand(model, samples, compute):
    """Log-probs from the model's own logits, one sequence at a time."""
    found = []
    for prompt, completion in zip(samples.prompts, samples.completions, strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1]
        found.append(compute(logits).gather(-1, completion[:, None])[:, 0].double())
    return torch.cat(found)


def nucleus(logits, share):
    """-inf for tokens that the most likely ones before them bring to the share already."""
    order = logits.sort(-1, descending=True)
    before = order.values.softmax(-1).cumsum(-1) - order.values.softmax(-1)
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order.indices, before < share)
    return logits.masked_fill(~kept, -torch.inf)


SETTINGS = {
    "plain": ({}, lambda z: z.log_softmax(-1)),
    "alone": ({"packed": False}, lambda z: z.log_softmax(-1)),
    "chunks": ({"max_chunk_bytes": 4096}, lambda z: z.log_softmax(-1)),
    "temperature": ({"temperature": 0.7}, lambda z: (z / 0.7).log_softmax(-1)),
    "softmax": ({"softmax": "bf16"}, lambda z: z.bfloat16().log_softmax(-1)),
    "mask": ({"top_p": 0.9, "temperature": 2.0}, lambda z: nucleus(z / 2.0, 0.9).log_softmax(-1)),
    "top-k": (
        {"top_k": 5},
        lambda z: z.masked_fill(z < z.topk(5).values[:, -1:], -torch.inf).log_softmax(-1),
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_do_what_they_say(name, peaked, samples):
    changes, compute = SETTINGS[name]
    scored = score(lambda dtype, attention: peaked, samples, Setting(**changes), 40)
    wanted = by_hand(peaked, samples, compute)
    if name == "softmax":  # near a tie of two bf16 numbers either may come out
        wrong = (scored - wanted).abs() > 1e-6 * wanted.abs()
        assert wrong.double().mean() < 0.05
        return
    torch.testing.assert_close(scored, wanted, rtol=1e-5, atol=2e-5)
    if changes.get("top_p") or changes.get("top_k"):
        assert scored.isinf().any() and scored.isfinite().any()


@pytest.mark.parametrize("top", [{}, {"top_k": 5}])
def test_a_16_bit_head_rounds_logits(top, peaked, samples):
    """Fused or not, log-probs are those of rounded logits, far from those of fp32."""
    half = Setting(head="bf16", **top)
    got = score(lambda dtype, attention: peaked, samples, half, 40)
    weight = peaked.lm_head.weight

    states = []
    handle = peaked.lm_head.register_forward_pre_hook(lambda module, inputs: states.append(inputs[0]))
    by_hand(peaked, samples, lambda z: z)
    handle.remove()
    wanted = []
    for prompt, completion, hidden in zip(samples.prompts, samples.completions, states, strict=True):
        z = (hidden[0, len(prompt) - 1 : -1].bfloat16() @ weight.bfloat16().T).float()
        if top:
            z = z.masked_fill(z < z.topk(5).values[:, -1:], -torch.inf)
        wanted.append(z.log_softmax(-1).gather(-1, completion[:, None])[:, 0].double())
    wanted = torch.cat(wanted).detach()
    exact = score(lambda dtype, attention: peaked, samples, replace(half, head="fp32"), 40)
    both = got.isfinite() & wanted.isfinite() & exact.isfinite()
    assert (got - wanted)[both].abs().mean() < 0.2 * (exact - wanted)[both].abs().mean()


def test_what_can_be_switched():
    plain = switches(Setting(), Sampling(5), "sdpa", 100)
    assert {"eager attention", "head in bf16", "one sequence at a time", "chunks of 16 rows"} <= plain.keys()
    assert not any("mask" in name or "temperature" in name for name in plain)
    masked = switches(Setting(temperature=0.5), Sampling(5, 0.5, 0.9), "eager", 100)
    assert masked["sampling mask on"] == {"top_p": 0.9, "top_k": 0} and "sdpa attention" in masked
    assert masked["log-probs before temperature"] == {"temperature": 1.0}
    half = switches(Setting(weights="bf16", head="bf16"), Sampling(5), "sdpa", 100)
    assert half["head in fp32"] == {"head": "fp32"} and "weights in fp32" in half


# --- what can't be compared


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --prompts"),
        (["M", "--prompts", "p", "--rollouts", "r"], "either --prompts"),
        (["--prompts", "p"], "the model is missing"),
        (["M", "--rollouts", "r", "--against", "a"], "without a model"),
        (["M", "--rollouts", "r", "--sampler-dtype", "bf16"], "sampled already"),
        (["M", "--prompts", "p", "--url", "localhost"], "url must be"),
        (["M", "--prompts", "p", "--count", "0"], "--count: got 0"),
        (["M", "--prompts", "p", "--temperature", "0"], "--temperature: got 0"),
        (["M", "--prompts", "p", "--top-p", "1.5"], "--top-p"),
        (["M", "--prompts", "p", "--clip-low", "-1"], "--clip-low"),
    ],
    ids=str,
)
def test_wrong_options_are_named(arguments, words, tmp_path, capsys):
    assert cli.main(["mismatch", *arguments, "--output", str(tmp_path / "out")]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("gspo mismatch: error: ") and words in message


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"token_ids": [1]}, "row 2: logprobs: got None"),
        ({"token_ids": [1, 2], "logprobs": [-1.0]}, "1 logprobs for 2 token_ids"),
        ({"token_ids": [1], "logprobs": [0.5]}, "at most 0"),
        ({"token_ids": [], "logprobs": []}, "token_ids: got []"),
        ({"token_ids": [1], "logprobs": [-1.0], "sampling_mask": 3}, "sampling_mask: got 3, expected a list"),
        ({"token_ids": [1], "logprobs": [-1.0], "sampling_mask": []}, "sampling_mask of 0 tokens for 1"),
        (
            {"token_ids": [1], "logprobs": [-1.0], "sampling_mask": [[2]]},
            "token 1 at 0 isn't in its sampling_mask",
        ),
    ],
    ids=str,
)
def test_files_of_another_kind_are_refused(row, words, tmp_path, capsys):
    path = tmp_path / "file.jsonl"
    good = {"prompt": "a", "token_ids": [1], "logprobs": [-1.0]}
    path.write_text(json.dumps(good) + "\n" + json.dumps({"prompt": "b"} | row) + "\n")
    command = ["mismatch", "--rollouts", str(path), "--against", str(path), "--output", str(tmp_path / "out")]
    assert cli.main(command) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"token_ids": [10**6], "sampling_mask": [[]]}, "has token 1000000, but the model embeds only"),
        ({"token_ids": [-1], "sampling_mask": [[]]}, "has token -1, but"),
        ({"sampling_mask": [[1, 10**6]]}, "has token 1000000, but"),
        ({"prompt": [{"role": "user", "content": "b"}]}, "the prompt is no text"),
    ],
    ids=str,
)
def test_files_of_another_model_are_refused(row, words, tmp_path, directory, capsys):
    path = tmp_path / "file.jsonl"
    good = {"prompt": "a", "token_ids": [1], "logprobs": [-1.0], "sampling_mask": [[1, 2]]}
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | row) + "\n")
    command = ["mismatch", str(directory), "--rollouts", str(path), "--output", str(tmp_path / "out")]
    assert cli.main(command) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "row 2" in message and words in message
