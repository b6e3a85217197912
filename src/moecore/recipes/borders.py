"""Tokens with which a document begins and ends: those that its tokenizer adds, each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PROBES = ("a", "0", ".")  # a vocabulary of text has an id for one of them


@dataclass(frozen=True, slots=True)
class Borders:
    """What stands before and after the tokens of a document.

    Attributes:
        begin: what the tokenizer adds before a text, such as `<s>` of Llama and Gemma.
        end: what the tokenizer adds after a text, and the end-of-sequence token.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]

    def content(self, ids: Sequence[int]) -> slice:
        """Return where the ids of a text lie without the borders that the text itself spells.

        `Borders((1,), (2,)).content([1, 3, 4, 2, 2])` is `slice(1, 3)`.
        """
        start, stop = 0, len(ids)
        n = len(self.begin)
        while n and tuple(ids[start : start + n]) == self.begin:
            start += n
        for end in (self.end, self.end[-1:]):
            n = len(end)
            while n and stop - n >= start and tuple(ids[stop - n : stop]) == end:
                stop -= n
        return slice(start, stop)


def borders_of(tokenizer: Any) -> Borders:
    """Return the borders that a tokenizer of transformers gives a document.

    Raises:
        ValueError: when the tokenizer changes the ids of a text to which it adds borders.
    """
    last = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    for probe in PROBES:
        plain, full = (
            tokenizer(probe, add_special_tokens=special)["input_ids"] for special in (False, True)
        )
        for i in range(len(full) - len(plain) + 1):
            if plain and full[i : i + len(plain)] == plain:
                end = tuple(full[i + len(plain) :])
                return Borders(tuple(full[:i]), end if end[-1:] == last else (*end, *last))
    raise ValueError("must add special tokens before and after a text, not change its own tokens")
