"""Types of options, with the values that each may have.

Nodes read those of an engine as settings and `LLM` takes them as arguments: both check them against these types.
"""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

_IPV4 = r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){3}"


def _host_port(address: str) -> str:
    host, _, port = address.rpartition(":")
    is_host = host and "/" not in host and (":" not in host or (host.startswith("[") and host.endswith("]")))
    if not is_host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) <= 65535:
        raise ValueError(
            "must be a gRPC address, host:port, without a scheme or a path; IPv6 is written in brackets, [::1]:8001"
        )
    return address


def _host(host: str) -> str:
    # Python also binds 127.1 and 010.0.0.1, which gRPC does not take, or takes for other addresses.
    is_number = re.fullmatch(r"[0-9.]+", host) and not re.fullmatch(_IPV4, host)
    if not host or "[" in host or is_number:
        raise ValueError(
            "must be an address of this machine, such as 10.0.0.2 or fd00::3 (without brackets), or a name of it"
        )
    return host


DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
"""`fp8` and `fp8_e4m3` are the same."""
Quantization = Literal["none", "int8", "int4"]
AttentionBackendName = Literal["auto", "native", "reference"]
DeviceName = Literal["auto", "cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority"]
BlockSize = Annotated[int, Field(ge=8, le=256, multiple_of=8)]
Count = Annotated[int, Field(ge=0)]
"""0 leaves the choice to kvrelay."""
MOST_THREADS = 1024
"""More cores than machines have. OpenMP ends the process if the system cannot start as many threads as it was asked
for."""
Threads = Annotated[int, Field(ge=0, le=MOST_THREADS)]
"""0 leaves the choice to torch."""
MemoryShare = Annotated[float, Field(ge=0.0, le=0.95)]
"""0 leaves the choice to kvrelay."""
NodesPerDevice = Annotated[int, Field(ge=1)]
Timeout = Annotated[float, Field(gt=0, le=1e8)]
"""Seconds that may become a deadline of gRPC, to which one that is centuries away has passed."""
Host = Annotated[str, AfterValidator(_host)]
"""A host to listen on."""
HostPort = Annotated[str, AfterValidator(_host_port)]
"""The address of a gRPC server."""
FileDescriptor = Annotated[int, Field(ge=0)]
