"""A model may sample other tokens than those that encode its text: what was sampled from is what is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from magrpo.model.lineup import Lineup
from magrpo.types import Action, Episode, Request
from tests.gateway.playing import FakeModel, make_lineup, open_gateway, open_lineup
from tests.tiny import VOCAB_SIZE

SAID = "wow, wonderful"
WO = VOCAB_SIZE + 8
"""The token of ``wo``, beyond those of the marks."""


@pytest.fixture(scope="module")
def merging(tmp_path_factory: pytest.TempPathFactory) -> Lineup:
    """Its tokenizer has a token for ``wo``, so there are two ways to write it."""
    folder = tmp_path_factory.mktemp("merging")
    make_lineup(folder)
    edit_json(folder / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update({"wo": WO}))
    edit_json(folder / "tokenizer.json", lambda tokenizer: tokenizer["model"]["merges"].append(["w", "o"]))
    edit_json(folder / "config.json", lambda config: config.update({"vocab_size": WO + 1}))
    return open_lineup(folder)


def edit_json(path: Path, change: object) -> None:
    content = json.loads(path.read_text())
    change(content)  # type: ignore[operator]
    path.write_text(json.dumps(content))


class SpellingModel(FakeModel):
    """Samples a token for each letter."""

    def generate(self, requests: Sequence[Request]) -> list[Action]:
        return [self.spell(action) for action in super().generate(requests)]

    def spell(self, action: Action) -> Action:
        tokenizer = self.lineup.tokenizer(action.agent)
        letters = [one for letter in action.text for one in tokenizer.encode(letter, add_special_tokens=False)]
        token_ids = (*letters, tokenizer.eos_token_id)
        return replace(action, token_ids=token_ids, sampling_logps=(-1.0,) * len(token_ids))


def converse(lineup: Lineup, model: FakeModel, said: str) -> Episode:
    """The agent is asked, its answer is sent back as ``said``, and it is asked again."""
    with open_gateway(model) as gateway:
        gateway.chat("hello")
        messages = [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": said},
            {"role": "user", "content": "wow"},
        ]
        gateway.send("v1/chat/completions", {"model": "planner", "messages": messages})
        episode = Episode(gateway.session.seal(), {})
    assert [episode.prompt_ids(n) for n in range(2)] == [request.prompt_ids for request in model.requests]
    return episode


def test_an_answer_that_is_sent_back_keeps_its_tokens(merging: Lineup) -> None:
    episode = converse(merging, SpellingModel(merging, lambda request, prompt: SAID), SAID)
    first, second = episode.calls
    assert second.extends == 0
    whole = episode.prompt_ids(1)
    begun = (*first.prompt_ids, *first.action.token_ids)
    assert whole[: len(begun)] == begun
    assert WO not in begun
    assert WO in second.prompt_ids, "what is new is encoded as text is"
    encoded = merging.render_chat("planner", episode.messages(1))
    assert encoded != whole, "as text the answer has other tokens"
    tokenizer = merging.tokenizer("planner")
    assert tokenizer.decode([*encoded]) == tokenizer.decode([*whole])


def test_an_answer_that_was_changed_is_encoded_anew(merging: Lineup) -> None:
    episode = converse(merging, SpellingModel(merging, lambda request, prompt: f" {SAID}"), SAID)
    assert episode.calls[1].extends == -1
    assert episode.prompt_ids(1) == merging.render_chat("planner", episode.messages(1))
    assert [message["content"] for message in episode.messages(1)] == ["hello", SAID, "wow"]


def test_an_answer_that_was_cut_off_is_encoded_anew(merging: Lineup) -> None:
    class CuttingModel(SpellingModel):
        def spell(self, action: Action) -> Action:
            spelled = super().spell(action)
            return replace(
                spelled,
                finish_reason="length",
                token_ids=spelled.token_ids[:-1],
                sampling_logps=spelled.sampling_logps[:-1],
            )

    episode = converse(merging, CuttingModel(merging, lambda request, prompt: SAID), SAID)
    assert episode.calls[1].extends == -1
    assert episode.prompt_ids(1) == merging.render_chat("planner", episode.messages(1))
