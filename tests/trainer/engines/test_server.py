"""The engine for a vLLM server, against a stand-in that speaks its interface: requests, answers, errors."""

import copy
import math
import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch

from gspo_kernels.trainer.engines.embedded import TransformersEngine
from gspo_kernels.trainer.engines.server import VLLMServer
from gspo_kernels.trainer.engines.vllm import VLLMEngine
from gspo_kernels.trainer.input_errors import EngineError
from gspo_kernels.trainer.rollout import Sampling
from tests.draws import shifted_seed
from tests.trainer.conftest import ids_of, tiny_qwen3
from tests.trainer.engines.stand_in import DEFAULTS, Refused, serving

ENDS = list(range(40))
PROMPTS = [[65, 66], [67], [68, 69, 70, 71], [65, 66]]


@pytest.fixture
def stand_in(model):
    with serving(copy.deepcopy(model)) as found:
        yield found


def make_server(stand_in, **changes):
    server = VLLMServer(stand_in.url, **({"model": None, "timeout": 60.0, "at_once": 3} | changes))
    server.check()
    return server


def make_engine(stand_in, end_ids=ENDS, **changes):
    return VLLMEngine(make_server(stand_in, **changes), list(end_ids), vocabulary=258)


@pytest.mark.parametrize(
    "sampling", [Sampling(6), Sampling(6, 0.7), Sampling(6, 1.3, top_p=0.8, top_k=40)], ids=str
)
def test_completions_are_what_the_server_sampled(stand_in, sampling):
    """Tokens and log-probs of each seed, bit for bit and in their order."""
    seeds = [3, 2**64 - 1, 5, 7]
    completions = make_engine(stand_in).generate(PROMPTS, sampling, seeds=seeds)
    answers = {body["seed"]: (body["prompt"], choice) for body, choice in stand_in.completions}
    for row, (seed, prompt) in enumerate(zip(seeds, PROMPTS, strict=True)):
        asked, choice = answers[seed % 2**63]
        tokens = choice["token_ids"]
        assert asked == prompt and ids_of(completions)[row] == tokens
        logprobs = torch.tensor(choice["logprobs"]["token_logprobs"])
        assert torch.equal(completions[row].logprobs, logprobs)
        assert completions[row].finished == (tokens[-1] in ENDS)
    assert len(completions) == 4


def test_log_probs_are_those_of_the_distribution_that_tokens_were_drawn_from(stand_in, model):
    sampling = Sampling(6, 0.7, top_p=0.9, top_k=50)
    completions = make_engine(stand_in).generate(PROMPTS * 4, sampling, seeds=range(16))
    exact, errors, sizes = copy.deepcopy(model).double(), [], []
    for prompt, ids, logprobs in zip(
        PROMPTS * 4, ids_of(completions), [each.logprobs for each in completions], strict=True
    ):
        with torch.no_grad():
            logits = (
                exact(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / sampling.temperature
            )
        for place, token in enumerate(ids):
            best = logits[place].topk(sampling.top_k).values.softmax(-1)
            kept = int((best.cumsum(-1) < sampling.top_p).sum()) + 1
            logp = logits[place, token] - logits[place].topk(kept).values.logsumexp(-1)
            errors.append(float(logprobs[place] - logp))
            sizes.append(float(logits[place].abs().max()))
    # One fp32 rounding of what a log-prob is made of: a logit, and the log of a sum over the vocabulary.
    assert torch.tensor(errors).pow(2).mean().sqrt() < 2.0**-24 * (max(sizes) + math.log(258))
    every = torch.cat([each.logprobs for each in completions])
    assert (every <= 0).all() and every.min() < -1


def test_a_completion_belongs_to_its_seed(stand_in):
    engine, sampling = make_engine(stand_in), Sampling(6)
    together = engine.generate(PROMPTS, sampling, seeds=[1, 2, 3, 4])
    alone = engine.generate(PROMPTS[2:3], sampling, seeds=[3])
    assert ids_of(alone) == ids_of(together)[2:3]
    other = engine.generate(PROMPTS, sampling, seeds=[5, 6, 7, 8])
    assert ids_of(other) != ids_of(together)
    with pytest.raises(ValueError, match="seeds: got 1, expected one for each of the 4 prompts"):
        engine.generate(PROMPTS, sampling, seeds=[1])
    torch.manual_seed(shifted_seed(0))
    drawn = engine.generate(PROMPTS, sampling)
    torch.manual_seed(shifted_seed(0))
    assert ids_of(engine.generate(PROMPTS, sampling)) == ids_of(drawn)
    assert ids_of(engine.generate(PROMPTS, sampling)) != ids_of(drawn)


def test_greedy_completions_are_those_of_the_model_itself(stand_in, model):
    expected = TransformersEngine(model, ENDS, 256, batch_size=4).generate(
        PROMPTS, Sampling(6, temperature=0.0)
    )
    found = make_engine(stand_in).generate(PROMPTS, Sampling(6, temperature=0.0, top_p=0.5, top_k=3))
    assert ids_of(found) == ids_of(expected)
    assert [(None, each.finished) for each in expected] == [(each.logprobs, each.finished) for each in found]


def test_no_default_of_the_server_shapes_the_distribution(stand_in):
    engine = make_engine(stand_in)
    engine.generate(PROMPTS, Sampling(6), seeds=range(4))
    engine.generate(PROMPTS, Sampling(6, temperature=0.0))
    for body, _ in stand_in.completions:
        assert body.keys() >= DEFAULTS.keys()
        neutral = {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        assert {name: body[name] for name in neutral} == neutral


def test_completions_end_at_our_tokens_alone(stand_in, model):
    """The served model's own end token is one like any other, and each of ours ends a completion."""
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


def test_log_probs_before_temperature_are_refused(stand_in):
    stand_in.mode = "raw_logprobs"
    for sampling in (Sampling(3, 0.7), Sampling(3, top_k=5), Sampling(3, top_p=0.5)):
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            make_engine(stand_in).generate(PROMPTS, sampling)
    assert make_engine(stand_in).generate(PROMPTS, Sampling(3))[0].logprobs is not None, (
        "it is the same there"
    )


def choice(**changes):
    return lambda answer: {"choices": [answer["choices"][0] | changes]}


@pytest.mark.parametrize(
    ("logprobs", "refused"),
    [
        ([0.0, 0.0, 0.0], False),
        ([-6e-8, -math.log(2) - 6e-8, -math.log(3)], False),  # two and three equally likely tokens
        ([0.0, 0.0, -1e-3], True),
        ([-0.5, 0.0, 0.0], True),
        ([-math.log(100)] * 3, True),
    ],
)
def test_the_most_likely_token_alone_has_probability_one(stand_in, logprobs, refused):
    stand_in.sample = lambda prompt, options: ([50, 60, 70], logprobs, "length")
    engine = make_engine(stand_in, end_ids=[0])
    if refused:
        with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
            engine.generate([[65]], Sampling(3, 0.7))
    else:
        assert ids_of(engine.generate([[65]], Sampling(3, 0.7))) == [[50, 60, 70]]


SPOILED = {
    "an older vLLM": (choice(token_ids=None), "answered something else than vLLM does"),
    "no choice": (lambda answer: {"choices": []}, "answered something else than vLLM does"),
    "two choices": (lambda answer: {"choices": answer["choices"] * 2}, "answered something else than vLLM"),
    "not an object": (lambda answer: ["choices"], "answered something else than vLLM does"),
    "not JSON": (lambda answer: "<html>", "answered no JSON but <html>; is it a vLLM server"),
    "no log-probs": (choice(logprobs=None), "gave none log-probs for 3 tokens"),
    "too few log-probs": (choice(logprobs={"token_logprobs": [-1.0]}), "gave 1 log-probs for 3 tokens"),
    "no number": (choice(logprobs={"token_logprobs": [None] * 3}), "answered something else than vLLM"),
    "NaN": (choice(logprobs={"token_logprobs": [float("nan")] * 3}), "log-probs that are not finite"),
    "aborted": (choice(token_ids=[], finish_reason="abort"), "after 0 tokens for the reason 'abort'"),
    "another vocabulary": (choice(token_ids=[50, 258, 50]), "sampled token 258, and .* embeds 258"),
    "went on after the end": (choice(token_ids=[1, 50, 60]), "ended a completion at token 60"),
    "ended elsewhere": (choice(token_ids=[50], finish_reason="stop"), "ended a completion at token 50"),
    "too long": (choice(token_ids=[50] * 4), "sampled 4 tokens, where 3 were asked for"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_answers_that_do_not_fit_are_errors_that_name_the_server(stand_in, case):
    engine = make_engine(stand_in, end_ids=[0, 1])
    stand_in.sample = lambda prompt, options: ([50, 60, 70], [-1.0] * 3, "length")
    stand_in.spoil, message = SPOILED[case]
    with pytest.raises(EngineError, match=message) as raised:
        engine.generate([[65]], Sampling(3), seeds=[1])
    assert stand_in.url in str(raised.value)


@pytest.mark.parametrize(
    "sampling", [Sampling(6, 0.7, top_k=20, return_mask=True), Sampling(4, 1.0, 0.8, 90, return_mask=True)]
)
def test_a_server_says_what_it_could_have_drawn(stand_in, sampling):
    engine, kept = make_engine(stand_in), {}
    sample = stand_in.sample

    def noted(prompt, options):
        found = sample(prompt, options)
        kept[options["seed"]] = stand_in.kept
        return found

    stand_in.sample = noted
    found = engine.generate(PROMPTS, sampling, seeds=range(4))
    assert [each.mask.to_lists() for each in found] == [kept[seed] for seed in range(4)]
    plain = make_engine(stand_in).generate(PROMPTS, replace(sampling, return_mask=False), seeds=range(4))
    assert ids_of(plain) == ids_of(found) and plain[0].mask is None
    stand_in.sample = lambda prompt, options: ([50, 60, 70], [-1.0] * 3, "length")
    engine = make_engine(stand_in, end_ids=[0])
    engine._probed = True
    for spoiled, message in (
        (None, "gave no sampling mask; start vLLM .* --return-sampling-mask"),
        ([[50]], "a sampling mask that does not hold the tokens that it sampled"),
        ([[50], [60], [71, 72]], "a sampling mask that does not hold the tokens that it sampled"),
    ):
        stand_in.spoil = choice(sampling_mask=spoiled)
        with pytest.raises(EngineError, match=message):
            engine.generate([[65]], replace(sampling, max_new_tokens=3), seeds=[1])
    stand_in.generate = lambda body: stand_in.answer("POST", "/nowhere", body, {})
    with pytest.raises(EngineError, match=r"404.*--return-sampling-mask --enable-scale-out"):
        engine.generate([[65]], sampling, seeds=[1])


def test_a_failure_and_ctrl_c_wait_for_no_other_completion(stand_in):
    """Of two requests at a time, one takes long; the others are not asked any more."""
    engine, complete, asked = make_engine(stand_in, at_once=2), stand_in.complete, []

    def one_is_slow(body):
        asked.append(body["seed"])
        if body["seed"] == 1:
            stand_in.lock.release()
            threading.Event().wait(20)
            stand_in.lock.acquire()
        if body["seed"] == 2:
            raise Refused(500, "out of memory")
        return complete(body)

    stand_in.complete, started = one_is_slow, time.monotonic()
    with pytest.raises(EngineError, match=r"answered 500 .*out of memory"):
        engine.generate(PROMPTS * 2, Sampling(3), seeds=[1, 2, 3, 4, 5, 6, 7, 8])
    assert set(asked) <= {1, 2}
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest-xdist ignore it
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[:1], Sampling(3), seeds=[1])
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert time.monotonic() - started < 15


def test_a_context_that_is_too_short_is_an_error(stand_in):
    stand_in.longest = 5
    with pytest.raises(EngineError, match=r"after 1 of 3 tokens; its --max-model-len must hold"):
        make_engine(stand_in, end_ids=[]).generate([[65] * 4], Sampling(3))


def test_what_the_server_refuses_is_said(stand_in):
    with pytest.raises(EngineError, match=r"/v1/completions answered 400 .*Token id 300 is out of voc"):
        make_engine(stand_in).generate([[300]], Sampling(3))
    stand_in.names = ["policy", "another"]
    with pytest.raises(
        EngineError, match=r"does not serve None; engine.model must be one of policy, another"
    ):
        make_server(stand_in)
    with pytest.raises(EngineError, match=r"does not serve 'an adapter'"):
        make_server(stand_in, model="an adapter")
    assert make_server(stand_in, model="another").model == "another"
    stand_in.names = []
    with pytest.raises(EngineError, match="it serves nothing"):
        make_server(stand_in)


def test_a_server_that_cannot_be_reached_is_named(stand_in, monkeypatch):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        url = f"http://localhost:{free.getsockname()[1]}"
    options = {"model": None, "timeout": 0.2, "at_once": 1}
    with pytest.raises(EngineError, match=f"{url}/v1/models cannot be reached: .*Connection refused"):
        VLLMServer(url, **options).check()
    stand_in.seconds = 5.0
    with pytest.raises(EngineError, match=r"/v1/models did not answer within 0.2 seconds \(engine.timeout\)"):
        VLLMServer(stand_in.url, **options).check()
    stand_in.seconds, stand_in.key = 0.0, "secret"
    with pytest.raises(EngineError, match=r"401 .* set VLLM_API_KEY"):
        make_server(stand_in)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("http_proxy", url)  # where nobody listens
    make_engine(stand_in).generate([[65]], Sampling(2))


def test_a_server_that_hangs_up_is_named():
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        listening.listen()
        url = f"http://localhost:{listening.getsockname()[1]}"

        def hang_up():
            connection, _ = listening.accept()
            connection.recv(1)
            connection.close()

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(EngineError, match=f"{url}/v1/models cannot be reached"):
            VLLMServer(url, model=None, timeout=5.0, at_once=1).check()


def test_weights_are_loaded_and_cached_prefixes_forgotten(tmp_path, stand_in, tokenizer):
    server, other = make_server(stand_in), tiny_qwen3(tokenizer, seed=1)
    engine = make_engine(stand_in)
    engine.generate(PROMPTS, Sampling(6, temperature=0.0))
    other.save_pretrained(tmp_path / "weights")
    server.reload(tmp_path / "weights")
    expected = TransformersEngine(other, ENDS, 256, batch_size=4).generate(
        PROMPTS, Sampling(6, temperature=0.0)
    )
    found = engine.generate(PROMPTS, Sampling(6, temperature=0.0))
    assert ids_of(found) == ids_of(expected)


def test_weights_that_cannot_be_loaded_are_an_error(tmp_path, stand_in, tokenizer):
    server = make_server(stand_in)
    with pytest.raises(
        EngineError, match=f"no such directory {tmp_path}/none.*the server must see them there"
    ):
        server.reload(tmp_path / "none")
    tiny_qwen3(tokenizer, vocab_size=300).save_pretrained(tmp_path / "another")
    with pytest.raises(EngineError, match=r"shapes of weights.*same architecture and vocabulary"):
        server.reload(tmp_path / "another")
    stand_in.developing = False
    with pytest.raises(
        EngineError, match=r"/collective_rpc answered 404 .*VLLM_SERVER_DEV_MODE=1 vllm serve"
    ):
        server.reload(tmp_path / "another")
