"""Settings: what each source may say, who wins, and the sentence for what is wrong."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from skerry.errors import ConfigError
from skerry.settings.loading import (
    child_environment,
    decided,
    differences,
    load,
    masked,
    run_config_from_json,
    to_json,
    to_toml,
)
from skerry.settings.models import RunConfig, Settings
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


def test_defaults_hold_together() -> None:
    assert resolve() == Settings()


def test_tables_of_one_file_reach_the_run_and_the_machine(tmp_path: Path) -> None:
    path = written(tmp_path, 'log_level = "debug"\n[sync]\nh_steps = 8\n[health]\nport = 1234\n')
    settings = load(path, (), {})
    assert settings.run.sync.h_steps == 8
    assert settings.local.health.port == 1234
    assert settings.local.log_level == "debug"


def test_where_a_learner_keeps_its_state_belongs_to_the_machine() -> None:
    settings = resolve("learner.save_every_s=5", SKERRY_LEARNER__PATH="/fast/disk")
    assert settings.local.learner.path == Path("/fast/disk")
    assert settings.local.learner.save_every_s == 5.0
    assert "learner" not in json.loads(to_json(settings.run))


def test_later_sources_win(tmp_path: Path) -> None:
    path = written(tmp_path, "[sync]\nh_steps = 8\nfragments = 3\noverlap_steps = 1\n")
    environ = {"SKERRY_SYNC__H_STEPS": "9", "SKERRY_SYNC__FRAGMENTS": "4"}
    sync = load(path, ["sync.h_steps=10"], environ).run.sync
    assert (sync.h_steps, sync.fragments, sync.overlap_steps) == (10, 4, 1)


def test_the_last_of_two_equal_sets_wins() -> None:
    assert resolve("sync.h_steps=8", "sync.h_steps=9").run.sync.h_steps == 9


def test_top_level_environment_variables_are_settings() -> None:
    assert resolve(SKERRY_LOG_LEVEL="warning").local.log_level == "warning"


def test_control_variables_are_no_settings() -> None:
    assert resolve(SKERRY_NATS_SERVER="/opt/nats-server") == Settings()


def test_variables_of_others_are_left_alone() -> None:
    assert resolve(SKERRYX="1", PATH="/bin") == Settings()


def test_opentelemetrys_own_variables_are_defaults(tmp_path: Path) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"}
    found = resolve(**environ).local.telemetry
    assert found.traces_url == "http://collector:4318/v1/traces"
    assert found.metrics_url == "http://collector:4318/v1/metrics"
    ours = load(written(tmp_path, '[telemetry]\nendpoint = ""\n'), (), environ).local.telemetry
    assert (ours.traces_url, ours.metrics_url) == ("", "")


def test_a_signal_may_have_an_address_of_its_own() -> None:
    environ = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://mlflow:5000/v1/traces"}
    found = resolve("telemetry.endpoint=http://collector:4318", **environ).local.telemetry
    assert found.traces_url == "http://mlflow:5000/v1/traces"
    assert found.metrics_url == "http://collector:4318/v1/metrics"


def test_a_signal_can_be_switched_off() -> None:
    found = resolve("telemetry.endpoint=http://c:4318", "telemetry.metrics=false").local.telemetry
    assert (found.traces_url != "", found.metrics_url) == (True, "")


def test_opentelemetrys_switch_switches_its_variables_off() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "True"}
    assert resolve(**environ) == Settings()


@pytest.mark.parametrize(
    ("assignment", "nearest"),
    [
        ("sync.h_step=3", "sync.h_steps"),
        ("h_steps=3", "sync.h_steps"),
        ("snyc.h_steps=3", "sync.h_steps"),
        ("loglevel=info", "log_level"),
        ("train.learning_rat=1", ""),
        ("nats.port=3", ""),
    ],
)
def test_unknown_key_names_the_nearest(assignment: str, nearest: str) -> None:
    error = refusal(assignment)
    assert error.path == assignment.partition("=")[0]
    assert error.nearest == nearest
    assert error.path in str(error)
    assert nearest in str(error)


def test_unknown_key_without_a_neighbour_lists_its_table() -> None:
    assert "outer.preset, outer.lr, outer.momentum" in str(refusal("outer.zzz=1"))


def test_unknown_table_lists_the_tables() -> None:
    assert "checkpoint, data, " in str(refusal("qqq.x=1"))


def test_unknown_environment_variable_is_named() -> None:
    error = refusal(SKERRY_SYNC_H_STEPS="3")
    assert "SKERRY_SYNC_H_STEPS" in str(error)
    assert error.nearest == "sync.h_steps"


def test_unknown_key_in_a_file_names_the_file(tmp_path: Path) -> None:
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
        ("learner.save_every_s=-1", "is -1, but it must be at least 0.0."),
        ("train.inner_max_age_steps=-1", "is -1, but it must be at least 0."),
        ("train.rewarm_steps=0.5", "is 0.5, but it must be a whole number."),
        ("sync.h_steps=true", "is true, but it must be a whole number."),
        ("sync.h_steps=2.5", "is 2.5, but it must be a whole number."),
        ("sync.h_steps=many", 'is "many", but it must be a whole number.'),
        ("train.lr=inf", "but it must be a finite number."),
        ("train.lr=nan", "but it must be a finite number."),
        ("sync.merge=mean", 'is "mean", but it must be average, rda, or module:function.'),
        ("sync.adoption=mix", "must be one of 'overwrite', 'blend' or 'rebase'."),
        ("sync.global_scheme=e3m0", "must be one of 'f32', 'bf16', 'int8' or 'int4'."),
        ("data.paths=src", 'is "src", but it must be a list such as ["a", "b"].'),
        ("sync=3", "sync (from --set) is a table of settings: give it as [sync]."),
    ],
)
def test_wrong_value_names_path_value_and_bound(assignment: str, sentence: str) -> None:
    error = refusal(assignment)
    assert sentence in str(error)
    assert error.path == assignment.partition("=")[0]


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["sync.quorum=3"], "sync.quorum is 3 but sync.learners is 2: "),
        (["sync.overlap_steps=24"], "sync.overlap_steps is 24 but sync.h_steps is 24: "),
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
        (["nats.url=localhost"], 'nats.url is "localhost", but it must look like '),
        (["telemetry.endpoint=collector:4318"], 'telemetry.endpoint is "collector:4318", but it'),
        (["nats.password_file=/x"], "nats.user is empty but nats.password_file is /x"),
        (["nats.credentials=/x", "nats.user=me"], "nats.credentials and nats.user are both"),
    ],
)
def test_contradictions_name_both_settings(sets: list[str], sentence: str) -> None:
    error = refusal(*sets)
    assert str(error).startswith(sentence)
    assert error.path == sentence.partition(" ")[0]


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file"):
        load(tmp_path / "none.toml", (), {})


def test_a_folder_is_no_config_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path, (), {})


def test_invalid_toml_names_line_and_column(tmp_path: Path) -> None:
    path = written(tmp_path, "[sync]\nh_steps = \n")
    with pytest.raises(ConfigError, match=r"line 2, column \d+"):
        load(path, (), {})


def test_binary_config_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load(path, (), {})


@pytest.mark.parametrize("text", ["sync.h_steps", "=3", ".x=3", "sync..x=3", ""])
def test_set_without_path_and_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--set table\.key=value"):
        split_assignment(text)


def test_text_settings_take_plain_text() -> None:
    assert resolve("nats.user=123").local.nats.user == "123"
    assert resolve('nats.user="a b"').local.nats.user == "a b"
    assert resolve("store.path=out/x").local.store.path == Path("out/x")


def test_an_empty_value_unsets_an_optional_setting(tmp_path: Path) -> None:
    path = written(tmp_path, "[outer]\nlr = 0.5\n")
    assert load(path, ["outer.lr="], {}).run.outer.lr is None


def test_options_of_a_model_of_ones_own_keep_their_types() -> None:
    model = resolve("model.factory=a:b", "model.options.n=3", "model.options.on=true").run.model
    assert model.options == {"n": 3, "on": True}


@given(st.integers())
def test_numbers_are_read_as_numbers(number: int) -> None:
    assert parse_value(str(number), int) == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_survive_set(number: float) -> None:
    parsed = parse_value(repr(number), float)
    assert isinstance(parsed, float)
    assert parsed == number


@given(st.text(alphabet=string.ascii_letters + string.digits + " _-./:=,[]{}#"))
def test_text_settings_keep_any_text(text: str) -> None:
    assert parse_value(text, str) == text


@given(st.text())
def test_reading_a_value_never_fails(text: str) -> None:
    parse_value(text, int)
    parse_value(text, str)
    parse_value(text, float | None)


@st.composite
def resolved(draw: st.DrawFn) -> Settings:
    """Return settings that a file may hold: numbers, any character, lists and none."""
    h_steps = draw(st.integers(2, 500))
    learners = draw(st.integers(1, 64))
    factory = draw(st.sampled_from(["", "mine.model:make"]))
    options = st.dictionaries(
        st.text(min_size=1, max_size=5), st.integers(-9, 9) | st.text(max_size=5) | st.booleans()
    )
    run = RunConfig.model_validate(
        {
            "sync": {"h_steps": h_steps, "overlap_steps": h_steps - 1, "learners": learners},
            "train": {
                "lr": draw(st.floats(1e-9, 1e3)),
                "duration_s": draw(st.none() | st.just(3.5)),
            },
            "model": {"factory": factory, "options": draw(options) if factory else {}},
            "data": {"source": "text", "paths": draw(st.lists(st.text(), min_size=1, max_size=3))},
        }
    )
    return Settings(run=run)


@hypothesis_settings(max_examples=60)
@given(resolved())
def test_a_written_file_loads_to_equal_settings(settings: Settings) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.toml")
        path.write_text(to_toml(settings), encoding="utf-8")
        assert load(path, (), {}) == settings


@hypothesis_settings(max_examples=60)
@given(resolved())
def test_a_run_config_survives_json(settings: Settings) -> None:
    config = decided(settings.run)
    assert run_config_from_json(to_json(config)) == config


def test_equal_configs_give_equal_json() -> None:
    assert to_json(resolve("sync.h_steps=8").run) == to_json(resolve("sync.h_steps=8").run)


@pytest.mark.parametrize("text", ["", "3", "[]", "{", '{"sync": {"h_step": 3}}'])
def test_a_damaged_run_record_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        run_config_from_json(text)


def test_a_run_record_is_checked_for_contradictions() -> None:
    with pytest.raises(ConfigError, match=r"sync\.quorum is 3"):
        run_config_from_json(json.dumps({"sync": {"quorum": 3}}))


def test_differences_are_dotted_paths() -> None:
    theirs = resolve("sync.h_steps=8", "train.lr=1", "model.factory=a:b").run
    assert differences(RunConfig(), theirs) == ("model.factory", "sync.h_steps", "train.lr")


def test_equal_configs_do_not_differ() -> None:
    assert differences(RunConfig(), RunConfig()) == ()


def test_passwords_in_addresses_are_masked() -> None:
    shown = masked(resolve("nats.url=nats://me:secret@a:4222,nats://token@b:4222"))
    assert shown["nats.url"] == "nats://me:***@a:4222,nats://***@b:4222"
    assert shown["sync.h_steps"] == 24
    shown |= masked(resolve("telemetry.endpoint=https://me:secret@otel.example"))
    assert shown["telemetry.endpoint"] == "https://me:***@otel.example"
    assert "secret" not in str(shown)


def test_children_inherit_everything_but_settings() -> None:
    environ = {"PATH": "/bin", "SKERRY_SYNC__H_STEPS": "8", "SKERRY_NATS_SERVER": "x", "A": "mine"}
    assert child_environment({"A": "default", "B": "2"}, environ) == {
        "PATH": "/bin",
        "SKERRY_NATS_SERVER": "x",
        "A": "mine",
        "B": "2",
    }


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
    config = decided(load(None, sets, {}).run)
    assert (config.outer.preset, config.outer.lr, config.outer.momentum) == spelt_out
    assert decided(config) == config
    assert run_config_from_json(to_json(config)) == config


@pytest.mark.parametrize(
    ("h_steps", "formerly"), [(100, ("direct", 1.0, None)), (257, ("nesterov", 0.7, 0.9))]
)
def test_auto_in_an_older_record_is_what_it_was(
    h_steps: int, formerly: tuple[str, float, float | None]
) -> None:
    config = run_config_from_json(to_json(load(None, [f"sync.h_steps={h_steps}"], {}).run))
    assert (config.outer.preset, config.outer.lr, config.outer.momentum) == formerly
