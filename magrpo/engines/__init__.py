"""Engines that generate completions."""

TABLE = {
    "auto": "magrpo.engines.auto:AutoEngine",
    "transformers": "magrpo.engines.transformers:TransformersEngine",
    "vllm": "magrpo.engines.vllm:VllmEngine",
}
