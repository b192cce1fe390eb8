"""Playing programs that behave, and programs that do not, with a fake model."""

from __future__ import annotations

import asyncio
import shlex
import sys
from asyncio import StreamWriter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from magrpo.envs.program import AgentProgram
from magrpo.errors import PluginFailed
from magrpo.gateway.launcher import EpisodesLost
from magrpo.gateway.player import EpisodePlayer, PlayedEpisode
from magrpo.model.lineup import Lineup
from magrpo.process.children import wait_for_end
from magrpo.types import Action, CaseStatus, Execution, ExecutionReport, Request
from tests.fakes import Clock
from tests.gateway.playing import (
    FakeModel,
    as_episode,
    find_marked,
    list_texts,
    make_services,
    make_tasks,
    play,
)
from tests.process_state import use_temporary_folder
from tests.processes import assert_all_end, find_running, read_command, wait_until

PROGRAM = '''
"""Does what the prompt of the problem names."""
import asyncio, http.client, json, os, random, signal, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

HOME = Path.cwd()
times_called = 0


def solve(problem, agents):
    global times_called
    times_called += 1
    name, _, argument = problem.prompt.partition(" ")
    return globals()[name](agents, *argument.split())


def ask(agents):
    return agents["planner"].ask("plan")


def two(agents):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda name: agents[name].ask("go"), agents))


def talk(agents, rounds, pause="0"):
    messages = [{"role": "system", "content": "Count."}]
    for number in range(int(rounds)):
        messages.append({"role": "user", "content": f"number {number}"})
        messages.append({"role": "assistant", "content": agents["planner"].ask(messages)})
        time.sleep(float(pause))
    return messages


async def wait(agents):
    async_ask = lambda name: asyncio.to_thread(agents[name].ask, "go")
    return await asyncio.gather(*map(async_ask, agents))


def abandon(agents, started, ended):
    """Asks the same twice and does not wait for the answers."""
    parts = urlsplit(agents.url)
    body = json.dumps({"model": "coder", "messages": [{"role": "user", "content": "vote"}]})
    connections = [http.client.HTTPConnection(parts.hostname, parts.port) for _ in range(2)]
    for connection in connections:
        connection.request("POST", f"{parts.path}/v1/chat/completions", body)
    while not os.path.exists(started):
        time.sleep(0.01)
    Path(ended).touch()
    return "done"


def run(agents):
    ask(agents)
    return agents.run_code("def f(): ...", "f", "def check(f): ...")["status"]


def fail(agents):
    ask(agents)
    raise ValueError("out of luck")


def leave(agents, status):
    ask(agents)
    sys.exit(int(status))


def vanish(agents, status):
    ask(agents)
    os._exit(int(status))


def kill(agents):
    ask(agents)
    os.kill(os.getpid(), signal.SIGKILL)


def hang(agents):
    ask(agents)
    while True:
        time.sleep(60)


def sleep(agents):
    time.sleep(1e6)


def be_silent(agents):
    return "nothing"


def give_set(agents):
    ask(agents)
    return {1, 2}


def give_nest(agents):
    ask(agents)
    sys.setrecursionlimit(20_000)
    nest = []
    for _ in range(5_000):
        nest = [nest]
    return nest


def give_much(agents):
    ask(agents)
    return "x" * 2**26


def give_special(agents):
    ask(agents)
    return {"text": "\\ud800 é", "number": float("nan")}


def print_much(agents):
    for _ in range(200):
        print("lots of words " * 1000)
    ask(agents)
    return "printed"


def print_then_fail(agents):
    print_much(agents)
    sys.stderr.write("no newline at the end")
    os._exit(5)


def leave_thread(agents):
    threading.Thread(target=time.sleep, args=(1e6,)).start()
    return ask(agents)


def leave_child(agents, mark):
    subprocess.Popen(["sh", "-c", "sleep 100000", mark])
    return ask(agents)


def leave_children(agents, mark):
    ended = os.posix_spawn("/bin/sh", ["sh", "-c", ":"], {})
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)  # it has ended, but nobody knows yet
    subprocess.Popen(["sh", "-c", "sleep 100000", mark])
    return ask(agents)


def leave_orphan(agents, mark):
    """A daemon: in a session of its own, with another parent, and with copies of all open files."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path(mark).write_text(str(os.getpid()))
            while True:
                time.sleep(60)
        os._exit(0)
    while not Path(mark).exists() or not Path(mark).read_text():
        time.sleep(0.01)
    return ask(agents)


def close_output(agents):
    sys.stdout.close()
    os.close(1)
    return ask(agents)


class Logger:
    def write(self, text):
        return len(text)


def replace_output(agents):
    sys.stdout = sys.stderr = Logger()
    return ask(agents)


def lose_output(agents):
    sys.stdout = None
    return ask(agents)


def close_files(agents):
    ask(agents)
    os.closerange(0, 256)
    return "closed"


def move(agents, folder):
    os.chdir(folder)
    return ask(agents)


def where(agents):
    print("as any program may")
    ask(agents)
    return {"folder": str(Path.cwd()), "home": str(HOME), "pid": os.getpid(), "called": times_called,
            "hash": hash("text"), "random": random.random(), "seed": agents.seed, "url": agents.url,
            "token": agents.token, "exported": [os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]]}
'''
COMMAND = """
import atexit, json, os, sys, time, signal
from openai import OpenAI
from pathlib import Path

problem = json.loads(Path(sys.argv[1]).read_text())
name = problem["prompt"]
client = OpenAI()  # finds the gateway in the environment
if name != "silent":
    answer = client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": name}])
if name == "fail":
    raise ValueError("out of luck")
if name == "exit":
    print("out of luck, too", flush=True)
    os._exit(3)
if name == "kill":
    os.kill(os.getpid(), signal.SIGTERM)
if name == "hang":
    while True:
        time.sleep(60)
if name == "warn":
    atexit.register(lambda: (sys.stdout.flush(), print("a warning at exit", file=sys.stderr)))
if name == "print":
    print("done, I think")
else:
    print("thinking ...")
    print(json.dumps({"keys": sorted(problem), "name": name}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory, with the program."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "acting.py").write_text(PROGRAM)
    (folder / "command.py").write_text(COMMAND)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def open_player(lineup: Lineup, **fields: Any) -> EpisodePlayer:
    return EpisodePlayer(AgentProgram(**{"run": "acting:solve", **fields}), lineup)


@pytest.fixture(scope="module", params=["reused processes"])
def player(request: pytest.FixtureRequest, folder: Path, lineup: Lineup) -> Iterator[EpisodePlayer]:
    player = open_player(lineup, fresh_processes=request.param == "fresh processes")
    yield player
    player.close()


with_both_players = pytest.mark.parametrize("player", ["reused processes", "fresh processes"], indirect=True)
"""For tests to which it matters whether a process plays one episode or many."""


FindProcess = Callable[[], psutil.Process]


def play_one(player: EpisodePlayer, model: FakeModel, prompt: str) -> PlayedEpisode:
    [played] = play(player, model, prompt)
    return played


def find_forkservers() -> list[psutil.Process]:
    """The fork servers that this process has started and that run."""
    return find_running(psutil.Process().children(), "magrpo.gateway.forkserver")


@pytest.fixture
def find_forkserver() -> Callable[[], psutil.Process]:
    """Finds the fork server that was started during the test."""
    before = find_forkservers()

    def find() -> psutil.Process:
        [found] = [server for server in find_forkservers() if server not in before]
        return found

    return find


# ------------------------------------------------------------------------------------------------- calls and results
@pytest.mark.parametrize("prompt", ["two", "wait"])
def test_concurrent_calls_of_functions_and_coroutines(player: EpisodePlayer, model: FakeModel, prompt: str) -> None:
    played = play_one(player, model, prompt)
    assert played.status == "finished"
    assert played.result == ["planner: go", "coder: go"]
    assert sorted(list_texts(played.calls)) == sorted(played.result)
    assert {call.extends for call in played.calls} == {-1}


def test_calls_that_extend_each_other_are_stored_once(player: EpisodePlayer, model: FakeModel) -> None:
    played = play_one(player, model, "talk 30")
    assert [call.extends for call in played.calls] == [*range(-1, 29)]
    episode = as_episode(played)
    assert [episode.prompt_ids(number) for number in range(30)] == [request.prompt_ids for request in model.requests]
    messages = played.result
    assert [[*episode.messages(number)] for number in range(30)] == [messages[: 2 * n + 2] for n in range(30)]
    stored = [len(call.prompt_ids) for call in played.calls[1:]]
    assert max(stored) < 1.1 * min(stored), "what a call adds does not grow with what came before"
    assert [len(call.messages) for call in played.calls] == [2] + [2] * 29


def test_a_history_that_was_rewritten_begins_anew(player: EpisodePlayer, lineup: Lineup) -> None:
    # The end of the answers is removed, as clients do, so no later prompt begins with an earlier completion.
    model = FakeModel(lineup, lambda request, prompt: "word ")
    played = play_one(player, model, "talk 3")
    assert [call.extends for call in played.calls] == [-1, 0, 1]
    model = FakeModel(lineup, lambda request, prompt: "so <|im_end|> so")  # cannot be sent back
    played = play_one(player, model, "talk 3")
    assert [call.extends for call in played.calls] == [-1, -1, -1]
    episode = as_episode(played)
    assert [episode.prompt_ids(number) for number in range(3)] == [request.prompt_ids for request in model.requests]


@with_both_players
def test_a_process_plays_many_episodes_or_one(player: EpisodePlayer, model: FakeModel) -> None:
    played = [play_one(player, model, "where").result for _ in range(3)]
    pids, called = [one["pid"] for one in played], [one["called"] for one in played]
    is_fresh = len(set(pids)) == 3
    assert called == ([1, 1, 1] if is_fresh else [called[0], called[0] + 1, called[0] + 2])
    assert is_fresh or len(set(pids)) == 1
    assert all(one["folder"] == one["home"] for one in played)
    assert all(one["exported"] == [f"{one['url']}/v1", one["token"]] for one in played)
    assert len({one["token"] for one in played}) == 3
    assert len({(one["hash"], one["random"], one["seed"]) for one in played}) == 1, "chance follows from the seed"


def test_there_may_be_no_episode(player: EpisodePlayer, model: FakeModel) -> None:
    assert play(player, model) == []


def test_episodes_of_other_problems_and_stages_have_other_seeds(player: EpisodePlayer, model: FakeModel) -> None:
    tasks = [*make_tasks("where", "where"), *make_tasks("where", seed=8)]
    seeds = [one.result["seed"] for one in player.play(tasks, make_services(model.generate))]
    assert len(set(seeds)) == 3


@with_both_players
def test_a_stage_that_is_played_again_gives_the_same_episodes(player: EpisodePlayer, lineup: Lineup) -> None:
    prompts = ("talk 3", "two", "ask", "fail", "talk 2")
    model = FakeModel(lineup, lambda request, prompt: str(request.seed))
    first, again = play(player, model, *prompts), play(player, model, *prompts)
    assert [one.result for one in first] == [one.result for one in again]
    # Concurrent calls that fell into different batches may have another order.
    assert [sorted(list_texts(one.calls)) for one in first] == [sorted(list_texts(one.calls)) for one in again]


def test_completions_that_nobody_waits_for_count(player: EpisodePlayer, model: FakeModel, tmp_path: Path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"

    def generate(requests: list[Request]) -> list[Action]:
        if sum(map(len, model.batches)) + len(requests) == 2:  # both have arrived
            started.touch()
            wait_until(ended.exists)
        return model.generate(requests)

    [played] = player.play(make_tasks(f"abandon {started} {ended}"), make_services(generate))
    assert (played.status, list_texts(played.calls)) == ("finished", ["coder: vote"] * 2)
    assert len({request.seed for request in model.requests}) == 2


@pytest.mark.parametrize(
    ("case", "status"), [("pass", "finished"), ("timeout", "finished"), ("infra_error", "infra_error")]
)
def test_a_failure_of_the_sandbox_is_not_the_programs(
    player: EpisodePlayer, model: FakeModel, case: CaseStatus, status: str
) -> None:
    def run_programs(executions: Sequence[Execution]) -> list[ExecutionReport]:
        return [ExecutionReport(case, (), "none") for _ in executions]

    services = replace(make_services(model.generate), run_programs=run_programs)
    [played] = player.play(make_tasks("run"), services)
    assert (played.status, played.result) == (status, case if status == "finished" else None)
    assert len(played.calls) == 1


# ------------------------------------------------------------------------------------------------------------ faults
@pytest.mark.parametrize(
    ("prompt", "status", "message"),
    [
        ("fail", "failed", "ValueError: out of luck"),
        ("leave 3", "failed", "SystemExit: 3"),
        ("vanish 5", "failed", "exit status 5"),
        ("kill", "failed", "signal 9"),
        ("give_set", "failed", "TypeError: Object of type set is not JSON serializable"),
        ("print_then_fail", "failed", "exit status 5: no newline at the end"),
        ("no_such_thing", "failed", "KeyError: 'no_such_thing'"),
        ("be_silent", "silent", "asked no agent"),
    ],
)
def test_faults_of_a_program(player: EpisodePlayer, model: FakeModel, prompt: str, status: str, message: str) -> None:
    played, well = play(player, model, prompt, "ask")
    assert (played.status, played.message, played.result) == (status, message, None)
    assert len(played.calls) == (prompt not in ("be_silent", "no_such_thing")), "what was sampled counts"
    assert well.status == "finished", "the others are not affected"
    assert play_one(player, model, "ask").status == "finished", "nor those that follow"


def test_a_program_that_vanishes_returned_nothing(player: EpisodePlayer, model: FakeModel) -> None:
    played = play_one(player, model, "vanish 0")
    assert (played.status, played.result) == ("finished", None)  # which no reward accepts


@pytest.mark.parametrize("prompt", ["give_much", "give_nest"])
def test_results_that_cannot_be_handed_over(player: EpisodePlayer, model: FakeModel, prompt: str) -> None:
    played = play_one(player, model, prompt)
    assert played.status == "failed"
    assert "returned" in played.message
    assert play_one(player, model, "ask").status == "finished"


def test_results_may_hold_any_text_and_number(player: EpisodePlayer, model: FakeModel) -> None:
    result = play_one(player, model, "give_special").result
    assert result["text"] == "\ud800 é"
    assert result["number"] != result["number"]


MESSES = ["print_much", "close_output", "replace_output", "lose_output", "leave_thread", "move /"]


@pytest.mark.parametrize("prompt", MESSES)
def test_programs_that_leave_a_mess_do_not_disturb_the_next(
    player: EpisodePlayer, model: FakeModel, prompt: str
) -> None:
    assert play_one(player, model, prompt).status == "finished"
    after = play_one(player, model, "where")
    assert after.status == "finished", after.message
    assert after.result["folder"] == after.result["home"]


def test_a_program_that_closes_every_file_fails_alone(player: EpisodePlayer, model: FakeModel) -> None:
    played = play_one(player, model, "close_files")
    assert (played.status, len(played.calls)) == ("failed", 1)
    assert play_one(player, model, "ask").status == "finished"


@with_both_players
@pytest.mark.parametrize("prompt", ["leave_child", "leave_children"])
def test_processes_that_a_program_leaves_behind_are_killed(
    player: EpisodePlayer, model: FakeModel, tmp_path: Path, prompt: str
) -> None:
    mark = tmp_path / prompt
    assert play_one(player, model, f"{prompt} {mark}").status == "finished"
    wait_until(lambda: not find_marked(mark))


@with_both_players
def test_a_daemon_that_a_program_leaves_behind_is_killed(
    player: EpisodePlayer, model: FakeModel, tmp_path: Path
) -> None:
    mark = tmp_path / "pid"
    assert play_one(player, model, f"leave_orphan {mark}").status == "finished"
    pid = int(mark.read_text())
    wait_until(lambda: not any(process.pid == pid and read_command(process) for process in psutil.process_iter()))
    assert play_one(player, model, "ask").status == "finished"


# ------------------------------------------------------------------------------------------------------- time limits
def test_a_program_that_hangs_is_killed(folder: Path, model: FakeModel, find_forkserver: FindProcess) -> None:
    player = open_player(model.lineup, time_limit_s=0.5)
    played = play_one(player, model, "hang")
    assert (played.status, played.message) == ("timed_out", "took longer than env.time_limit_s = 0.5")
    assert find_forkserver().children() == []
    player.close()


def test_time_that_completions_take_does_not_count(folder: Path, lineup: Lineup) -> None:
    clock = Clock()
    looked = []

    def get_time() -> float:
        looked.append(clock.now)
        return clock.now

    def reply(request: Request, prompt: str) -> str:
        clock.now += 1000.0
        return "slowly"

    player = EpisodePlayer(AgentProgram(run="acting:solve", time_limit_s=0.01), lineup, get_time)
    [played] = player.play(make_tasks("talk 20 0.05"), make_services(FakeModel(lineup, reply).generate))
    player.close()
    assert played.status == "finished"
    since_first_answer = [now for now in looked if now >= 1000.0]
    # The session looks at the end of each of 20 requests, and at the beginning of the 19 others.
    assert len(since_first_answer) > 20 + 19, "the limit was looked at while the program ran"


# ------------------------------------------------------------------------------------------------- ends of the stage
def test_a_fork_server_that_dies_loses_its_episodes_only(
    folder: Path, model: FakeModel, find_forkserver: FindProcess
) -> None:
    is_alive = True

    def kill_forkserver(requests: list[Request]) -> list[Action]:
        nonlocal is_alive
        if is_alive:  # else the other program's calls have come in a batch of their own
            is_alive = False
            server = find_forkserver()
            workers = server.children()
            assert workers
            server.kill()
            assert_all_end([server, *workers])
        return model.generate(requests)  # too late

    player = open_player(model.lineup)
    for _ in range(3):
        is_alive = True
        with pytest.raises(EpisodesLost, match="the process that runs episodes died"):
            player.play(make_tasks("ask", "two"), make_services(kill_forkserver))
        assert [one.status for one in play(player, model, "ask", "two")] == ["finished"] * 2
    player.close()


@pytest.mark.parametrize("is_repeated", [True, False])
def test_daemons_of_a_fork_server_that_died_are_killed(
    folder: Path, model: FakeModel, find_forkserver: FindProcess, tmp_path: Path, *, is_repeated: bool
) -> None:
    mark = tmp_path / "pid"

    def kill_forkserver(requests: list[Request]) -> list[Action]:
        find_forkserver().kill()
        return model.generate(requests)  # too late

    player = open_player(model.lineup)
    with pytest.raises(EpisodesLost):
        player.play(make_tasks(f"leave_orphan {mark}"), make_services(kill_forkserver))
    daemon = psutil.Process(int(mark.read_text()))
    assert daemon.is_running()
    if is_repeated:
        assert play_one(player, model, "ask").status == "finished"
        assert_all_end([daemon])
    player.close()
    assert_all_end([daemon])


@pytest.mark.parametrize("at", ["generate", "advance"])
def test_a_stage_that_ends_early_leaves_no_program_running(
    folder: Path, model: FakeModel, find_forkserver: FindProcess, at: str
) -> None:
    player = open_player(model.lineup)
    error = RuntimeError("the engine broke")

    def generate(requests: list[Request]) -> list[Action]:
        if at == "generate" and len(model.batches) >= 2:
            raise error
        return model.generate(requests)

    def advance(number: int) -> None:
        if at == "advance":
            raise error

    services = make_services(generate, advance)
    with pytest.raises(RuntimeError, match="the engine broke") as raised:
        player.play(make_tasks("ask", *["talk 50"] * 5, *["hang"] * 5), services)
    assert raised.value is error
    running = [worker for worker in find_forkserver().children() if read_command(worker)]
    assert len(running) <= 1, "only a worker without an episode may be left"
    assert [one.status for one in play(player, model, "ask", "two")] == ["finished"] * 2
    player.close()


def test_a_program_whose_order_waits_for_room_in_the_pipe_does_not_outlive_its_stage(
    folder: Path, model: FakeModel, find_forkserver: FindProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[StreamWriter] = []

    async def let_one_pass(pipe: StreamWriter) -> None:
        orders.append(pipe)
        if len(orders) > 1:
            await asyncio.Event().wait()

    def generate(requests: list[Request]) -> list[Action]:
        raise RuntimeError("the engine broke")

    player = open_player(model.lineup)
    with monkeypatch.context() as patches:
        patches.setattr(StreamWriter, "drain", let_one_pass)
        with pytest.raises(RuntimeError, match="the engine broke"):
            player.play(make_tasks("ask", "sleep"), make_services(generate))
    assert len(orders) == 2
    assert play_one(player, model, "ask").status == "finished"
    assert len(find_forkserver().children()) == 1, "an idle worker"
    player.close()


def test_closing_leaves_nothing_and_may_be_repeated(
    folder: Path, model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find_forkserver: FindProcess
) -> None:
    use_temporary_folder(monkeypatch, tmp_path)
    open_files = psutil.Process().num_fds()
    for fresh in (True, False):
        player = open_player(model.lineup, fresh_processes=fresh)
        play(player, model, *["ask"] * 3, "fail", "leave_thread")
        server = find_forkserver()
        processes = [server, *server.children()]
        assert list(tmp_path.iterdir())
        player.close()
        player.close()
        assert wait_for_end(processes, 0) == []
        assert list(tmp_path.iterdir()) == []
        wait_until(lambda: psutil.Process().num_fds() <= open_files)


def test_a_player_that_never_played_closes_too(folder: Path, lineup: Lineup) -> None:
    open_player(lineup).close()


def test_files_of_episodes_do_not_pile_up(
    folder: Path, model: FakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_temporary_folder(monkeypatch, tmp_path)
    player = open_player(model.lineup, fresh_processes=True)
    play(player, model, *["ask"] * 3, "fail", "kill", "leave_thread")
    [own] = tmp_path.iterdir()
    names = {path.name for path in own.iterdir()}
    play(player, model, *["ask"] * 3, "fail", "kill", "leave_thread", "print_then_fail")
    assert {path.name for path in own.iterdir()} == names == {"server.log"}
    player.close()


def test_an_address_is_unknown_after_its_batch(player: EpisodePlayer, model: FakeModel) -> None:
    from magrpo.gateway.agents import GatewayRefused, post_json  # no library, though the module is loaded anyway

    result = play_one(player, model, "where").result
    with pytest.raises(GatewayRefused, match="unknown session"):
        post_json(f"{result['url']}/v1/chat/completions", {"model": "planner", "messages": []}, "")


# ------------------------------------------------------------------------------------------ programs that cannot start
@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("nowhere:solve", "No module named 'nowhere'"),
        ("acting:nothing", "has no attribute 'nothing'"),
    ],
)
def test_programs_that_cannot_be_imported(folder: Path, model: FakeModel, run: str, message: str) -> None:
    player = open_player(model.lineup, run=run)
    for _ in range(2):  # a second attempt is no worse
        with pytest.raises(PluginFailed, match=f"(?s)env.run = '{run}' cannot be started:.*{message}"):
            play(player, model, "ask")
    player.close()


def test_a_program_gets_no_input_while_it_is_imported(folder: Path, model: FakeModel) -> None:
    (folder / "asking.py").write_text("input('Which game? ')\ndef solve(problem, agents): ...\n")
    player = open_player(model.lineup, run="asking:solve")
    with pytest.raises(PluginFailed, match=r"cannot be started:(?s:.*)EOFError"):
        play(player, model, "ask")
    player.close()


def test_an_import_that_does_not_end_is_given_up(
    folder: Path, model: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magrpo.gateway.launcher.IMPORT_LIMIT_S", 1)
    (folder / "endless.py").write_text("import time\nprint('loading')\ntime.sleep(1e6)\n")
    player = open_player(model.lineup, run="endless:solve")
    before = find_forkservers()
    with pytest.raises(PluginFailed, match=r"env\.run = 'endless:solve' has not been imported after 1 s"):
        play(player, model, "ask")
    player.close()
    assert find_forkservers() == before


# ---------------------------------------------------------------------------------------------------------- commands
@pytest.fixture(scope="module")
def commands(folder: Path, lineup: Lineup) -> Iterator[EpisodePlayer]:
    run = f"{shlex.quote(sys.executable)} command.py {{problem_file}}"
    player = open_player(lineup, run=run, models={"gpt": "coder"}, time_limit_s=600)
    yield player
    player.close()


def test_commands(commands: EpisodePlayer, model: FakeModel) -> None:
    prompts = ("do well", "warn", "fail", "exit", "kill", "print", "silent")
    played = dict(zip(prompts, play(commands, model, *prompts), strict=True))
    well = played["do well"]
    assert (well.status, [call.agent for call in well.calls]) == ("finished", ["coder"])
    assert well.result["name"] == "do well"
    assert "hidden_test" not in well.result["keys"]
    ends = {prompt: (one.status, one.message) for prompt, one in played.items()}
    assert ends == {
        "do well": ("finished", ""),
        "warn": ("finished", ""),
        "fail": ("failed", "exit status 1: ValueError: out of luck"),
        "exit": ("failed", "exit status 3: out of luck, too"),
        "kill": ("failed", "signal 15"),
        "print": ("failed", "the last line that it printed is not JSON: 'done, I think'"),
        "silent": ("silent", "asked no agent"),
    }


def test_commands_that_hang_are_killed(folder: Path, model: FakeModel, find_forkserver: FindProcess) -> None:
    player = open_player(model.lineup, run="sh -c 'sleep 100000; true'", time_limit_s=0.5)
    assert play_one(player, model, "ask").status == "timed_out"
    wait_until(lambda: find_forkserver().children(recursive=True) == [])
    player.close()


def test_commands_that_do_not_exist(folder: Path, model: FakeModel) -> None:
    player = open_player(model.lineup, run="no-such-command --now")
    played = play_one(player, model, "ask")
    assert (played.status, played.calls) == ("failed", ())
    assert played.message == "FileNotFoundError: [Errno 2] No such file or directory"
    player.close()
