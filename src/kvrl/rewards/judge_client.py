"""Questions to a chat endpoint, answered once: what it has said is kept in a file, each reply as it comes."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrl.errors import KvrlError
from kvrl.rewards.call import BadReward

FIELD = "reward.funcs.judge.params"
EXCERPT = 60  # characters of a reply in a message


@dataclass(frozen=True)
class Server:
    """An endpoint and how it is treated. timeout: seconds of one request."""

    base_url: str
    api_key: str
    concurrency: int
    max_retries: int
    timeout: float

    def connect(self) -> Any:
        """openai's client, an async context manager. Errors: KvrlError for an address that is none."""
        from openai import AsyncOpenAI

        try:
            return AsyncOpenAI(
                base_url=self.base_url, api_key=self.api_key, max_retries=self.max_retries, timeout=self.timeout
            )
        except Exception as error:  # a bare one of httpx's, or of what newer versions of openai use in its place
            raise KvrlError(f"{FIELD}.base_url: {self.base_url} is no address ({error}); give one like "
                            "http://localhost:8000/v1") from error  # fmt: skip


class ReplyCache:
    """Replies by key in an sqlite file, which several processes may share; a reply is on disk when `put` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect()) as database, database:
                database.execute("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise KvrlError(f"{FIELD}.cache: {path} cannot be used ({error}); give another file") from None

    def get(self, key: str) -> str | None:
        """The reply, or None."""
        with closing(self._connect()) as database:
            row = database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    def put(self, key: str, reply: str) -> None:
        """Keep a reply."""
        with closing(self._connect()) as database, database:
            database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=60)


class NoCompletion(Exception):
    """A server answered, with something that is no chat completion."""


class Client:
    """A model at a server, and the replies that are kept."""

    def __init__(self, server: Server, model: str, sampling: dict[str, Any], cache: Path) -> None:
        self.server, self.model, self.sampling = server, model, sampling
        self.cache = ReplyCache(cache)

    async def ping(self) -> None:
        """Errors: KvrlError for fields that no request has, for no endpoint at the address, and for a refused key."""
        import openai
        from openai.resources.chat.completions import AsyncCompletions

        fields = {*inspect.signature(AsyncCompletions.create).parameters} - {"self", "model", "messages", "stream"}
        for field in self.sampling:
            if field not in fields:
                raise KvrlError(f"{FIELD}.sampling: {field} is no field of a request; take it out, or put it in "
                                "extra_body if the server knows it")  # fmt: skip
        async with self.server.connect() as client:
            try:
                answer = await client.models.with_raw_response.list()
            except (openai.APIConnectionError, openai.AuthenticationError, openai.PermissionDeniedError) as error:
                raise self._failure(error, "nothing was asked") from error
            except openai.APIStatusError:  # it is there; not every server lists its models
                return
        body = answer.http_response.text
        if not isinstance(parsed(body), dict):
            raise KvrlError(f"{FIELD}.base_url: {self.server.base_url} is no OpenAI-compatible endpoint (it lists its "
                            f"models as {excerpt(body)}); correct the address, up to and with /v1")  # fmt: skip

    async def ask(self, questions: Sequence[str]) -> list[str | BadReward]:
        """The replies, each distinct question asked once in all. Errors: KvrlError when the server fails.

        A reply that was cut off is a BadReward, and is not kept. After a failure no further question is sent; what is
        under way ends first, and its replies are kept.
        """
        import openai

        keys = [self.key(question) for question in questions]
        missing = {key: q for key, q in zip(keys, questions, strict=True) if self.cache.get(key) is None}
        slots = asyncio.Semaphore(self.server.concurrency)
        failures: list[Exception] = []

        async def one(client: Any, key: str, question: str) -> None:
            async with slots:
                if failures:
                    return
                try:
                    answer = await client.chat.completions.with_raw_response.create(
                        model=self.model, messages=messages(question), **self.sampling
                    )
                    reply, whole = read_completion(answer.http_response.text)
                except (openai.OpenAIError, NoCompletion) as error:
                    failures.append(error)
                    return
                if whole:
                    self.cache.put(key, reply)

        async with self.server.connect() as client:
            await asyncio.gather(*(one(client, key, question) for key, question in missing.items()))
        replies = [self.cache.get(key) for key in keys]
        if failures:
            kept = sum(reply is not None for reply in replies)
            where = f"{kept} of {len(keys)} replies are kept in {self.cache.path} and are not asked for again"
            raise self._failure(failures[0], where) from failures[0]
        limit = self.sampling.get("max_tokens", "the server's own")
        cut = BadReward(f"a reply was cut off at params.sampling.max_tokens ({limit}; raise it)")
        return [cut if reply is None else reply for reply in replies]  # all that is whole is kept

    def key(self, question: str) -> str:
        """What a reply is kept under: model, messages and sampling."""
        asked = json.dumps([self.model, messages(question), self.sampling], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()

    def _failure(self, error: Exception, kept: str) -> KvrlError:
        import openai

        url = self.server.base_url
        reason = " ".join(str(error).split())
        if isinstance(error, openai.APIConnectionError):
            return KvrlError(f"{FIELD}.base_url: {url} does not answer ({reason}); start the server or correct the "
                             f"address, then run again: {kept}")  # fmt: skip
        if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
            return KvrlError(f"{FIELD}.api_key_env: {url} refuses the key ({reason}); set the variable to a valid one: "
                             f"{kept}")  # fmt: skip
        return KvrlError(f"{FIELD}: {url} fails for model {self.model} ({reason}); mend the request or the server, "
                         f"then run again: {kept}")  # fmt: skip


def read_completion(body: str) -> tuple[str, bool]:
    """The text of a chat completion, and whether it is whole. Errors: NoCompletion for a body that is none.

    A message without text, such as a refusal, has the text "".
    """
    try:
        choice = parsed(body)["choices"][0]
        content, whole = choice["message"].get("content") or "", choice.get("finish_reason") != "length"
    except (TypeError, LookupError, AttributeError):
        content = None
    if not isinstance(content, str):
        raise NoCompletion(f"its answer is no chat completion: {excerpt(body)}")
    return content, whole


def parsed(body: str) -> Any:
    """The JSON value of a body; None if it is no JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None


def excerpt(reply: str) -> str:
    """The start of a reply, on one line."""
    text = repr(reply)
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."


def messages(question: str) -> list[dict[str, str]]:
    """A question as a chat."""
    return [{"role": "user", "content": question}]
