"""`dglab check --server`: a real server, and servers that are wrong in every way a server can be."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dglab_utils.errors import LabError
from dglab_utils.measure.serving import ask, requests_of
from dglab_utils.models.nano import tokenizer
from dglab_utils.runs import cli

PROMPTS = ["one", "two", "three"]


def completion(text, stop="stop", tokens=3):
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": stop}
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@contextmanager
def serving(answer, models=("m",)):
    """A server on loopback; `answer(body, at_once)` gives (status, content type, bytes)."""
    under_way, lock, seen = [0], threading.Lock(), []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def send(self, status, kind, body):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            listed = {"object": "list", "data": [{"id": name, "object": "model"} for name in models]}
            self.send(200, "application/json", json.dumps(listed).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                under_way[0] += 1
                seen.append(body)
            time.sleep(0.05)  # until those that were asked at once are here
            with lock:
                at_once = under_way[0]
            try:
                self.send(*answer(body, at_once))
            except BrokenPipeError:
                pass
            finally:
                time.sleep(0.05)
                with lock:
                    under_way[0] -= 1

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


def said(text, **more):
    return 200, "application/json", json.dumps(completion(text, **more)).encode()


def asked(body):
    return body["messages"][0]["content"]


def test_a_steady_server_is_invariant():
    with serving(lambda body, at_once: said(f"you said {asked(body)}")) as (url, seen):
        told = ask(url, PROMPTS, waves=[2, 4])
    assert len(seen) == requests_of(3, [2, 4]) == 6 + 6 + 12
    assert all((b["temperature"], b["seed"], b["max_tokens"]) == (0, 0, 64) for b in seen)
    assert (told.changed, told.unsteady, told.failed, told.model) == ([], [], [], "m")
    assert [len(wave.replies) for wave in told.waves] == [6, 12] and told.waves[0].tokens_per_second > 0


def test_a_notebook_may_ask():
    """Where a loop runs already, as in a kernel."""

    async def cell():
        return ask(url, PROMPTS, waves=[2])

    with serving(lambda body, at_once: said("same")) as (url, _), ThreadPoolExecutor(1) as pool:
        told = pool.submit(asyncio.run, cell()).result()
    assert len(told.waves[0].replies) == 6 and not told.changed


def test_an_answer_that_depends_on_company_is_shown():
    def answer(body, at_once):
        return said(
            "a b c" if at_once < 3 or asked(body) != "two" else "a b d", stop="stop" if at_once < 3 else "length"
        )

    with serving(answer) as (url, _):
        told = ask(url, PROMPTS, waves=[2, 4])
    assert {c.at_once for c in told.changed} == {4} and not told.unsteady
    two = [c for c in told.changed if c.prompt == 1]
    assert two and {(c.at, c.alone, c.there, c.stops) for c in two} == {(4, "a b c", "a b d", ("stop", "length"))}


def test_an_unsteady_server_needs_no_company():
    answers = iter(range(1000))
    with serving(lambda body, at_once: said(f"draw {next(answers)}")) as (url, _):
        assert ask(url, PROMPTS, waves=[2]).unsteady == [0, 1, 2]


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ((500, "application/json", b'{"error": {"message": "out of memory"}}'), "HTTP 500"),
        ((200, "text/html", b"<html>it works</html>"), "not that of a chat completion"),
        ((200, "application/json", b"{not json"), "not that of a chat completion"),
        ((200, "application/json", b'{"text": "hello"}'), "not that of a chat completion"),
        ((200, "text/event-stream", b'data: {"choices": []}\n\ndata: [DONE]\n\n'), "not that of a chat completion"),
    ],
)
def test_a_server_that_answers_nothing_usable_is_one_line(answer, told, capsys):
    with serving(lambda *_: answer) as (url, _):
        assert cli.main(["check", "--server", url, "--waves", "2"]) == 2
    error = capsys.readouterr().err
    assert told in error and error.splitlines()[-1].startswith("dglab: ")


def test_a_slow_server_is_not_waited_for(capsys):
    def answer(body, at_once):
        time.sleep(3)
        return said("late")

    with serving(answer) as (url, _):
        assert cli.main(["check", "--server", url, "--timeout", "0.3", "--waves", "2"]) == 2
    assert "no answer within 0.3 s" in capsys.readouterr().err


def test_requests_that_fail_are_counted_and_nothing_is_claimed(tmp_path, capsys):
    def answer(body, at_once):
        return said("same") if at_once < 4 else (503, "application/json", b'{"error": {"message": "full"}}')

    with serving(answer) as (url, _):
        arguments = ["check", "--server", url, "--waves", "2", "4", "--json", str(tmp_path / "r.json")]
        assert cli.main([*arguments, "--html", str(tmp_path / "r.html")]) == 2
    printed = capsys.readouterr().out
    assert "Not known" in printed and "HTTP 503" in printed
    told = json.loads((tmp_path / "r.json").read_text())
    assert len(told["waves"]) == 2 and told["changed"] == []
    assert "Not known" in (tmp_path / "r.html").read_text()


def test_a_changed_answer_has_status_one(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    with serving(lambda body, at_once: said(f"{asked(body)} {at_once}")) as (url, seen):
        assert cli.main(["check", "--server", url, "--waves", "2", "--prompts", str(tmp_path / "prompts.txt")]) == 1
    assert {asked(body) for body in seen} == {"one", "two"}
    printed = capsys.readouterr().out
    assert "Not invariant: an answer depends on the requests" in printed and "'one 1' alone" in printed


def test_what_cannot_be_asked_is_refused(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(LabError, match="no server answers"):
        ask(nobody, PROMPTS)
    with pytest.raises(LabError, match="no prompt, or an empty one"):
        ask(nobody, [])
    with pytest.raises(LabError, match=r"that is 48 requests, 10 are allowed"):
        ask(nobody, PROMPTS, most_requests=10)
    with serving(lambda *_: said("x"), models=("a", "b")) as (url, _):
        with pytest.raises(LabError, match=r"serves 2 models \(a, b\); name one"):
            ask(url, PROMPTS)
        assert ask(url, PROMPTS, waves=[2], model="b").model == "b"
    assert cli.main(["check"]) == 2
    assert "name a model, or give --server URL" in capsys.readouterr().err


# -- a real server -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """`transformers serve` with a tiny Llama, batching continuously, on loopback."""
    folder = tmp_path_factory.mktemp("served") / "llama"
    torch.manual_seed(0)
    own = tokenizer.__wrapped__()
    own.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    own.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(own), num_key_value_heads=2, eos_token_id=own.eos_token_id, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("transformers"), "serve", str(folder), "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    log = folder.parent / "server.log"
    with log.open("w") as out:
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        server = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()[-3000:]
                time.sleep(0.2)
        else:
            pytest.fail(log.read_text()[-3000:])
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(timeout=30)


def test_a_real_server_is_asked(real, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("copy abc\nsort cba\n")
    arguments = ["check", "--server", real, "--prompts", str(tmp_path / "prompts.txt"), "--waves", "2", "3"]
    status = cli.main([*arguments, "--max-tokens", "8", "--json", str(tmp_path / "r.json")])
    told = json.loads((tmp_path / "r.json").read_text())
    printed = capsys.readouterr().out
    assert told["verdict"] in printed
    assert status == (1 if told["changed"] or told["unsteady"] else 0), printed
    replies = [r for wave in told["waves"] for r in wave["replies"]]
    assert len(replies) == 2 * 2 + 2 * 3 and not any(r["failed"] for r in replies)
    assert all(r["text"] and 0 < r["tokens"] <= 8 and r["stop"] in ("stop", "length") for r in replies)
