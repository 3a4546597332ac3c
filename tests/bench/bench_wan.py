"""Training over slow links, beside what others would run: ``python tests/bench/bench_wan.py``.

Needs root (``tests/support/wan.py``) and torch. Every contestant trains one model on one text, a
process in each region, and a step takes at least ``--step-s``:

ddp-f32, ddp-fp16
    torch's DistributedDataParallel over gloo, with buckets of the better of two sizes; the second
    with torch's own hook that sends gradients in half precision
diloco
    synchronous DiLoCo as torchft runs it: H steps, then an f32 all-reduce that all wait for
skerry
    learners of ``skerry.torch.join``, broker and syncer in the first region

Links are scaled by r: what one 16-bit ring all-reduce of the model takes on them, in units of a
step. 12 B parameters over four regions at 3 Gbit/s take 96 s, and a step 4.8 s: r = 20. How good a
step of DDP is does not depend on the network, so its loss by step is found without one.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Goal, parser, write
from wan_loop import GO

from skerry.cli.cluster.broker import find_server
from skerry.models.base import build_model, specs_of
from skerry.settings.models import RunConfig
from tests.support.processes import SKERRY
from tests.support.wan import DEVICE, Link, Region, Regions, missing

LOOP = Path(__file__).parent / "wan_loop.py"
NAMES = "us", "eu", "asia", "sa"
HUB = NAMES[0]
LIMIT_S, POLL_S = 3600.0, 0.2
SETTLE = 2
"""Steps at the beginning that no figure counts."""
BUCKETS_MB = 1.0, 25.0
H_STEPS = 24
GOALS = {"ddp-f32": 20.0, "ddp-fp16": 18.0}


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is trained, how long, and over which links."""

    layers: int = 4
    width: int = 128
    batch: int = 4
    seq_len: int = 64
    lr: float = 2e-3
    step_s: float = 0.4
    steps: int = 360
    few: int = 6
    seeds: int = 3
    judge_every: int = 12
    ratio: float = 20.0
    rtt_ms: float = 100.0

    def config(self, seed: int) -> RunConfig:
        """Return the run of every contestant."""
        return RunConfig.model_validate(
            {
                "model": {
                    "layers": self.layers,
                    "d_model": self.width,
                    "heads": 4,
                    "kv_heads": 2,
                    "d_ff": 3 * self.width,
                },
                "data": {"batch": self.batch, "seq_len": self.seq_len, "seed": seed},
                "train": {
                    "steps": self.steps,
                    "lr": self.lr,
                    "schedule": "constant",
                    "seed": seed,
                },
                "sync": {
                    "learners": len(NAMES),
                    "fragments": 4,
                    "h_steps": H_STEPS,
                    "overlap_steps": 6,
                },
            }
        )

    @property
    def parameters(self) -> int:
        config = self.config(0)
        return sum(spec.size for spec in specs_of(build_model(config.model, config.train)))

    def link(self) -> Link:
        """Return the link on which a 16-bit ring all-reduce takes ``ratio`` steps."""
        size = 2 * (len(NAMES) - 1) / len(NAMES) * 2 * self.parameters
        return Link(8e-6 * size / (self.ratio * self.step_s), self.rtt_ms / 1e3)


@dataclass(slots=True)
class Told:
    """What the processes of one contest have printed, by region, and what their links carried."""

    ends: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    judged: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    codes: dict[str, int] = field(default_factory=dict[str, int])
    up_mb: dict[str, float] = field(default_factory=dict[str, float])
    down_mb: dict[str, float] = field(default_factory=dict[str, float])

    def step_s(self, every: int = 1) -> float:
        """Return seconds per step in the slowest region, over whole rounds of ``every`` steps.

        A region that joined too late for two rounds is judged by all that it took.
        """

        def mean(ends: Sequence[float]) -> float:
            first = max(SETTLE, every) - 1
            count = (len(ends) - 1 - first) // every * every
            if not count:
                first, count = SETTLE, len(ends) - 1 - SETTLE
            return (ends[first + count] - ends[first]) / count

        return max(mean(ends) for ends in self.ends.values())

    def longest_s(self, but: Sequence[str] = ()) -> float:
        """Return the longest step of all regions ``but`` some."""
        kept = [ends for name, ends in self.ends.items() if name not in but]
        return max(b - a for ends in kept for a, b in pairwise(ends[SETTLE:]))

    def steps(self) -> int:
        return min(len(ends) for ends in self.ends.values())


@dataclass(slots=True)
class Trouble:
    """A link that is cut and an island that is killed, ``at_step`` of the last region."""

    at_step: int
    cut: str = ""
    cut_s: float = 60.0
    kill: str = ""


class Contestants:
    """Processes of one contest, in regions or, without, beside each other on this machine."""

    def __init__(self, folder: Path, regions: Regions | None) -> None:
        self.folder = folder
        self.regions = regions
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._services: list[subprocess.Popen[bytes]] = []

    def start(self, how: str, sizes: Sizes, seed: int, steps: int, **more: Any) -> None:
        """Start a process in each region."""
        address = self.regions[HUB].address if self.regions else "127.0.0.1"
        url = f"{address}:29500"
        if how == "skerry":
            url = self._serve(address)
        for rank, name in enumerate(NAMES):
            asked = {
                "how": how,
                "rank": rank,
                "size": len(NAMES),
                "url": url,
                "config": sizes.config(seed).model_dump(mode="json"),
                "step_s": sizes.step_s if self.regions else 0.0,
                "steps": steps,
                "judge_every": sizes.judge_every if rank == len(NAMES) - 1 else 0,
                "bucket_mb": BUCKETS_MB[-1],
                "seed": seed,
            }
            path = self.folder / f"{name}.json"
            path.write_text(json.dumps(asked | more))
            self.processes[name] = self._spawn(name, [sys.executable, str(LOOP), str(path)])

    def _serve(self, address: str) -> str:
        """Start a broker and a syncer in the first region; return the broker's address."""
        settings = self.folder / "nats.conf"
        settings.write_text(
            f'listen: "{address}:4222"\nmax_payload: 2097152\n'
            f'jetstream {{ store_dir: "{self.folder}/jetstream" }}\n'
        )
        url = f"nats://{address}:4222"
        self._services.append(self._spawn("nats", [str(find_server()), "-c", str(settings)], HUB))
        while "Server is ready" not in (self.folder / "nats.err").read_text():
            if self._services[0].poll() is not None:
                raise RuntimeError(self.said())
            time.sleep(POLL_S)
        syncer = [*SKERRY, "syncer", "--nats", url, "--run", "wan", "--name", "syncer"]
        self._services.append(self._spawn("syncer", syncer, HUB))
        return url

    def _spawn(self, name: str, command: list[str], region: str = "") -> subprocess.Popen[bytes]:
        if self.regions:
            where: Region = self.regions[region or name]
            command = where.inside(["env", f"GLOO_SOCKET_IFNAME={DEVICE}", *command])
        out, err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        with out.open("wb") as said, err.open("wb") as failed:
            return subprocess.Popen(command, stdout=said, stderr=failed)

    def told(self) -> Told:
        """Return what was printed until now."""
        found = Told()
        for name in self.processes:
            ends, judged = list[float](), dict[int, float]()
            for line in (self.folder / f"{name}.out").read_text().splitlines():
                if not line.startswith("{"):
                    continue
                said = json.loads(line)
                if "at_s" in said:
                    ends.append(said["at_s"])
                elif "judged" in said:
                    judged[said["judged"]] = said["loss"]
            found.ends[name], found.judged[name] = ends, judged
            code = self.processes[name].poll()
            if code is not None:
                found.codes[name] = code
        return found

    def wait(self, trouble: Trouble | None = None) -> Told:
        """Return what was printed once all have ended, or one has failed without ``trouble``."""
        until_s, alone = time.monotonic() + LIMIT_S, trouble is None
        outs, begun, healed_s = [self.folder / f"{name}.out" for name in NAMES], False, 0.0
        while any(p.poll() is None for p in self.processes.values()):
            if time.monotonic() > until_s:
                raise TimeoutError(self.said())
            if alone and any(process.poll() for process in self.processes.values()):
                break
            if not begun and all('"ready"' in path.read_text() for path in outs):
                (self.folder / GO).touch()
                begun = True
            if trouble and self.told().steps() >= trouble.at_step:
                healed_s = time.monotonic() + trouble.cut_s
                self._befall(trouble)
                trouble = None
            if healed_s and self.regions and time.monotonic() > healed_s:
                for region in self.regions.all:
                    region.cut = False
            time.sleep(POLL_S)
        return self.told()

    def _befall(self, trouble: Trouble) -> None:
        if trouble.cut and self.regions:
            self.regions[trouble.cut].cut = True
        if trouble.kill:
            self.processes[trouble.kill].kill()

    def said(self) -> str:
        """Return the end of what each process has written as errors."""
        texts = [(path.name, path.read_text()[-800:]) for path in self.folder.glob("*.err")]
        return "\n".join(f"{name}: {text}" for name, text in texts if text)

    def end(self) -> None:
        """End what still runs."""
        for process in [*self.processes.values(), *self._services]:
            process.send_signal(signal.SIGKILL)
            process.wait()


def contest(
    how: str,
    sizes: Sizes,
    *,
    seed: int = 0,
    steps: int = 0,
    network: bool = True,
    trouble: Trouble | None = None,
    **more: Any,
) -> Told:
    """Run one contestant to its end, over links or without any."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not network:
            return _contest(Contestants(folder, None), how, sizes, seed, steps, trouble, more)
        with Regions(NAMES, sizes.link()) as regions:
            running = Contestants(folder, regions)
            told = _contest(running, how, sizes, seed, steps, trouble, more)
            for region in regions.all:
                told.up_mb[region.name] = region.up / 1e6
                told.down_mb[region.name] = region.down / 1e6
            return told


def _contest(
    running: Contestants,
    how: str,
    sizes: Sizes,
    seed: int,
    steps: int,
    trouble: Trouble | None,
    more: dict[str, Any],
) -> Told:
    try:
        running.start(how, sizes, seed, steps or sizes.steps, **more)
        told = running.wait(trouble)
        if trouble is None and any(told.codes.values()):
            raise RuntimeError(running.said())
        return told
    finally:
        running.end()


@dataclass(frozen=True, slots=True)
class Speed:
    """What a step of one contestant takes over links of one kind.

    ``up_mb`` and ``down_mb`` are what the busiest region's link carries for it.
    """

    how: str
    ratio: float
    rtt_ms: float
    step_s: float
    slowdown: float
    up_mb: float
    down_mb: float

    @classmethod
    def of(cls, how: str, sizes: Sizes, told: Told) -> Speed:
        step_s = told.step_s(H_STEPS if how in {"diloco", "skerry"} else 1)
        busiest = (max(told.up_mb.values()), max(told.down_mb.values()))
        up_mb, down_mb = (mb / told.steps() for mb in busiest)
        slowdown = step_s / sizes.step_s
        return cls(how, sizes.ratio, sizes.rtt_ms, step_s, slowdown, up_mb, down_mb)

    def line(self) -> str:
        return (
            f"| {self.ratio:g} | {self.rtt_ms:g} | {self.how} | {self.step_s:.2f} |"
            f" {self.slowdown:.1f} | {self.up_mb:.2f} | {self.down_mb:.2f} |"
        )


def speeds(sizes: Sizes, bucket_mb: float) -> list[Speed]:
    """Return what a step takes over these links, contestant by contestant."""
    found: list[Speed] = []
    few = {"ddp-f32": sizes.few, "ddp-fp16": sizes.few, "diloco": 2 * H_STEPS + 1}
    for how, steps in few.items():
        told = contest(how, sizes, steps=steps, bucket_mb=bucket_mb)
        found.append(Speed.of(how, sizes, told))
        print(found[-1].line(), flush=True)
    told = contest("skerry", replace(sizes, steps=12 * H_STEPS))
    found.append(Speed.of("skerry", sizes, told))
    print(found[-1].line(), flush=True)
    return found


def better_bucket_mb(sizes: Sizes) -> float:
    """Return the size of DDP's buckets with which a step takes less over these links."""
    took = {mb: contest("ddp-fp16", sizes, steps=4, bucket_mb=mb).step_s() for mb in BUCKETS_MB}
    return min(took, key=lambda mb: took[mb])


def when_reached(curve: dict[int, float], loss: float) -> int | None:
    """Return the first step from which the mean of three judgements is at most ``loss``."""
    steps = sorted(curve)
    for at in range(len(steps) - 2):
        if statistics.mean(curve[step] for step in steps[at : at + 3]) <= loss:
            return steps[at + 1]
    return None


@dataclass(frozen=True, slots=True)
class Race:
    """Time to equal loss: the one that Skerry ends with, which DDP has after ``ddp_steps``.

    Skerry's time counts from the first step of its first region, and its steps are that time.
    """

    seed: int
    loss: float
    skerry_steps: int
    skerry_s: float
    ddp_steps: int | None

    def factor(self, ddp_step_s: float) -> float | None:
        """Return how many times as long DDP takes to that loss."""
        return None if self.ddp_steps is None else self.ddp_steps * ddp_step_s / self.skerry_s


def race(sizes: Sizes, seed: int) -> Race:
    """Train with Skerry over the links, and with DDP without any, to the same loss."""
    told = contest("skerry", sizes, seed=seed)
    judged = told.judged[NAMES[-1]]
    last = sorted(judged)[-3:]
    loss, ends = statistics.mean(judged[step] for step in last), told.ends[NAMES[-1]]
    took_s = ends[last[1] - 1] - min(own[0] for own in told.ends.values()) + sizes.step_s
    ddp = contest("ddp-f32", sizes, seed=seed, network=False).judged[NAMES[-1]]
    return Race(seed, loss, round(took_s / sizes.step_s), took_s, when_reached(ddp, loss))


def troubles(sizes: Sizes) -> list[str]:
    """Cut one region off and kill another's process; say what became of the others."""
    middle, lines = Trouble(H_STEPS * 2, cut=NAMES[2], kill=NAMES[1]), list[str]()
    told = contest("skerry", sizes, trouble=middle)
    longest_s, ended = told.longest_s(but=(NAMES[1],)), told.codes.get(NAMES[-1]) == 0
    lines.append(
        f"skerry: {NAMES[2]} cut off for {middle.cut_s:g} s, {NAMES[1]} killed: the longest step of"
        f" the others {longest_s:.2f} s; the run {'ended' if ended else 'did not end'}"
    )
    cut = Trouble(3, cut=NAMES[2], cut_s=min(60.0, middle.cut_s))
    told = contest("ddp-fp16", sizes, steps=sizes.few, trouble=cut)
    after = f"the longest step {told.longest_s():.0f} s, exit codes {sorted(told.codes.values())}"
    lines.append(f"ddp-fp16: {NAMES[2]} cut off for {cut.cut_s:g} s: {after}")
    told = contest("ddp-fp16", sizes, steps=sizes.few, trouble=Trouble(3, kill=NAMES[1]))
    after = f"{told.steps()} of {sizes.few} steps, exit codes {sorted(told.codes.values())}"
    lines.append(f"ddp-fp16: {NAMES[1]} killed: {after}")
    return lines


def main() -> None:
    options = parser("Training over slow links, beside what others would run.")
    for name, value in asdict(Sizes()).items():
        options.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options.add_argument("--curve", action="store_true", help="also r = 10, 40 and 50, 150 ms")
    options.add_argument("--troubles", action="store_true", help="also cut a link, kill an island")
    chosen = options.parse_args()
    sizes = Sizes(**{name: getattr(chosen, name) for name in asdict(Sizes())})
    if lacks := missing():
        print(f"wan: not run, it needs {lacks}")
        return
    link = sizes.link()
    print(f"wan: {sizes.parameters:,} parameters, {link.mbit:.2f} Mbit/s at r = {sizes.ratio:g}")
    bucket_mb = better_bucket_mb(sizes)
    print(f"DDP with buckets of {bucket_mb:g} MB\n")
    print("| r | RTT, ms | | a step, s | of a step alone | MB up | MB down |")
    print("|---|---|---|---|---|---|---|")
    found = speeds(sizes, bucket_mb)
    more = [{"ratio": 10.0}, {"ratio": 40.0}, {"rtt_ms": 50.0}, {"rtt_ms": 150.0}]
    for change in more if chosen.curve else []:
        found += speeds(replace(sizes, **change), bucket_mb)
    here = {speed.how: speed for speed in found[:4]}
    races = [race(sizes, seed) for seed in range(sizes.seeds)]
    goals = list[Goal]()
    for how, goal in GOALS.items():
        ours = here["skerry"].step_s
        goals.append(Goal(f"a step of {how}", goal, here[how].step_s / ours, "of ours"))
    for one in races:
        factors = [one.factor(here[how].step_s) for how in GOALS]
        print(f"seed {one.seed}: loss {one.loss:.3f} after {one.skerry_steps} steps; DDP has it")
        print(f"  after {one.ddp_steps}: times as long as Skerry (f32, fp16): {factors}")
    factors = [factor for one in races if (factor := one.factor(here["ddp-f32"].step_s))]
    if factors:
        goals.append(Goal("time to equal loss, f32", 15.0, statistics.median(factors), "of ours"))
    for line in troubles(sizes) if chosen.troubles else []:
        print(line)
    write("wan", [asdict(row) for row in (*found, *races)], goals, chosen.json)


if __name__ == "__main__":
    main()
