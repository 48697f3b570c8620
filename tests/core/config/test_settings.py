"""Settings: which source wins, and what users read if something is wrong."""

import json
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import CliPositionalArg

from kvrelay.bench.command import SETTINGS as BENCH_SETTINGS
from kvrelay.cli.client import ChatSettings, CompleteSettings, StatusSettings
from kvrelay.cli.serve import ServeSettings
from kvrelay.core.config.fields import Placeholder, Verbatim, flag_of
from kvrelay.core.config.settings import ProcessSettings, load_settings
from kvrelay.node.settings import NodeSettings
from router.settings import RouterSettings

PROCESSES: tuple[type[ProcessSettings], ...] = (
    *(ServeSettings, NodeSettings, RouterSettings),
    *(CompleteSettings, ChatSettings, StatusSettings),
    *BENCH_SETTINGS.values(),
)


class SampleSettings(ProcessSettings):
    """Runs a sample process.

    A second paragraph.
    """

    model: CliPositionalArg[str] = Field(default="", description="Directory of the model.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on.")
    block_size: int = Field(default=16, gt=0, description="Tokens per block.")
    max_model_len: int | None = Field(default=None, gt=0, description="Longest sequence.")
    decode_nodes: tuple[str, ...] = Field(default=(), description="Addresses of decode nodes.")
    connector: tuple[str, ...] = Field(default=("redis",), description="How blocks move.")
    rates: tuple[float, ...] = Field(default=(0.5, 1.0), description="One after the other.")
    limits: Annotated[tuple[str, ...], Placeholder("NAME=MS")] = Field(default=(), description="What is too slow.")
    stop: Annotated[tuple[str, ...], Verbatim()] = Field(default=(), description="Where to stop.")
    wait: float = Field(default=1.0, ge=0, description="Seconds to wait.")
    dtype: Literal["auto", "bfloat16"] = Field(default="auto", description="Of the weights.")
    redis_url: SecretStr | None = Field(default=None, description="Where Redis is.")
    supervised: bool = Field(default=False, description="End with standard input.")


class DerivedSettings(SampleSettings):
    """Runs a sample process that has more to say."""

    own: int = Field(default=0, description="Of its own.")


def load(*argv: str) -> SampleSettings:
    return load_settings(SampleSettings, argv, prog="sample")


def failure(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        load(*argv)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 1\nblock-size: 1\nmax_model_len: 1\ndecode_nodes: [a:1, b:2]\n")
    return path


def test_what_is_not_given_has_its_default() -> None:
    settings = load("m")
    assert (settings.model, settings.port, settings.max_model_len, settings.decode_nodes) == ("m", 8000, None, ())


def test_flags_win_over_environment_over_file_over_defaults(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    monkeypatch.setenv("KVRELAY_PORT", "2")
    monkeypatch.setenv("KVRELAY_BLOCK_SIZE", "2")
    settings = load("m", "--port", "3", f"--config={config_file}")
    assert (settings.port, settings.block_size, settings.max_model_len, settings.dtype) == (3, 2, 1, "auto")


def test_the_environment_names_the_file(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    monkeypatch.setenv("KVRELAY_CONFIG", str(config_file))
    assert load("m").decode_nodes == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("client", "argv"),
    [(StatusSettings, []), (ChatSettings, []), (CompleteSettings, ["Once"]), (BENCH_SETTINGS["latency"], [])],
)
def test_a_client_leaves_the_file_of_the_environment_to_the_server(
    client: type[ProcessSettings],
    argv: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    config_file: Path,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("KVRELAY_CONFIG", str(config_file))
    own = tmp_path / "own.yaml"
    own.write_text("url: grpc://10.0.0.1:8001")
    assert load_settings(client, argv, prog="kvrelay").config is None
    assert "KVRELAY_CONFIG is not a setting of this process" in capsys.readouterr().err
    settings = load_settings(client, [*argv, "--config", str(own)], prog="kvrelay")
    assert str(settings.model_dump()["url"]).endswith("10.0.0.1:8001")


@pytest.mark.parametrize(("client", "argv"), [(CompleteSettings, ["Once"]), (BENCH_SETTINGS["latency"], [])])
def test_a_client_leaves_the_folder_of_the_model_to_the_server(
    client: type[ProcessSettings], argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_MODEL", "/models/tiny")
    assert load_settings(client, argv, prog="kvrelay").model_dump()["model"] == ""
    assert "KVRELAY_MODEL is not a setting of this process" in capsys.readouterr().err
    assert load_settings(client, [*argv, "--model", "tiny"], prog="kvrelay").model_dump()["model"] == "tiny"


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.__name__)
def test_help_names_the_variables_that_a_client_ignores(
    process: type[ProcessSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(process, ["--help"], prog="process")
    text = " ".join(capsys.readouterr().out.split())
    ignored = [name for name in ("config", "model") if process.is_client and name in process.model_fields]
    assert text.count("is for servers, is ignored.") == len(ignored)
    assert all(f" KVRELAY_{name.upper()}, which is for servers, is ignored." in text for name in ignored)


@pytest.mark.parametrize(
    "argv",
    [("--decode-nodes", "a:1,b:2"), ("--decode-nodes", "a:1", "--decode-nodes", "b:2"), ("--decode-nodes=a:1, b:2",)],
)
def test_a_list_is_one_flag_with_commas_or_several_flags(argv: tuple[str, ...]) -> None:
    assert load("m", *argv).decode_nodes == ("a:1", "b:2")


@pytest.mark.parametrize("text", ["\n", " a, b", ",", "[1]", "'", '"'])
def test_an_item_that_is_verbatim_stays_as_it_is(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    for content in ({"stop": text}, {"stop": [text]}):
        path.write_text(json.dumps(content))
        assert load("m", "--config", str(path)).stop == (text,)
    assert load("m", "--stop", text, f"--stop={text}").stop == (text, text)
    monkeypatch.setenv("KVRELAY_STOP", text)
    assert load("m").stop == (text,)


def test_arguments_lists_and_booleans_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MODEL": "m", "DECODE_NODES": "a:1,b:2", "SUPERVISED": "true", "DTYPE": ""}.items():
        monkeypatch.setenv(f"KVRELAY_{name}", value)
    settings = load()
    assert (settings.model, settings.decode_nodes, settings.supervised) == ("m", ("a:1", "b:2"), True)
    assert settings.dtype == "auto", "an empty variable is an unset one"


def test_settings_are_frozen() -> None:
    settings = load("m")
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1


def test_every_process_describes_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "usage: sample" in text
    assert "Runs a sample process.\n\nA second paragraph." in text
    for name, field in SampleSettings.model_fields.items():
        assert (field.description or "?").split()[0] in text
        assert name == "model" or flag_of(name) in text
    assert "(default: 16)" in text and "(default: redis)" in text and "(default: 0.5,1.0)" in text
    assert "--config FILE" in text and "--decode-nodes A,B" in text and "--stop TEXT" in text
    assert "--limits NAME=MS" in text
    assert "tuple[" not in text and "SecretStr" not in text
    assert "(default: None)" not in text and "(default: )" not in text, "says nothing"


def test_help_opens_with_what_is_a_process_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_settings(DerivedSettings, ["--help"], prog="derived")
    options = capsys.readouterr().out.split("options:")[1]
    assert options.index("--config") < options.index("--own") < options.index("--port") < options.index("--dtype")


def test_missing_argument_says_where_it_may_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    text = failure(capsys)
    assert "MODEL is missing: Directory of the model." in text
    assert "KVRELAY_MODEL" in text


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (("--port", "x"), "--port: Input should be a valid integer"),
        (("--port", "70000"), "less than or equal to 65535, got '70000'"),
        (("--dtype", "fp8"), "--dtype: Input should be 'auto' or 'bfloat16'"),
        (("--wait", "inf"), "--wait: Input should be a finite number, got 'inf'"),
        (("--wait", "nan"), "--wait: Input should be a finite number, got 'nan'"),
        (("--port",), "--port: expected one argument"),
        (("--redis-url", "-x"), "--redis-url: expected one argument, written --name=VALUE if it begins"),
        (("--prot", "3"), "did you mean --port?"),
        (("--block_siz=3",), "did you mean --block-size?"),
        (("--model", "m"), "MODEL is given without --model"),
        (("--modl",), "there is no setting '--modl'\n"),
        (("--conn", "ucx"), "there is no setting '--conn ucx'; did you mean --connector?"),
        (("--size", "3"), "did you mean --block-size?"),
        (("--my-block-size", "3"), "did you mean --block-size?"),
        (("--co", "x"), "did you mean --config or --connector?"),
        (("another",), "one argument too many: 'another'"),
        (("-5x",), "there is no setting '-5x'; write -- before a MODEL that begins with a dash\n"),
        (("--config", ""), "--config: names no file"),
    ],
)
def test_a_wrong_flag_is_named_with_its_problem(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], problem: str
) -> None:
    text = failure(capsys, "m", *argv)
    assert problem in text
    assert "Try `sample --help`." in text


def test_every_wrong_setting_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    text = failure(capsys, "m", "--port", "x", "--block-size", "0")
    assert "KVRELAY_PORT or `port:`" in text
    assert "KVRELAY_BLOCK_SIZE or `block_size:`" in text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("prot: 1", "there is no setting 'prot'; did you mean port?"),
        ("config: other.yaml", "there is no setting 'config'"),
        ("- port", "not a list"),
        ("port: [", "is not valid YAML at line 1, column 8"),
        ("port 1\nwait: 2", "a line is `name: value`, without tabs"),
        ("port: 1\nhost: \x01", "is not valid YAML: it has characters that are no text"),
        ("host: 2024-02-30", "a value looks like a date or a number, but is none"),
        ("port: 0b_", "if it is a text, write it in quotes"),
        ("port: 1\nwait: 2\nport: 3", "line 3 sets 'port' again, after line 1"),
        ("# mine\nblock-size: 8\nblock_size: 16", "line 3 sets 'block_size' again, after line 2"),
        ("port: x", "--port: Input should be a valid integer"),
        ("decode_nodes:", "--decode-nodes: Input should be a valid list, got None"),
        ("redis_url: 123456", "--redis-url: must be a text: write it in quotes\n"),
        ("redis_url: [redis://a, redis://b]", "--redis-url: must be one text, without brackets\n"),
        ("port: true", "line 1: port has to be a decimal number, not `true`\n"),
        ("wait: off", "line 1: wait has to be a decimal number, not `off`, which YAML reads as false\n"),
        ("port: 1\nwait: 1:30", "line 2: wait has to be a decimal number, not `1:30`, which YAML reads as 90\n"),
        ("wait: 1:30.5", "line 1: wait has to be a decimal number, not `1:30.5`, which YAML reads as 90.5\n"),
        ("block-size: 0777", "line 1: block_size has to be a decimal number, not `0777`, which YAML reads as 511\n"),
        ("max_model_len: -0x1F", "max_model_len has to be a decimal number, not `-0x1F`, which YAML reads as -31\n"),
        ("rates:\n- 0.5\n- yes", "line 3: rates has to be a decimal number, not `yes`, which YAML reads as true\n"),
        ("decode_nodes: [on]", "--decode-nodes: must be a text: write it in quotes, got True"),
    ],
)
def test_a_wrong_file_is_explained(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, problem: str
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    assert problem in failure(capsys, "m", "--config", str(path))


def test_a_missing_file_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "nowhere.yaml"
    assert f"cannot read {path}: No such file" in failure(capsys, "m", "--config", str(path))


def test_a_file_has_numbers_as_flags_have_them(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("port: 0\nblock_size: '32'\nmax_model_len:\nwait: 0.5\nrates: [1, 2.5e+1, 1e2]\nsupervised: on\n")
    settings = load("m", "--config", str(path))
    assert (settings.port, settings.block_size, settings.max_model_len, settings.wait) == (0, 32, None, 0.5)
    assert (settings.rates, settings.supervised) == ((1, 25, 100), True)


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("# nothing\n")
    assert load("m", "--config", str(path)).port == 8000


def test_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVRELAY_BLOK_SIZE", "8")
    assert "KVRELAY_BLOK_SIZE; did you mean KVRELAY_BLOCK_SIZE?" in failure(capsys, "m")


def test_variable_of_another_process_is_mentioned(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_LEASE_TTL", "8")
    assert load("m").port == 8000
    assert "KVRELAY_LEASE_TTL is not a setting of this process" in capsys.readouterr().err


@pytest.mark.parametrize("process", PROCESSES, ids=lambda process: process.__name__)
def test_no_variable_of_another_process_is_taken_for_a_misspelt_one(
    process: type[ProcessSettings], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for other in PROCESSES:
        for name in other.model_fields.keys() - process.model_fields.keys():
            monkeypatch.setenv(f"KVRELAY_{name.upper()}", "1")
    with pytest.raises(SystemExit) as ended:
        load_settings(process, ["--help"], prog="process")
    assert ended.value.code == 0, capsys.readouterr().err


def test_a_variable_that_kubernetes_sets_for_a_service_is_told_from_a_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVRELAY_PORT", "tcp://10.96.3.7:8000")
    assert "enableServiceLinks: false" in failure(capsys, "m")
    assert load("m", "--port", "1").port == 1
    monkeypatch.setenv("KVRELAY_PORTS", "tcp://10.96.3.8:8000")  # almost a setting
    assert load("m", "--port", "1").port == 1
    assert "note: the variable KVRELAY_PORTS is not a setting of this process" in capsys.readouterr().err


def test_secrets_are_never_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KVRELAY_REDIS_URL", "redis://:hunter2@host")
    assert "hunter2" not in repr(load("m"))
    assert "hunter2" not in failure(capsys, "m", "--port", "x")


@pytest.mark.parametrize(
    "value", ["@hunter2", "%hunter2", "'hunter2", "a: hunter2", "[hunter2", "*hunter2", "!hunter2 x", "!hunter2!x y"]
)
def test_a_secret_that_is_not_valid_yaml_is_not_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, value: str
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(f"port: 1\nredis_url: {value}\n")
    message = failure(capsys, "m", "--config", str(path))
    assert "is not valid YAML at line" in message
    assert "hunter2" not in message


def test_a_secret_that_is_wrong_is_not_printed_either(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("redis_url: [redis://:hunter2@host]\n")
    text = failure(capsys, "m", "--config", str(path))
    assert "--redis-url: must be one text" in text and "hunter2" not in text


def test_a_flag_that_is_given_empty_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sample.yaml"
    path.write_text("model: m\ndecode_nodes: [a:1]\n")
    assert load("--config", str(path)).decode_nodes == ("a:1",)
    assert load("--config", str(path), "--decode-nodes=").decode_nodes == ()


def test_the_word_none_is_a_text() -> None:
    assert load_settings(CompleteSettings, ["None"], prog="kvrelay complete").prompt == "None"
    assert load_settings(ChatSettings, ["None"], prog="kvrelay chat").message == "None"
