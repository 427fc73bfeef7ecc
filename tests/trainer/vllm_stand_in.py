"""A server that speaks vLLM's HTTP interface, with a tiny transformers model behind it.

It refuses unknown fields, which vLLM accepts, and it exposes careless clients: options that a request leaves
out have unusual defaults, prompts are cached until the cache is reset, and greedy log-probs are taken before
temperature, top-k and top-p.
"""

import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import torch
from transformers import AutoModelForCausalLM

NEUTRAL = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
DEFAULTS = {"temperature": 0.1, "top_p": 0.5, "top_k": 1, "repetition_penalty": 5.0, **NEUTRAL}
OPTIONS = {"max_tokens", "seed", "logprobs", "stop_token_ids", "ignore_eos", *DEFAULTS}


class Refused(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class StandIn:
    """The state and the answers of the server; tests change its attributes while it runs."""

    def __init__(self, model):
        self.model, self.dtype = model.eval(), torch.float32  # the dtype of reloaded weights
        self.names, self.key, self.seconds = ["policy"], None, 0.0  # listed models, API key, delay of answers
        self.developing = True  # whether it reloads weights
        self.spoil = lambda answer: answer  # may change an answer before it is sent
        self.reloads, self.cached = [], {}  # loaded directories; scores by prefix
        self.lock = threading.Lock()

    def answer(self, method, path, body, headers):
        threading.Event().wait(self.seconds)
        if path.startswith("/v1") and self.key and headers["Authorization"] != f"Bearer {self.key}":
            raise Refused(401, '{"error":"Unauthorized"}')
        if (method, path) == ("GET", "/v1/models"):
            listed = [{"id": name, "parent": None} for name in self.names]
            return {"object": "list", "data": [*listed, {"id": "an adapter", "parent": "policy"}]}
        posted = {"/v1/completions": self.complete, "/inference/v1/generate": self.generate}
        if self.developing:
            posted |= {"/collective_rpc": self.reload, "/reset_prefix_cache": self.forget}
        if method != "POST" or path not in posted:
            raise Refused(404, '{"detail":"Not Found"}')
        with self.lock:
            return self.spoil(posted[path](body))

    def complete(self, body):
        if unknown := body.keys() - {"model", "prompt", "return_token_ids"} - OPTIONS:
            raise Refused(400, f"unknown fields {sorted(unknown)}")
        if body["model"] not in self.names:
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        prompt, options = body["prompt"], DEFAULTS | body
        assert isinstance(prompt, list) and prompt
        assert body["return_token_ids"] is True
        assert -(2**63) <= options.get("seed", 0) < 2**63
        if max(prompt) >= self.model.config.vocab_size:
            raise Refused(400, f"Token id {max(prompt)} is out of vocabulary")
        with torch.no_grad():
            tokens, logprobs, reason = self.sample(prompt, options)
        choice = {"index": 0, "text": "unused", "token_ids": tokens, "finish_reason": reason}
        if options.get("logprobs") is not None:
            choice["logprobs"] = {"tokens": [str(token) for token in tokens], "token_logprobs": logprobs}
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}

    def generate(self, body):
        """Answer vLLM's own endpoint: the completion under other names, and its sampling masks."""
        if unknown := body.keys() - {"model", "token_ids", "sampling_params"}:
            raise Refused(400, f"unknown fields {sorted(unknown)}")
        options = body["sampling_params"]
        if options["top_k"] <= 0:
            raise Refused(400, "sampling masks need top_k > 0")
        named = {"model": body["model"], "prompt": body["token_ids"], "return_token_ids": True}
        answer = self.complete(named | options)
        (choice,) = answer["choices"]
        logprobs = choice["logprobs"]["token_logprobs"]
        choice["logprobs"] = {"content": [{"token": "token_id:?", "logprob": value} for value in logprobs]}
        choice["sampling_mask"] = self.kept
        return answer

    def sample(self, prompt, options):
        assert all(options[name] == value for name, value in NEUTRAL.items())
        draws = torch.Generator().manual_seed(options.get("seed", 0))
        ends = {*options.get("stop_token_ids", ())}
        if not options.get("ignore_eos"):
            ends.add(self.model.config.eos_token_id)
        tokens, logprobs, self.kept = [], [], []
        while len(tokens) < options["max_tokens"] and (not tokens or tokens[-1] not in ends):
            scores = self.scores([*prompt, *tokens])
            seen = torch.tensor([*prompt, *tokens])
            penalty = options["repetition_penalty"]
            scores[seen] = torch.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
            raw = scores.log_softmax(-1)
            if options["temperature"] == 0:
                tokens.append(int(scores.argmax()))
                logprobs.append(float(raw[tokens[-1]]))
                continue
            scores = scores / options["temperature"]
            order = scores.argsort(descending=True)
            if options["top_k"] > 0:
                scores[order[options["top_k"] :]] = -torch.inf
            if options["top_p"] < 1:
                sums = scores.softmax(-1)[order].cumsum(-1)
                scores[order[1:][sums[:-1] >= options["top_p"]]] = -torch.inf
            self.kept.append(scores.isfinite().nonzero().flatten().tolist())
            logp = scores.log_softmax(-1)
            tokens.append(int(torch.multinomial(logp.exp(), 1, generator=draws)))
            logprobs.append(float(logp[tokens[-1]]))
        return tokens, logprobs, "stop" if tokens[-1] in ends else "length"

    def scores(self, ids):
        if tuple(ids) not in self.cached:
            self.cached[tuple(ids)] = self.model(torch.tensor([ids])).logits[0, -1].float()
        return self.cached[tuple(ids)].clone()

    def reload(self, body):
        assert body["method"] == "reload_weights"
        weights_path = body["kwargs"]["weights_path"]
        if not Path(weights_path).is_dir():
            raise Refused(500, f"no such directory {weights_path}")
        loaded = AutoModelForCausalLM.from_pretrained(weights_path, dtype=self.dtype).eval()
        mine, new = ({k: v.shape for k, v in model.state_dict().items()} for model in (self.model, loaded))
        if mine != new:
            raise Refused(500, "AssertionError: shapes of weights")
        self.reloads.append(weights_path)
        self.model = loaded
        return {"results": [None]}

    def forget(self, body):
        self.cached.clear()


@contextlib.contextmanager
def serving(model):
    """Yield a `StandIn` that answers at its ``url``."""
    stand_in = StandIn(model)

    class Handler(BaseHTTPRequestHandler):
        def respond(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            status = 200
            try:
                answer = stand_in.answer(self.command, urlsplit(self.path).path, body, self.headers)
            except Refused as refusal:
                answer, status = str(refusal), refusal.status
            text = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer)
            with contextlib.suppress(ConnectionError):  # the client may have given up
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

        do_GET = do_POST = respond

        def log_message(self, *_):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 64

    with Server(("localhost", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        stand_in.url = f"http://localhost:{server.server_port}"
        try:
            yield stand_in
        finally:
            server.shutdown()
