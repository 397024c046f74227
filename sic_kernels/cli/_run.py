"""Shared by `demo` and `eval`: a progress bar, a prefill and teacher-forced steps that report what they did."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..integrations import transformers as adapter
from ..models.language_model import require

Tensor = torch.Tensor
Advance = Callable[[int], None]

PREFILL_CHUNK = 512


@contextlib.contextmanager
def progress() -> Iterator[Any]:
    """A rich progress bar on stderr (stdout is for results); `bar.add_task(text, total=n)`, `bar.advance(task, n)`."""
    require("rich", "the progress bar and the tables")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<34}"), BarColumn(), TextColumn("{task.completed}/{task.total}"),
               TimeElapsedColumn(), TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar


def wide_console() -> Any:
    """stdout; where it is not a terminal, wide enough that no cell of our tables wraps."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 160))


def prefill(model: Any, ids: Tensor, cache: Any, advance: Advance) -> None:
    """Put `ids [1,N]` into `cache` in chunks; no logits are computed."""
    with torch.inference_mode():
        for chunk in ids.split(PREFILL_CHUNK, dim=1):
            model.base_model(input_ids=chunk, cache=cache, use_cache=True)
            advance(chunk.shape[1])


def fill(cache: adapter.SlicedCache, rows: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Put keys and values `[Hkv,n,D]` of every layer into an empty cache, as one step of one sequence."""
    with torch.inference_mode():
        for layer, (k, v) in enumerate(rows):
            cache.layers[layer].seen = k.shape[1]
            pending = adapter.PendingKV(cache, layer, k[None], v[None])
            live = cache._begin(pending, None)
            assert cache.pages is not None
            cache.pages.append(layer, pending.k, pending.v, live)
            cache._end(layer)


def teacher_forced(model: Any, ids: Tensor, cache: Any, chunk: int, advance: Advance) -> Iterator[Tensor]:
    """Run `ids [1,N]` on top of `cache`, `chunk` tokens a forward; yields the log-probabilities `[n,V]` of each."""
    with torch.inference_mode():
        for part in ids.split(chunk, dim=1):
            logits = model(input_ids=part, cache=cache, use_cache=True).logits[0]
            yield torch.log_softmax(logits.float(), dim=-1)
            advance(part.shape[1])


class AttentionTimer:
    """Seconds spent in an attention implementation: `with AttentionTimer(model, "sdpa") as timer: ...`."""

    NAME = "sic_timed"

    def __init__(self, model: Any, implementation: str) -> None:
        self.model, self.implementation = model, implementation
        self.seconds = 0.0

    def __enter__(self) -> AttentionTimer:
        adapter.register()
        inner = AttentionInterface()[self.implementation]

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = inner(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        AttentionInterface.register(self.NAME, timed)
        AttentionMaskInterface.register(self.NAME, AttentionMaskInterface()[self.implementation])
        self._before = self.model.config._attn_implementation
        self.model.set_attn_implementation(self.NAME)
        return self

    def __exit__(self, *error: Any) -> None:
        self.model.set_attn_implementation(self._before)
