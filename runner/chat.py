"""Talk with a model: each line of input is a message, its answer streams as it is generated.

/reset forgets the conversation, /exit (or the end of the input) leaves. What was said before is
found in the prefix cache, so a turn computes its own message alone.
"""

import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from ..reference.terminal import one_line, printable
from ..scheduler import RequestError
from .engine import Engine
from .engine_options import add_engine_options, make_engine
from .serving import make_request
from .tokenizer import Tokenizer

_KEPT = "\n\t"


def add_arguments(parser: ArgumentParser) -> None:
    """The engine's options and the first message of the conversation."""
    add_engine_options(parser)
    parser.set_defaults(max_tokens=128)
    parser.add_argument("--system", help="a system message that starts the conversation")


def run(options: Namespace) -> int:
    """Answer messages until the input ends; 1 when one was refused."""
    engine, checkpoint = make_engine(options)
    start = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(start)
    status = turn = 0
    for message in _lines():
        if message == "/exit":
            break
        if message == "/reset":
            messages = list(start)
            continue
        if not message:
            continue
        asked = [*messages, {"role": "user", "content": message}]
        try:
            answer = ""
            for piece in stream(engine, checkpoint.tokenizer, asked, str(turn), options.max_tokens):
                answer += piece
                if not options.json:
                    print(printable(piece, _KEPT), end="", flush=True)
        except RequestError as error:
            hint = "/reset starts a new conversation"
            print(f"error: {one_line(error)} ({hint})", file=sys.stderr, flush=True)
            status = 1
            continue
        finally:
            turn += 1
        messages = [*asked, {"role": "assistant", "content": answer}]
        print(json.dumps(messages[-2:]) if options.json else "", flush=True)
    return status


def _lines() -> Iterator[str]:
    """Messages: typed ones behind a prompt, piped ones as they are."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


def stream(
    engine: Engine,
    tokenizer: Tokenizer,
    messages: list[dict[str, str]],
    request_id: str,
    max_tokens: int,
) -> Iterator[str]:
    """Pieces of the answer to `messages`, as the engine samples them.

    A piece ends where a character does: a token may hold a part of one. RequestError for a
    conversation that cannot be served, and when the engine gives it up.
    """
    token_ids = tokenizer.encode_messages(messages)
    engine.add_request(make_request(tokenizer, request_id, token_ids, max_tokens))
    shown = ""
    for _ in engine.run():
        text = tokenizer.decode(engine.completions[request_id].token_ids)
        if text.endswith("\ufffd") or not text.startswith(shown):
            continue
        yield text[len(shown) :]
        shown = text
    completion = engine.completions[request_id]
    if completion.error is not None:
        raise RequestError(request_id, completion.error)
    text = tokenizer.decode(completion.token_ids)
    if text != shown:
        yield text[len(shown) :]
