"""From tokens to chat messages: reads a completion as a message, perhaps with tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magrpo.errors import ConfigError, quote_error
from magrpo.text import replace_surrogates
from magrpo.types import Action

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from magrpo.model.lineup import Lineup

_HERMES = Path(__file__).with_name("hermes.json")
_HERMES_MARK = '<tool_call>\\n{\\"name\\": <function-name>'
"""How the chat templates that write tool calls in the Hermes form describe it to the model."""

_MAX_PARTS = 16
"""Largest number of tokens that are decoded together because each ends within a character; more are no text."""
_FIELDS = {"role", "content", "reasoning_content", "tool_calls"}
"""What a message may hold."""


class CannotParse(ValueError):
    """A model's tool calls cannot be read because there is no response template; the message names the remedy."""


@dataclass
class Chat:
    """Reads the completions of the agents of ``lineup`` as messages; ``lineup`` itself renders their prompts."""

    lineup: Lineup
    response_template: Path | None = None
    """A response template for all agents; None: see :attr:`magrpo.envs.program.AgentProgram.response_template`."""
    _templates: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ConfigError if the response template of the configuration is unusable."""
        if self.response_template is not None:
            template = read_response_template(self.response_template)
            self._templates = {self.lineup.base(agent): template for agent in self.lineup.agents}

    def read_text(self, agent: str, token_ids: Sequence[int]) -> str:
        """The text of a completion with the marks of tool calls, some of which are special tokens."""
        tokenizer = self.lineup.tokenizer(agent)
        text = str(tokenizer.decode([*token_ids]))
        for stop in self.lineup.stop_token_ids(agent):
            text = text.removesuffix(str(tokenizer.decode([stop])))
        return text

    def continue_text(self, prompt_ids: Sequence[int], action: Action) -> Action:
        """The completion of a text, with the space that decoders such as Llama 2's drop where a text begins."""
        tokenizer = self.lineup.tokenizer(action.agent)
        prompt, whole = (
            str(tokenizer.decode([*ids], skip_special_tokens=True))
            for ids in (prompt_ids, (*prompt_ids, *action.token_ids))
        )
        return replace(action, text=f" {action.text}") if whole == f"{prompt} {action.text}" else action

    def parse(
        self, agent: str, prompt_ids: Sequence[int], text: str, tools: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """The message in :meth:`read_text` of a completion: ``content``, perhaps ``reasoning_content``, ``tool_calls``.

        A tool call that is cut off or is not JSON stays part of the content, as does everything if the response
        template has other fields, so the whole text is always there.
        Raises CannotParse if nothing says how the agent's model writes tool calls.
        """
        template = self._find_template(agent)
        prompt = str(self.lineup.tokenizer(agent).decode([*prompt_ids]))
        try:
            parsed: dict[str, Any] = replace_surrogates(
                self.lineup.tokenizer(agent).parse_response(
                    text, dict(template), prefix=prompt, tools=list(map(dict, tools))
                )
            )
        except (ValueError, KeyError, RecursionError):  # the model wrote something that its own form does not allow
            return {"content": text}
        if "thinking" in parsed:  # the name in transformers' own response templates
            parsed["reasoning_content"] = parsed.pop("thinking")
        if parsed.keys() - _FIELDS - template.get("defaults", {}).keys():  # a client would not see them
            return {"content": text}
        if parsed.keys() - {"role", "content"}:  # what is left between other parts, such as line breaks
            parsed["content"] = str(parsed.get("content", "")).strip()
        return parsed

    def check_tools(self, agent: str) -> None:
        """Raise CannotParse if the prompt would not describe tools, or nothing says how the model writes their calls.

        A response template of the configuration is enough: it may read as calls what a model writes without tools.
        """
        self._find_template(agent)

    def _find_template(self, agent: str) -> Mapping[str, Any]:
        base = self.lineup.base(agent)
        if base not in self._templates:
            self._templates[base] = self._load_template(agent)
        return self._templates[base]

    def _load_template(self, agent: str) -> Mapping[str, Any]:
        if self.lineup.model.chat_template == "none":
            raise CannotParse(
                'model.chat_template = "none" leaves the tools out of the prompt: set it to "auto", or ask without '
                "tools"
            )
        tokenizer = self.lineup.tokenizer(agent)
        own = tokenizer.init_kwargs.get("response_template")
        if own and tokenizer.chat_template:
            return dict(own)
        if _HERMES_MARK in str(tokenizer.chat_template):
            return dict(json.loads(_HERMES.read_text(encoding="utf-8")))
        raise CannotParse(
            f"the tokenizer of {self.lineup.base(agent)!r} does not say how the model writes tool calls: give a "
            "response template in env.response_template, or ask without tools"
        )


def decode_pieces(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], behind: Sequence[int] = ()
) -> list[str]:
    """The text that each token adds to a completion. A character of several tokens is added by the last of them.

    Decodes each token behind those that added the text before it, because decoders treat the first token differently;
    ``behind``: the prompt, if the completion continues its text.
    """
    pieces = []
    whole = [*behind, *token_ids]
    # The tokens up to ``begin`` have been given, the last text of theirs from ``context`` on.
    context, begin = 0, len(behind)
    for end in range(begin + 1, len(whole) + 1):
        text = str(tokenizer.decode(whole[context:end]))
        is_part = text.endswith("\ufffd") and end < len(whole) and end - begin < _MAX_PARTS
        if is_part:
            pieces.append("")
            continue
        known = str(tokenizer.decode(whole[context:begin])) if begin else ""
        pieces.append(text[len(known) :])
        context, begin = begin, end
    return pieces


def read_response_template(path: Path) -> Mapping[str, Any]:
    """Read a response template. Raises ConfigError, naming the file, if it is unusable."""
    from transformers.utils.chat_parsing import response_templates  # only programs with tools need it

    try:
        template: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        response_templates.load_response_template(template)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"env.response_template = {str(path)!r}: {quote_error(error)}; correct the file, or leave the key out"
        ) from None
    return template
