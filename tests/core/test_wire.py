"""What another version of the protocol may say does not break the reader."""

from kvrelay.core.outputs import FinishReason, TokenOutput
from kvrelay.core.wire import output_from_wire, output_to_wire
from kvrelay.v1 import common_pb2


def test_every_finish_reason_survives_the_wire() -> None:
    for reason in (None, *FinishReason):
        output = TokenOutput(1, (5, 6), finish_reason=reason)
        assert output_from_wire(output_to_wire(output)) == output


def test_an_unknown_finish_reason_ends_the_output_as_an_error() -> None:
    message = common_pb2.TokenOutput(token_ids=[5], stop_token_id=-1)
    message.finish_reason = 77  # type: ignore[assignment]
    assert output_from_wire(message).finish_reason is FinishReason.ERROR
