"""`dglab check --server`: a real server, and servers that are wrong in every way a server can be."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dglab_utils.errors import LabError
from dglab_utils.measure.serving import NO_COMPLETION, ask, printable, requests_of
from dglab_utils.models.nano import tokenizer
from dglab_utils.runs import check_server, cli
from dglab_utils.runs.check_page import as_json, as_text
from dglab_utils.runs.check_server import page_of, status_of

PROMPTS = ["one", "two", "three"]
WAIT = 10  # seconds for the requests of a wave to come in
ENOUGH = 5  # seconds in which a few answers come on any machine, where a time limit must end what follows


def completion(text, stop="stop", tokens=3, **more):
    message = {"role": "assistant", "content": text, **more}
    choice = {"index": 0, "message": message, "finish_reason": stop}
    usage = {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": 1 + tokens}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}


@contextmanager
def serving(answer, prompts=0, waves=(), models=("m",)):
    """A server on loopback; `answer(body, at_once)` gives (status, content type, bytes), `models` what it lists.

    Told of how many prompts and which waves it is asked, once, it answers none of a wave's requests before all of them
    are in.
    """
    under_way, came, seen = [], threading.Condition(), []
    wanted = list(range(1, 2 * prompts + 1))  # of each request in its order: how many must be in
    for k in waves:
        for _ in range(prompts):
            wanted += [len(wanted) + k] * k

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
            data = [{"id": name, "object": "model"} for name in models] if isinstance(models, tuple) else models
            listed = {"object": "list", "data": data}
            self.send(200, "application/json", json.dumps(listed).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            most = [0]  # requests that were under way together with this one
            with came:
                seen.append(body)
                under_way.append(most)
                for other in under_way:
                    other[0] = max(other[0], len(under_way))
                came.notify_all()
                until = wanted[len(seen) - 1] if len(seen) <= len(wanted) else 0
                came.wait_for(lambda: len(seen) >= until, WAIT)
            try:
                told = answer(body, most[0])
            finally:
                with came:  # before the answer is sent: what is asked after it is not together with it
                    under_way[:] = [other for other in under_way if other is not most]
            with suppress(OSError):  # the client has gone
                self.send(*told)

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # a connection beyond is tried again after a second

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()  # `shutdown` waits so long
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", seen
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def listening(answer):
    """A server that speaks no HTTP by itself: `answer(connection)` is called for each once a request is there."""

    def serve(connection):
        with connection:
            try:
                connection.recv(65536)
                answer(connection)
            except OSError:  # the client has gone
                pass

    def accept():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes `accept`


@pytest.fixture
def hang():
    """Waits until the test is over."""
    over = threading.Event()
    yield lambda: over.wait(120)
    over.set()


def after(count, act):
    """For `each`: acts when so many replies have come."""
    seen = []

    def each(reply):
        seen.append(reply)
        if len(seen) == count:
            act()

    return each


def told_of(told):
    """(the page as text, the JSON, the exit status)."""
    page = page_of("http://here", told)
    return as_text(page), json.loads(as_json(page)), status_of(told)


def said(text, **more):
    return 200, "application/json", json.dumps(completion(text, **more)).encode()


def asked(body):
    return body["messages"][0]["content"]


def test_a_steady_server_is_invariant():
    met = []

    def answer(body, at_once):
        met.append(at_once)
        return said(f"you said {asked(body)}")

    with serving(answer, 3, [2, 4]) as (url, seen):
        told = ask(url, PROMPTS, waves=[2, 4])
    assert met == [1] * 6 + [2] * 6 + [4] * 12
    assert len(seen) == requests_of(3, [2, 4]) == 6 + 6 + 12
    assert all((b["temperature"], b["seed"], b["max_tokens"]) == (0, 0, 64) for b in seen)
    assert (told.changed, told.unsteady, told.failed, told.model) == ([], [], [], "m")
    assert [len(wave.replies) for wave in told.waves] == [6, 12]
    (heads, *rows), *_ = page_of(url, told).tables.values()
    assert heads[-1] == "tokens/s" and len(rows) == 3 and all(float(row[-1]) > 0 for row in rows)


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

    with serving(answer, 3, [2, 4]) as (url, _):
        told = ask(url, PROMPTS, waves=[2, 4])
    assert {c.at_once for c in told.changed} == {4} and not told.unsteady
    two = [c for c in told.changed if c.prompt == 1]
    assert two and {(c.at, c.alone, c.there, c.stops) for c in two} == {(4, "a b c", "a b d", ("stop", "length"))}


def test_an_unsteady_server_needs_no_company():
    """What is unsteady alone says nothing of company: it is not compared, and decides the verdict."""
    answers = iter(range(1000))

    def answer(body, at_once):
        return said(f"draw {next(answers)}" if asked(body) == "one" else "same" if at_once == 1 else "other")

    with serving(answer, 2, [2]) as (url, _):
        told = ask(url, ["one", "two"], waves=[2])
    assert told.unsteady == [0] and {c.prompt for c in told.changed} == {1}
    assert len(told.compared) == len(told.not_compared) == 2
    printed, _, status = told_of(told)
    assert "Not steady: 1 of 2 prompts got two different answers" in printed and "Not invariant" not in printed
    assert (
        "same answer for 1 of 2 prompts\n" in printed and "2 answers: no two equal ones alone for prompt 1" in printed
    )
    assert status == 1


def test_another_reason_to_end_is_no_other_text():
    def answer(body, at_once):
        return said("same", stop="stop" if at_once == 1 else "length")

    with serving(answer, 1, [2]) as (url, _):
        told = ask(url, ["one"], waves=[2])
    assert [(c.text_differs, c.stop_differs, c.at) for c in told.changed] == [(False, True, None)] * 2
    printed, _, status = told_of(told)
    assert "0 of 2 answers differ from the one given alone" in printed
    assert "2 of 2 answers ended for another reason than alone" in printed
    assert "prompt 1, sent together with 1 more; ended for 'stop' alone, 'length' together" in printed
    assert "Not invariant: no text changed" in printed and status == 1


@pytest.mark.parametrize("part", ["reasoning_content", "reasoning", "tool_calls"])
def test_reasoning_and_tool_calls_are_compared(part):
    def answer(body, at_once):
        word = "alone" if at_once == 1 else "together"
        call = {"id": str(time.time()), "type": "function", "function": {"name": "find", "arguments": word}}
        return said(None, **{part: [call] if part == "tool_calls" else word})

    with serving(answer, 1, [2]) as (url, _):
        told = ask(url, ["one"], waves=[2])
    texts = {"tool_calls": "[call] find(alone)"}
    assert len(told.changed) == 2 and told.changed[0].alone == texts.get(part, "[reasoning] alone")


def test_a_word_that_moves_from_reasoning_to_the_answer_is_a_difference():
    def answer(body, at_once):
        return said("b\nc", reasoning="a") if at_once == 1 else said("c", reasoning="a\nb")

    with serving(answer, 1, [2]) as (url, _):
        assert len(ask(url, ["one"], waves=[2]).changed) == 2


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    with serving(lambda *_: said(parts)) as (url, _):
        assert {reply.text for reply in ask(url, ["one"], waves=[2]).replies} == {"ab"}


@pytest.mark.parametrize("empty", [None, "", []])
def test_an_answer_without_text_is_none(empty, capsys):
    with serving(lambda *_: said(empty)) as (url, seen):
        assert cli.main(["check", "--server", url, "--waves", "2"]) == 2
    assert "an answer without text (raise --max-tokens?)" in capsys.readouterr().err
    assert len(seen) == 4  # those after the second prompt would fail as well


@pytest.mark.parametrize("wrong", [{"one": 400}, {"one": 400, "two": 413}])
def test_a_first_prompt_that_fails_does_not_end_the_check(wrong):
    def answer(body, at_once):
        if asked(body) in wrong:
            return wrong[asked(body)], "application/json", b'{"error": {"message": "too long"}}'
        return said("same")

    with serving(answer) as (url, seen):
        told = ask(url, PROMPTS, waves=[2])
    assert len(seen) == len(told.replies) == told.wanted and not told.partial
    assert {reply.prompt for reply in told.failed} == set(range(len(wrong)))
    printed, _, status = told_of(told)
    assert f"{4 * len(wrong)} requests; the first: HTTP 400: " in printed and "too long" in printed
    assert f"{len(wrong)} without two answers" in printed and "Not known" in printed and status == 2


def test_what_has_no_answer_alone_is_not_compared():
    def answer(body, at_once):
        if at_once == 1 and asked(body) == "two":
            return 503, "application/json", b"{}"
        return said("same")

    with serving(answer, 2, [2]) as (url, _):
        told = ask(url, ["one", "two"], waves=[2])
    assert (len(told.compared), len(told.not_compared), told.changed) == (2, 2, [])
    printed, _, status = told_of(told)
    assert "0 of 2 answers differ" in printed and "2 answers: no two equal ones alone for prompt 2" in printed
    assert "same answer for 1 of 1 prompt; 1 without two answers" in printed
    assert "Not known: 2 answers" in printed and status == 2


def test_nothing_is_said_of_answers_that_are_not_there():
    """No wave was answered: dashes, no number that is none, and no claim."""

    def answer(body, at_once):
        return said("same") if at_once == 1 else (503, "application/json", b"{}")

    with serving(answer, 1, [2]) as (url, _):
        told = ask(url, ["one"], waves=[2])
    printed, plain, status = told_of(told)
    assert "Not known: no answer could be compared" in printed and "nan" not in printed.lower()
    assert plain["compared"] == 0 and status == 2


def test_after_a_time_limit_nothing_is_alone(hang):
    def answer(body, at_once):
        if asked(body) == "two":
            hang()
        return said("same")

    with serving(answer) as (url, seen):
        told = ask(url, PROMPTS, waves=[2], timeout=ENOUGH)
    assert len(seen) == len(told.replies) == 3 and told.waves == ()
    printed, _, status = told_of(told)
    assert "nothing after it would be alone; raise --timeout (3 of 12 requests came back)" in printed
    assert "Not known" in printed and status == 2


def test_a_wave_named_twice_is_asked_once():
    with serving(lambda *_: said("same")) as (url, seen):
        told = ask(url, ["one"], waves=[2, 3, 2, 2])
    assert [wave.at_once for wave in told.waves] == [2, 3] and len(seen) == requests_of(1, [2, 3, 2, 2]) == 7


# -- ended early ---------------------------------------------------------------------------------------------


@pytest.fixture
def interrupt():
    """Sends Ctrl-C to this process, which a job in the background would ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_what_has_arrived_is_kept_on_ctrl_c(interrupt, hang):
    """In the middle of a wave, of which one request hangs."""

    def answer(body, at_once):
        if at_once > 1 and asked(body) == "four":
            hang()
        return said("same" if at_once == 1 else "other")

    with serving(answer, 4, [4]) as (url, _):
        told = ask(url, [*PROMPTS, "four"], waves=[4], each=after(11, interrupt))
    assert told.partial == "broken off" and len(told.replies) == 11
    assert {c.prompt for c in told.changed} == {0, 1, 2} and told.waves[0].seconds > 0
    printed, plain, status = told_of(told)
    assert "3 of 3 answers differ from the one given alone (3 of 4 prompts)" in printed
    assert "broken off (11 of 24 requests came back)" in printed and "Not invariant" in printed
    assert status == 1 and plain["partial"] == "broken off"


def test_the_first_reply_is_kept_on_ctrl_c(interrupt):
    with serving(lambda *_: said("same")) as (url, _):
        told = ask(url, PROMPTS, waves=[2], each=after(1, interrupt))
    assert len(told.alone) == 1 and told.waves == ()
    printed, _, status = told_of(told)
    assert "Not known: no answer could be compared" in printed and status == 2


def test_ctrl_c_on_the_command_line(interrupt, hang, monkeypatch, capsys):
    def answer(body, at_once):
        if at_once > 1 and asked(body).startswith("In two"):
            hang()
        return said("same" if at_once == 1 else "other")

    def ask_until(*arguments, each, **more):
        stop = after(11, interrupt)  # the others of the wave are answered
        return ask(*arguments, each=lambda reply: (each(reply), stop(reply)), **more)

    monkeypatch.setattr(check_server, "ask", ask_until)
    with serving(answer, 4, [4]) as (url, _):
        assert cli.main(["check", "--server", url, "--waves", "4"]) == 1
    printed = capsys.readouterr().out
    assert "3 of 3 answers differ" in printed and "broken off (11 of 24" in printed


def test_ctrl_c_before_any_answer_is_ctrl_c(interrupt, hang):
    def answer(body, at_once):
        interrupt()
        hang()
        return said("late")

    with serving(answer) as (url, _), pytest.raises(KeyboardInterrupt):
        ask(url, PROMPTS)


@pytest.mark.parametrize("replies", [0, 8])
def test_ctrl_c_reaches_the_thread_of_a_notebook(replies, interrupt, hang):
    """A kernel's loop takes no signals: KeyboardInterrupt is raised where `ask` waits."""

    def answer(body, at_once):
        if not replies:
            interrupt()
        if len(seen) > replies:  # those after it
            hang()
        return said("same")

    async def cell():
        return ask(url, PROMPTS, waves=[2, 3, 4], each=after(replies, interrupt))

    kernel = asyncio.new_event_loop()
    try:
        with serving(answer) as (url, seen):
            if replies:
                told = kernel.run_until_complete(cell())
                assert told.partial == "broken off" and len(told.alone) == 6
                assert len(told.replies) == replies
            else:
                with pytest.raises(KeyboardInterrupt):
                    kernel.run_until_complete(cell())
    finally:
        kernel.close()


def test_the_whole_has_a_time_limit(hang, capsys):
    def answer(body, at_once):
        if len(seen) > 3:
            hang()
        return said("same")

    with serving(answer) as (url, seen):
        arguments = ["check", "--server", url, "--most-seconds", str(ENOUGH), "--waves", "50"]
        assert cli.main(arguments) == 2
    assert len(seen) == 4
    printed = capsys.readouterr().out
    assert f"ended after {ENOUGH} s (--most-seconds)" in printed and "Not known" in printed


def test_a_server_that_hangs_is_left_after_one_request(hang):
    with serving(lambda *_: hang() and said("late")) as (url, seen):
        with pytest.raises(LabError, match=r"no request was answered: no answer within 0\.2 s"):
            ask(url, PROMPTS, model="m", timeout=0.2)
        with pytest.raises(LabError, match=r"no request was answered: ended after 0\.5 s"):
            ask(url, PROMPTS, model="m", most_seconds=0.5)
    assert len(seen) <= 2


def test_a_list_of_models_that_drips_is_not_waited_for():
    def drip(connection):
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(100):  # and closes: another reason than the time limit
            connection.sendall(b" ")
            time.sleep(0.1)

    with listening(drip) as url, pytest.raises(LabError, match=r"no answer within 0\.5 s"):
        ask(url, PROMPTS, timeout=0.5)


# -- what a server should not send ---------------------------------------------------------------------------


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("drop", [reset, lambda connection: connection.sendall(b"HTTP/1.1 200 OK\r\n")])
def test_a_dropped_connection_has_a_reason(drop):
    with listening(drop) as url, pytest.raises(LabError) as told:
        ask(url, PROMPTS, model="m")
    assert "no server answers (" in str(told.value) and "()" not in str(told.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": 5},
        {"text": {"a": 1}},
        {"text": [5]},
        {"text": [{"type": "image_url", "image_url": "x"}]},
        {"text": "a", "stop": ["stop"]},
        {"text": "a", "reasoning": 5},
        {"text": "a", "tool_calls": [{"function": {"name": 1, "arguments": None}}]},
    ],
)
def test_fields_of_wrong_types_are_failures(wrong):
    told = "the answer is not that of a chat completion"
    with serving(lambda *_: said(**wrong)) as (url, _), pytest.raises(LabError, match=told):
        ask(url, PROMPTS)


@pytest.mark.parametrize("tokens", [None, "7", -1, 1.5, True, 10**400])
def test_counts_that_are_none_are_not_told(tokens):
    with serving(lambda *_: answer) as (url, _):
        answer = said("same")
        body = json.loads(answer[2])
        body["usage"]["completion_tokens"] = tokens
        answer = (*answer[:2], json.dumps(body).encode())
        told = ask(url, ["one"], waves=[2])
    printed, _, status = told_of(told)
    assert {reply.tokens for reply in told.replies} == {0} and status == 0 and "Invariant here" in printed


@pytest.mark.parametrize("models", [None, [{"id": None}], [{"id": ""}], [{"id": 1}, {"id": 2}], ["m"], [{}], "m", {}])
def test_a_list_of_models_of_wrong_types_is_one_line(models):
    told = "its list of models has no names that can be read; name the model|serves 0 models"
    with serving(lambda *_: said("x"), models=models) as (url, _), pytest.raises(LabError, match=told):
        ask(url, PROMPTS)


def test_what_a_server_sends_cannot_command_a_terminal(capsys):
    evil = "\x1b[2Jred\x07 \ud800 \u202e"
    error = json.dumps({"error": {"message": evil}}).encode()

    def answer(body, at_once):
        return said("a" + evil) if at_once == 1 else (500, "application/json", error)

    name = evil.replace("\ud800", "")  # which could not be asked for
    with serving(answer, 1, [2], models=(name,)) as (url, _):
        told = ask(url, ["one"], waves=[2])
    with serving(answer, 4, [2], models=(name,)) as (url, _):
        assert cli.main(["check", "--server", url, "--waves", "2"]) == 2
    with serving(lambda *_: said("x"), models=(evil, "b")) as (url, _):
        assert cli.main(["check", "--server", url]) == 2
    output = "".join(capsys.readouterr())
    assert "red" in output and not set(output) & {"\x1b", "\x07", "\ud800", "\u202e"}
    assert told.model == name and told.alone[0].text == "a" + evil  # what is compared and asked for stays as it came
    assert told_of(told)[1]["alone"][0]["text"] == "a" + evil
    assert printable("é\n\x00 漢" * 99, 8) == "é \\x00 漢"


# -- what a user should not ask ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["http://[::1", "127.0.0.1:8000/v1", "localhost/v1", "ftp://a/v1", "http://", "http://a:b"]
)
def test_what_is_no_address_is_one_line(url, capsys):
    assert cli.main(["check", "--server", url]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dglab: server ") and "give one such as http://127.0.0.1:8000/v1" in error


def test_keys(monkeypatch):
    with serving(lambda *_: said("same")) as (url, _):
        monkeypatch.setenv("OPENAI_API_KEY", "")
        assert not ask(url, ["one"], waves=[2]).failed
        monkeypatch.setenv("OPENAI_API_KEY", "schlüssel")
        with pytest.raises(LabError, match="OPENAI_API_KEY: has characters"):
            ask(url, ["one"])


@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1"])
@pytest.mark.parametrize("option", ["--timeout", "--most-seconds"])
def test_times_are_finite(option, seconds, capsys):
    assert cli.main(["check", "--server", "http://127.0.0.1:1/v1", option, seconds]) == 2
    assert "want finite numbers above 0" in capsys.readouterr().err


# -- from the command line -----------------------------------------------------------------------------------


def test_the_page_is_plain_and_short(capsys):
    with serving(lambda body, at_once: said("same")) as (url, _):
        assert cli.main(["check", "--server", url, "--waves", "2", "3"]) == 0
    printed = capsys.readouterr().out
    assert "4 prompts, each alone twice, then together: 2 and 3 requests at the same time" in printed
    assert "same answer for 4 of 4 prompts" in printed and "0 of 20 answers differ" in printed
    assert "Invariant here: all 20 answers" in printed.splitlines()[-1]
    assert len(printed.splitlines()) < 20 and max(map(len, printed.splitlines()[:-1])) < 100
    assert not any(word in printed for word in ("company", "at once", "stops", "unsteady"))


@pytest.mark.parametrize(
    ("answer", "told", "requests"),
    [
        ((500, "application/json", b'{"error": {"message": "out of memory"}}'), "HTTP 500", 4),
        ((401, "application/json", b'{"error": {"message": "who?"}}'), "HTTP 401", 2),
        ((404, "text/html", b"<html>nothing here</html>"), "HTTP 404", 2),
        ((200, "text/html", b"<html>it works</html>"), NO_COMPLETION, 2),
        ((200, "application/json", b"{not json"), NO_COMPLETION, 2),
        ((200, "application/json", b'{"text": "hello"}'), NO_COMPLETION, 2),
        ((200, "text/event-stream", b'data: {"choices": []}\n\ndata: [DONE]\n\n'), NO_COMPLETION, 2),
    ],
)
def test_a_server_that_answers_nothing_usable_is_one_line(answer, told, requests, capsys):
    with serving(lambda *_: answer) as (url, seen):
        assert cli.main(["check", "--server", url, "--waves", "2"]) == 2
    assert len(seen) == requests
    error = capsys.readouterr().err
    assert told in error and error.splitlines()[-1].startswith("dglab: ")


def test_a_slow_server_is_not_waited_for(hang, capsys):
    with serving(lambda *_: hang() and said("late")) as (url, seen):
        assert cli.main(["check", "m", "--server", url, "--timeout", "0.3", "--waves", "2"]) == 2
    assert "no answer within 0.3 s" in capsys.readouterr().err and len(seen) <= 1


def test_requests_that_fail_are_counted_and_nothing_is_claimed(tmp_path, capsys):
    def answer(body, at_once):
        return said("same") if at_once < 4 else (503, "application/json", b'{"error": {"message": "full"}}')

    with serving(answer, 4, [2, 4]) as (url, _):
        arguments = ["check", "--server", url, "--waves", "2", "4", "--json", str(tmp_path / "r.json")]
        assert cli.main([*arguments, "--html", str(tmp_path / "r.html")]) == 2
    printed = capsys.readouterr().out
    assert "Not known" in printed and "HTTP 503" in printed
    told = json.loads((tmp_path / "r.json").read_text())
    assert len(told["waves"]) == 2 and told["changed"] == []
    assert "Not known" in (tmp_path / "r.html").read_text()


def test_a_changed_answer_has_status_one(tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("one\n\ntwo\n")
    with serving(lambda body, at_once: said(f"{asked(body)} {at_once}"), 2, [2]) as (url, seen):
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
