"""Settings that are each in bounds but contradict each other.

Every sentence begins with the dotted path of its setting.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import xxhash

from skerry import code, folders
from skerry.algorithm.presets import INNERS, MERGES, OUTERS
from skerry.errors import ConfigError, CorpusError
from skerry.settings.local import LocalSettings, NatsSettings, store_kinds
from skerry.settings.models import DataConfig, RunConfig
from skerry.settings.modes import RATES, clauses, turns_are_even
from skerry.settings.tree import split_assignment

BROKERS = ("nats", "tls", "ws", "wss")
TOKENIZER = "tokenizer.json"
CODE_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "model.factory": ("",),
    "data.factory": ("",),
    "train.inner": INNERS,
    "sync.merge": MERGES,
    "outer.preset": OUTERS,
}
"""Settings that may name a function as ``module:function``, and the other values of each."""


def tokenizer_digest(folder: Path) -> str:
    """Return the hash of a folder's tokenizer, 32 hexadecimal digits; ConfigError without one."""
    try:
        return xxhash.xxh3_128_hexdigest((folder / TOKENIZER).read_bytes())
    except OSError as error:
        msg = f"{folder / TOKENIZER} cannot be read ({error.strerror}): name a tokenizer's folder."
        raise ConfigError(msg, path="tokenizer") from error


def refuse_tokenizer(folder: Path, wanted: str) -> None:
    """Raise CorpusError if a folder's tokenizer has another digest than ``wanted``; "" fits any."""
    if wanted and (found := tokenizer_digest(folder)) != wanted:
        msg = (
            f"The tokenizer of {folder} is {found}, and this run's learners have {wanted}: name"
            " the folder of that one."
        )
        raise CorpusError(msg, path="tokenizer")


def check_run(run: RunConfig) -> None:
    """Raise ConfigError if two settings of a run contradict each other."""
    parts = _of_code, _of_mode, _of_sync, _of_data, _of_tables
    for sentence in chain.from_iterable(part(run) for part in parts):
        raise ConfigError(sentence, path=sentence.partition(" ")[0])


def remark_on_rate(run: RunConfig) -> str:
    """Return a warning about a learning rate that was never measured, or an empty text."""
    least, most = RATES.get(run.train.inner, (0.0, math.inf))
    model, rate = run.model, run.train.lr
    begun = model.path or model.weights or model.factory or model.lora_rank or model.preset == "own"
    if begun or least <= rate <= most:
        return ""
    return (
        f"train.lr is {rate:g}: with {run.train.inner} only {least:g} to {most:g} were measured, "
        "by small models from scratch (docs/quality.md)."
    )


def check_local(local: LocalSettings) -> None:
    """Raise ConfigError if a machine's settings contradict each other."""
    for sentence in chain(_of_addresses(local), _of_nats(local.nats)):
        raise ConfigError(sentence, path=sentence.partition(" ")[0])


def refuse_code(run: RunConfig) -> None:
    """Raise CodeRefused if a run names code that this machine does not allow."""
    for path, value in named_code(run):
        code.refuse(value, path)


def refuse_data(data: DataConfig, by: str = "data.paths") -> None:
    """Raise ConfigError if a run names text that this machine's own settings do not allow.

    ``by`` is the option that names a user's own text instead, for the error message.
    """
    words_by = "--tokenizer" if by == "--text" else "data.tokenizer_folder"
    for setting, names, what, option in (
        ("paths", data.paths, "text", by),
        ("tokenizer_folder", (data.tokenizer_folder,), "tokenizer", words_by),
    ):
        for name in filter(None, names):
            if not folders.is_allowed(name):
                msg = (
                    f"The run's data.{setting} is {name}, which this machine does not offer: name"
                    f" your own {what} with {option}, or if you trust the run, add"
                    f" --set allow_data={shlex.quote(name)}."
                )
                raise ConfigError(msg, path=f"data.{setting}")


def refuse_run_settings(sets: Sequence[str], *but: str) -> None:
    """Raise ConfigError for a ``--set`` of a setting that a checkpoint brings with it.

    Allowed are ``model.path``, a machine's own copy of frozen weights, and the paths in ``but``.
    """
    for keys, _ in map(split_assignment, sets):
        path = ".".join(keys)
        if keys[0] in RunConfig.model_fields and path not in {"model.path", *but}:
            msg = f"{path} would change nothing here: the checkpoint brings its own, leave it out."
            raise ConfigError(msg, path=path)


def permissions(run: RunConfig) -> str:
    """Return the options by which a machine allows the text and the code that a run names."""
    modules = [code.module_of(name) for _, name in named_code(run) if name not in code.DOCUMENTED]
    named = {"allow_data": [*run.data.paths, run.data.tokenizer_folder], "allow_code": modules}
    lists = {setting: ",".join(dict.fromkeys(filter(None, of))) for setting, of in named.items()}
    return "".join(
        f" --set {shlex.quote(f'{setting}={of}')}" for setting, of in lists.items() if of
    )


def named_code(run: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield path and value of every setting that may name a user's own function."""
    for path in CODE_SETTINGS:
        table, _, name = path.partition(".")
        yield path, getattr(getattr(run, table), name)


def is_address(url: str, schemes: Container[str]) -> bool:
    """Return True for an address with one of these schemes, a host and no invalid port."""
    try:
        parts = urlsplit(url.strip())
        return parts.scheme in schemes and bool(parts.netloc) and parts.port != 0
    except ValueError:  # an invalid port, or half an IPv6 address
        return False


def masked_url(url: str) -> str:
    """Return an address, or each of several with commas, without its password or token."""
    if "," in url:
        return ",".join(map(masked_url, url.split(",")))
    credentials, at, rest = url.rpartition("@")
    if not at:
        return url
    scheme, mark, user = credentials.rpartition("://")
    name, colon, _ = user.partition(":")
    return f"{scheme}{mark}{f'{name}:***' if colon else '***'}@{rest}"


def refuse_secret(url: str, otherwise: str = ", or set SKERRY_NATS__URL") -> None:
    """Raise ConfigError for an address with a password or token on a command line."""
    if "@" in url:
        msg = (
            f"nats.url is {masked_url(url)} on the command line, which every user of this machine "
            f"can list: name a file by nats.password_file or nats.credentials{otherwise}."
        )
        raise ConfigError(msg, path="nats.url")


def _of_code(run: RunConfig) -> Iterator[str]:
    for path, value in named_code(run):
        known = CODE_SETTINGS[path]
        if value not in known and not code.module_of(value):
            names = f"{', '.join(known)}, or " if any(known) else ""
            yield f'{path} is "{value}", but it must be {names}module:function.'


def _of_mode(run: RunConfig) -> Iterator[str]:
    for clause in clauses(run.mode, run.sync.learners):
        table, _, name = clause.path.partition(".")
        value: object = getattr(getattr(run, table), name)
        if not clause.holds(value):
            better = "leave it out"
            if clause.value is not None:
                better += f" or set {clause.path}={clause.value}"
            yield (
                f'{clause.path} is {json.dumps(value)} but mode is "{run.mode}", {clause.because}: '
                f"{better}."
            )
    sync = run.sync
    if not turns_are_even(run.mode, sync.h_steps, sync.fragments):
        yield (
            f'sync.fragments is {sync.fragments} but mode is "{run.mode}" and sync.h_steps is '
            f"{sync.h_steps}: where fragments take turns evenly, one divides the other; set one to "
            "a multiple of the other."
        )
    if run.mode != "data-parallel" and run.train.inner == "gradient":
        yield (
            f'train.inner is "gradient" but mode is "{run.mode}": bare gradients are for '
            "mode=data-parallel; leave it out."
        )


def _of_sync(run: RunConfig) -> Iterator[str]:
    sync, liveness = run.sync, run.liveness
    if sync.quorum > sync.learners:
        yield (
            f"sync.quorum is {sync.quorum} but sync.learners is {sync.learners}: no round could "
            f"ever close; set sync.quorum to at most {sync.learners}."
        )
    if not sync.overlap_steps and sync.quorum < sync.learners:
        yield (
            f"sync.quorum is {sync.quorum} but sync.overlap_steps is 0 and sync.learners is "
            f"{sync.learners}: learners that stop for a round must all be waited for; set "
            f"sync.quorum={sync.learners}, or overlap_steps to at least 1."
        )
    if sync.overlap_steps >= sync.h_steps:
        yield (
            f"sync.overlap_steps is {sync.overlap_steps} but sync.h_steps is {sync.h_steps}: "
            "a fragment would be due again before it is adopted; set overlap_steps below h_steps, "
            f"or h_steps to at least {sync.overlap_steps + 1}."
        )
    if sync.shards > sync.fragments:
        yield (
            f"sync.shards is {sync.shards} but sync.fragments is {sync.fragments}: a shard without "
            f"a fragment has nothing to do; set sync.shards to at most {sync.fragments}, or "
            f"sync.fragments to at least {sync.shards}."
        )
    if liveness.gone_phi <= liveness.suspect_phi:
        yield (
            f"liveness.gone_phi is {liveness.gone_phi} but liveness.suspect_phi is "
            f"{liveness.suspect_phi}: a learner is suspect before it is gone; set gone_phi higher."
        )
    least = sync.learners * sync.chunk_bytes
    if run.log.window_bytes < least:
        yield (
            f"log.window_bytes is {run.log.window_bytes} but {sync.learners} learners send chunks "
            f"of {sync.chunk_bytes} bytes: set it to at least {least}."
        )


def _of_data(run: RunConfig) -> Iterator[str]:
    data, train = run.data, run.train
    if data.source != "stdlib" and not data.paths:
        yield (
            f'data.paths is empty but data.source is "{data.source}": name the files or folders '
            "to train on."
        )
    if data.weights and (len(data.weights) != len(data.paths) or min(data.weights) <= 0):
        yield (
            f"data.weights is {list(data.weights)} but data.paths names {len(data.paths)}: give "
            "each a weight above 0."
        )
    if data.batch % train.accumulate:
        yield (
            f"train.accumulate is {train.accumulate} but data.batch is {data.batch}: a step takes "
            "its batch in equal parts; choose a divisor."
        )
    if data.factory and (data.paths or data.source != "stdlib"):
        yield (
            f"data.factory is {data.factory!r} but data.source and data.paths name text, too: "
            "leave one of them out."
        )
    if data.options and not data.factory:
        yield "data.options is set but data.factory is empty: it is for a dataset of your own."
    if data.tokenizer_folder and not data.factory and data.source != "text":
        yield (
            f'data.tokenizer_folder is set but data.source is "{data.source}", which is not '
            'tokenised: set data.source to "text".'
        )
    if data.source == "stdlib" and data.paths:
        yield (
            'data.paths is set but data.source is "stdlib", which reads no paths: set data.source '
            'to "text", "tokens" or "prepared".'
        )


def _of_tables(run: RunConfig) -> Iterator[str]:
    model, train, outer = run.model, run.train, run.outer
    heads, width, kv_heads = model.heads, model.d_model, model.kv_heads
    if heads is not None and width is not None and width % heads:
        yield f"model.heads is {heads} but model.d_model is {width}: heads must divide d_model."
    if heads is not None and kv_heads is not None and heads % kv_heads:
        yield f"model.kv_heads is {kv_heads} but model.heads is {heads}: it must divide heads."
    if model.options and not model.factory:
        yield "model.options is set but model.factory is empty: it is for a model of your own."
    if train.schedule == "warmup-stable-decay" and train.warmup + train.decay > 1:
        yield (
            f"train.decay is {train.decay} but train.warmup is {train.warmup}: together they are "
            f"more than the run; set train.decay to at most {1 - train.warmup:g}."
        )
    if outer.preset == "direct" and outer.momentum:
        yield (
            f'outer.momentum is {outer.momentum} but outer.preset is "direct", which has none: '
            'remove it or set outer.preset to "nesterov".'
        )
    if outer.preset == "adamw" and train.inner != "gradient":
        yield (
            f'outer.preset is "adamw" but mode is "{run.mode}", whose learners run AdamW '
            "themselves: set mode=data-parallel, or another outer.preset."
        )


def _of_addresses(local: LocalSettings) -> Iterator[str]:
    telemetry, web = local.telemetry, ("http", "https")
    otlp = "http://127.0.0.1:4318 (OTLP over http/protobuf)"
    monitoring = "http://127.0.0.1:8222 (`http: ...` in the broker's config)"
    buckets = f"{' or '.join(f'{kind}://bucket/prefix' for kind in store_kinds())}, without keys"
    rules = [
        ("nats.url", local.nats.url.split(","), BROKERS, "nats://host:4222"),
        ("store.url", [local.store.url], store_kinds(), buckets),
        ("store.endpoint", [local.store.endpoint], web, "https://host:443"),
        ("telemetry.endpoint", [telemetry.endpoint], web, otlp),
        ("telemetry.traces_endpoint", [telemetry.traces_endpoint], web, otlp),
        ("telemetry.metrics_endpoint", [telemetry.metrics_endpoint], web, otlp),
        ("telemetry.logs_endpoint", [telemetry.logs_endpoint], web, otlp),
        ("metrics.broker", local.metrics.broker_urls, web, monitoring),
    ]
    for path, urls, schemes, example in rules:
        for url in filter(None, urls):
            has_keys = path == "store.url" and "@" in url
            if not is_address(url, schemes) or has_keys:
                yield f'{path} is "{masked_url(url)}", but it must look like {example}.'


def _of_nats(nats: NatsSettings) -> Iterator[str]:
    if not nats.url:
        yield "nats.url is empty: give the address of a broker, such as nats://host:4222."
    if nats.password_file is not None and not nats.user:
        yield f"nats.user is empty but nats.password_file is {nats.password_file}: set both."
    if nats.credentials is not None and nats.user:
        yield "nats.credentials and nats.user are both set: remove one of them."
    if nats.key_file is not None and nats.cert_file is None:
        yield f"nats.key_file is {nats.key_file} but nats.cert_file is empty: set both."
