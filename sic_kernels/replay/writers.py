"""Which progress word the last run over a buffer was marked in: of two plans over the same buffers, each in a word of its own,
one does not know what lies there."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable

from .cursor_word import CursorWord

# By `Buffer.identity`. Of this process: what another one wrote, before the file was opened here, its word says.
_words: weakref.WeakValueDictionary[Hashable, CursorWord] = weakref.WeakValueDictionary()


def claim(identities: Iterable[Hashable], word: CursorWord) -> None:
    """A run that is marked in `word` begins to write these buffers."""
    for identity in identities:
        if _words.get(identity) is not word:
            _words[identity] = word


def are_others(identities: Iterable[Hashable], word: CursorWord) -> bool:
    """Whether the last run over any of these was marked in another word that is still open."""
    found = map(_words.get, identities)
    return any(other is not None and other is not word and other.is_open for other in found)
