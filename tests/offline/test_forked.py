"""An `LLM` in a process that was forked from its own says so: it would wait for threads that are not there."""

import os
import warnings

from kvrelay import LLM, KVRelayError, SamplingParams
from tests.demo_model import DEMO_MODEL


def test_an_llm_in_a_forked_process_is_refused() -> None:
    llm = LLM(DEMO_MODEL, dtype="float32", threads=1, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=32)
    with warnings.catch_warnings(action="ignore"):  # this process has threads: that is the point
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            llm.generate("A week has", SamplingParams(max_tokens=1), progress=False)
        except KVRelayError as error:
            status = 0 if "'spawn'" in str(error) else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert llm.generate("A week has", SamplingParams(max_tokens=1), progress=False)
