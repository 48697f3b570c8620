"""The router's edge: the protocols of clients (OpenAI over HTTP, `kvrelay.v1.Router` over gRPC), and tokenising."""
