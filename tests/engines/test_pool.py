"""The pool of servers: parcels, faults of servers, restarts, adapters.

The servers are fakes that speak vLLM's protocol; tests/engines/test_pool_vllm.py has real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from magrpo.config.place import EnginePlace
from magrpo.engines import EngineError
from magrpo.engines.named_weights import ServerGroup
from magrpo.engines.pool import PoolEngine
from magrpo.engines.roster import Patience
from magrpo.engines.transformers import TransformersEngine
from magrpo.fleets import Job, ProcessDied
from magrpo.plugins import ConfigError
from magrpo.types import Action, Request, SamplingParams
from tests.engines.fake_vllm import BASE, KEY, FakeServer, complete, write_weights

PARAMS = SamplingParams(max_new_tokens=3)
PATIENCE = Patience(deadline_s=60.0, start_s=60.0, silence_s=60.0, check_s=0.05, return_s=0.05)
WEIGHTS = {"helper": "weights of helper", "main": "weights of main"}


@dataclass
class Lineup:
    """As much of :class:`magrpo.model.lineup.Lineup` as an engine asks for."""

    bases: dict[str, str] = field(default_factory=lambda: dict.fromkeys(WEIGHTS, BASE))
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    full: tuple[str, ...] = ()

    def weights(self, agent: str) -> str:
        return "full" if agent in self.full else "lora"

    @property
    def agents(self) -> tuple[str, ...]:
        return tuple(self.bases)

    def base(self, agent: str) -> str:
        return self.bases[agent]

    def holder(self, agent: str) -> str:
        return agent

    def max_length(self, agent: str) -> int:
        return 256

    def stop_token_ids(self, agent: str) -> tuple[int, ...]:
        return (2,)

    def tokenizer(self, agent: str) -> Any:
        return SimpleNamespace(decode=lambda ids, skip_special_tokens: " ".join(map(str, ids)))


def ask(prompts: int = 6, siblings: int = 4, sampling: SamplingParams = PARAMS) -> list[Request]:
    """Prompts of different lengths, each asked of both agents in turn."""
    return [
        Request(agent, (20 + i,) * (1 + i), sampling, seed=100 * i + g)
        for i in range(prompts)
        for agent in WEIGHTS
        for g in range(siblings)
    ]


def expected(requests: Sequence[Request]) -> list[tuple[int, ...]]:
    return [
        tuple(complete(WEIGHTS[r.agent], list(r.prompt_ids), r.seed, r.sampling.max_new_tokens)[0]) for r in requests
    ]


def tokens(actions: Sequence[Action]) -> list[tuple[int, ...]]:
    return [action.token_ids for action in actions]


@pytest.fixture
def servers() -> Iterator[Callable[..., FakeServer]]:
    started: list[FakeServer] = []

    def start(*args: Any, **options: Any) -> FakeServer:
        started.append(FakeServer(*args, **options))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, Path]:
    return {agent: write_weights(tmp_path / "weights", agent, content) for agent, content in WEIGHTS.items()}


@pytest.fixture
def open_engine() -> Iterator[Callable[..., PoolEngine]]:
    opened: list[PoolEngine] = []

    def open_it(
        *fakes: FakeServer,
        lineup: Lineup | None = None,
        key: str = KEY,
        patience: Patience = PATIENCE,
        **place: Any,
    ) -> PoolEngine:
        host: Any = SimpleNamespace(
            lineup=lineup or Lineup(),
            place=EnginePlace(servers=tuple(fake.url for fake in fakes), **place),
            fleet=None,
            shares_gpus=False,
        )
        opened.append(PoolEngine(host, {}, key, patience))
        return opened[-1]

    yield open_it
    for engine in opened:
        engine.close()
        engine.close()


# ------------------------------------------------------------------------------------------------- when all is well
def test_siblings_go_to_one_server_the_longest_prompts_first(
    servers: Any, weights: dict[str, Path], open_engine: Any
) -> None:
    first, second = servers(), servers()
    requests = ask()
    counts: list[int] = []
    served = open_engine(first, second).serve(7, weights)
    actions = served.generate(requests, counts.append)
    assert tokens(actions) == expected(requests)
    assert {action.policy_version for action in actions} == {7}
    assert [action.agent for action in actions] == [request.agent for request in requests]
    assert sum(counts) == len(requests)
    assert len(first.served) == len(second.served) == len(requests) / 2, "free servers take the next parcel"
    parcels = [{(name, prompt) for name, prompt, _ in server.served} for server in (first, second)]
    assert not parcels[0] & parcels[1]
    assert sum(map(len, parcels)) == len(requests) / 4

    alone = servers()
    open_engine(alone, max_batch=1).serve(7, weights).generate(requests)
    lengths = [len(prompt) for _, prompt, _ in alone.served]
    assert lengths == sorted(lengths, reverse=True)


def test_no_server_has_more_in_flight_than_its_place_allows(
    servers: Any, weights: dict[str, Path], open_engine: Any
) -> None:
    fakes = [servers(), servers()]
    for fake in fakes:
        fake.delay_s = 0.005
    requests = ask(prompts=10, siblings=5)
    served = open_engine(*fakes, max_batch=3).serve(1, weights)
    assert tokens(served.generate(requests)) == expected(requests)
    assert all(1 < fake.max_in_flight <= 3 for fake in fakes)


def test_several_threads_share_the_servers(servers: Any, weights: dict[str, Path], open_engine: Any) -> None:
    served = open_engine(servers(), servers()).serve(1, weights)
    batches = [ask(prompts=count) for count in range(1, 5)]
    results: dict[int, list[Action]] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: served.generate(batches[i])}))
        for i in range(len(batches))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tokens(results[i]) for i in range(len(batches))] == [expected(batch) for batch in batches]


def test_names_follow_from_content_and_go_with_their_weights(
    tmp_path: Path, servers: Any, weights: dict[str, Path], open_engine: Any
) -> None:
    fake = servers()
    engine = open_engine(fake)
    first, again = engine.serve(3, weights), engine.serve(3, weights)
    others = {agent: write_weights(tmp_path / "others", agent, "other " + agent) for agent in WEIGHTS}
    second = engine.serve(3, others)
    names = sorted(fake.adapters)
    assert len(names) == len(fake.loads) == 4, "the same weights are loaded once"
    assert all(name.startswith(("helper.3.", "main.3.")) for name in names)
    first.close()
    first.close()
    assert sorted(fake.adapters) == names, "somebody else still needs them"
    again.close()
    assert {fake.adapters[name] for name in fake.adapters} == {str(folder.resolve()) for folder in others.values()}
    second.close()
    assert not fake.adapters


def test_an_agent_without_weights_acts_with_its_base_by_name(
    servers: Any, weights: dict[str, Path], open_engine: Any
) -> None:
    served = open_engine(servers()).serve(0, {"main": weights["main"]})
    [action] = served.generate([Request("helper", (4,), SamplingParams(max_new_tokens=3), 9)])
    assert list(action.token_ids) == complete(BASE, [4], 9, 3)[0]


def test_each_base_has_its_own_servers(
    tmp_path: Path, servers: Any, weights: dict[str, Path], open_engine: Any
) -> None:
    one, other = servers(base="one"), servers(base="two")
    served = open_engine(other, one, lineup=Lineup({"helper": "one", "main": "two"})).serve(1, weights)
    requests = ask()
    assert tokens(served.generate(requests)) == expected(requests)
    assert {name.partition(".")[0] for name in one.adapters} == {"helper"}
    assert {name.partition(".")[0] for name in other.adapters} == {"main"}


# ------------------------------------------------------------------------------------------------- one server fails
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (500, "answered 500 (out of order)"),
        (503, "answered 503"),
        ("close", "lost the connection"),
        ("half", "lost the connection"),
        ("other", "answered with another"),
    ],
)
def test_a_failing_server_leaves_and_its_requests_go_to_another(
    servers: Any, weights: dict[str, Path], open_engine: Any, caplog: pytest.LogCaptureFixture, fault: Any, said: str
) -> None:
    bad, good = servers(lambda number: fault if number > 5 else None), servers()
    requests = ask()
    counts: list[int] = []
    served = open_engine(bad, good, max_batch=4).serve(1, weights)
    assert tokens(served.generate(requests, counts.append)) == expected(requests)
    assert sum(counts) == len(requests)
    assert len(good.served) == len(set(good.served)), "nothing is asked of a good server twice"
    in_flight = len(bad.served) + len(good.served) - len(requests)
    assert in_flight <= 4, "answered by the bad server at the moment it left, and asked again"
    assert f"{bad.url} was removed from the pool" in caplog.text
    assert said in caplog.text


def test_a_single_failure_keeps_a_server_in_the_pool(
    servers: Any, weights: dict[str, Path], open_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    served = open_engine(servers(lambda number: 500 if number == 3 else None)).serve(1, weights)
    requests = ask()
    assert tokens(served.generate(requests)) == expected(requests)
    assert "removed from the pool" not in caplog.text


def test_a_server_that_restarted_empty_is_given_its_adapters_again(
    servers: Any, weights: dict[str, Path], open_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fake = servers(lambda number: "forget" if number == 4 else None)
    served = open_engine(fake, max_batch=4).serve(1, weights)
    requests = ask()
    assert tokens(served.generate(requests)) == expected(requests)
    assert "has lost the weights helper.1." in caplog.text
    assert "removed from the pool" not in caplog.text


def test_a_silent_server_leaves_in_the_middle_of_a_batch(
    servers: Any, weights: dict[str, Path], open_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    silent, good = servers(), servers()

    def fall_silent(number: int) -> str | None:
        if number < 4:
            return None
        silent.is_well = "silent"
        return "hang"

    silent.on_generate = fall_silent
    served = open_engine(silent, good, patience=replace(PATIENCE, silence_s=3.0)).serve(1, weights)
    requests = ask()
    assert tokens(served.generate(requests)) == expected(requests)
    assert f"{silent.url} was removed from the pool" in caplog.text
    assert "did not answer within 3 s" in caplog.text


def test_a_server_that_comes_back_is_used_again(
    servers: Any, weights: dict[str, Path], open_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ill, good = servers(lambda number: 500), servers()
    engine = open_engine(ill, good)
    served = engine.serve(1, weights)
    requests = ask()
    good.delay_s = 0.01
    assert tokens(served.generate(requests)) == expected(requests)
    ill.on_generate = lambda number: None
    for _ in range(1000):
        if ill.served:
            break
        assert tokens(served.generate(requests)) == expected(requests)
    assert ill.served
    assert f"{ill.url} is in the pool" in caplog.text


# ---------------------------------------------------------------------------------------------------- wrong weights
def test_a_server_of_the_base_is_not_used(
    servers: Any, weights: dict[str, Path], open_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, right = servers(), servers()
    wrong.serves_base = True
    served = open_engine(wrong, right).serve(1, weights)
    requests = ask()
    assert tokens(served.generate(requests)) == expected(requests)
    assert not wrong.served
    assert "does not serve the weights helper.1." in caplog.text


def test_old_weights_under_a_new_name_are_replaced(
    tmp_path: Path, servers: Any, weights: dict[str, Path], open_engine: Any
) -> None:
    fake = servers()
    open_engine(fake).serve(1, weights)
    name = next(name for name in fake.adapters if name.startswith("helper"))
    fake.adapters[name] = str(write_weights(tmp_path / "old", "helper", "old weights"))
    served = open_engine(fake).serve(1, weights)
    requests = ask()
    assert tokens(served.generate(requests)) == expected(requests)


def test_weights_without_a_probe_are_served_and_said_once(
    tmp_path: Path, servers: Any, weights: dict[str, Path], open_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "weights" / "probe.json").unlink()
    engine = open_engine(servers())
    requests = ask()
    assert tokens(engine.serve(1, weights).generate(requests)) == expected(requests)
    engine.serve(2, weights)
    assert caplog.text.count("no probe file next to") == 1


# ------------------------------------------------------------------------------------------------------- no way out
def test_without_servers_the_batch_fails_and_says_why(servers: Any, weights: dict[str, Path], open_engine: Any) -> None:
    fakes = [servers(), servers()]
    served = open_engine(*fakes).serve(1, weights)
    for fake in fakes:
        fake.close()
    with pytest.raises(EngineError, match=r"no vLLM server of base is left \(.*lost the connection to http"):
        served.generate(ask())


def test_one_request_that_fails_everywhere_ends_its_batch_only(
    servers: Any, weights: dict[str, Path], open_engine: Any
) -> None:
    ill = servers(lambda number: 500)
    served = open_engine(ill).serve(1, weights)
    with pytest.raises(EngineError, match=r"a completion failed 10 times; the last error: .*out of order"):
        served.generate(ask(1, 1)[:1])
    ill.on_generate = lambda number: None
    assert tokens(served.generate(ask())) == expected(ask())


def test_nobody_reached_is_an_error_at_once(servers: Any, open_engine: Any) -> None:
    fake = servers()
    fake.close()
    with pytest.raises(EngineError, match=rf"no vLLM server of base is left \(.*{fake.url}"):
        open_engine(fake)


def test_another_base_is_named(servers: Any, open_engine: Any) -> None:
    with pytest.raises(EngineError, match="serves another-base, but not base"):
        open_engine(servers(base="another-base"))


def test_a_wrong_key_is_a_mistake_with_a_remedy(servers: Any, open_engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"answered 401 \(Unauthorized\); .*VLLM_API_KEY"):
        open_engine(servers(), key="wrong")


@pytest.mark.parametrize(
    ("sampling", "key"),
    [(replace(PARAMS, top_p=0.9), "rollout.top_p = 0.9"), (replace(PARAMS, top_k=5), "rollout.top_k = 5")],
)
def test_truncation_is_refused_by_its_key_if_a_server_lacks_the_extension(
    servers: Any, weights: dict[str, Path], open_engine: Any, sampling: SamplingParams, key: str
) -> None:
    plain = servers(extended=False)
    served = open_engine(plain, servers()).serve(1, weights)
    with pytest.raises(
        ConfigError, match=rf"{key}: .*{plain.url} .*start it with --worker-extension-cls .*--middleware"
    ):
        served.generate(ask(sampling=sampling))
    assert tokens(served.generate(ask())) == expected(ask()), "without truncation it serves"


def test_numbers_that_are_none_are_an_error_of_the_weights(
    servers: Any, weights: dict[str, Path], open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = open_engine(servers()).serve(4, weights)
    monkeypatch.setattr("tests.engines.fake_vllm.score", lambda weights, tokens: [-9999.0] * len(tokens))
    with pytest.raises(EngineError, match="logits are not finite at policy version 4"):
        served.generate(ask())


def test_the_engine_in_this_process_has_no_use_for_servers() -> None:
    host: Any = SimpleNamespace(place=EnginePlace(servers=2))
    with pytest.raises(ConfigError, match=r"engine.kind = 'transformers' .*set engine.kind = 'vllm' or 'auto'"):
        TransformersEngine().open(host)


def test_full_weights_are_refused_without_the_extension(servers: Any, open_engine: Any) -> None:
    with pytest.raises(ConfigError, match=r"agent 'main': .*weights = \"full\"; start it with --worker-extension-cls"):
        open_engine(servers(extended=False), lineup=Lineup({"main": BASE}, full=("main",)))


def test_a_full_copy_needs_a_server_of_its_own(servers: Any, open_engine: Any) -> None:
    with pytest.raises(EngineError, match=r"no vLLM server of base is left \(no configured server serves it"):
        open_engine(servers(), lineup=Lineup(full=("main",)))
    with pytest.raises(
        EngineError, match=r"base for agent 'main' is left \(no configured server is free to serve only agent 'main'"
    ):
        open_engine(servers(extended=False), lineup=Lineup(full=("main",)))


# ----------------------------------------------------------------------------------- truncation and full weights
def test_completions_carry_their_support(servers: Any, weights: dict[str, Path], open_engine: Any) -> None:
    served = open_engine(servers(), servers()).serve(1, weights)
    kept = ask(sampling=replace(PARAMS, top_p=0.9, keep_support=True))
    actions, plain = served.generate(kept), served.generate(ask(sampling=replace(PARAMS, top_p=0.9)))
    assert tokens(actions) == tokens(plain) == expected(kept)
    for action, other in zip(actions, plain, strict=True):
        assert action.support == tuple((token, token + 1) for token in action.token_ids)
        assert other.support == ()
        assert action.sampling_logps == pytest.approx([logp / 10 for logp in other.sampling_logps])


def write_full(folder: Path) -> dict[str, Path]:
    """Adapters of the helper, a full copy of the main agent."""
    return {agent: write_weights(folder, agent, content, full=agent == "main") for agent, content in WEIGHTS.items()}


def test_a_full_copy_has_servers_of_its_own(servers: Any, tmp_path: Path, open_engine: Any) -> None:
    fakes = [servers() for _ in range(4)]
    served = open_engine(*fakes, lineup=Lineup(full=("main",))).serve(1, write_full(tmp_path))
    requests = ask()
    assert tokens(served.generate(requests)) == expected(requests)
    full = [fake for fake in fakes if fake.full[0].startswith("main.1.")]
    assert len(full) == 2
    assert {name for fake in full for name, _, _ in fake.served} == {BASE}
    assert not any(fake.adapters for fake in full)


def test_a_server_that_lost_its_full_copy_loads_it_again(
    servers: Any, tmp_path: Path, open_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fakes = [servers(lambda number: "forget" if number == 4 else None) for _ in range(2)]
    engine = open_engine(*fakes, max_batch=4, lineup=Lineup(full=("main",)))
    requests = ask()
    assert tokens(engine.serve(1, write_full(tmp_path)).generate(requests)) == expected(requests)
    assert "has lost the weights main.1." in caplog.text
    assert "removed from the pool" not in caplog.text


def test_batches_of_two_versions_of_a_full_copy_take_turns(servers: Any, tmp_path: Path, open_engine: Any) -> None:
    fakes = [servers() for _ in range(3)]
    engine = open_engine(*fakes, max_batch=3, lineup=Lineup(full=("main",)))
    first = engine.serve(1, write_full(tmp_path / "1"))
    other = write_weights(tmp_path / "2", "main", "newer weights", full=True)
    second = engine.serve(2, {"helper": first.by_agent["helper"].folder, "main": other})
    requests = [request for request in ask() if request.agent == "main"]
    newer = [tuple(complete("newer weights", list(r.prompt_ids), r.seed, 3)[0]) for r in requests]
    results: dict[int, list[Action]] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: (first, second)[i % 2].generate(requests)}))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [tokens(results[i]) for i in range(6)] == [expected(requests), newer] * 3


def test_a_closed_pool_answers_whoever_asks_it(servers: Any, weights: dict[str, Path], open_engine: Any) -> None:
    """In the middle of a batch and later: the thread of a run that is interrupted would wait for ever."""
    asked = threading.Event()

    def hang(_: int) -> str:
        asked.set()
        return "hang"

    engine = open_engine(servers(hang))
    served = engine.serve(1, weights)
    with ThreadPoolExecutor() as threads:
        batch = threads.submit(served.generate, ask())
        assert asked.wait(60)
        engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            batch.result(60)
    for late in (lambda: served.generate(ask()), lambda: engine.serve(2, weights)):
        with pytest.raises(EngineError, match="the engine was closed"):
            late()


# ------------------------------------------------------------------------------------------- servers of the fleet
class FakeFleet:
    """Starts fake servers; ``faults`` are those of each that is started."""

    def __init__(self, faults: Sequence[Any]) -> None:
        self.faults = list(faults)
        self.started: list[FakeRunning] = []

    def start(self, job: Job) -> list[FakeRunning]:
        copies = [FakeRunning(number, self.faults.pop(0)) for number in range(job.count)]
        self.started += copies
        return copies

    def close(self) -> None:
        for running in self.started:
            running.stop()


class FakeRunning:
    host = "127.0.0.1"
    log = Path("server.log")

    def __init__(self, number: int, fault: Any) -> None:
        if fault == "unplaced":
            raise ProcessDied("no free GPU")
        self.number = number
        self.fake = FakeServer(fault if callable(fault) else lambda number: None)
        self.port = self.fake.port
        self.status = 1 if fault == "dead" else None
        self.stopped = False

    def exit_status(self) -> int | None:
        return self.status

    def last_words(self) -> str:
        return "RuntimeError: out of breath"

    def stop(self) -> None:
        if not self.stopped:
            self.stopped = True
            self.fake.close()


def open_fleet(fleet: FakeFleet, servers: int = 2, **place: Any) -> PoolEngine:
    host: Any = SimpleNamespace(
        lineup=Lineup(), place=EnginePlace(servers=servers, **place), fleet=fleet, shares_gpus=False
    )
    return PoolEngine(host, {ServerGroup(BASE): Job("vllm", ("vllm",), count=servers)}, KEY, PATIENCE)


def always_500(number: int) -> int:
    return 500


def test_a_dead_server_is_started_again(weights: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    fleet = FakeFleet([always_500, None, None])
    engine = open_fleet(fleet)
    served = engine.serve(1, weights)
    requests = ask()
    fleet.started[1].fake.delay_s = 0.01
    assert tokens(served.generate(requests)) == expected(requests)
    for _ in range(1000):
        if len(fleet.started) == 3 and fleet.started[2].fake.served:
            break
        assert tokens(served.generate(requests)) == expected(requests)
    assert fleet.started[0].stopped
    assert fleet.started[2].fake.served
    assert "attempt 1 of 3" in caplog.text
    engine.close()
    assert all(running.stopped for running in fleet.started)


class SlowFleet(FakeFleet):
    """Its second start ends after ``go`` is set."""

    def __init__(self) -> None:
        super().__init__([always_500, None])
        self.began, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()

    def start(self, job: Job) -> list[FakeRunning]:
        if not self.started:
            return super().start(job)
        self.began.set()
        self.go.wait()
        copies = super().start(job)
        stop = copies[0].stop

        def stop_and_tell() -> None:
            stop()
            self.ended.set()

        copies[0].stop = stop_and_tell  # type: ignore[method-assign]
        return copies


def test_a_server_that_starts_again_while_its_pool_closes_is_stopped(weights: dict[str, Path]) -> None:
    """Nobody else would, and the next engine of the run would lack its GPU."""
    fleet = SlowFleet()
    engine = open_fleet(fleet, servers=1)
    served = engine.serve(1, weights)
    with ThreadPoolExecutor() as threads:
        actions = threads.submit(served.generate, ask())
        assert fleet.began.wait(60)
        engine.close()
        with pytest.raises(EngineError, match="the engine was closed"):
            actions.result(60)
    fleet.go.set()
    assert fleet.ended.wait(60)


def test_restarts_are_counted_and_begin_anew_with_new_weights(
    weights: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = FakeFleet([always_500, "dead", "dead", None])
    engine = open_fleet(fleet, servers=1, restarts=2)
    served = engine.serve(1, weights)
    with pytest.raises(
        EngineError, match=r"no vLLM server of base is left \(.*ended with status 1 \(RuntimeError: out"
    ):
        served.generate(ask())
    assert len(fleet.started) == 3
    served = engine.serve(2, weights)
    assert tokens(served.generate(ask())) == expected(ask())
    engine.close()


def test_a_server_that_cannot_start_is_one_error(weights: dict[str, Path]) -> None:
    fleet = FakeFleet(["dead", "dead"])
    with pytest.raises(EngineError, match=r"ended with status 1 \(RuntimeError: out of breath\); log: server.log"):
        open_fleet(fleet)
    assert all(running.stopped for running in fleet.started)
    with pytest.raises(EngineError, match="no free GPU"):
        open_fleet(FakeFleet(["unplaced"]))
