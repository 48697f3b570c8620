"""The router's edge: what clients speak (OpenAI over HTTP, `kvrelay.v1.Router` over gRPC), and tokenising."""
