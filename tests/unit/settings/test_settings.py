"""Settings: what each source may say, who wins, and the sentence for what is wrong."""

from __future__ import annotations

import json
import string
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from skerry.algorithm.presets import MERGES
from skerry.errors import ConfigError
from skerry.settings.checks import masked_url, permissions
from skerry.settings.loading import (
    child_environment,
    decided,
    differences,
    load,
    run_config_from_json,
    to_json,
    to_toml,
)
from skerry.settings.local import Settings
from skerry.settings.models import RunConfig
from skerry.settings.tree import parse_value, split_assignment


def resolve(*sets: str, **environ: str) -> Settings:
    return load(None, sets, environ)


def refusal(*sets: str, **environ: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(*sets, **environ)
    assert str(caught.value).count("\n") == 0
    return caught.value


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_tables_of_one_file_reach_the_run_and_the_machine(tmp_path: Path) -> None:
    path = written(tmp_path, 'log_level = "debug"\n[sync]\nh_steps = 8\n[health]\nport = 1234\n')
    settings = load(path, (), {})
    assert settings.run.sync.h_steps == 8
    assert (settings.local.health.port, settings.local.log_level) == (1234, "debug")
    assert "health" not in json.loads(to_json(settings.run))


def test_later_sources_win(tmp_path: Path) -> None:
    path = written(tmp_path, "[sync]\nh_steps = 8\nfragments = 3\noverlap_steps = 1\n")
    environ = {"SKERRY_SYNC__H_STEPS": "9", "SKERRY_SYNC__FRAGMENTS": "4"}
    sync = load(path, ["sync.h_steps=12", "sync.h_steps=10"], environ).run.sync
    assert (sync.h_steps, sync.fragments, sync.overlap_steps) == (10, 4, 1)


def test_variables_of_ours_are_settings_and_those_of_others_are_left_alone() -> None:
    assert resolve(SKERRY_LOG_LEVEL="warning").local.log_level == "warning"
    assert resolve(SKERRY_LEARNER__PATH="/disk").local.learner.path == Path("/disk")
    assert resolve(SKERRY_NATS_SERVER="/opt/nats-server", SKERRYX="1", PATH="/bin") == Settings()


def test_opentelemetrys_own_variables_are_defaults(tmp_path: Path) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}
    found = resolve(**environ).local.telemetry
    assert found.traces_url == "http://collector:4318/v1/traces"
    assert found.metrics_url == "http://collector:4318/v1/metrics"
    ours = load(written(tmp_path, '[telemetry]\nendpoint = ""\n'), (), environ).local.telemetry
    assert (ours.traces_url, ours.metrics_url) == ("", "")
    assert resolve(**environ, OTEL_SDK_DISABLED="True") == Settings()


def test_a_signal_may_have_an_address_of_its_own_or_the_only_one() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://mlflow:5000/v1/traces"}
    found = resolve("telemetry.endpoint=http://collector:4318", **environ).local.telemetry
    assert found.traces_url == "http://mlflow:5000/v1/traces"
    assert found.metrics_url == "http://collector:4318/v1/metrics"
    assert resolve(**environ).local.telemetry.metrics_url == ""


@pytest.mark.parametrize(
    ("assignment", "nearest", "hint"),
    [
        ("sync.h_step=3", "sync.h_steps", "did you mean sync.h_steps?"),
        ("h_steps=3", "sync.h_steps", "did you mean"),
        ("snyc.h_steps=3", "sync.h_steps", "did you mean"),
        ("sync.mode=diloco", "mode", "did you mean mode?"),
        ("loglevel=info", "log_level", "did you mean log_level?"),
        ("train.learning_rat=1", "", "there are train.inner, train.steps"),
        ("nats.port=3", "", "there are nats.url"),
        ("outer.zzz=1", "", "outer.preset, outer.lr, outer.momentum"),
        ("qqq.x=1", "", "checkpoint, contain, data, "),
    ],
)
def test_unknown_key_names_the_nearest_or_what_there_is(
    assignment: str, nearest: str, hint: str
) -> None:
    error = refusal(assignment)
    assert (error.path, error.nearest) == (assignment.partition("=")[0], nearest)
    assert str(error).startswith(f"{error.path} (from --set) is not a setting: ")
    assert hint in str(error)


def test_unknown_key_of_the_environment_or_a_file_names_its_source(tmp_path: Path) -> None:
    error = refusal(SKERRY_SYNC_H_STEPS="3")
    assert "SKERRY_SYNC_H_STEPS" in str(error)
    assert error.nearest == "sync.h_steps"
    path = written(tmp_path, "[sync]\nh_step = 8\n")
    with pytest.raises(ConfigError, match=r"sync\.h_step \(from .*run\.toml\).*sync\.h_steps"):
        load(path, (), {})


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        ("sync.h_steps=0", "sync.h_steps (from --set) is 0, but it must be at least 1."),
        ("train.lr=0", "train.lr (from --set) is 0, but it must be more than 0.0."),
        ("train.b1=1", "train.b1 (from --set) is 1, but it must be less than 1.0."),
        ("health.port=70000", "is 70000, but it must be at most 65535."),
        ("train.rewarm_steps=0.5", "is 0.5, but it must be a whole number."),
        ("train.seed=9223372036854775808", "but it must be less than 9223372036854775808."),
        ("data.seed=-9223372036854775809", "but it must be at least -9223372036854775808."),
        ("log.window_s=1e10", "is 10000000000.0, but it must be at most 9000000000.0."),
        ("sync.h_steps=true", "is true, but it must be a whole number."),
        ("sync.h_steps=many", 'is "many", but it must be a whole number.'),
        ("train.lr=inf", "but it must be a finite number."),
        ("train.lr=nan", "but it must be a finite number."),
        (
            "sync.merge=mean",
            f'is "mean", but it must be {", ".join(MERGES)}, or module:function.',
        ),
        ("sync.adoption=mix", "must be one of 'overwrite', 'blend' or 'rebase'."),
        ("sync.global_scheme=e3m0", "must be one of 'f32' or 'bf16'."),
        ("data.paths=3", 'is 3, but it must be a list such as ["a", "b"].'),
        ("sync=3", "sync (from --set) is a table of settings: give it as [sync]."),
    ],
)
def test_wrong_value_names_path_value_and_bound(assignment: str, sentence: str) -> None:
    error = refusal(assignment)
    assert sentence in str(error)
    assert error.path == assignment.partition("=")[0]


def test_a_file_may_begin_with_the_mark_that_windows_editors_write(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 7\n", encoding="utf-8-sig")
    assert load(path, (), {}).run.train.steps == 7


def test_a_machines_paths_may_begin_with_its_owners_home() -> None:
    sets = ["store.path=~/kept", "nats.credentials=~/keys/a.nk"]
    local = load(None, sets, {}).local
    assert local.store.path == Path.home() / "kept"
    assert local.nats.credentials == Path.home() / "keys/a.nk"


@pytest.mark.parametrize("value", ["my books, b.txt", '["my books", "b.txt"]'])
def test_a_list_of_texts_is_written_with_commas_or_as_toml(value: str) -> None:
    sets, environ = ["data.source=text", f"data.paths={value}"], {"SKERRY_ALLOW_DATA": value}
    read = load(None, sets, environ=environ)
    assert read.run.data.paths == read.local.allow_data == ("my books", "b.txt")


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["sync.quorum=3"], "sync.quorum is 3 but sync.learners is 2: "),
        (["sync.overlap_steps=24"], "sync.overlap_steps is 24 but sync.h_steps is 24: "),
        (["sync.shards=9"], "sync.shards is 9 but sync.fragments is 8: "),
        (["model.heads=3", "model.d_model=64"], "model.heads is 3 but model.d_model is 64: "),
        (["model.heads=4", "model.kv_heads=3"], "model.kv_heads is 3 but model.heads is 4: "),
        (["model.options.x=1"], "model.options is set but model.factory is empty: "),
        (["model.factory=mine"], 'model.factory is "mine", but it must be module:function.'),
        (["data.source=text"], 'data.paths is empty but data.source is "text": '),
        (['data.paths=["a"]'], 'data.paths is set but data.source is "stdlib"'),
        (["outer.preset=adagrad"], 'outer.preset is "adagrad", but it must be auto, '),
        (["outer.preset=direct", "outer.momentum=0.9"], "outer.momentum is 0.9 but "),
        (["liveness.gone_phi=2"], "liveness.gone_phi is 2.0 but liveness.suspect_phi is 3.0"),
        (["log.window_bytes=1048576", "sync.learners=9"], "log.window_bytes is 1048576 but 9"),
        (["train.accumulate=3"], "train.accumulate is 3 but data.batch is 8: "),
        (
            ["train.schedule=warmup-stable-decay", "train.warmup=0.5", "train.decay=0.6"],
            "train.decay is 0.6 but train.warmup is 0.5: ",
        ),
        (["nats.url=localhost"], 'nats.url is "localhost", but it must look like '),
        (["nats.url="], "nats.url is empty: "),
        (["telemetry.endpoint=collector:4318"], 'telemetry.endpoint is "collector:4318", but it'),
        (["metrics.broker=h:1,http://b"], 'metrics.broker is "h:1", but it must look like http'),
        (["nats.password_file=/x"], "nats.user is empty but nats.password_file is /x"),
        (["nats.credentials=/x", "nats.user=me"], "nats.credentials and nats.user are both"),
    ],
)
def test_contradictions_name_both_settings(sets: list[str], sentence: str) -> None:
    error = refusal(*sets)
    assert str(error).startswith(sentence)
    assert error.path == sentence.partition(" ")[0]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, r"run\.toml cannot be read: No such file"),
        ("", "Is a directory"),
        (b"[sync]\nh_steps = \n", r"line 2, column \d+"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_config_is_one_sentence(
    tmp_path: Path, content: bytes | str | None, sentence: str
) -> None:
    path = tmp_path / "run.toml"
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path if content == "" else path, (), {})


@pytest.mark.parametrize("text", ["sync.h_steps", "=3", ".x=3", "sync..x=3", ""])
def test_set_without_path_and_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--set table\.key=value"):
        split_assignment(text)


def test_text_settings_take_plain_text_and_options_keep_their_types() -> None:
    assert resolve("nats.user=123").local.nats.user == "123"
    assert resolve('nats.user="a b"').local.nats.user == "a b"
    assert resolve("store.path=out/x").local.store.path == Path("out/x")
    model = resolve("model.factory=a:b", "model.options.n=3", "model.options.on=true").run.model
    assert model.options == {"n": 3, "on": True}


def test_an_empty_value_unsets_an_optional_setting(tmp_path: Path) -> None:
    path = written(tmp_path, "[outer]\nlr = 0.5\n")
    assert load(path, ["outer.lr="], {}).run.outer.lr is None


@given(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())
def test_numbers_are_read_as_numbers_and_reading_never_fails(
    number: int, real: float, text: str
) -> None:
    assert parse_value(str(number), int) == number
    parsed = parse_value(repr(real), float)
    assert (type(parsed), parsed) == (float, real)
    for kind in (int, str, float | None):
        parse_value(text, kind)


@given(st.text(alphabet=string.ascii_letters + string.digits + " _-./:=,[]{}#"))
def test_text_settings_keep_any_text(text: str) -> None:
    assert parse_value(text, str) == text


@st.composite
def resolved(draw: st.DrawFn) -> Settings:
    """Return settings that a file may hold: numbers, any character, lists and none."""
    h_steps, learners = draw(st.integers(2, 500)), draw(st.integers(1, 64))
    factory = draw(st.sampled_from(["", "mine.model:make"]))
    options = st.dictionaries(
        st.text(min_size=1, max_size=5), st.integers(-9, 9) | st.text(max_size=5) | st.booleans()
    )
    lr, duration_s = draw(st.floats(1e-9, 1e3)), draw(st.none() | st.just(3.5))
    run: dict[str, Any] = {
        "sync": {"h_steps": h_steps, "overlap_steps": h_steps - 1, "learners": learners},
        "train": {"lr": lr, "duration_s": duration_s},
        "model": {"factory": factory, "options": draw(options) if factory else {}},
        "data": {"source": "text", "paths": draw(st.lists(st.text(), min_size=1, max_size=3))},
    }
    return Settings(run=RunConfig.model_validate(run))


@hypothesis_settings(max_examples=60)
@given(resolved())
def test_a_written_file_loads_to_equal_settings_and_a_run_survives_json(settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(to_toml(settings), encoding="utf-8")
        assert load(path, (), {}) == settings
    config = decided(settings.run)
    assert run_config_from_json(to_json(config)) == config


@pytest.mark.parametrize("text", ["", "3", "[]", "{", '{"sync": {"h_step": 3}}'])
def test_a_damaged_run_record_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        run_config_from_json(text)


def test_a_run_record_is_checked_for_contradictions() -> None:
    with pytest.raises(ConfigError, match=r"sync\.quorum is 3"):
        run_config_from_json(json.dumps({"sync": {"quorum": 3}}))


def test_differences_are_dotted_paths() -> None:
    theirs = resolve("sync.h_steps=8", "train.lr=1", "model.factory=a:b", "model.options.x=1").run
    paths = ("model.factory", "model.options", "sync.h_steps", "train.inner", "train.lr")
    assert differences(RunConfig(), theirs) == paths
    assert differences(RunConfig(), RunConfig()) == ()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://me:secret@a:4222", "nats://me:***@a:4222"),
        ("nats://token@b:4222", "nats://***@b:4222"),
        ("nats://me:secret@a,nats://me:secret@b", "nats://me:***@a,nats://me:***@b"),
        ("https://otel.example", "https://otel.example"),
    ],
)
def test_passwords_in_addresses_are_masked(url: str, shown: str) -> None:
    assert masked_url(url) == shown
    assert "secret" not in str(refusal(f"store.endpoint=x{url}"))


def test_permissions_are_for_the_text_and_the_code_that_a_run_names_and_no_more() -> None:
    assert permissions(RunConfig()) == ""
    data = {"source": "text", "paths": ["/my text/a", "/b"], "tokenizer_folder": "/words"}
    code = {"model": {"factory": "mine:build"}, "outer": {"preset": "optax:sgd"}}
    named = run_config_from_json(json.dumps({"data": data, **code}))
    assert permissions(named) == " --set 'allow_data=/my text/a,/b,/words' --set allow_code=mine"


def test_children_inherit_everything_but_settings() -> None:
    environ = {"PATH": "/bin", "SKERRY_SYNC__H_STEPS": "8", "SKERRY_NATS_SERVER": "x", "A": "mine"}
    kept = {"PATH": "/bin", "SKERRY_NATS_SERVER": "x", "A": "mine"}
    assert child_environment({"A": "default", "B": "2"}, environ) == kept | {"B": "2"}


@pytest.mark.parametrize(
    ("sets", "spelt_out"),
    [
        ([], ("direct", 1.0, None)),
        (["sync.h_steps=63"], ("direct", 1.0, None)),
        (["sync.h_steps=64"], ("nesterov", 0.7, 0.5)),
        (["outer.momentum=0.3"], ("nesterov", 1.0, 0.3)),
        (["sync.h_steps=64", "outer.momentum=0"], ("direct", 0.7, None)),
        (["sync.h_steps=64", "outer.lr=0.4"], ("nesterov", 0.4, 0.5)),
        (["outer.preset=nesterov"], ("nesterov", None, None)),
        (["outer.preset=direct"], ("direct", None, None)),
    ],
)
def test_a_run_keeps_the_outer_optimizer_that_auto_meant(
    sets: list[str], spelt_out: tuple[str, float | None, float | None]
) -> None:
    config = decided(resolve(*sets).run)
    assert (config.outer.preset, config.outer.lr, config.outer.momentum) == spelt_out
    assert decided(config) == config
    assert run_config_from_json(to_json(config)) == config
