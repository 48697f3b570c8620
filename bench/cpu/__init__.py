"""Our targets on CPUs, and what measures whether they are met."""
