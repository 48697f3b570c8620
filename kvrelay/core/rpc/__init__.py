"""gRPC between processes: connections, how calls run, our values as messages, and errors on their way."""
