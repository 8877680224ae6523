"""Fill a Jinja chat template, which came with a downloaded model, where it can do no harm.

The template runs sandboxed in a process of its own, with limits on time, memory and output.
"""

import json
import subprocess
import sys
from collections.abc import Sequence

from ..reference.extras import MissingExtraError

SECONDS = 10
MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 20

_RENDER = f"""
import json, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
    resource.setrlimit(resource.RLIMIT_CPU, ({SECONDS}, {SECONDS}))
except (ImportError, ValueError, OSError):
    pass
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

def raise_exception(message):
    raise TemplateError(message)

template, names = json.loads(sys.stdin.buffer.read())
try:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    parts, length = [], 0
    for part in environment.from_string(template).generate(**names):
        length += len(part)
        if length > {MAX_CHARACTERS}:
            raise TemplateError("it writes more than {MAX_CHARACTERS} characters")
        parts.append(part)
    result = {{"text": "".join(parts)}}
except MemoryError:
    result = {{"error": "it needs more than {MEMORY_BYTES} bytes of memory"}}
except BaseException as error:
    result = {{"error": str(error) or type(error).__name__}}
sys.stdout.write(json.dumps(result))
"""


def render_chat(
    template: str, messages: Sequence[dict[str, str]], *, bos_token: str, eos_token: str
) -> str:
    """The text of a conversation as Hugging Face's apply_chat_template writes it.

    ValueError when the template is broken, refuses the messages or exceeds a limit.
    """
    try:
        import jinja2  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError("jinja2", "model") from error
    names = {
        "messages": list(messages),
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", _RENDER],
            input=json.dumps([template, names]).encode(),
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"the model's chat template fails: it takes more than {SECONDS} s"
        ) from None
    try:
        result = json.loads(done.stdout)
    except ValueError:
        result = {"error": f"it ended with status {done.returncode}"}
    if "error" in result:
        raise ValueError(f"the model's chat template fails: {result['error']}")
    text: str = result["text"]
    return text
