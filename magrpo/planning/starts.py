"""What would start at a place: processes, their number, their GPUs and where; nothing is started."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from magrpo.config.place import Place
from magrpo.config.run import RunConfig

CHOSEN = "chosen when it starts"


@dataclass(frozen=True, slots=True)
class Start:
    """Equal processes of a run."""

    what: str
    count: int
    gpus: int
    """Of each."""
    where: str
    port: str = ""
    """How they are reached; empty: not over the network."""
    note: str = ""


def list_starts(place: Place, num_bases: int = 1, *, on_gpus: bool = True) -> Iterator[Start]:
    """What starts at ``place``, the driver first; each of ``num_bases`` models has servers of its own.

    ``on_gpus``: whether ranks take a GPU each where the place leaves it open.
    """
    here = "this machine" if place.fleet.kind == "local" else f"nodes of the Ray cluster {place.fleet.address}"
    engine, update = place.engine, place.update
    alone = "generates and updates" if place.is_default else ", ".join(_list_duties(place))
    yield Start(
        "driver", 1, 0, "this machine", note=f"{alone}; model.device decides about GPUs" if alone else "no weights"
    )
    if isinstance(engine.servers, tuple):
        note = f"at most {engine.max_batch} completions at once"
        yield from (Start("server", 1, 0, "an external machine", url, note) for url in engine.servers)
    elif engine.servers:
        note = f"vLLM, at most {engine.max_batch} completions at once, {engine.restarts} restarts per stage"
        each = f"; {engine.servers} for each of {num_bases} models" if num_bases > 1 else ""
        yield Start("server", engine.servers * num_bases, engine.gpus, here, CHOSEN, note + each)
    if update.ranks:
        turns = "; takes turns on the servers' GPUs" if update.colocate else ""
        is_open = on_gpus and (isinstance(engine.servers, tuple) or not engine.servers or engine.gpus > 0)
        gpus = int(is_open) if update.gpus is None else update.gpus
        yield Start("rank", update.ranks, gpus, here, CHOSEN, f"torchrun{turns}")
    nodes = place.sandbox.nodes
    yield Start("sandbox", max(nodes, 1), 0, here if nodes else "this machine", note="runs the agents' programs")


def count_bases(config: RunConfig) -> int:
    """The number of base models and full copies, each of which has servers of its own."""
    return len({agent.model if agent.weights != "full" else f"{agent.name}: full" for agent in config.agents})


def count_gpus(place: Place, starts: Iterable[Start]) -> int:
    """The GPUs that the ``starts`` of a place need together."""
    needs = {start.what: start.count * start.gpus for start in starts}
    wanted = [needs.get("server", 0), needs.get("rank", 0)]
    return max(wanted) if place.update.colocate else sum(wanted)


def _list_duties(place: Place) -> list[str]:
    """What the driver does beside driving."""
    duties = [] if place.engine.is_remote else ["generates"]
    return duties if place.update.ranks else [*duties, "updates"]
