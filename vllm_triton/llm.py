"""LLM: the engine as a function, for scripts and notebooks."""

import itertools
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from vllm_triton.config import EngineConfig
from vllm_triton.engine.core import EngineCore
from vllm_triton.engine.output_processor import OutputProcessor
from vllm_triton.errors import ConfigError, RequestError
from vllm_triton.outputs import RequestOutput
from vllm_triton.sampling_params import SamplingParams
from vllm_triton.tokenizer.renderer import RenderedPrompt, Renderer

Prompt = str | dict[str, Any]
Messages = list[dict[str, Any]]


class LLM:
    """Loads a model and generates for lists of prompts.

    Args: those of EngineConfig; `dtype` may be a torch dtype.
    Raises: ConfigError, ModelError, RegistryError.
    """

    def __init__(self, model: str, **settings: Any):
        config = _engine_config(model, settings)
        self.core = EngineCore(config)
        self.tokenizer = None if config.skip_tokenizer_init else self.core.checkpoint.load_tokenizer()
        vocab_size, max_model_len = self.core.model_config.vocab_size, self.core.max_model_len
        self.renderer = Renderer(self.tokenizer, vocab_size, max_model_len)
        self.processor = OutputProcessor(
            self.tokenizer, vocab_size, max_model_len, self.core.model_config.eos_token_ids
        )
        self._ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes each prompt.

        Args:
            prompts: strings, or {"prompt_token_ids": [...]}; one or several.
            sampling_params: one for all, or one for each prompt; the default draws 16 tokens.
            use_tqdm: shows a progress bar.
        Returns: one output per prompt, in order.
        Raises: RequestError, before anything runs, for the first prompt that is wrong.
        """
        listed = [prompts] if isinstance(prompts, str | dict) else list(prompts)
        return self._run([self.renderer.render_prompt(prompt) for prompt in listed], sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or several; each is a list of {"role": ..., "content": ...}."""
        conversations: list[Any] = [messages] if messages and isinstance(messages[0], dict) else list(messages)
        return self._run([self.renderer.render_chat(one) for one in conversations], sampling_params, use_tqdm)

    def _run(
        self,
        prompts: list[RenderedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_each(sampling_params, len(prompts))
        ids: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                ids.append(str(next(self._ids)))
                for request in self.processor.add_request(ids[-1], prompt, one):
                    self.core.add_request(request)
            outputs = self._finish(ids, use_tqdm)
        except BaseException:
            # The next call must find the engine empty, whatever ended this one.
            self._drop(ids)
            raise
        return [outputs[request_id] for request_id in ids]

    def _finish(self, ids: list[str], use_tqdm: bool) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        num_tokens = 0
        with tqdm(total=len(ids), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            while self.core.has_unfinished_requests():
                step = self.core.step()
                finished, to_abort = self.processor.process(step)
                if to_abort:
                    self.core.abort_requests(to_abort)
                num_tokens += sum(len(output.new_token_ids) for output in step.outputs)
                for output in finished:
                    outputs[output.request_id] = output
                    bar.update()
                if finished and use_tqdm:
                    bar.set_postfix_str(f"output {num_tokens / max(bar.format_dict['elapsed'], 1e-9):.1f} tok/s")
        return outputs

    def _drop(self, ids: list[str]) -> None:
        for request_id in ids:
            self.core.abort_requests(self.processor.remove_request(request_id))


def _engine_config(model: str, settings: dict[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ConfigError(f"LLM has no setting {', '.join(unknown)}; it has {', '.join(known)}")
    return EngineConfig(model=model, **settings)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(
            f"sampling_params must be one, or one for each of the {count} prompts, got {len(params)}", "sampling_params"
        )
    return list(params)
