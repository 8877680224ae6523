"""Text to token ids and back, on the `tokenizers` library (extra `model`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..reference.extras import MissingExtraError
from .chat_template import render_chat

if TYPE_CHECKING:
    import tokenizers

PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "smollm")
"""Pre-tokenizers of byte-level BPE files that `bpe_backend` knows."""

# llama.cpp's and Llama 3's own splitting rule: contractions, words, up to three digits, the rest.
_LLAMA_BPE_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer with the facts that generation needs besides it."""

    backend: "tokenizers.Tokenizer"
    stop_token_ids: tuple[int, ...]
    """Ids that end a text; the first is the model's end-of-sequence id."""
    chat_template: str | None
    bos_token: str = ""
    eos_token: str = ""

    def encode(self, text: str) -> list[int]:
        """Ids of raw text, with the beginning-of-sequence id where the model wants one."""
        return self.backend.encode(text).ids

    def encode_chat(self, text: str) -> list[int]:
        """Ids of one user message in the chat template, up to where the assistant answers."""
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation in the chat template, up to where the assistant answers.

        ValueError when the model has no chat template.
        """
        if self.chat_template is None:
            raise ValueError("the model has no chat template: give prompts as raw text")
        rendered = render_chat(
            self.chat_template,
            messages,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
        )
        # The template writes the special tokens itself.
        return self.backend.encode(rendered, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids; special tokens are left out."""
        return self.backend.decode(list(token_ids), skip_special_tokens=True)


def bpe_backend(
    tokens: Sequence[str],
    merges: Sequence[tuple[str, str]],
    special_ids: Sequence[int],
    pre_tokenizer: str,
    bos_token: str | None,
) -> "tokenizers.Tokenizer":
    """Byte-level BPE from a vocabulary in id order and its merges in rank order.

    `bos_token` is put before every text when given. ValueError for an unknown pre-tokenizer.
    """
    try:
        from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, processors
        from tokenizers import pre_tokenizers as pre
    except ModuleNotFoundError as error:
        raise MissingExtraError("tokenizers", "model") from error

    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a piece that is a token as it is, before any merge.
    whole_first = pre_tokenizer == "llama-bpe"
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=list(merges), ignore_merges=whole_first)
    )
    byte_level = pre.ByteLevel(add_prefix_space=False, use_regex=pre_tokenizer != "llama-bpe")
    if pre_tokenizer == "gpt-2":
        backend.pre_tokenizer = byte_level
    elif pre_tokenizer == "smollm":
        backend.pre_tokenizer = pre.Sequence([pre.Digits(individual_digits=True), byte_level])
    elif pre_tokenizer == "llama-bpe":
        split = pre.Split(Regex(_LLAMA_BPE_SPLIT), behavior="isolated")
        backend.pre_tokenizer = pre.Sequence([split, byte_level])
    else:
        raise ValueError(
            f"pre-tokenizer {pre_tokenizer!r}: must be one of {', '.join(PRE_TOKENIZERS)}"
        )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(tokens[index], special=True, normalized=False) for index in special_ids]
    )
    if bos_token is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos_token} $A", special_tokens=[(bos_token, vocabulary[bos_token])]
        )
    return backend
