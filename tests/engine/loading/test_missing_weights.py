"""What stands in the place of weights that are missing is named, with what to do about it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from kvrelay.core.errors import ModelLoadError
from kvrelay.engine.loading.config_json import read_config
from kvrelay.text.tokenizer import Tokenizer
from tests.engine.load_on_cpu import load
from tests.engine.prequantized_models import make_prequantized_model
from tests.engine.tiny_models import make_tiny_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def set_config(directory: Path, field: str, value: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))


def test_weights_under_another_name_are_named(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    (tmp_path / "._model.safetensors").touch()  # macOS' own
    (tmp_path / WEIGHTS).rename(tmp_path / "gptq_model-4bit-128g.safetensors")
    with pytest.raises(
        ModelLoadError, match=rf"has neither .*, but gptq_model-4bit-128g.safetensors: rename it to {WEIGHTS}$"
    ):
        load(tmp_path)
    for name in "abcd":
        (tmp_path / f"{name}.safetensors").touch()
    with pytest.raises(
        ModelLoadError, match=rf"but a\.safetensors, b\.safetensors, c\.safetensors, \.\.\.: fetch {INDEX} if"
    ):
        load(tmp_path)


@pytest.mark.parametrize(("recipe", "file"), [("gptq-64", "quantize_config.json"), ("awq-64", "quant_config.json")])
def test_a_quantisation_that_another_file_describes_is_asked_for(recipe: str, file: str, tmp_path: Path) -> None:
    directory = make_prequantized_model("llama", recipe, tmp_path).directory
    described = json.loads((directory / "config.json").read_text())["quantization_config"]
    method = described.pop("quant_method")
    (directory / file).write_text(json.dumps(described))
    set_config(directory, "quantization_config", None)
    refused = rf"q_proj\.weight is missing from .*, which has .*q_proj\.qweight: .* config\.json lacks .*{file}"
    with pytest.raises(ModelLoadError, match=rf"{refused}.*with a quant_method of .*{method}"):
        load(directory)
    set_config(directory, "quantization_config", {**described, "quant_method": method})
    load(directory)


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_names_without_their_prefix_are_told(dtype: str, tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    set_config(tmp_path, "dtype", None)
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(tmp_path / WEIGHTS).items()}
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"^tensor model\.(.*) is missing from .*, which has \1: .* prefix `model\.`"
    ):
        load(tmp_path, dtype="auto" if dtype == "auto" else "float32")


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (load, WEIGHTS),
        (load, INDEX),
        (load, "a.safetensors"),
        (lambda snapshot: read_config(snapshot / "config.json"), "config.json"),
        (lambda snapshot: Tokenizer.load(str(snapshot)), "tokenizer.json"),
    ],
    ids=["weights", "index", "shard", "configuration", "tokenizer"],
)
def test_a_snapshot_without_the_blobs_of_its_cache_is_told_from_one_without_files(
    read: Callable[[Path], object], name: str, tmp_path: Path
) -> None:
    """Only the folder of the snapshot was mounted, say. Its files are links to those beside it."""
    model = make_tiny_model("llama", tmp_path / "model", with_tokenizer=True)
    if name in (INDEX, "a.safetensors"):
        names = load_file(model / WEIGHTS)
        (model / WEIGHTS).rename(model / "a.safetensors")
        (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "a.safetensors")}))
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.move(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    read(snapshot)
    missing = (snapshot / name).readlink()
    (snapshot / name).resolve().unlink()
    with pytest.raises(ModelLoadError, match=rf"/{name} is a link to {missing}, which is not there: .*, blobs too"):
        read(snapshot)
