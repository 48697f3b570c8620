"""The settings of a node. Prefill and decode nodes have the same, but each its own help."""

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import CliPositionalArg

from kvrelay.core.config.option_types import (
    AttentionBackendName,
    BlockSize,
    Count,
    DeviceName,
    DTypeName,
    FileDescriptor,
    Host,
    KVCacheDType,
    MemoryShare,
    NodesPerDevice,
    Quantization,
    SchedulingPolicy,
    Threads,
)
from kvrelay.core.config.settings import ProcessSettings
from kvrelay.core.kv.connectors import AUTO, ConnectorSetting
from kvrelay.core.process.logs import LogLevel


class NodeOptions(ProcessSettings):
    """The settings that are the same for all nodes of a cluster; `kvrelay serve` has them for its nodes, too."""

    dtype: DTypeName = Field(
        default="auto",
        description="Data type of weights, and of KV unless that is fp8; auto takes the checkpoint's, but on a CPU "
        "float32 for float16.",
    )
    kv_cache_dtype: KVCacheDType = Field(
        default="auto",
        description="Data type of KV: auto takes that of dtype; fp8 (the same as fp8_e4m3) needs half of bfloat16's "
        "memory, and uses the checkpoint's scales if it has any.",
    )
    calculate_kv_scales: bool = Field(
        default=False,
        description="With an FP8 KV cache, if the checkpoint has no scales: derive them from the weights instead of "
        "using 1.",
    )
    quantization: Quantization = Field(
        default="none",
        description="Weight-only quantisation, rounded to nearest while loading: int8 (a scale per 128 weights) or "
        "int4 (per 64; the output head stays int8). Steps are faster and take less memory; the tokens differ. On CPUs "
        "only: with it, device auto leaves a GPU unused. AWQ and GPTQ checkpoints need none.",
    )
    attention_backend: AttentionBackendName = Field(
        default="auto",
        description="Attention kernels: native (compiled, for CPUs), reference (torch, slow), or auto, which takes the "
        "fastest ones that there are for the device.",
    )
    device: DeviceName = Field(
        default="auto",
        description="Where to compute; auto takes a GPU if torch sees one that the kernels support and no option is "
        "set that is for CPUs (quantization, attention_backend native); the nodes of a machine share it.",
    )
    enforce_eager: bool = Field(
        default=False,
        description="On a GPU: record no steps (CUDA graphs) at the start; starts faster, decodes slower.",
    )
    connector: ConnectorSetting = Field(
        default=AUTO,
        description="How KV moves: shared_memory (nodes of one host), ucx or redis (any hosts), or several in that "
        "order, such as ucx,redis: each is asked for what those before it cannot provide, redis after every node that "
        "has it. auto: shared_memory on loopback (and so with kvrelay serve); otherwise shared_memory,ucx if ucxx is "
        "installed and there is a cluster secret, else redis. A start whose self-test of one fails ends, but auto "
        "leaves out shared memory before ucx; a Redis that cannot be reached is used once it can.",
    )
    redis_url: SecretStr = Field(
        default=SecretStr("redis://127.0.0.1:6379/0"),
        description="Redis for the redis connector: redis://, rediss:// (TLS) or unix://. Unset: "
        "redis://127.0.0.1:6379/0. A URL with a password belongs in KVRELAY_REDIS_URL or the file: arguments are "
        "visible to everyone on the machine.",
    )
    redis_ttl: int = Field(
        default=3600, gt=0, description="Seconds that a block stays in Redis after a node has last published it."
    )
    shared_memory_dir: str = Field(default="", description="Directory for KV pools; empty: /dev/shm.")
    kv_staging_gib: float = Field(
        default=4.0,
        gt=0,
        description="With KV on a GPU: most host memory (GiB) that a node moves blocks through; they wait there until "
        "peers have fetched them.",
    )
    kv_device_transfer: Literal["auto", "direct", "staged"] = Field(
        default="auto",
        description="With KV on a GPU: direct moves it from device to device (CUDA IPC on one host, UCX), staged "
        "through host memory (see kv_staging_gib); auto is direct if a self-test at the start shows that it works, "
        "staged if it shows that it does not.",
    )
    fetch_timeout: float = Field(
        default=10.0, gt=0, le=600, description="Seconds that one fetch of KV from another node may take."
    )
    block_size: BlockSize = Field(default=16, description="Tokens per KV block, a multiple of 8 up to 256.")
    num_blocks: Count = Field(default=0, description="KV blocks in a node's pool; 0 sizes the pool by memory.")
    max_model_len: Count = Field(
        default=0,
        description="Most tokens of prompt and output together; 0 takes the model's, or what the pool holds if that is "
        "less.",
    )
    max_num_seqs: Count = Field(
        default=0,
        description="Most sequences that a node runs at a time, at most max_num_batched_tokens; 0 is 64 on a CPU, 256 "
        "on a GPU, or fewer if a step has fewer tokens.",
    )
    max_num_batched_tokens: Count = Field(
        default=0,
        description="Most tokens that a node computes in one step; long prompts are cut into chunks of it. 0 is 512 on "
        "a CPU, 2048 on a GPU, or max_num_seqs if that is more.",
    )
    max_num_mixed_tokens: Count = Field(
        default=0,
        description="Tokens of a step that also decodes, decodes included; prompts get at least 16 of a step even if "
        "that makes it larger. A smaller value makes decoding steadier while prompts are computed, and delays those "
        "prompts' first tokens. If it is below max_num_batched_tokens, a prompt takes at least four such steps, unless "
        "it is short. 0 is max_num_batched_tokens on a GPU; on a CPU it is 128, or more: as many prompt tokens as make "
        "a step half as long again or 10 ms longer, by what earlier steps have taken, and more while many queue.",
    )
    stream_interval: float = Field(
        default=0.008,
        ge=0,
        le=0.1,
        description="Longest time, in seconds (not tokens), that a stream's further tokens are held back to be sent "
        "together; its first and last ones never are. Affects only steps shorter than this. 0 sends each at once.",
    )
    scheduling_policy: SchedulingPolicy = Field(
        default="fcfs", description="fcfs ignores the priority of requests; priority runs lower values first."
    )
    log_level: LogLevel = Field(default="info", description="Least severe messages that are logged.")
    step_timeout: float = Field(
        default=60.0,
        ge=5.0,
        description="Seconds that an engine step may take, and a fetch of KV after its time is over; a node that hangs "
        "for longer exits with an error, to be restarted.",
    )

    @field_validator("redis_url")
    @classmethod
    def _has_scheme(cls, url: SecretStr) -> SecretStr:
        if not url.get_secret_value().startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("must begin with redis://, rediss:// or unix://")
        return url


class NodeSettings(NodeOptions):
    """Settings of a node of either role."""

    model: CliPositionalArg[str] = Field(default="", description="Hugging Face model directory (or cached hub name).")
    host: Host = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=0, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    node_id: str = Field(
        default="",
        description="Name of this node in logs and metrics, of its own in the cluster; empty: its role, its machine's "
        "name, host and port, or a random one if port is 0. To be set where two machines have the same name.",
    )
    threads: Threads = Field(
        default=0, description="CPU threads to compute with; 0: as torch chooses, but no more than the process may use."
    )
    gpu_memory_utilization: MemoryShare = Field(
        default=0.0,
        description="On a GPU: most of its memory that this node takes, weights and all, also with num_blocks; 0 takes "
        "0.9, divided by nodes_per_device. On a CPU, when num_blocks is 0: share of free RAM for KV; 0 takes 1 GiB, or "
        "what one sequence of max_model_len needs if that is more, but at most an equal share of the free RAM for each "
        "of nodes_per_device, and one for everything else.",
    )
    nodes_per_device: NodesPerDevice = Field(
        default=1,
        description="How many nodes share this one's GPU, or the RAM where there is none; divides the memory that it "
        "takes by default.",
    )
    cluster_secret: SecretStr = Field(
        default=SecretStr(""),
        description="Secret that all nodes of the cluster share, at least 16 characters; required by the ucx "
        "connector. Belongs in KVRELAY_CLUSTER_SECRET or the file: arguments are visible to everyone on the machine.",
    )
    ucx_host: str = Field(
        default="",
        description="Address at which peers reach this node's ucx connector; empty: --host, on loopback 127.0.0.1.",
    )
    ucx_net_devices: str = Field(
        default="", description="Network devices for UCX, such as mlx5_0:1,eth0; empty: lo on loopback, otherwise all."
    )
    drain_timeout: float = Field(
        default=30.0,
        ge=0,
        description="Seconds that requests and leases get to finish on a stop; a second signal cuts this short.",
    )
    supervised: bool = Field(default=False, description="Exit when standard input closes (used by kvrelay serve).")
    core_table: str = Field(
        default="",
        pattern=r"^(\d+:\d+)?$",
        description="Inherited file descriptor of the table through which nodes of one machine lend each other cores, "
        "and this node's entry in it, such as 3:0 (used by kvrelay serve).",
    )
    weight_store: FileDescriptor | None = Field(
        default=None,
        description="Inherited file descriptor of the memory in which the nodes of one machine share their weights "
        "(used by kvrelay serve).",
    )


class PrefillSettings(NodeSettings):
    """A prefill node of a cluster: computes the KV of prompts and offers it to the decode nodes. It loads MODEL, serves
    gRPC to a router, and prints one JSON line on standard output when it is ready.

    Example: kvrelay prefill ./my-model --host 10.0.0.2 --port 7000 --connector redis --redis-url redis://10.0.0.9
    """


class DecodeSettings(NodeSettings):
    """A decode node of a cluster: fetches the KV of prompts from prefill nodes, computes what is missing, and generates
    the tokens. It loads MODEL, serves gRPC to a router, and prints one JSON line on standard output when it is ready.

    Example: kvrelay decode ./my-model --host 10.0.0.3 --port 7000 --connector redis --redis-url redis://10.0.0.9
    """


SETTINGS_OF_COMMAND: Mapping[str, type[NodeSettings]] = {"prefill": PrefillSettings, "decode": DecodeSettings}
