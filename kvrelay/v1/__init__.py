"""Generated from proto/kvrelay/v1 by `make proto`. Do not edit."""
