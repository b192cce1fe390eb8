"""The process that holds one vLLM engine, and the messages it exchanges with the trainer's process.

Runs as ``python -m magrpo.engines.vllm_server PARENT FD``, and ends with the process ``PARENT``. Messages are msgpack
of the classes below. An exception ends the process with its traceback in the log, where the trainer reads it. vLLM is
imported only here; the engine core runs in this process.
"""

from __future__ import annotations

import gc
import sys
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import msgspec

from magrpo.engines import Completion
from magrpo.process.parent import exit_with_parent
from magrpo.types import Request

if TYPE_CHECKING:
    import vllm
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest


class CreateEngine(msgspec.Struct, tag=True):
    """Create the engine. ``engine``: keyword arguments of ``vllm.LLM``."""

    engine: dict[str, Any]


class Generate(msgspec.Struct, tag=True):
    """Generate completions, with the adapters of agents that have one. Answers: :class:`Finished`, then ``Done``."""

    served: int
    """Number of the weights, as in :class:`LoadAdapters`."""
    items: dict[int, Request]
    """Requests by number; each is answered exactly once."""
    stop_token_ids: dict[str, tuple[int, ...]]
    """Ids of the stop tokens of each agent."""


class LoadAdapters(msgspec.Struct, tag=True):
    """Serve these adapter folders, by agent, as the weights with the number ``served``."""

    served: int
    folders: dict[str, str]


class UnloadAdapters(msgspec.Struct, tag=True):
    """Forget the adapters with the number ``served``."""

    served: int


class LoadModel(msgspec.Struct, tag=True):
    """Load the weights of a transformers folder."""

    folder: str


class Sleep(msgspec.Struct, tag=True):
    """Release the GPU memory of the key-value cache and of the weights."""


class Wake(msgspec.Struct, tag=True):
    """Undo :class:`Sleep`."""


class Done(msgspec.Struct, tag=True):
    """The call succeeded: the last answer to every call."""


class Finished(msgspec.Struct, tag=True):
    """Finished completions, by number of the request."""

    completions: dict[int, Completion]


ServerCall = CreateEngine | Generate | LoadAdapters | UnloadAdapters | LoadModel | Sleep | Wake


class VllmServer:
    """One vLLM engine and the adapters it serves."""

    def __init__(self, start: CreateEngine) -> None:
        gc.disable()
        from vllm import LLM  # defers vllm, which is optional

        gc.freeze()  # vLLM collects garbage six times while it starts, and would look at all that is loaded each time
        gc.enable()
        self._llm: vllm.LLM = LLM(**start.engine)
        self._llm.collective_rpc("watch_truncation")
        self._adapters: dict[int, dict[str, LoRARequest]] = defaultdict(dict)
        self._count = 0

    def handle_call(self, call: ServerCall, channel: Connection) -> None:
        """Carry out one call."""
        match call:
            case Generate():
                self._generate(call, channel)
            case LoadAdapters():
                self._load_adapters(call)
            case UnloadAdapters(served):
                for adapter in self._adapters.pop(served, {}).values():
                    self._llm.llm_engine.remove_lora(adapter.lora_int_id)
            case LoadModel(folder):
                self._llm.collective_rpc("reload_from", args=(folder,))
                assert self._llm.reset_prefix_cache()
            case Sleep():
                self._llm.sleep(level=1)
            case Wake():
                self._llm.wake_up()

    def _load_adapters(self, call: LoadAdapters) -> None:
        from vllm.lora.request import LoRARequest  # defers vllm

        for agent, folder in call.folders.items():
            self._count += 1
            adapter = LoRARequest(f"{agent}.{call.served}.{self._count}", self._count, folder)
            if not self._llm.llm_engine.add_lora(adapter):
                raise RuntimeError(f"vLLM refused the adapter {folder}")
            self._adapters[call.served][agent] = adapter

    def _generate(self, call: Generate, channel: Connection) -> None:
        from vllm import RequestOutput, TokensPrompt  # defers vllm
        from vllm.logprobs import FlatLogprobs

        from magrpo.engines.vllm_worker import SUPPORT  # torch

        engine, items = self._llm.llm_engine, call.items
        adapters = self._adapters.get(call.served, {})
        for i, request in items.items():
            prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
            params = _sampling_params(request, call.stop_token_ids[request.agent])
            if request.sampling.records_support:
                params.extra_args = {SUPPORT: str(i)}
            engine.add_request(str(i), prompt, params, lora_request=adapters.get(request.agent))
        while engine.has_unfinished_requests():
            finished = Finished({})
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                sampled = output.outputs[0]
                assert isinstance(sampled.logprobs, FlatLogprobs)
                number, tokens, logprobs = int(output.request_id), list(sampled.token_ids), sampled.logprobs
                if items[number].sampling.records_support:
                    finished.completions[number] = self._over_support(number, tokens, logprobs)
                else:
                    finished.completions[number] = Completion(tokens, list(logprobs.logprobs))
            if finished.completions:
                channel.send_bytes(msgspec.msgpack.encode(finished))

    def _over_support(self, number: int, token_ids: list[int], logprobs: FlatLogprobs) -> Completion:
        """The completion with log-probabilities over its support; the whole vocabulary where nothing was cut off."""
        from magrpo.engines.vllm_worker import expand_support  # torch

        truncated, *_ = self._llm.collective_rpc("take_truncated", args=(str(number), logprobs.ranks))
        logps, support = expand_support(
            logprobs.logprobs, truncated, self._llm.llm_engine.model_config.get_vocab_size()
        )
        return Completion(token_ids, logps, support)


def _sampling_params(request: Request, stop_token_ids: Sequence[int]) -> vllm.SamplingParams:
    """vLLM's parameters; every one that a model's own generation config might set is set here."""
    from vllm import SamplingParams  # defers vllm
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        top_k=request.sampling.top_k,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        max_tokens=request.sampling.max_new_tokens,
        seed=request.seed,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def main(parent: int, fd: int) -> None:
    """Serve calls until the other side hangs up."""
    exit_with_parent(parent)
    channel = Connection(fd)
    decoder: msgspec.msgpack.Decoder[ServerCall] = msgspec.msgpack.Decoder(ServerCall)
    server = VllmServer(msgspec.msgpack.decode(channel.recv_bytes(), type=CreateEngine))
    while True:
        channel.send_bytes(msgspec.msgpack.encode(Done()))
        try:
            message = channel.recv_bytes()
        except EOFError:
            return
        server.handle_call(decoder.decode(message), channel)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
