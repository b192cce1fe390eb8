import hashlib
import tempfile
import time
from pathlib import Path

from magrpo.cluster.connection import Cluster
from magrpo.cluster.ranks import RanksUpdates
from magrpo.config.place import Place
from magrpo.config.run import load_config
from magrpo.model.policy import Policy
from magrpo.run.layout import samples_file
from magrpo.run.store import write_records
from magrpo.updates.inline import InlineUpdates
from tests.stages.updating import make_samples
from tests.tiny import tiny_base

f = Path(tempfile.mkdtemp(dir="/dev/shm"))
tiny_base(f / "base")
for n in range(1, 4):
    (f / f"samples-{n}").mkdir()
    for a, s in zip(("helper", "main"), (make_samples(2 * n), make_samples(2 * n + 1, groups=5))):
        write_records(f / f"samples-{n}" / samples_file(a), s)
agents = [f"agents.{i}.{k}" for i in range(2) for k in (f"model={f / 'base'}", "weights=lora")]
config = load_config(
    Path("pipelines/configs/embedded.toml"),
    [
        *agents,
        "algo.beta=0.1",
        "algo.update_epochs=2",
        "lora.rank=4",
        "rollout.max_new_tokens=16",
        "optim.micro_batch_tokens=40",
        "optim.lr=1e-3",
        "model.device=cpu",
        "model.dtype=float32",
        "optim.lanes=4",
    ],
)


def dig(p):
    return {
        str(q.relative_to(p)): hashlib.sha256(q.read_bytes()).hexdigest() for q in sorted(p.rglob("*")) if q.is_file()
    }


def go(u, out):
    u.begin(out / "0")
    u.adopt(out / "0")
    m = {}
    for n in range(1, 4):
        c = []
        m = u.update(f / f"samples-{n}", out / f"{n - 1}", out / f"{n}", c.append)
        u.adopt(out / f"{n}")
    return m, sum(c)


t = time.time()
m1 = go(
    InlineUpdates(Policy.open(config.agents, config.model, config.lora, config.train.seed), config, f / "fb"), f / "one"
)
print("inline", time.time() - t)
t = time.time()
c = Cluster("")
print("cluster", time.time() - t)
for k in (1, 2, 4):
    t = time.time()
    u = RanksUpdates(c, Place.model_validate({"ranks": {"count": k}}), config, f / "fb")
    m = go(u, f / f"r{k}")
    print(k, m == m1, dig(f / f"r{k}" / "3") == dig(f / "one" / "3"), time.time() - t, m[1])
    u.close()
c.close()
