"""``gspo mismatch`` on a tiny model; transformers' ``generate`` samples in the command, or for files."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from gspo_kernels import cli
from gspo_kernels.mismatch.measure import Comparison
from gspo_kernels.mismatch.report import explanation, make_report
from gspo_kernels.mismatch.scoring import Samples, Setting, Switched, score
from tests.trainer.conftest import plain_logits, tiny_qwen3

PROMPTS = ("ab", "bcd", "c", "dabc", "ea", "fgh", "ijkl", "mn")
LENGTH = 12


@pytest.fixture(scope="module")
def peaked(tokenizer):
    """Return a model whose logits differ by several nats, like those of a trained model."""
    model = tiny_qwen3(tokenizer)
    with torch.no_grad():
        model.lm_head.weight.mul_(30.0)
    return model.eval()


@pytest.fixture(scope="module")
def directory(tmp_path_factory, peaked, tokenizer):
    """Return a directory with the model and a file of prompts."""
    path = tmp_path_factory.mktemp("peaked")
    peaked.save_pretrained(path)
    tokenizer.save_pretrained(path)
    write(path / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    return path


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rollouts(path, tokenizer, model, masks=False, **sampling):
    """Write completions with log-probs of ``generate``, and with ``masks`` if asked, as a run would."""
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor(tokenizer([prompt])["input_ids"])
        out = model.generate(
            ids, do_sample=True, max_new_tokens=LENGTH, output_scores=True, return_dict_in_generate=True,
            **{"top_k": 0, **sampling},
        )  # fmt: skip
        tokens = out.sequences[0, ids.shape[1] :]
        logprobs = torch.stack(out.scores, 1)[0].float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        lists = {"prompt_ids": ids[0], "token_ids": tokens, "logprobs": logprobs}
        rows.append({"prompt": prompt} | {name: values.tolist() for name, values in lists.items()})
        if masks:
            kept = [scores[0].isfinite().nonzero()[:, 0].tolist() for scores in out.scores]
            rows[-1]["sampling_mask"] = kept
    return write(path, rows)


def reported(tmp_path, *arguments):
    assert cli.main(["mismatch", *map(str, arguments), "--overwrite", "--output", str(tmp_path / "out")]) == 0
    return json.loads((tmp_path / "out" / "mismatch.json").read_text())


def error_of(capsys, *arguments):
    assert cli.main(["mismatch", *map(str, arguments)]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("gspo mismatch: error: ")
    return message


def left_by(report):
    """Return the mean difference under each switch, relative to the baseline's."""
    before = report["summary"]["tokens/mean"]
    return {each["name"]: each["tokens/mean"] / before for each in report["switches"]}


@pytest.fixture
def no_picture(monkeypatch):
    monkeypatch.setattr("gspo_kernels.mismatch.report.draw", lambda *arguments: None)


def test_generate_in_fp32_agrees(tmp_path, directory, capsys):
    arguments = (directory, "--prompts", directory / "prompts.jsonl", "--max-new-tokens", LENGTH)
    report = reported(tmp_path, *arguments)
    assert 0 < report["summary"]["tokens/mean"] < 1e-5 and report["summary"]["sequences/outside"] == 0
    moved = {each["name"]: each["moved"] for each in report["switches"]}
    assert moved["head in bf16"] > 1e-3 and moved["one sequence at a time"] < 1e-5
    out = capsys.readouterr().out
    assert "No sequence leaves the clip range" in out and "head in bf16" in out
    assert (tmp_path / "out" / "mismatch.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("rounds", "dtype"), [(False, "fp32"), (True, "fp32"), (True, "bf16")], ids=("generate", "fp32", "bf16")
)
def test_a_sampler_in_bf16_is_found(tmp_path, directory, monkeypatch, no_picture, rounds, dtype):
    """With ``rounds`` layers round otherwise for a single token, as kernels of decoding do. Some processors
    round bf16 products by the number of rows, and so score otherwise than they sample.
    """
    plain = Qwen3MLP.forward

    def rounded(self, x):
        return plain(self, x) * (1.0 + 2.0**-6 * (x.shape[1] == 1 and x.dtype == torch.bfloat16))

    monkeypatch.setattr(Qwen3MLP, "forward", rounded if rounds else plain)
    arguments = (directory, "--prompts", directory / "prompts.jsonl", "--max-new-tokens", LENGTH)
    report = reported(tmp_path, *arguments, "--sampler-dtype", "bf16", "--dtype", dtype)
    left = left_by(report)
    decoded = left.pop("decoding in bf16 with a cache")
    assert report["summary"]["sequences/outside"] > 0.5 and decoded < 0.02
    if rounds:
        assert min(left.values()) > 0.5
        assert any("with decoding in bf16 with a cache, 0.0%" in sentence for sentence in report["advice"])
    else:
        assert decoded <= left.pop("weights and head in bf16") < min(left.values())


@pytest.mark.parametrize(
    ("sampling", "cause", "advice"),
    [
        ({"top_k": 3, "top_p": 0.98, "temperature": 0.6}, "sampling mask on", "top_p=1"),
        ({"temperature": 0.7}, "log-probs before temperature", "processed_logprobs"),
    ],
    ids=("mask", "temperature"),
)
def test_the_cause_is_found(tmp_path, directory, peaked, tokenizer, sampling, cause, advice, no_picture):
    """One sampler cuts tails off; another returns log-probs from before the temperature."""
    generated = sampling if "top_k" in sampling else {}
    options = [f"--{name}={value}".replace("_", "-") for name, value in sampling.items()]
    file = rollouts(tmp_path / "rollouts.jsonl", tokenizer, peaked, **generated)
    report = reported(tmp_path, directory, "--rollouts", file, *options)
    left = left_by(report)
    assert report["summary"]["sequences/mean_log_s"] < -1e-3
    assert min(left, key=left.get) == cause and left[cause] < 0.01
    assert any(advice in sentence for sentence in report["advice"])


def test_prompts_are_the_tokens_that_the_sampler_had(
    tmp_path, directory, peaked, tokenizer, capsys, no_picture
):
    """Many tokenizers make other tokens of a prompt's text than it was made of; here the text is another."""
    file = rollouts(tmp_path / "rollouts.jsonl", tokenizer, peaked)
    rows = [json.loads(line) | {"prompt": "another"} for line in file.read_text().splitlines()]
    found = {}
    for name in ("kept", "older"):
        write(file, [{k: v for k, v in row.items() if name == "kept" or k != "prompt_ids"} for row in rows])
        found[name] = reported(tmp_path, directory, "--rollouts", file, "--no-switches")["summary"]
        told = f"{file} has no prompt_ids: its prompts are tokenized again" in capsys.readouterr().err
        assert told == (name == "older")
    assert found["kept"]["tokens/max"] < 1e-4 and found["older"]["tokens/mean"] > 0.1


def test_masks_of_a_run_are_trained_with(tmp_path, directory, peaked, tokenizer, no_picture):
    sampling = {"top_p": 0.8, "temperature": 0.6}
    file = rollouts(tmp_path / "rollouts.jsonl", tokenizer, peaked, masks=True, **sampling)
    report = reported(tmp_path, directory, "--rollouts", file, "--temperature", "0.6")
    assert report["summary"]["tokens/mean"] < 1e-5 and report["summary"]["sequences/outside"] == 0
    named = {each["name"]: each for each in report["switches"]}
    assert named["sampling mask off"]["sequences/outside"] > 0.5
    assert named["one sequence at a time"]["tokens/mean"] < 1e-5
    assert named["softmax in bf16"]["tokens/mean"] < 0.1


def test_two_files(tmp_path, peaked, tokenizer, capsys, no_picture):
    one, other = rollouts(tmp_path / "one.jsonl", tokenizer, peaked), tmp_path / "other.jsonl"
    rows = [json.loads(line) for line in one.read_text().splitlines()]
    write(other, [row | {"logprobs": [value - 1e-3 for value in row["logprobs"]]} for row in rows])
    report = reported(tmp_path, "--rollouts", one, "--against", other)
    assert report["summary"]["sequences/mean_log_s"] == pytest.approx(-1e-3)
    assert report["summary"]["sequences/outside_low"] == 1.0 and report["switches"] == []
    rows[3]["token_ids"][0] += 1
    write(other, rows)
    arguments = ("--rollouts", one, "--against", other, "--output")
    assert "row 4: its token_ids are not those" in error_of(capsys, *arguments, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    before = [path.read_bytes() for path in (tmp_path / "out").iterdir()]
    assert "--overwrite" in error_of(
        capsys, "--rollouts", one, "--against", one, "--output", tmp_path / "out"
    )
    assert [path.read_bytes() for path in (tmp_path / "out").iterdir()] == before


@pytest.mark.parametrize("flags", [["--update.learning_rate=1e-6"], ["--lora.rank=4", "--lora.alpha=8"]])
def test_weights_that_did_not_sample_are_named(tmp_path, directory, flags, no_picture):
    """Exported or not, rounded to 16 bits or not; those that sampled are recognized."""
    run, prompts, reward = tmp_path / "run", directory / "prompts.jsonl", tmp_path / "my_reward.py"
    reward.write_text("def odd(completion_ids):\n    return [float(ids[0] % 2) for ids in completion_ids]\n")
    line = ["--model", directory, "--dataset", prompts, "--reward", f"{reward}:odd", "--output", run, *flags]
    line += ["--rollout.prompts_per_rollout=4", "--rollout.max_new_tokens=4", "--rollout.group_size=4"]
    line += ["--save_rollouts", "--checkpoint.every=1", "--update.steps=2", "--update.minibatches=2"]
    assert cli.main(["train", *map(str, line)]) == 0
    whole, half = tmp_path / "whole", tmp_path / "half"
    for folder, options in ((whole, []), (half, ["--dtype", "bf16"])):
        assert cli.main(["export", str(run), "--step", "1", "--to", str(folder), *options]) == 0
    cases = [(run / "model", 2, "fp32", True), (directory, 2, "bf16", True), (whole, 2, "fp32", False)]
    more = [
        (whole, 2, "bf16", False),
        (whole, 2, "fp16", False),
        (half, 2, "fp32", False),
        (whole, 1, "fp32", True),
        (directory, 1, "fp32", False),
    ]
    for model, step, dtype, stale in cases + more * (len(flags) == 1):
        file = run / "rollouts" / f"step_00000{step}.jsonl"
        options = ("--no-switches", "--count", 4, "--dtype", dtype)
        report = reported(tmp_path, model, "--rollouts", file, *options)
        assert any("not those that sampled" in advice for advice in report["advice"]) == stale
        if stale:
            assert not any("although nothing was trained" in advice for advice in report["advice"])


# --- how log-probs are computed


@pytest.fixture(scope="module")
def samples(peaked, tokenizer):
    """Return greedy completions of the model in which every third token is replaced by a random one."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.tensor(tokenizer([prompt])["input_ids"][0]) for prompt in PROMPTS]
    completions = []
    for prompt, length in zip(ids, (3, 1, 7, 2, 5, 4, 6, 12), strict=True):
        written = peaked.generate(prompt[None], do_sample=False, min_new_tokens=length, max_new_tokens=length)
        tokens = written[0, len(prompt) :].clone()
        tokens[1::3] = torch.randint(0, 250, (len(tokens[1::3]),), generator=generator)
        completions.append(tokens)
    return Samples(ids, completions, torch.zeros(sum(map(len, completions)), dtype=torch.float64))


def by_hand(model, samples, logprobs, half=False):
    """Return log-probs from the model's own logits, one sequence at a time; ``half``: from a bf16 head."""
    found, head = [], model.lm_head
    own = head.forward
    if half:
        head.forward = lambda hidden: (hidden.bfloat16() @ head.weight.bfloat16().T).float()
    for prompt, completion in zip(samples.prompts, samples.completions, strict=True):
        with torch.no_grad():
            logits = plain_logits(model, prompt, completion)
        found.append(logprobs(logits).gather(-1, completion[:, None])[:, 0].double())
    head.forward = own
    return torch.cat(found)


def log_softmax(logits):
    return logits.log_softmax(-1)


def top_5(logits):
    return log_softmax(TopKLogitsWarper(5)(None, logits))


def nucleus(logits):
    return log_softmax(TopPLogitsWarper(0.9)(None, logits / 2.0))


SETTINGS = {
    "plain": ({}, log_softmax),
    "alone": ({"packed": False}, log_softmax),
    "decoded": ({"decode": True}, log_softmax),
    "chunks": ({"max_chunk_bytes": 4096}, log_softmax),
    "temperature": ({"temperature": 0.7}, lambda z: log_softmax(z / 0.7)),
    "softmax": ({"softmax": "bf16"}, lambda z: log_softmax(z.bfloat16())),
    "mask": ({"top_p": 0.9, "temperature": 2.0}, nucleus),
    "top-k": ({"top_k": 5}, top_5),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name, peaked, samples):
    changes, compute = SETTINGS[name]
    scored = score(lambda dtype, attention: peaked, samples, Setting(**changes), 40)
    wanted = by_hand(peaked, samples, compute)
    if name == "softmax":  # near the middle of two bf16 numbers, either may result
        assert ((scored - wanted).abs() > 1e-6 * wanted.abs()).double().mean() < 0.05
        return
    torch.testing.assert_close(scored, wanted, rtol=1e-5, atol=2e-5)
    if changes.get("top_p") or changes.get("top_k"):
        assert scored.isinf().any() and scored.isfinite().any()


@pytest.mark.parametrize("top", [{}, {"top_k": 5}])
def test_a_16_bit_head_rounds_logits(top, peaked, samples):
    """Log-probs are those of rounded logits, fused or not, and far from those of fp32 logits."""
    half = Setting(head="bf16", **top)
    wanted = by_hand(peaked, samples, top_5 if top else log_softmax, half=True)
    both = half, replace(half, head="fp32")
    got, exact = (score(lambda dtype, attention: peaked, samples, each, 40) for each in both)
    drawn = got.isfinite() & wanted.isfinite() & exact.isfinite()
    assert (got - wanted)[drawn].abs().mean() < 0.2 * (exact - wanted)[drawn].abs().mean()


# --- errors


def test_wrong_options_are_named(tmp_path, capsys):
    for arguments, words in (
        ([], "either --prompts"),
        (["M", "--prompts", "p", "--rollouts", "r"], "either --prompts"),
        (["--prompts", "p"], "the model is missing"),
        (["M", "--rollouts", "r", "--against", "a"], "without a model"),
        (["M", "--prompts", "p", "--url", "http://h", "--sampler-dtype", "bf16"], "--sampler-dtype"),
        *(
            (["M", "--rollouts", "r", f"--{name}", value], f"--{name}: got {value}")
            for name, value in (
                ("sampler-dtype", "bf16"),
                ("seed", "1"),
                ("max-new-tokens", "8"),
                ("url", "http://h"),
            )
        ),
        *(
            (["--rollouts", "r", "--against", "a", f"--{name}", value], f"--{name}: got {value}")
            for name, value in {
                "dtype": "bf16",
                "head": "fp16",
                "attention": "sdpa",
                "temperature": "0.5",
                "tokens": "9",
                "top-k": "5",
                "top-p": "0.9",
            }.items()
        ),
        (["--rollouts", "r", "--against", "a", "--no-switches"], "--no-switches"),
        (["M", "--prompts", "p", "--url", "localhost"], "url must be"),
        (["M", "--prompts", "p", "--count", "0"], "--count: got 0"),
        (["M", "--prompts", "p", "--temperature", "0"], "--temperature: got 0"),
        (["M", "--prompts", "p", "--top-p", "1.5"], "--top-p"),
        (["M", "--prompts", "p", "--clip-low", "-1"], "--clip-low"),
    ):
        assert words in error_of(capsys, *arguments, "--output", tmp_path / "out")


def test_files_of_another_kind_or_model_are_refused(tmp_path, directory, capsys):
    file = tmp_path / "file.jsonl"
    good = {"prompt": "a", "token_ids": [1], "logprobs": [-1.0]}
    masked, two_files = good | {"sampling_mask": [[1, 2]]}, ("--rollouts", file, "--against", file)
    with_model = (directory, "--rollouts", file)
    for arguments, first, changes, words in (
        (two_files, good, {"logprobs": None}, "row 2: logprobs: got None"),
        (two_files, good, {"token_ids": [1, 2]}, "1 logprobs for 2 token_ids"),
        (two_files, good, {"logprobs": [0.5]}, "at most 0"),
        (two_files, good, {"token_ids": [], "logprobs": []}, "token_ids: got []"),
        (two_files, good, {"token_ids": [1.5]}, "token_ids: got [1.5], expected whole numbers"),
        (two_files, good, {"prompt_ids": "a"}, "prompt_ids: got 'a', expected a list"),
        (with_model, good, {"prompt_ids": [10**6]}, "has token 1000000, but"),
        (two_files, good, {"sampling_mask": 3}, "sampling_mask: got 3, expected a list"),
        (two_files, good, {"sampling_mask": []}, "sampling_mask of 0 tokens for 1"),
        (two_files, good, {"sampling_mask": [[2]]}, "token 1 at 0 isn't in its sampling_mask"),
        (with_model, masked, {"token_ids": [10**6], "sampling_mask": [[]]}, "has token 1000000, but"),
        (with_model, masked, {"token_ids": [-1], "sampling_mask": [[]]}, "has token -1, but"),
        (with_model, masked, {"sampling_mask": [[1, 10**6]]}, "has token 1000000, but"),
        (with_model, masked, {"prompt": [{"role": "user", "content": "b"}]}, "the prompt is not text"),
    ):
        write(file, [first, first | changes])
        message = error_of(capsys, *arguments, "--output", tmp_path / "out")
        assert "row 2" in message and words in message


# --- numbers of a comparison by hand, and the advice that follows from them


def compared(*differences):
    """Return a comparison with these differences of tokens; the sampler's log-probs are -1, -2, ..."""
    flat = torch.tensor([each for sequence in differences for each in sequence], dtype=torch.float64)
    sampling = -1.0 - torch.arange(len(flat), dtype=torch.float64)
    lengths = torch.tensor([0, *(len(sequence) for sequence in differences)])
    return Comparison(sampling + flat, sampling, lengths.cumsum(0).int(), (3e-4, 4e-4))


def test_sequences_and_their_range():
    # A ratio on the upper bound is inside, as for a clip.
    edge = math.log1p(4e-4)
    comparison = compared([1e-3, -1e-3], [edge - 1e-12], [edge + 1e-9], [-3e-4, -4e-4, -2.99e-4], [0.0] * 5)
    wanted = torch.tensor([0.0, edge, edge, -9.99e-4 / 3, 0.0], dtype=torch.float64)
    torch.testing.assert_close(comparison.log_s, wanted, rtol=0, atol=2e-9)
    assert comparison.outside.tolist() == [False, False, True, True, False]
    rms = float(wanted.square().mean()) ** 0.5
    of_sequences = {"outside": 2 / 5, "outside_low": 1 / 5, "outside_high": 1 / 5, "rms_log_s": rms}
    numbers = comparison.summary()
    assert {name: numbers[f"sequences/{name}"] for name in of_sequences} == pytest.approx(of_sequences)
    values = torch.linspace(-0.01, 0.02, 1001, dtype=torch.float64).tolist()
    low, high = compared(*([value] for value in values)).range_that_holds(0.9)
    assert low == pytest.approx(-math.expm1(-0.01 + 0.05 * 0.03), rel=0.01)
    assert high == pytest.approx(math.expm1(0.02 - 0.05 * 0.03), rel=0.01)


def test_tokens_of_which_one_is_impossible():
    of_tokens = {
        "count": 5,
        "impossible": 0,
        "mean": 0.53 / 5,
        "signed_mean": -0.11 / 5,
        "quantile_0.5": 0.02,
    }
    of_tokens |= {"quantile_0.99": 0.3, "max": 0.3, "ratio_beyond_tenth": 2 / 5}
    numbers = compared([0.0, 0.2, -0.3, 0.01, -0.02]).summary()
    assert {name: numbers[f"tokens/{name}"] for name in of_tokens} == pytest.approx(of_tokens)
    comparison = compared([-math.inf, 0.0], [0.0], [1e-5])
    assert comparison.possible.tolist() == [False, True, True, True]
    assert comparison.outside.tolist() == [True, False, False]
    numbers = comparison.summary()
    assert numbers["tokens/impossible"] == 1 and numbers["tokens/max"] == pytest.approx(1e-5)
    assert numbers["sequences/count"] == 3 and numbers["sequences/outside"] == pytest.approx(1 / 3)
    both = Comparison(*(torch.tensor([-math.inf, -1.0]),) * 2, torch.tensor([0, 2]), (3e-4, 4e-4))
    assert both.log_s.tolist() == [0.0]


def test_corrections_respect_length_or_not():
    comparison = compared([-0.01] * 100, [-0.01] * 300)
    token, mean, total = comparison.corrections().values()
    assert [token["mean"], mean["mean"]] == pytest.approx([math.exp(-0.01)] * 2)
    assert total["mean"] == pytest.approx((math.exp(-1.0) + math.exp(-3.0)) / 2)
    assert total["ess"] < 0.7 < 0.99 < mean["ess"]


def test_the_cause_removes_the_difference():
    before = compared([1e-2, -1e-2], [2e-2])
    half, gone = compared([6e-3, -6e-3], [1.2e-2]), compared([1e-6, 0.0], [0.0])
    mean = before.summary()["tokens/mean"]
    lost = compared([-math.inf, 0.0], [0.0])
    rest = [Switched("half", {"head": "bf16"}, half, 0.0), Switched("lost", {"top_p": 0.5}, lost, 0.0)]
    assert explanation(rest, mean) is None
    found = Switched("gone", {"weights": "bf16"}, gone, 0.0)
    assert explanation([*rest, found], mean) is found
    assert explanation([found], 0.0) is None


ONE = ([-math.inf],), ([1e-3] * 4,), ([1e-3, 1.3e-3],)


@pytest.mark.parametrize("differences", [([-math.inf, 0.1], [0.0]), *ONE], ids=str)
def test_a_report_of_infinite_or_equal_numbers(tmp_path, differences):
    comparison = compared(*differences)
    completions = [torch.arange(5, 5 + len(each)) for each in differences]
    samples = Samples(None, completions, comparison.sampling)
    switch = Switched("head in bf16", {"head": "bf16"}, comparison, 0.0)
    report = make_report(samples, comparison, [switch], None, {"why": "a test"})
    written, picture = report.write(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(written.read_text())
    if len(differences) == 2:
        assert found["per_token"]["training"] == [None, pytest.approx(-1.9), -3.0]
        assert found["log_s"] == [None, 0.0] and found["about"] == {"why": "a test"}
        assert [worst["token"] for worst in found["worst"]] == [5, 6]
        assert "impossible to one side: 1" in report.text()
