"""What every process shares: values, errors, settings, gRPC, logging. Nothing here imports torch."""
