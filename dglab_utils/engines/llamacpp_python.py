"""llama.cpp inside this process, where the package llama-cpp-python is installed: a causal model of a GGUF file.

Greedy, token by token, so that they are counted here and in the way of all engines. Nothing that a former prompt left
in the cache is used.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path

from dglab_utils.engines.generation import Generation
from dglab_utils.errors import LabError
from dglab_utils.models.loading import check_gguf


class LlamaCppPython:
    """A loaded GGUF model."""

    def __init__(self, model: str | Path, *, context: int = 2048, threads: int | None = None):
        """Loads it.

        Args:
            context: tokens that prompt and answer may have together.
            threads: of the CPU; None for the library's own choice.

        Raises:
            LabError: no such package, no GGUF file, or one that the library cannot load.
        """
        self.path = Path(model)
        check_gguf(self.path)
        if find_spec("llama_cpp") is None:
            raise LabError("llama-cpp-python: not installed; `pip install llama-cpp-python` (builds it, wants cmake)")
        import llama_cpp

        self.name = "llama-cpp-python"
        try:
            self.model = llama_cpp.Llama(str(self.path), n_ctx=context, n_threads=threads, verbose=False)
        except (ValueError, OSError) as error:
            raise LabError(f"{self.path}: cannot be loaded by llama-cpp-python: {error}") from error
        self._is_end = lambda token: llama_cpp.llama_vocab_is_eog(self.model._model.vocab, token)

    def generate(self, prompt: str, *, max_new_tokens: int) -> Generation:
        """A greedy answer."""
        if not prompt.strip():
            raise LabError("prompt: empty; write what is to be answered")
        asked = self.model.tokenize(prompt.encode())
        if len(asked) + max_new_tokens > self.model.n_ctx():
            raise LabError(
                f"{self.path.name}: {len(asked)} tokens of prompt and {max_new_tokens} of answer do not fit into "
                f"{self.model.n_ctx()}; load it with a larger context"
            )
        self.model.reset()  # else what the last prompt shares with this one would not be read again
        began, read, tokens, ended = time.perf_counter(), 0.0, list[int](), False
        for token in self.model.generate(asked, temp=0.0, repeat_penalty=1.0):
            if not tokens:
                read = time.perf_counter() - began
            tokens.append(token)
            ended = bool(self._is_end(token))
            if ended or len(tokens) == max_new_tokens:
                break
        seconds = time.perf_counter() - began
        text = self.model.detokenize(tokens[: len(tokens) - ended], prev_tokens=asked).decode(errors="replace")
        return Generation(
            engine=self.name,
            model=self.path.name,
            text=text,
            tokens=len(tokens),
            filled=len(tokens),
            ended=ended,
            forwards=len(tokens) - 1,  # the first token comes with the prompt
            processed=len(tokens) - 1,
            ids=tuple(tokens),
            notes=("the prompt as it is, without a chat template",),
            prefill_s=read,
            decode_s=seconds - read,
        )
