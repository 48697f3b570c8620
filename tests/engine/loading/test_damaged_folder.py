"""A damaged model folder ends in a ModelLoadError that names the file and the field, before anything is allocated."""

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from paged_kernels.reference import ReferenceBackend

from kvrelay.core.errors import ModelLoadError
from kvrelay.core.model.vocabulary import vocabulary_digest
from kvrelay.engine.loading.loader import load_model
from kvrelay.engine.models.model_config import load_model_config
from kvrelay.text.tokenizer import Tokenizer
from tests.engine.tiny_models import make_tiny_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.q_proj.weight"
DEEP = "[" * 100_000 + "]" * 100_000
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model("llama", tmp_path, with_tokenizer=True)


def _load(directory: Path) -> None:
    load_model(str(directory), dtype="auto", attention=ReferenceBackend(), max_model_len=64)


def _bind(path: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # which takes only short paths
        made.bind(path.name)


def _edit(path: Path, field: str, value: str) -> None:
    """Sets a field of a JSON file to `value`, which is JSON, or only looks like it."""
    fields = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**fields, field: "@"}).replace('"@"', value))


def _edit_header(path: Path, edit: Callable[[dict[str, Any]], str]) -> None:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = edit(json.loads(content[8:end])).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])


@pytest.mark.parametrize("text", [DEEP, '{"a":' * 100_000 + "1" + "}" * 100_000, "[1]", "null", "", "{", "\0"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_file_that_is_no_json_object_is_named(folder: Path, name: str, text: str) -> None:
    if name == INDEX:
        (folder / WEIGHTS).rename(folder / "a.safetensors")
    (folder / name).write_text(text)
    with pytest.raises(ModelLoadError, match=rf"/{name} (is not valid JSON|must hold a JSON object)"):
        _load(folder)


@pytest.mark.parametrize("text", [DEEP, "[1]", "1e999", "null", "", "{"])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "tokenizer.json", "added_tokens.json"])
def test_a_file_of_the_tokenizer_that_is_no_json_object_is_named(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(ModelLoadError, match=rf"/{name} (is not valid JSON|must hold a JSON object)"):
        Tokenizer.load(str(folder))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("tokenizer.json", "version", "7"),
        ("tokenizer.json", "model", "1e999"),
    ],
)
def test_a_tokenizer_that_no_library_understands_is_refused(folder: Path, name: str, field: str, value: str) -> None:
    _edit(folder / name, field, value)
    with pytest.raises(ModelLoadError, match=r"no tokenizer can be loaded|tokenizer\.json"):
        Tokenizer.load(str(folder))


@pytest.mark.parametrize("value", ["1e999", "NaN", "1000000000000", "1" + "0" * 30, "-1", "0", "true", '"7"', "[1]"])
@pytest.mark.parametrize(
    "field",
    [
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "intermediate_size", "max_position_embeddings", "rms_norm_eps", "quantization_config",
    ],
)  # fmt: skip
def test_a_field_with_an_absurd_value_is_named(folder: Path, field: str, value: str) -> None:
    (folder / "generation_config.json").unlink()
    _edit(folder / "config.json", field, value)
    with pytest.raises(ModelLoadError, match=f"/config.json: .*{field}"):
        _load(folder)


@pytest.mark.parametrize("value", ["1e999", "-1", "true", '"7"', "[[1]]", "[1, true]", "320"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_sequence_that_is_no_token_is_refused(folder: Path, name: str, value: str) -> None:
    (folder / "generation_config.json").unlink()
    _edit(folder / name, "eos_token_id", value)
    with pytest.raises(ModelLoadError, match=f"/{name}: eos_token_id"):
        _load(folder)


@pytest.mark.parametrize("layers", ["1000000000000", "5000"])
def test_a_family_with_windows_has_no_more_layers_than_it_can_have(tmp_path: Path, layers: str) -> None:
    make_tiny_model("qwen2-sliding", tmp_path)
    _edit(tmp_path / "config.json", "layer_types", "null")
    _edit(tmp_path / "config.json", "num_hidden_layers", layers)
    with pytest.raises(ModelLoadError, match=f"num_hidden_layers: {layers} must be .* at most 4096"):
        _load(tmp_path)


@pytest.mark.parametrize("changes", [{"hidden_size": 2**20, "head_dim": 16}, {"vocab_size": 2**24}])
def test_sizes_that_the_weights_do_not_have_take_no_memory(
    folder: Path, changes: Mapping[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for field, value in changes.items():
        _edit(folder / "config.json", field, str(value))
    monkeypatch.setattr("paged_kernels.cpu.weight_memory.WeightMemory.take", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(ModelLoadError, match="has shape"):
        _load(folder)


@pytest.mark.parametrize("value", ["1e-300", "1e300", "1" + "0" * 400])
@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_a_trained_length_that_none_can_be_is_refused(tmp_path: Path, kind: str, value: str) -> None:
    make_tiny_model(f"llama-rope-{kind}", tmp_path)
    rope = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    changed = json.dumps({**rope, "original_max_position_embeddings": "@"}).replace('"@"', value)
    _edit(tmp_path / "config.json", "rope_parameters", changed)
    with pytest.raises(ModelLoadError, match=r"rope_parameters\.original_max_position_embeddings"):
        _load(tmp_path)


def test_a_list_for_the_format_of_a_quantised_checkpoint_is_refused(folder: Path) -> None:
    _edit(folder / "config.json", "quantization_config", json.dumps({**_GPTQ, "checkpoint_format": ["gptq"]}))
    with pytest.raises(ModelLoadError, match=r"checkpoint_format: \['gptq'\] is not supported"):
        _load(folder)


def test_a_length_beyond_float32_is_not_offered(tmp_path: Path) -> None:
    make_tiny_model("llama-rope-linear", tmp_path)
    _edit(tmp_path / "config.json", "rope_parameters", '{"rope_type": "linear", "rope_theta": 1e4, "factor": 1e308}')
    assert load_model_config(tmp_path).max_context_length == 2**24


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("shape", value) for value in ("[1e999, 0]", "[-64, -64]", "[64.0, 64.0]", '["64", "64"]', "[true, 64]")),
        *(("shape", value) for value in ("64", "null", str([2**63, 2**63]), str([1] * 100))),
        *(("data_offsets", value) for value in ("[0, 1e999]", "[NaN, 1]", "[2.5, 3]", "[-1, 4]", "[0]", "[0, 1, 2]")),
        ("data_offsets", '["0", "16384"]'),
        *(("dtype", value) for value in ("null", "[1]", "7")),
    ],
)
def test_a_wrong_entry_of_a_header_is_named(folder: Path, field: str, value: str) -> None:
    _edit_header(
        folder / WEIGHTS,
        lambda header: json.dumps({**header, QUERY: {**header[QUERY], field: "@"}}).replace('"@"', value),
    )
    with pytest.raises(ModelLoadError, match=rf"/{WEIGHTS}: tensor {QUERY}: malformed header entry: {field}"):
        _load(folder)


def test_a_tensor_in_a_header_twice_is_refused(folder: Path) -> None:
    entry = {"dtype": "F32", "shape": [4096], "data_offsets": [0, 16384]}
    _edit_header(folder / WEIGHTS, lambda header: f'{{"{QUERY}": {json.dumps(entry)}, {json.dumps(header)[1:]}')
    with pytest.raises(ModelLoadError, match=f"its header .*{QUERY} is in it twice"):
        _load(folder)


@pytest.mark.parametrize("header", [DEEP, "1" * 5000, "{}x", "[1]"])
def test_a_header_that_is_no_json_object_is_refused(folder: Path, header: str) -> None:
    _edit_header(folder / WEIGHTS, lambda _: header)
    with pytest.raises(ModelLoadError, match=rf"{WEIGHTS} is not a safetensors file: its header (is not|must hold)"):
        _load(folder)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_a_header_of_an_absurd_length_is_refused(folder: Path, length: int) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(length.to_bytes(8, "little") + content[8:])
    with pytest.raises(ModelLoadError, match=f"{WEIGHTS} is not a safetensors file"):
        _load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", WEIGHTS])
def test_a_pointer_in_place_of_a_file_is_told_from_a_damaged_one(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123456\n")
    with pytest.raises(ModelLoadError, match=f"{name} is a pointer of Git LFS, not the file: `git lfs pull`"):
        vocabulary_digest(folder)
        _load(folder)


@pytest.mark.parametrize("shard", [DEEP, "7", "null", '"../a.safetensors"', '"/etc/passwd"', '"."', '".w"'])
def test_an_index_leads_to_files_beside_it_only(folder: Path, shard: str) -> None:
    (folder / WEIGHTS).rename(folder / "a.safetensors")
    (folder / INDEX).write_text(f'{{"weight_map": {{"{QUERY}": {shard}}}}}')
    with pytest.raises(ModelLoadError, match=INDEX):
        _load(folder)


def test_a_shard_may_be_a_link_to_a_file_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("blobs") / "blob"
    (folder / WEIGHTS).rename(elsewhere)
    (folder / "a.safetensors").symlink_to(elsewhere)
    (folder / INDEX).write_text(json.dumps({"weight_map": {QUERY: "a.safetensors"}}))
    _load(folder)


@pytest.mark.parametrize("load", [_load, lambda folder: Tokenizer.load(str(folder))], ids=["node", "router"])
@pytest.mark.parametrize(
    "put", [os.mkfifo, lambda path: path.symlink_to("/dev/null"), _bind], ids=["fifo", "device", "socket"]
)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "templates/a.jinja"]
)
def test_what_is_no_file_is_refused_instead_of_read(
    folder: Path, name: str, put: Callable[[Path], None], load: Callable[[Path], None]
) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    put(path)
    with pytest.raises(ModelLoadError, match=f"/{name} is a FIFO, a socket or a device"):
        load(folder)


def test_hidden_files_and_links_to_nothing_are_not_looked_at(folder: Path) -> None:
    (folder / ".git").mkdir()
    os.mkfifo(folder / ".git" / "monitor")
    os.mkfifo(folder / ".lock")
    (folder / "notes").symlink_to(folder / "nowhere")
    _load(folder)
    Tokenizer.load(str(folder))


def test_a_file_that_another_one_replaces_while_it_is_read_is_refused(folder: Path) -> None:
    """Two tensors of the same shape have changed places. Read by the offsets of the first header, K's weights would be
    V's, under the fingerprint of the second file."""
    old = (folder / WEIGHTS).read_bytes()
    new = old.replace(b"k_proj", b"#_proj").replace(b"v_proj", b"k_proj").replace(b"#_proj", b"v_proj")
    assert len(new) == len(old) and new != old

    def replace_before_reading(done: int, total: int) -> None:
        (folder / WEIGHTS).write_bytes(new)

    with pytest.raises(ModelLoadError, match=f"{WEIGHTS} changed while it was read"):
        load_model(
            str(folder),
            dtype="auto",
            attention=ReferenceBackend(),
            max_model_len=64,
            progress=replace_before_reading,
        )
    _load(folder)
