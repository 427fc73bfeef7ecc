"""The vLLM engine with a stand-in server: requests, answers, weights, errors, whole runs."""

import copy
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo_kernels.trainer import vllm
from gspo_kernels.trainer.config import InputError, from_mapping
from gspo_kernels.trainer.report import read_metrics
from gspo_kernels.trainer.rollout import ModelEngine, Sampling
from gspo_kernels.trainer.vllm import VLLMEngine, VLLMServer
from tests.forks import in_processes
from tests.trainer.conftest import (
    ROWS,
    assert_most_likely,
    ids_of,
    make_trainer,
    odd_share,
    same,
    small_config,
    tiny_qwen3,
    weights,
)
from tests.trainer.vllm_stand_in import Refused, serving

ENDS = list(range(40))
PROMPTS = [[65, 66], [67], [68, 69, 70, 71], [65, 66]]


@pytest.fixture
def stand_in(model):
    with serving(copy.deepcopy(model)) as found:
        yield found


@pytest.fixture(autouse=True)
def limits(monkeypatch):
    for name, value in {"TIMEOUT": 60.0, "AT_ONCE": 3}.items():
        monkeypatch.setattr(vllm, name, value)


def make_engine(stand_in, end_ids=ENDS):
    return VLLMEngine(VLLMServer(stand_in.url), list(end_ids), vocabulary=258)


def test_greedy_completions_are_those_of_the_model(stand_in, model):
    expected = ModelEngine(model, ENDS, 256, 4).generate(PROMPTS, Sampling(6, temperature=0.0))
    found = make_engine(stand_in).generate(PROMPTS, Sampling(6, temperature=0.0, top_p=0.5, top_k=3))
    assert ids_of(found) == ids_of(expected)
    assert [(None, each.finished) for each in expected] == [(each.logprobs, each.finished) for each in found]


def test_completions_end_at_our_tokens_alone(stand_in, model):
    """The end token of the served model is an ordinary token; each of our end tokens ends a completion."""
    ids = [65]
    for _ in range(4):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    first, never = ids[1], min({*range(258)} - {*ids})
    stand_in.model.config.eos_token_id = first
    greedy = Sampling(4, temperature=0.0)
    goes_on = make_engine(stand_in, end_ids=[never]).generate([[65]], greedy)
    assert ids_of(goes_on)[0][0] == first and len(goes_on[0].ids) == 4 and not goes_on[0].finished
    ended = make_engine(stand_in, end_ids=[never, first]).generate([[65]], greedy)
    assert ids_of(ended) == [[first]] and ended[0].finished
    last = make_engine(stand_in, end_ids=[first]).generate([[65]], Sampling(1, temperature=0.0))
    assert last[0].finished, "the end token may be the last one that there is room for"


@pytest.mark.parametrize("top_k", [258, 4])
@pytest.mark.parametrize("local", [False, True], ids=["server", "local"])
def test_most_likely_tokens_come_with_logprobs(stand_in, model, local, top_k, monkeypatch):
    """Without the sampled token where it is none of them, and without those that could not be drawn."""
    monkeypatch.setattr(stand_in, "model", model.eval())
    K = 6
    engine = make_engine(stand_in)
    if local:
        monkeypatch.setitem(sys.modules, "vllm", LocalModule(stand_in))
        config = from_mapping({"objective": {"name": "CISPO", "centering": 30}})
        engine = VLLMEngine(vllm.LocalVLLM(config, "model", 20), ENDS, 258)
        assert engine.vllm.vllm.options["max_logprobs"] == 30
    sampling = Sampling(7, 0.8, top_k=top_k % 258, top_logprobs=K)
    completions = engine.generate(PROMPTS * 3, sampling)
    assert_most_likely(model, PROMPTS * 3, completions, K, 0.8, top_k)
    drawn = torch.cat([each.centering.ids == each.ids.unsqueeze(1) for each in completions])
    assert top_k == 4 or not drawn.any(1).all(), "a sampled token that is none of the most likely ones"


def choice(**changes):
    return lambda answer: {"choices": [answer["choices"][0] | changes]}


def scored(values, **others):
    return choice(logprobs={"token_logprobs": values, **others})


SPOILED = {
    "an older vLLM": (choice(token_ids=None), "gave another answer than vLLM does"),
    "two choices": (lambda answer: {"choices": answer["choices"] * 2}, "gave another answer than vLLM"),
    "not JSON": (lambda answer: "<html>", "gave another answer than vLLM does: <html>"),
    "no log-probs": (choice(logprobs=None), "returned None as log-probs of 3 tokens"),
    "too few log-probs": (scored([-1.0]), r"returned \[-1.0\] as log-probs of 3"),
    "no number": (scored([None] * 3), "gave another answer than vLLM"),
    "NaN": (scored([float("nan")] * 3), r"returned \[nan, nan, nan\] as log-probs"),
    "no likely tokens": (scored([-1.0] * 3, top_logprobs=[]), "log-probs of 0 places"),
    "another token": (scored([-1.0] * 3, top_logprobs=[{"token_id:258": -1.0}] * 3), "of unknown tokens"),
    "texts": (scored([-1.0] * 3, top_logprobs=[{"a": -1.0}] * 3), "gave another answer than vLLM does"),
    "aborted": (choice(token_ids=[], finish_reason="abort"), "after 0 tokens for the reason 'abort'"),
    "another vocabulary": (choice(token_ids=[50, 258, 50]), "sampled token 258, and .* embeds 258"),
    "went on after the end": (choice(token_ids=[1, 50, 60]), r"after 3 tokens .* where \[0, 1\] or 3"),
    "ended elsewhere": (choice(token_ids=[50], finish_reason="stop"), "after 1 tokens for the reason 'stop'"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_wrong_answers_name_the_server(stand_in, case):
    engine = make_engine(stand_in, end_ids=[0, 1])
    stand_in.sample = lambda prompt, options: ([50, 60, 70], [-1.0] * 3, "length")
    stand_in.spoil, message = SPOILED[case]
    top = 2 if case in ("no likely tokens", "another token", "texts") else 0
    with pytest.raises(InputError, match=message) as raised:
        engine.generate([[65]], Sampling(3, top_logprobs=top))
    assert stand_in.url in str(raised.value)


def test_a_server_that_refuses_is_named(stand_in, monkeypatch):
    with pytest.raises(InputError, match=r"/v1/completions answered 400 .*Token id 300 is out of voc"):
        make_engine(stand_in).generate([[300]], Sampling(3))
    said, started = [], time.monotonic()
    monkeypatch.setattr(vllm, "WAIT", 1.5)
    with pytest.raises(InputError, match=r"localhost:1/v1/models cannot be reached: .*Connection refused"):
        VLLMServer("http://localhost:1", say=said.append)
    assert len(said) == 1 and time.monotonic() - started > 1.5
    for change, value, words in (
        ("names", ["policy", "another"], "serves policy, another; expected one"),
        ("names", [], "serves nothing"),
        ("answer", lambda *_: {"models": []}, "gave another answer than vLLM"),
        ("seconds", 5.0, r"/v1/models did not answer within 0.2 seconds"),
        ("key", "secret", r"401 .* set VLLM_API_KEY"),
    ):
        with monkeypatch.context() as patch, pytest.raises(InputError, match=words):
            patch.setattr(stand_in, change, value)
            patch.setattr(vllm, "TIMEOUT", 0.2 if change == "seconds" else 60.0)
            VLLMServer(stand_in.url)
    stand_in.key = "secret"
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("http_proxy", "http://localhost:1")
    make_engine(stand_in).generate([[65]], Sampling(2))


def test_failures_wait_for_no_other_completion(stand_in, monkeypatch):
    """Two requests run at once: the first takes long, the second fails. Most others are never sent."""
    monkeypatch.setattr(vllm, "AT_ONCE", 2)
    engine, complete = make_engine(stand_in), stand_in.complete
    asked, released = [], threading.Event()

    def first_is_slow(body):
        asked.append(tuple(body["prompt"]))
        if body["prompt"] == [65]:
            stand_in.lock.release()
            released.wait(20)
            stand_in.lock.acquire()
        if body["prompt"] == [66]:
            raise Refused(500, "out of memory")
        return complete(body)

    stand_in.complete, started = first_is_slow, time.monotonic()
    try:
        with pytest.raises(InputError, match=r"answered 500 .*out of memory"):
            engine.generate([[65 + number] for number in range(40)], Sampling(3))
        assert len(asked) < 10 and time.monotonic() - started < 15
    finally:
        released.set()


def test_weights_that_cannot_be_loaded_are_an_error(tmp_path, stand_in, tokenizer):
    server = VLLMServer(stand_in.url)
    with pytest.raises(InputError, match=f"no such directory {tmp_path}/none"):
        server.load(tmp_path / "none")
    tiny_qwen3(tokenizer, vocab_size=300).save_pretrained(tmp_path / "another")
    with pytest.raises(InputError, match=r"shapes of weights"):
        server.load(tmp_path / "another")
    stand_in.developing = False
    with pytest.raises(InputError, match=r"/collective_rpc answered 404 .*VLLM_SERVER_DEV_MODE=1 vllm serve"):
        server.load(tmp_path / "another")


class LocalModule:
    """A stand-in for the module ``vllm``: an ``LLM`` in this process, whose answers a `StandIn` computes.

    It refuses to sample or to load while a part that this needs is asleep, and to wake a part twice.
    """

    def __init__(self, stand_in):
        self.stand_in, self.options, self.asleep, self.naps = stand_in, None, set(), 0

    def LLM(self, model, **options):
        self.options = {"model": model, **options}
        return self

    def sleep(self, level):
        assert level == 1 and self.options["enable_sleep_mode"], "weights must survive"
        self.asleep, self.naps = {"weights", "kv_cache"}, self.naps + 1

    def wake_up(self, tags):
        assert self.asleep.issuperset(tags)
        self.asleep.difference_update(tags)

    SamplingParams = SimpleNamespace

    def generate(self, inputs, parameters, use_tqdm):
        assert not self.asleep
        for each, params in zip(inputs, parameters, strict=True):
            body = {"model": "policy", "prompt": each["prompt_token_ids"], "return_token_ids": True}
            body |= vars(params)
            assert body.pop("detokenize") is False
            (choice,) = self.stand_in.complete(body)["choices"]
            values = None
            if "logprobs" in choice:
                values = [
                    {token: SimpleNamespace(logprob=value) for token, value in top.items()}
                    for top in self.stand_in.top
                ]
            yield SimpleNamespace(outputs=[SimpleNamespace(**(choice | {"logprobs": values}))])

    def collective_rpc(self, method, kwargs):
        assert method == "reload_weights" and "weights" not in self.asleep
        self.stand_in.receive(kwargs["weights_iterator"])

    def reset_prefix_cache(self):
        self.stand_in.forget({})


@pytest.fixture
def other_weights(tokenizer):
    """Yield a server whose first weights differ from the run's, so that its answers need the first sync."""
    with serving(tiny_qwen3(tokenizer, seed=7)) as found:
        yield found


def run(tokenizer, output, url, *, model=None, **sections):
    """Train two steps; return for each the mean distance of sampling log-probs from the trainer's."""
    sections["engine"] = {"url": url} | sections.get("engine", {})
    sections["update"] = {"steps": 2, "learning_rate": 1e-2} | sections.get("update", {})
    make_trainer(tokenizer, ROWS, odd_share, small_config(output, **sections), model=model).train()
    return [each["mismatch/mean"] for each in read_metrics(output / "metrics.jsonl")[1:]]


RUNS = {
    "local": {"rollout": {"batch_size": 9}, "engine": {"memory": 0.25}, "seed": 3},
    "adapters elsewhere": {"lora": {"rank": 2}, "rollout": {"temperature": 0.8}},
    "bf16": {"update": {"precision": "bf16"}},
    "off-policy weights": {"off_policy": {"level": "token"}, "rollout": {"top_k": 20, "temperature": 0.7}},
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_samples_from_the_weights_of_now(tmp_path, tokenizer, other_weights, case, monkeypatch):
    """Log-probs differ from the trainer's by rounding alone; vLLM's last weights are the exported ones."""
    url, output, sections = other_weights.url, tmp_path / "run", dict(RUNS[case])
    module, model, written = LocalModule(other_weights), None, output
    if case == "local":
        monkeypatch.setitem(sys.modules, "vllm", module)
        url, model = "local", str(tmp_path / "base")
        tiny_qwen3(tokenizer).save_pretrained(model)
    if case == "adapters elsewhere":
        written = tmp_path / "elsewhere" / "below"
        sections["engine"] = {"weights": str(written)}
    if case == "bf16":
        other_weights.dtype = torch.bfloat16
    steps = run(tokenizer, output, url, model=model, **sections)
    if case == "local":
        expected = {"model": model, "dtype": "float32", "gpu_memory_utilization": 0.25}
        expected |= {"max_num_seqs": 9, "seed": 3, "max_model_len": 4 + 5}
        expected |= {"logprobs_mode": "processed_logprobs"}
        assert module.options.items() >= expected.items()
        assert module.asleep == {"weights", "kv_cache"} and module.naps == 1 + 2 + 2 + 2, (
            "start, rollouts, evals"
        )
    if case == "off-policy weights":
        assert min(steps) > 0.1, "the probability that top-k cut off"
    else:
        assert len(steps) == 2 and max(steps) < (0.1 if case == "bf16" else 1e-5)
    # Weights are loaded before the first evaluation and after each step, each time from a new directory.
    assert len(set(other_weights.reloads)) == 3
    if case == "local":  # no file
        assert other_weights.reloads == [0, 1, 2]
    else:
        assert {str(written)} == {path.rpartition("/")[0] for path in other_weights.reloads}
    assert not list(written.glob(".unfinished-*"))
    if case != "bf16":
        exported = AutoModelForCausalLM.from_pretrained(output / "model")
        assert same(weights(other_weights.model), weights(exported))


def test_two_processes_share_a_server(tmp_path, tokenizer, other_weights):
    """Each process asks for its share; the server loads weights once for both; its failure ends both."""

    def works(rank):
        assert max(run(tokenizer, tmp_path / "two", other_weights.url)) < 1e-5

    def fails(rank):
        words = rf"must see them there.*they are in {tmp_path}/fails: .*/collective_rpc answered 404"
        with pytest.raises(InputError, match=words):
            run(tokenizer, tmp_path / "fails", other_weights.url)

    in_processes(2, works)
    assert len(other_weights.reloads) == 3
    other_weights.developing = False
    in_processes(2, fails)


def test_engines_that_cannot_start_are_refused(tmp_path, tokenizer, other_weights, model, monkeypatch):
    model.save_pretrained(tmp_path / "base")
    monkeypatch.setattr(vllm, "WAIT", 0.0)
    other_weights.max_model_len = 8
    for url, words, changes in (
        (other_weights.url, r"engine.url: got .* and an engine; only one", {"engine": ModelEngine}),
        (other_weights.url, r"takes 8, and prompt and completion have up to 9 tokens", {}),
        ("local", r"engine.url: a local vLLM loads the model from a directory", {}),
        ("local", r"vLLM cannot start .*No module named 'vllm'", {"model": str(tmp_path / "base")}),
        ("http://localhost:1", "http://localhost:1/v1/models cannot be reached", {}),
    ):
        config = small_config(tmp_path / "run", engine={"url": url})
        with pytest.raises(InputError, match=words):
            make_trainer(tokenizer, ROWS, odd_share, config, **changes)
    assert not (tmp_path / "run").exists()
