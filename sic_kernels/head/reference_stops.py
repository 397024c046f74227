"""What `StopMatcher` means: a search through the whole text at every step."""

from __future__ import annotations


class StopMatcher:
    """One row. `feed` gives (matched, safe, trim) as the native matcher does; `finish` the rest."""

    def __init__(self, stops: list[bytes], include: bool = False) -> None:
        self.stops, self.include = stops, include
        self.text, self.emitted = b"", 0

    def feed(self, chunk: bytes) -> tuple[bool, bytes, int]:
        self.text += chunk
        output = self._output()
        certain = len(self.text) - self._held() if output is None else output
        safe, self.emitted = self.text[self.emitted : certain], max(self.emitted, certain)
        return output is not None, safe, 0 if output is None else len(self.text) - output

    def finish(self) -> bytes:
        return b"" if self._output() is not None else self.text[self.emitted :]

    def _output(self) -> int | None:
        """How many bytes of the text are output once a stop is complete: the first end wins, of equals the longest stop."""
        for end in range(1, len(self.text) + 1):
            ending = [len(stop) for stop in self.stops if self.text[:end].endswith(stop)]
            if ending:
                return end if self.include else end - max(ending)
        return None

    def _held(self) -> int:
        """The longest end of the text that begins a stop."""
        if self.include:
            return 0
        begins = [n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])]
        return max(begins, default=0)
