"""The arguments of `LLM`: values are checked before anything is loaded, and defaults are those of a node."""

import ast
import inspect
from dataclasses import MISSING, fields
from typing import Any

import pytest

from kvrelay import LLM, ConfigurationError
from kvrelay.engine.options import EngineOptions
from tests.demo_model import DEMO_MODEL
from tests.pages import names, page, rows, section

# What LLM leaves at its default, and why.
NOT_OFFERED = {
    "weight_store",  # nodes of one machine share their weights
    "nodes_per_device",  # an LLM is alone on its device; gpu_memory_utilization says otherwise
    "scheduling_policy",  # no prompt has a priority
}


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("dtype", "fp16", "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("kv_cache_dtype", "bfloat16", "'auto', 'fp8' or 'fp8_e4m3'"),
        ("quantization", "awq", "'none', 'int8' or 'int4'"),
        ("quantization", "INT8", "'none', 'int8' or 'int4'"),
        ("quantization", "int3", "'none', 'int8' or 'int4'"),
        ("quantization", None, "'none', 'int8' or 'int4'"),
        ("attention_backend", "flash", "'auto', 'native' or 'reference'"),
        ("device", "gpu", "'auto', 'cpu' or 'cuda'"),
        ("calculate_kv_scales", "yes", "boolean"),
        ("enforce_eager", 1, "boolean"),
        ("block_size", 0, "greater than or equal to 8"),
        ("block_size", 264, "less than or equal to 256"),
        ("block_size", 20, "multiple of 8"),
        ("threads", -1, "greater than or equal to 0"),
        ("threads", 10**6, "less than or equal to 1024"),
        ("threads", "2", "integer"),
        ("num_blocks", 1.5, "integer"),
        ("gpu_memory_utilization", 90, "less than or equal to 0.95"),
        ("max_model_len", None, "integer"),
        ("max_num_seqs", -1, "greater than or equal to 0"),
        ("max_num_batched_tokens", -1, "greater than or equal to 0"),
        ("max_num_mixed_tokens", -1, "greater than or equal to 0"),
    ],
)
def test_a_value_that_an_option_cannot_have_is_refused(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{option}: .*{allowed}.*, got {value!r}$"):
        LLM("no-model-is-read", **{option: value})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_batched_tokens": 15}, "max_num_batched_tokens 15 is less than 16; raise it"),
        ({"max_num_seqs": 33, "max_num_batched_tokens": 32}, "tokens 32 is less than max_num_seqs 33, .*lower max_num"),
        (
            {"max_model_len": 65, "num_blocks": 4},
            "max_model_len 65 is more than 4 blocks .* to 64, or raise num_blocks",
        ),
        ({"max_model_len": 1}, "max_model_len 1 leaves no token for an answer"),
        ({"calculate_kv_scales": True}, "calculate_kv_scales is for an FP8 KV cache: set kv_cache_dtype to fp8"),
    ],
)
def test_options_that_contradict_each_other_are_refused_before_anything_is_read(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        LLM("no-model-is-read", **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"device": "cuda", "quantization": "int8"},
            "^device cuda: quantization int8 is for CPUs.*use device cpu$",
        ),
        (
            {"num_blocks": 10**12, "device": "cpu"},
            "no memory for 1000000000000 KV blocks .*lower num_blocks or gpu_",
        ),
    ],
)
def test_what_a_machine_cannot_do_is_said_with_the_keywords(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        LLM(DEMO_MODEL, **options)


def test_arguments_are_the_options_of_an_engine_with_the_same_defaults() -> None:
    options = {
        one.name: inspect.Parameter.empty if one.default is MISSING else one.default for one in fields(EngineOptions)
    }
    parameters = list(inspect.signature(LLM).parameters.values())
    assert {one.name: one.default for one in parameters} == {
        name: default for name, default in options.items() if name not in NOT_OFFERED
    }
    assert options.keys() >= NOT_OFFERED


def test_the_signature_shows_types_that_a_reader_knows() -> None:
    """`help(LLM)` and editors show it, and not how a value is checked."""
    assert "FieldInfo" not in str(inspect.signature(LLM))


def test_the_page_has_every_option_with_its_default() -> None:
    said: dict[str, object] = {}
    for options, defaults, _ in rows(section(page("offline.md"), "## Options")):
        before_meaning = defaults.split(": ")[0].replace("`", "")
        values = ast.literal_eval(f"[{before_meaning}]")
        said |= zip(names(options), values * (len(names(options)) // len(values)), strict=True)
    parameters = list(inspect.signature(LLM).parameters.values())[1:]
    assert said == {parameter.name: parameter.default for parameter in parameters}
