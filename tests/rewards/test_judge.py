from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrl.errors import KvrlError
from kvrl.rewards import BadReward, score
from kvrl.rewards.build import build_rewards, pair_judge
from kvrl.rewards.config import RewardSettings
from kvrl.rewards.judge import Judge, fill, read_mark, read_verdict, settle

CPU = torch.device("cpu")
Answer = Callable[[str], "str | int | tuple[str | None, str] | bytes"]
"""From the question to the reply (with its finish_reason), to an HTTP status, or to a body."""
NO_COMPLETIONS = [
    b"<html>hi</html>", b"{bad", b"null", b"[1]", b'{"choices": []}', b'{"choices": null}', b'{"choices": [{}]}',
    b'{"error": {"message": "overloaded"}}', b'{"choices": [{"message": null}]}',
    b'{"choices": [{"message": {"content": [1]}}]}',
]  # fmt: skip


class Server:
    """An OpenAI-compatible endpoint that answers as `answer` says and keeps what it was sent."""

    def __init__(self) -> None:
        self.answer: Answer = lambda question: "5"
        self.asked: list[dict] = []
        self.keys: list[str | None] = []
        self.models_status = 200
        self.models: bytes = b'{"object": "list", "data": []}'
        self.busy = 0
        self.lock = threading.Lock()
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/v1"

    @property
    def questions(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.asked]

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def _handler(server) -> type[http.server.BaseHTTPRequestHandler]:  # noqa: N805
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.keys.append(self.headers.get("Authorization"))
                status = 401 if self.headers.get("Authorization") == "Bearer wrong" else server.models_status
                self._send(status, server.models)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server.lock:
                    server.asked.append(body)
                    server.busy += 1
                reply = server.answer(body["messages"][0]["content"])
                with server.lock:
                    server.busy -= 1
                if isinstance(reply, int):
                    self._send(reply, b'{"error": {"message": "no such\\nmodel"}}')
                    return
                if isinstance(reply, bytes):
                    self._send(200, reply)
                    return
                content, end = reply if isinstance(reply, tuple) else (reply, "stop")
                message = {"role": "assistant", "content": content}
                choice = {"index": 0, "finish_reason": end, "message": message}
                completion = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
                self._send(200, json.dumps(completion | {"choices": [choice]}).encode())

            def _send(self, status: int, data: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.send_header("retry-after-ms", "1")  # no long pauses between retries
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.stop()


@pytest.fixture
def judge(server: Server, tmp_path: Path) -> Callable[..., Judge]:
    """A prepared judge of that server, with its cache in tmp_path."""

    def make(**params: Any) -> Judge:
        given = {"base_url": server.url, "model": "m", "cache": str(tmp_path / "replies.sqlite"), **params}
        made = Judge(**given)
        made.prepare(CPU)
        return made

    return make


def marks(judge: Judge, completions: list[str], prompts: list | None = None, **settings: Any) -> list[float]:
    columns = {"prompt": prompts or ["p"] * len(completions)}
    return score([judge], None, completions, columns, **settings).rewards.tolist()


def test_marks_on_the_scale_from_0_to_1(server: Server, judge: Callable[..., Judge]) -> None:
    server.answer = lambda question: {"good": "10", "fair": " 4.5\n", "poor": "Score: 0/10"}[
        next(word for word in ("good", "fair", "poor") if word in question)
    ]
    assert marks(judge(), ["good", "fair", "poor"]) == pytest.approx([1.0, 0.45, 0.0])
    assert marks(judge(scale=[-5, 15]), ["good", "poor"]) == pytest.approx([0.75, 0.25])


def test_the_request(server: Server, judge: Callable[..., Judge]) -> None:
    reward = judge(template="Q {prompt} R {completion} of {answer}? {low}-{high}", scale=[1, 5.5], sampling={"seed": 3})
    assert reward.columns == ("prompts", "answer")
    columns = {"prompt": [[{"role": "user", "content": "hi {completion}"}]], "answer": [7]}
    assert score([reward], None, ["{prompt}!"], columns).rewards.tolist() == pytest.approx([4 / 4.5])
    assert server.asked == [
        {"messages": [{"role": "user", "content": "Q user: hi {completion} R {prompt}! of 7? 1-5.5"}],
         "model": "m", "seed": 3}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("7", 0.7),
        ("<think>at most 3, so 3</think>\n**8**", 0.8),
        ("<think>The request has 3 parts", None),
        ("<think>3</think> 4 <think>or 5", None),
        ("at most 3, so 3</think> 8", 0.8),  # where the template opens the thought
        ("-1", None),
        ("11", None),
        ("10.0", 1.0),
        ("none", None),
        ("", None),
    ],
)
def test_read_mark(reply: str, expected: float | None) -> None:
    mark = read_mark(reply, 0, 10)
    assert isinstance(mark, BadReward) if expected is None else mark == pytest.approx(expected)


def test_a_mark_that_cannot_be_read_is_the_sample_s_error(server: Server, judge: Callable[..., Judge]) -> None:
    server.answer = lambda question: "fine!" if "odd" in question else "5"
    with pytest.raises(KvrlError, match=r"replied 'fine!', in which the mark is no number from 0 to 10, for sample 1"):
        marks(judge(), ["a", "odd"])
    assert marks(judge(), ["a", "odd", "b"], on_error="drop") == pytest.approx([0.5, float("nan"), 0.5], nan_ok=True)


def test_a_reply_that_was_cut_off_is_no_mark_and_is_not_kept(server: Server, judge: Callable[..., Judge]) -> None:
    server.answer = lambda question: ("5 of the", "length") if "long" in question else "5"
    message = (
        r"Judge: a reply was cut off at params\.sampling\.max_tokens \(512; raise it\) for sample 1 \(prompt 'p'\)"
    )
    with pytest.raises(KvrlError, match=message):
        marks(judge(), ["a", "long"])
    assert marks(judge(), ["a", "long"], on_error="drop") == pytest.approx([0.5, float("nan")], nan_ok=True)
    assert len(server.asked) == 3  # the one that was cut off is asked again
    server.answer = lambda question: ("", "length")  # all of it thoughts, which the server takes out
    with pytest.raises(
        KvrlError, match=r"judge: a reply was cut off .* raise it\), or set params.on_unreadable to tie"
    ):
        judge(mode="pairwise").prefer(["p"], ["one"], ["two"])
    assert judge(mode="pairwise", on_unreadable="tie").prefer(["p"], ["one"], ["two"]) == [0.5]


@pytest.mark.parametrize("body", NO_COMPLETIONS)
def test_an_answer_that_is_no_completion_is_a_failure_of_the_server(
    server: Server, judge: Callable[..., Judge], body: bytes
) -> None:
    server.answer = lambda question: body if "bad" in question else "5"
    with pytest.raises(KvrlError, match=r"fails for model m .*no chat completion.* 1 of 2 replies are kept") as failed:
        marks(judge(concurrency=1), ["a", "bad"], on_error="drop")
    assert "\n" not in str(failed.value)
    with pytest.raises(KvrlError, match="no chat completion"):
        judge(mode="pairwise", on_unreadable="tie").prefer(["p"], ["bad"], ["two"])


def test_a_refusal_is_the_sample_s_error(server: Server, judge: Callable[..., Judge]) -> None:
    server.answer = lambda question: (None, "stop")
    assert marks(judge(), ["a"], on_error="drop") == pytest.approx([float("nan")], nan_ok=True)


@pytest.mark.parametrize("body", [b"<html>hi</html>", b"{bad", b"null", b"[]"])
def test_an_address_without_an_endpoint(server: Server, judge: Callable[..., Judge], body: bytes) -> None:
    server.models = body
    with pytest.raises(KvrlError, match=r"base_url: http.* is no OpenAI-compatible endpoint .* up to and with /v1"):
        judge()
    server.models_status = 404
    judge()


def test_nothing_is_asked_twice(server: Server, judge: Callable[..., Judge]) -> None:
    assert marks(judge(), ["a", "b", "a", "a"]) == [0.5] * 4
    assert len(server.asked) == 2
    server.answer = lambda question: "9"
    assert marks(judge(), ["b", "c"]) == pytest.approx([0.5, 0.9])  # a new judge with the same file
    assert len(server.asked) == 3
    marks(judge(model="other"), ["a"])
    marks(judge(sampling={"temperature": 1}), ["a"])
    marks(judge(template="{completion}?"), ["a"])
    assert len(server.asked) == 6
    marks(judge(base_url=server.url + "/", concurrency=1, max_retries=0), ["a"])
    assert len(server.asked) == 6


def test_what_came_before_a_failure_is_kept(server: Server, judge: Callable[..., Judge], tmp_path: Path) -> None:
    server.answer = lambda question: 404 if "bad" in question else "5"
    with pytest.raises(KvrlError) as failed:
        marks(judge(concurrency=1), ["a", "b", "bad", "c", "d"], on_error="drop")
    message = str(failed.value)
    assert "fails for model m" in message and "no such model" in message and "\n" not in message
    assert f"2 of 5 replies are kept in {tmp_path / 'replies.sqlite'}" in message
    assert len(server.asked) == 3  # after the failure nothing more is sent
    server.answer = lambda question: "7"
    assert marks(judge(), ["a", "b", "bad", "c", "d"]) == pytest.approx([0.5, 0.5, 0.7, 0.7, 0.7])
    assert len(server.asked) == 6


def test_requests_under_way_end_and_are_kept(server: Server, judge: Callable[..., Judge]) -> None:
    failed = threading.Event()

    def answer(question: str) -> str | int:
        if "bad" in question:
            failed.set()
            return 404
        failed.wait(10)
        return "5"

    server.answer = answer
    with pytest.raises(KvrlError, match="1 of 2 replies are kept"):
        marks(judge(concurrency=2), ["a", "bad"])


def test_a_busy_server_is_asked_again(server: Server, judge: Callable[..., Judge]) -> None:
    left = [429, 503, 500]
    server.answer = lambda question: left.pop() if left else "5"
    assert marks(judge(max_retries=3), ["a"]) == [0.5]
    assert len(server.asked) == 4
    left.extend([503, 503])
    with pytest.raises(KvrlError, match=r"fails for model m \(Error code: 503"):
        marks(judge(max_retries=1), ["b"])


def test_concurrency_is_limited_and_used(server: Server, judge: Callable[..., Judge]) -> None:
    together, excess = threading.Barrier(3), threading.Event()

    def answer(question: str) -> str:
        if server.busy > 3:
            excess.set()
        together.wait(20)  # no reply before three questions are there
        excess.wait(0.1)
        return "5"

    server.answer = answer
    assert marks(judge(concurrency=3), [str(i) for i in range(6)]) == [0.5] * 6
    assert not excess.is_set()


def test_a_server_that_is_down(server: Server, judge: Callable[..., Judge], tmp_path: Path) -> None:
    ready = judge(max_retries=0)
    marks(ready, ["a"])
    server.stop()
    with pytest.raises(KvrlError) as failed:
        marks(ready, ["a", "b"], on_error="drop")
    message = str(failed.value)
    assert f"base_url: {server.url} does not answer" in message and "start the server" in message
    assert "1 of 2 replies are kept" in message and "\n" not in message
    assert marks(ready, ["a"]) == [0.5]  # what is kept needs no server
    with pytest.raises(KvrlError, match="does not answer .* nothing was asked"):
        judge(max_retries=0)


def test_a_server_that_does_not_list_its_models(server: Server, judge: Callable[..., Judge]) -> None:
    server.models_status = 404
    assert marks(judge(), ["a"]) == [0.5]


def test_keys(server: Server, judge: Callable[..., Judge], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KvrlError, match=r"params\.api_key_env: KVRL_TEST_KEY is not set"):
        judge(api_key_env="KVRL_TEST_KEY")
    monkeypatch.setenv("KVRL_TEST_KEY", "right")
    judge(api_key_env="KVRL_TEST_KEY")
    assert server.keys[-1] == "Bearer right"
    monkeypatch.setenv("KVRL_TEST_KEY", "wrong")
    with pytest.raises(KvrlError, match=r"params\.api_key_env: .* refuses the key"):
        judge(api_key_env="KVRL_TEST_KEY")
    asked = len(server.keys)
    for key in ("", "schlüssel", "a\nb", "a "):
        monkeypatch.setenv("KVRL_TEST_KEY", key)
        with pytest.raises(KvrlError, match=r"params\.api_key_env: KVRL_TEST_KEY is empty, or has spaces"):
            judge(api_key_env="KVRL_TEST_KEY")
    assert len(server.keys) == asked


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"template": "{prompt}?"}, r"judge\.params\.template: has no {completion}, which mode scalar asks about"),
        ({"template": "{first} {prompt}", "mode": "pairwise"}, "has no {second}, which mode pairwise asks about"),
        ({"scale": [3, 3]}, r"judge\.params\.scale: 3 is not below 3"),
        ({"sampling": {"top_k": 5}}, r"judge\.params\.sampling: top_k is no field of a request; .* extra_body"),
        ({"sampling": {"stream": True}}, r"judge\.params\.sampling: stream is no field"),
        ({"cache": "/dev/null/x"}, r"judge\.params\.cache: /dev/null/x cannot be used"),
        ({"base_url": "http://localhost:abc/v1"}, r"judge\.params\.base_url: http://localhost:abc/v1 is no address"),
        ({"base_url": "http://[::1/v1"}, r"judge\.params\.base_url: http://\[::1/v1 is no address"),
    ],
)
def test_bad_parameters(judge: Callable[..., Judge], params: dict, message: str) -> None:
    from kvrl.rewards import get_reward

    with pytest.raises(KvrlError, match=message):
        get_reward("judge", **({"base_url": "x", "model": "m"} | params)).prepare(CPU)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("A", 1.0), ("B.", 0.0), ("Tie", 0.5), ("**[[B]]**", 0.0), ("Reply A, since Reply A is right", 1.0),
        ("<think>A or B?</think> B", 0.0), ("<think>Reply A says", None),
        ("A is better than B", None), ("a good one", None), ("", None),
    ],
)  # fmt: skip
def test_read_verdict(reply: str, expected: float | None) -> None:
    assert read_verdict(reply) == expected


@pytest.mark.parametrize(
    ("forward", "backward", "expected"),
    [(1, 0, 1), (0, 1, 0), (1, 1, 0.5), (0, 0, 0.5), (0.5, 0.5, 0.5), (1, 0.5, 0.5), (0.5, 0, 0.5)],
)
def test_settle(forward: float, backward: float, expected: float) -> None:
    assert settle(forward, backward) == expected


def longer(question: str) -> str:
    """The verdict of a judge who likes long replies."""
    first, second = question.split("|")[1:3]
    return "tie" if len(first) == len(second) else "A" if len(first) > len(second) else "B"


def test_pairs_are_asked_in_both_orders(server: Server, judge: Callable[..., Judge]) -> None:
    pairs = judge(mode="pairwise", template="{prompt} {answer}|{first}|{second}|")
    server.answer = longer
    verdicts = pairs.prefer(["p", "q", "r"], ["xx", "y", "z"], ["x", "yyy", "w"], answer=[1, 2, 3])
    assert verdicts == [1.0, 0.0, 0.5]
    expected = ["p 1|xx|x|", "p 1|x|xx|", "q 2|y|yyy|", "q 2|yyy|y|", "r 3|z|w|", "r 3|w|z|"]
    assert sorted(server.questions) == sorted(expected)


@pytest.mark.parametrize("column", ["prompts", "firsts", "seconds", "self"])
def test_a_column_of_any_name_can_be_asked_about(server: Server, judge: Callable[..., Judge], column: str) -> None:
    pairs = judge(mode="pairwise", template=f"{{prompt}} {{{column}}}|{{first}}|{{second}}|")
    server.answer = longer
    assert pairs.prefer(["p"], ["xx"], ["x"], **{column: [7]}) == [1.0]
    assert server.questions[0].startswith("p 7|")


@pytest.mark.parametrize("favourite", ["A", "B"])
def test_a_liking_for_a_place_cancels(server: Server, judge: Callable[..., Judge], favourite: str) -> None:
    server.answer = lambda question: favourite
    assert judge(mode="pairwise").prefer(["p"], ["one"], ["two"]) == [0.5]


def test_verdicts_that_cannot_be_read(server: Server, judge: Callable[..., Judge]) -> None:
    server.answer = lambda question: "A or B" if "odd" in question else longer(question)
    template = "{prompt}|{first}|{second}|"
    with pytest.raises(KvrlError, match=r"judge: replied 'A or B', which is not A, B or tie; .*on_unreadable to tie"):
        judge(mode="pairwise", template=template).prefer(["p", "odd"], ["xx"] * 2, ["x"] * 2)
    lenient = judge(mode="pairwise", template=template, on_unreadable="tie")
    assert lenient.prefer(["p", "odd"], ["xx"] * 2, ["x"] * 2) == [1.0, 0.5]


def test_fill_replaces_each_name_once_and_leaves_the_rest() -> None:
    assert fill('{a} {b} {"x": 1} {other}', {"a": "{b}", "b": 2}) == '{b} 2 {"x": 1} {other}'
    assert fill("{a}", {"a": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "v"}]}) == (
        "user: u\nassistant: v"
    )


class _Task:
    name = "stub"

    def reward(self, completions: list[str], **columns: list) -> list[float | None]:
        return [0.0] * len(completions)


def test_a_pairwise_judge_is_no_reward(server: Server, tmp_path: Path) -> None:
    params = {"base_url": server.url, "model": "m", "cache": str(tmp_path / "c.sqlite")}
    entry = {"func": "judge", "params": params | {"mode": "pairwise"}}
    with pytest.raises(KvrlError, match=r"judge\.params\.mode: pairwise gives preferences, .* online_dpo"):
        build_rewards(RewardSettings(funcs=["task", entry]), _Task())  # type: ignore[list-item, arg-type]
    server.answer = lambda question: "tie"
    found = pair_judge(RewardSettings(funcs=[entry]))  # type: ignore[list-item]
    assert found is not None and found.prefer(["p"], ["a"], ["b"]) == [0.5]
    down = {"func": "judge", "params": entry["params"] | {"base_url": "http://127.0.0.1:9/v1", "max_retries": 0}}
    with pytest.raises(KvrlError, match="127.0.0.1:9/v1 does not answer"):
        pair_judge(RewardSettings(funcs=[down]))  # type: ignore[list-item]
    for field, given in {
        "funcs.judge.weight": {"funcs": [entry | {"weight": 1.0}]},
        "weights": {"funcs": [entry], "weights": [2.0]},
        "timeout": {"funcs": [entry], "timeout": 3},
        "on_error": {"funcs": [entry], "on_error": "drop"},
    }.items():
        with pytest.raises(KvrlError, match=rf"^reward\.{field}: .* has no effect on a judge of mode pairwise"):
            pair_judge(RewardSettings(**given))  # type: ignore[arg-type]
    for funcs in (["task", entry], [entry, "task"], ["task"], [{"func": "judge", "params": params}]):
        assert pair_judge(RewardSettings(funcs=funcs)) is None  # type: ignore[arg-type]
    rewards = build_rewards(RewardSettings(funcs=[{"func": "judge", "params": params}]), _Task())  # type: ignore[list-item, arg-type]
    server.answer = lambda question: "5"
    assert rewards(["a"], {"prompt": ["p"]}).rewards.tolist() == [0.5]


def test_the_cache_is_in_the_user_s_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Judge(base_url="x", model="m").client.cache.path == tmp_path / "kvrl" / "judge.sqlite"
